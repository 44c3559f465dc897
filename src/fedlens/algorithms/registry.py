"""Algorithms by name, and the aggregate and server step that each brings itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.base.registry import Entry, Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "fedavg": Entry("fedlens.algorithms.fedavg:fedavg", "Federated Averaging (McMahan et al. 2017)"),
        "fedavgm": Entry(
            "fedlens.algorithms.fedavgm:fedavgm", "FedAvg with server momentum (Hsu et al. 2019)"
        ),
        "fedprox": Entry(
            "fedlens.algorithms.fedprox:fedprox", "a proximal term at the clients (Li et al. 2020)"
        ),
        "fedir": Entry(
            "fedlens.algorithms.fedir:fedir",
            "importance-reweighted client losses (Hsu et al. 2020, section 5.2)",
        ),
        "fedvc": Entry(
            "fedlens.algorithms.fedvc:fedvc", "virtual clients of one size (Hsu et al. 2020, section 5.3)"
        ),
        "fedadagrad": Entry(
            "fedlens.algorithms.fedopt:fedadagrad", "Adagrad at the server (Reddi et al. 2021)"
        ),
        "fedadam": Entry("fedlens.algorithms.fedopt:fedadam", "Adam at the server (Reddi et al. 2021)"),
        "fedyogi": Entry("fedlens.algorithms.fedopt:fedyogi", "Yogi at the server (Reddi et al. 2021)"),
        "fednova": Entry(
            "fedlens.algorithms.fednova:fednova",
            "updates normalized by their number of steps (Wang et al. 2020)",
        ),
        "moon": Entry("fedlens.algorithms.moon:moon", "model-contrastive learning (Li, He and Song 2021)"),
        "fedbn": Entry(
            "fedlens.algorithms.fedbn:fedbn",
            "batch normalization layers stay at the clients (Li et al. 2021)",
        ),
        "local-only": Entry(
            "fedlens.algorithms.personal:local_only", "each client trains alone: the lower bound"
        ),
        "finetune": Entry(
            "fedlens.algorithms.personal:finetune", "FedAvg, fine-tuned at each client before it is used"
        ),
        "scaffold": Entry(
            "fedlens.algorithms.scaffold:scaffold", "control variates against drift (Karimireddy et al. 2020)"
        ),
        "feddyn": Entry(
            "fedlens.algorithms.feddyn:feddyn", "dynamic regularization of the clients (Acar et al. 2021)"
        ),
        "mime": Entry(
            "fedlens.algorithms.mime:mime",
            "the server's optimizer at the clients, with drift correction (Karimireddy et al. 2020)",
        ),
        "mimelite": Entry(
            "fedlens.algorithms.mime:mimelite",
            "the server's optimizer at the clients (Karimireddy et al. 2020)",
        ),
        "feddane": Entry(
            "fedlens.algorithms.feddane:feddane",
            "local gradients corrected by the mean gradient (Li et al. 2019)",
        ),
        "admm": Entry(
            "fedlens.algorithms.admm:admm", "a dual variable at each client (Ghaemi 2022, section 4.3)"
        ),
        "ceadmm": Entry(
            "fedlens.algorithms.admm:ceadmm", "ADMM with several local iterations (Zhou and Li 2021)"
        ),
        "iceadmm": Entry(
            "fedlens.algorithms.admm:iceadmm", "CEADMM with one gradient an iteration (Zhou and Li 2021)"
        ),
        "liadmm": Entry(
            "fedlens.algorithms.admm:liadmm", "linearized inexact ADMM (Ghaemi 2022, Algorithm 4)"
        ),
        "centralized": Entry(
            "fedlens.algorithms.centralized:centralized", "the upper bound: training on the pooled data"
        ),
    },
)

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

# These select and aggregate nothing. Tables of a recipe that were meant for another algorithm do not stand in the way.
WITHOUT_SLOTS = frozenset({"centralized"})


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
