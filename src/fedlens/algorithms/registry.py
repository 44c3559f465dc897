"""Algorithms by name, and the aggregate and server step that each brings itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.registry import Entry, Registry
from fedlens.local.settings import RATE_SETTINGS, LocalSettings

SLOTS = ("select", "client", "aggregate", "server")
LOCAL = frozenset(LocalSettings.model_fields)


@dataclass(frozen=True)
class AlgorithmEntry(Entry):
    """One row of the algorithms, with the tables and settings that it honours. Others are refused: `refuse_unused`.

    Args:
        slots: the tables of single components, of `SLOTS`.
        local: the settings of `[local]`, of `LOCAL`; the learning rate, which has no default, is always one of them.
        stand_in: settings that name layers of the real model, with those of the small model that settings are checked
            with before the real one is built.
        on_parties: whether clients are parties with features of the same examples, as `data.parties` makes them.
    """

    slots: tuple[str, ...] = SLOTS
    local: frozenset[str] = LOCAL
    stand_in: Mapping[str, str] = field(default_factory=dict)
    on_parties: bool = False


_CUT = {"cut": "0"}
_ALGORITHMS: dict[str, AlgorithmEntry] = {
    "fedavg": AlgorithmEntry("fedlens.algorithms.fedavg:fedavg", "Federated Averaging (McMahan et al. 2017)"),
    "fedavgm": AlgorithmEntry(
        "fedlens.algorithms.fedavgm:fedavgm", "FedAvg with server momentum (Hsu et al. 2019)"
    ),
    "fedprox": AlgorithmEntry(
        "fedlens.algorithms.fedprox:fedprox", "a proximal term at the clients (Li et al. 2020)"
    ),
    "fedir": AlgorithmEntry(
        "fedlens.algorithms.fedir:fedir",
        "importance-reweighted client losses (Hsu et al. 2020, section 5.2)",
    ),
    "fedvc": AlgorithmEntry(
        "fedlens.algorithms.fedvc:fedvc", "virtual clients of one size (Hsu et al. 2020, section 5.3)"
    ),
    "fedadagrad": AlgorithmEntry(
        "fedlens.algorithms.fedopt:fedadagrad", "Adagrad at the server (Reddi et al. 2021)"
    ),
    "fedadam": AlgorithmEntry("fedlens.algorithms.fedopt:fedadam", "Adam at the server (Reddi et al. 2021)"),
    "fedyogi": AlgorithmEntry("fedlens.algorithms.fedopt:fedyogi", "Yogi at the server (Reddi et al. 2021)"),
    "fednova": AlgorithmEntry(
        "fedlens.algorithms.fednova:fednova",
        "updates normalized by their number of steps (Wang et al. 2020)",
    ),
    "moon": AlgorithmEntry(
        "fedlens.algorithms.moon:moon", "model-contrastive learning (Li, He and Song 2021)"
    ),
    "fedbn": AlgorithmEntry(
        "fedlens.algorithms.fedbn:fedbn",
        "batch normalization layers stay at the clients (Li et al. 2021)",
    ),
    "local-only": AlgorithmEntry(
        "fedlens.algorithms.personal:local_only",
        "each client trains alone, a reference",
        slots=("select", "client"),
    ),
    "finetune": AlgorithmEntry(
        "fedlens.algorithms.personal:finetune", "FedAvg, fine-tuned at each client before it is used"
    ),
    "scaffold": AlgorithmEntry(
        "fedlens.algorithms.scaffold:scaffold", "control variates against drift (Karimireddy et al. 2020)"
    ),
    "feddyn": AlgorithmEntry(
        "fedlens.algorithms.feddyn:feddyn", "dynamic regularization of the clients (Acar et al. 2021)"
    ),
    "mime": AlgorithmEntry(
        "fedlens.algorithms.mime:mime",
        "the server's optimizer at the clients, with drift correction (Karimireddy et al. 2020)",
    ),
    "mimelite": AlgorithmEntry(
        "fedlens.algorithms.mime:mimelite",
        "the server's optimizer at the clients (Karimireddy et al. 2020)",
    ),
    "feddane": AlgorithmEntry(
        "fedlens.algorithms.feddane:feddane",
        "local gradients corrected by the mean gradient (Li et al. 2019)",
    ),
    "admm": AlgorithmEntry(
        "fedlens.algorithms.admm:admm", "a dual variable at each client (Ghaemi 2022, section 4.3)"
    ),
    "ceadmm": AlgorithmEntry(
        "fedlens.algorithms.admm:ceadmm", "ADMM with several local iterations (Zhou and Li 2021)"
    ),
    "iceadmm": AlgorithmEntry(
        "fedlens.algorithms.admm:iceadmm", "CEADMM with one gradient an iteration (Zhou and Li 2021)"
    ),
    "liadmm": AlgorithmEntry(
        "fedlens.algorithms.admm:liadmm", "linearized inexact ADMM (Ghaemi 2022, Algorithm 4)"
    ),
    "dsgd": AlgorithmEntry(
        "fedlens.algorithms.dsgd:dsgd",
        "peers mix their models with their neighbours' (Lian et al. 2017)",
        slots=(),
        local=LOCAL - {"stragglers", "straggler_work"},
    ),
    "push-sum": AlgorithmEntry(
        "fedlens.algorithms.push_sum:push_sum",
        "peers mix along edges that may go one way (Assran et al. 2019)",
        slots=(),
        local=LOCAL - {"examples", "stragglers", "straggler_work"},
    ),
    "gradient-tracking": AlgorithmEntry(
        "fedlens.algorithms.gradient_tracking:gradient_tracking",
        "peers step along an estimate of everyone's gradient (Pu and Nedic 2018)",
        slots=(),
        local=frozenset({"lr", "epochs", "steps", "batch_size", "last_batch", *RATE_SETTINGS}),
    ),
    "fedgkt": AlgorithmEntry(
        "fedlens.algorithms.fedgkt:fedgkt",
        "small networks at clients and a large one at the server teach each other (He et al. 2020)",
        slots=("select",),
        local=LOCAL - {"examples", "lr_scale", "stragglers", "straggler_work"},
        stand_in=_CUT,
    ),
    "splitfed": AlgorithmEntry(
        "fedlens.algorithms.splitfed:splitfed",
        "split learning: each client trains the first layers, the server the others (Thapa et al. 2022)",
        slots=("select", "server"),
        local=LOCAL - {"clip_norm", "stragglers", "straggler_work", "examples", "lr_scale"},
        stand_in=_CUT,
    ),
    "split-relay": AlgorithmEntry(
        "fedlens.algorithms.split_relay:split_relay",
        "split learning: clients in turn hand the first layers on (Gupta and Raskar 2018)",
        slots=("select",),
        local=LOCAL - {"clip_norm", "stragglers", "straggler_work", "examples", "lr_scale"},
        stand_in=_CUT,
    ),
    "fednas": AlgorithmEntry(
        "fedlens.algorithms.fednas:fednas",
        "clients search an architecture together (He et al. 2020)",
        slots=("select",),
        local=LOCAL - {"examples", "lr_scale"},
    ),
    "fedma": AlgorithmEntry(
        "fedlens.algorithms.fedma:fedma",
        "hidden units are matched before they are averaged, so layers may grow (Wang et al. 2020)",
        slots=("select",),
        local=LOCAL - {"examples", "lr_scale", "stragglers", "straggler_work"},
    ),
    "vertical": AlgorithmEntry(
        "fedlens.algorithms.vertical:vertical",
        "parties with other features of the same examples train one network (He et al. 2021)",
        slots=(),
        local=LOCAL - {"clip_norm", "stragglers", "straggler_work", "examples", "lr_scale"},
        on_parties=True,
    ),
    "centralized": AlgorithmEntry(
        "fedlens.algorithms.centralized:centralized",
        "training on the pooled data, a reference",
        slots=(),
        local=LOCAL - {"stragglers", "straggler_work"},
    ),
}

ALGORITHMS = Registry("algorithm", _ALGORITHMS)

# What `[client]` can name; on top of the algorithm's own rule, and several in a list.
RULES = Registry(
    "client rule",
    {
        "plain": Entry("fedlens.local.rules:plain", "plain local training"),
        "proximal": Entry("fedlens.local.rules:proximal", "FedProx's proximal term"),
        "contrastive": Entry("fedlens.algorithms.moon:contrastive", "MOON's model-contrastive term"),
        "reweighted": Entry(
            "fedlens.algorithms.fedir:reweighted",
            "FedIR: examples weighted by class, towards a target distribution",
        ),
        "control-variate": Entry(
            "fedlens.algorithms.scaffold:control_variate", "SCAFFOLD's control variates"
        ),
        "dynamic": Entry("fedlens.algorithms.feddyn:dynamic", "FedDyn's linear and quadratic terms"),
        "dual": Entry(
            "fedlens.algorithms.admm:dual", "ADMM's dual variable and penalty (Ghaemi 2022, section 4.3)"
        ),
    },
)


def unused_slots(algorithm: Any) -> tuple[str, ...]:
    """The tables that the algorithm of this name does not use; none of a user's own, which answers for itself.

    >>> unused_slots("local-only"), unused_slots("own.py:mine")
    (('aggregate', 'server'), ())
    """
    entry = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    return () if entry is None else tuple(slot for slot in SLOTS if slot not in entry.slots)


def refuse_unused(algorithm: Any, slots: Mapping[str, Any], local: LocalSettings) -> None:
    """Raises `ConfigError` for a table of `slots` or a setting of `local` that the algorithm of this name ignores.

    Args:
        slots: the tables or components by name; None for those that are not set.
        local: settings at their defaults are not counted as set.
    """
    unused = unused_slots(algorithm)
    slot = next((slot for slot in unused if slots.get(slot) is not None), None)
    if slot is not None:
        honoured = ", ".join(f"[{name}]" for name in SLOTS if name not in unused)
        raise ConfigError(
            f"'{algorithm}' does not use the table [{slot}]",
            where=slot,
            hint=f"remove it; of the components it uses {honoured or 'none'}",
        )
    entry = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    for name, value in local:
        field = LocalSettings.model_fields[name]
        if entry is None or name in entry.local or field.is_required() or value == field.default:
            continue
        raise ConfigError(
            f"'{algorithm}' does not use local.{name}",
            where=f"local.{name}",
            hint=f"remove it; of [local] it uses {', '.join(sorted(entry.local))}",
        )


def refuse_other_data(algorithm: Any, parties: bool) -> None:
    """Raises `ConfigError` if the algorithm is for clients with whole examples and the data for parties, or reversed.

    Args:
        algorithm: its name, or a user's own, which is for clients with whole examples.
        parties: whether `data.parties` is set.
    """
    entry = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    on_parties = entry is not None and entry.on_parties
    if on_parties == parties:
        return
    holders = ("clients that hold whole images", "parties that hold parts of the same images")
    named = [f"algorithm.name = '{name}'" for name, row in _ALGORITHMS.items() if row.on_parties]
    place = "data.partition" if parties else "data.parties = {split = 'quadrants'}"
    raise ConfigError(
        f"'{algorithm}' trains {holders[on_parties]}, not {holders[parties]}",
        where="data.parties" if parties else "data.partition",
        hint="set " + " or ".join([*(named if parties else ()), f"{place} in its place"]),
    )


_AGGREGATES = {"fednova": "normalized"}
_SERVERS = {"fedavgm": "momentum", "fedadagrad": "adagrad", "fedadam": "adam", "fedyogi": "yogi"}


def default_table(slot: str, algorithm: Any) -> dict[str, Any]:
    """The table of a component that the user's table does not name: what the algorithm's paper does.

    Args:
        algorithm: its name, or its table.

    >>> default_table("select", "fedvc"), default_table("server", {"name": "fedyogi"})
    ({'name': 'by-size'}, {'name': 'yogi'})
    """
    table = algorithm if isinstance(algorithm, Mapping) else {"name": algorithm}
    name = str(table.get("name"))
    if slot == "aggregate":
        return {"name": _AGGREGATES.get(name, "mean")}
    if slot == "server":
        return {"name": _SERVERS.get(name, "plain")}
    if name == "fedvc":
        return {"name": "by-size"}
    if name == "fedprox" and table.get("scheme") == "algorithm-2":
        return {"name": "by-size", "method": "replacement"}
    return {"name": "uniform"}
