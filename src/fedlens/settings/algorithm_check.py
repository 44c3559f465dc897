"""Checks whether the components of an algorithm fit together, before any data is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.private_averaging import refuse_statistics
from fedlens.algorithms.registry import ALGORITHMS, SLOTS, AlgorithmEntry
from fedlens.base.errors import ConfigError
from fedlens.base.registry import feeding, settings_model
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.protocol import FederationInfo, ModelSpec
from fedlens.core.tree import TreeSpec
from fedlens.local.chain import chain
from fedlens.settings.config import AT_SITES, NETWORK, Config, Evaluation
from fedlens.settings.plan import SLOT_REGISTRIES, Plan
from fedlens.settings.resolve import Resolved
from fedlens.tasks.registry import TASKS

_MANY = 10**5  # clients of a dataset that has its own
_SHAPE, _CLASSES = (1, 4, 4), 10
_LR = 1e-6  # the bound on a rate times the weight of a quadratic term is left to the run


def check_combinations(config: Config, locate: Callable[[str], str] = str) -> None:
    """Raises `ConfigError` if settings exclude each other. `locate` says where a person finds a key."""
    if config.local.lr_warmup >= config.rounds:
        raise ConfigError(
            f"local.lr_warmup is {config.local.lr_warmup}, but the run has only {config.rounds} rounds, so the "
            "learning rate would never reach local.lr",
            where=locate("local.lr_warmup"),
            hint="set it below rounds",
        )
    if config.data.parties is not None and config.model.get("cache_features"):
        raise ConfigError(
            "the features of whole images cannot be kept where parties have parts of them",
            where=locate("model.cache_features"),
            hint="set model.cache_features = false",
        )
    _check_sites(config, locate)
    if config.data.validation_from == "client" and not config.data.validation:
        raise ConfigError(
            "`data.validation_from = 'client'` needs `data.validation` above 0",
            where=locate("data.validation_from"),
            hint="set data.validation = 0.2, the share that each client holds out",
        )


def _check_sites(config: Config, locate: Callable[[str], str]) -> None:
    """Raises `ConfigError` for what needs the examples of all clients in one place, if they are at sites."""
    network = config.engine.get("name") == NETWORK
    if config.at_sites != network:
        raise ConfigError(
            f"the dataset '{AT_SITES}' and the engine '{NETWORK}' belong together, and only one is set",
            where=locate("engine.name" if config.at_sites else "data.dataset"),
            hint=f"set engine.name = '{NETWORK}'"
            if config.at_sites
            else f"set data.dataset.name = '{AT_SITES}'",
        )
    if not network:
        return
    pooled = {
        "data.partition": config.data.partition is not None,
        "data.parties": config.data.parties is not None,
        "data.reassign": config.data.reassign,
        "evaluation.train": config.evaluation.train,
        "data.validation_from": config.data.validation > 0 and config.data.validation_from == "global",
    }
    for key, is_set in pooled.items():
        if is_set:
            raise ConfigError(
                "this setting needs the examples of all clients in one place, and they stay at the sites",
                where=locate(key),
                hint="set it to 'client'" if key.endswith("_from") else "remove it",
            )
    if config.evaluation.clients not in (None, "none") and not config.data.validation:
        raise ConfigError(
            "the sites measure the model on examples that they hold out, and none are held out",
            where=locate("data.validation"),
            hint="set data.validation = 0.2 and data.validation_from = 'client'",
        )


def check_at_sites(config: Config, algorithm: AlgorithmBase, measure: Sequence[str]) -> None:
    """Raises `ConfigError` for an algorithm that pools data or that sites refuse, or if nothing measures the model."""
    if algorithm.pools_data:
        raise ConfigError(
            f"'{config.algorithm['name']}' trains on the examples of all clients in one place, and they stay at the "
            "sites",
            where="algorithm.name",
            hint="set algorithm.name = 'fedavg'",
        )
    if all(algorithm.takes(op) is None for op in algorithm.ops):
        raise ConfigError(
            f"'{config.algorithm['name']}' with these settings asks clients for what every site refuses",
            where="algorithm.name",
            hint="set algorithm.name = 'fedavg' and aggregate.name = 'mean', or see 'What a site may be asked' in "
            "docs/engines.md",
        )
    check_measured(config, algorithm, measure)


def check_measured(
    config: Config, algorithm: AlgorithmBase, measure: Sequence[str], locate: Callable[[str], str] = str
) -> None:
    """Raises `ConfigError` if nothing measures a model of sites; `locate` says where a person finds a key."""
    if not measure and config.evaluation.clients in (None, "none") and not algorithm.personal:
        raise ConfigError(
            "nothing measures the model: the server has no test images, and no client is asked",
            where=locate("evaluation.clients"),
            hint="set data.dataset.test to a dataset at the server"
            + ("" if algorithm.blind else ", or evaluation.clients = 'all'"),
        )


def check_algorithm(planned: Plan) -> None:
    """Raises `ConfigError` if the algorithm refuses its settings, whatever the data and the model are.

    The algorithm is made for a small model with batch normalization and clients of equal size. What depends on the
    data, on the real model or on the size of `local.lr` is left to the run, and so are components of a user's own.
    """
    config, chosen = planned.config, planned.chosen
    check_combinations(config, planned.locate)
    if not _ready_made(config):
        return
    federation = _federation(config)
    scale = {"head": 2.0} if config.local.lr_scale else None  # its names are those of the real model
    parts = Parts(
        ModelSpec(_small_model, "linear", {}, _SHAPE, federation.classes, seed=0),
        TASKS.find(federation.kind)(),
        config.local.model_copy(update={"lr": _LR, "lr_scale": scale}),
        federation,
        ("@test", "@train") if config.evaluation.train else ("@test",),
        measure_clients=config.evaluation.clients,
        test_peers=config.evaluation.test_peers,
        privacy=config.privacy,
        **{slot: chosen[slot]() for slot in SLOT_REGISTRIES if slot in chosen},
    )
    rule = chain(*(one() for one in planned.rules)) if planned.rules else None
    algorithm = chosen["algorithm"]
    if isinstance(entry := ALGORITHMS.entries.get(algorithm.name), AlgorithmEntry):
        algorithm = replace(algorithm, settings={**algorithm.settings, **entry.stand_in})
    made = algorithm(replace(parts, client=rule))
    check_evaluation(config.evaluation, made)
    check_privacy(config, made)
    if config.at_sites:
        measure = [] if config.data.dataset.get("test") is None else ["@test"]
        check_measured(config, made, measure, planned.locate)


def check_evaluation(settings: Evaluation, algorithm: AlgorithmBase, workers: bool = False) -> None:
    """Raises `ConfigError` for evaluations that the algorithm does not have, or not on workers beside a round."""
    if settings.test_peers is not None and not algorithm.has_peers:
        raise ConfigError(
            "this algorithm has one model on the test data, and no peers with models of their own",
            where="evaluation.test_peers",
            hint="remove it, or choose an algorithm of peers, such as algorithm.name = 'dsgd'",
        )
    if settings.overlap and algorithm.blind:
        raise ConfigError(
            "with sums that the server cannot open, a round is saved before the next begins, so no evaluation can run "
            "beside it",
            where="evaluation.overlap",
            hint="set evaluation.overlap = false",
        )
    if settings.overlap and workers and (asks := algorithm.evaluation_asks) > 1:
        raise ConfigError(
            f"an evaluation asks {asks} times here, of the server and of clients, and one that overlaps with the "
            "next round can ask once",
            where="evaluation.overlap",
            hint="set evaluation.overlap = false, or evaluation.clients = 'none' and no evaluation.test_peers",
        )


def check_privacy(
    config: Config, algorithm: AlgorithmBase, spec: TreeSpec | None = None, moments_of: int = 0
) -> None:
    """Raises `ConfigError` if `[privacy]` is set and something else breaks its promise.

    Args:
        config: all settings.
        algorithm: which has to clip and to add noise.
        spec: of the model, if it is known.
        moments_of: the training images that the dataset's mean and deviation were computed of.
    """
    of_clients = config.privacy is not None and config.privacy.hides_clients
    if config.record.unsafe and not of_clients:
        raise ConfigError(
            "without [privacy] of whole clients everything is recorded anyway",
            where="record.unsafe",
            hint="remove it",
        )
    if config.privacy is None:
        return
    if not of_clients and config.engine.get("precision") == "fp16":
        raise ConfigError(
            "gradients of single examples are computed without the scaled loss that fp16 needs",
            where="engine.precision",
            hint="set it to 'bf16' or 'fp32'",
        )
    if moments_of and config.data.normalize == "standard":
        what = (
            "images are normalized by the mean and the deviation of all clients' images, which have no noise"
        )
        raise ConfigError(what, where="data.normalize", hint="set it to 'unit' or 'half'")
    if spec is not None:
        refuse_statistics(spec)
    if not algorithm.protects:
        raise ConfigError(
            f"'{config.algorithm['name']}' does not clip what clients send and adds no noise, or measures more",
            where="privacy",
            hint="remove the table, or choose an algorithm that averages, such as algorithm.name = 'fedavg'",
        )


def refuse_frozen(algorithm: AlgorithmBase, config: Config) -> None:
    """Raises `ConfigError` if a part of a model is to be frozen whose shapes change."""
    for key in ("freeze", "cache_features"):
        if algorithm.grows and config.model.get(key):
            raise ConfigError(
                f"'{config.algorithm['name']}' changes the shapes of the model, so no part of it can stay as it is",
                where=f"model.{key}",
                hint="remove it, or choose another algorithm",
            )


def refuse_replaced(
    paper: Resolved, algorithm: AlgorithmBase, parts: Parts, overridden: frozenset[str] = frozenset()
) -> None:
    """Raises `ConfigError` if a setting of the algorithm feeds a component that the user's table replaces.

    A setting is accepted if the component is the same anyway. One at its default is accepted unless it was
    `overridden`: a run's own config.toml contains all settings.
    """
    fields = settings_model(paper.factory).model_fields
    for slot, part in algorithm.replaced.items():
        for name in feeding(paper.factory, slot) if part != parts.slots[slot] else ():
            value, default = paper.settings[name], fields[name].default
            # A default that is a word, such as tau_eff = "mean", is not a value that the table could ignore.
            asked = f"algorithm.{name}" in overridden and not isinstance(default, str)
            given = value != default or asked
            if given and not fields[name].is_required():
                raise ConfigError(
                    f"the table [{slot}] replaces the {slot} component that '{paper.name}' sets up with '{name}'",
                    where=f"algorithm.{name}",
                    hint=f"set {slot}.{name} instead where it exists, or remove [{slot}]",
                )


def algorithm_settings(config: Config) -> dict[str, Any]:
    """The settings that `check_algorithm` depends on, for a check of each combination once."""
    tables = config.model_dump(
        mode="json", fallback=repr, include={"algorithm", "local", "evaluation", *SLOTS}
    )
    tables["local"].pop("lr")
    data = config.data
    return {
        **tables,
        "rounds": config.rounds,
        "partition": repr(data.partition or data.parties),
        "held_out": [data.validation > 0, data.validation_from],
    }


def _ready_made(config: Config) -> bool:
    """Whether all components are those of fedlens."""
    tables = [
        config.algorithm,
        *(table for table in config.slots.values() if table is not None),
        *_rules(config),
    ]
    names = [table["name"] for table in tables]
    return all(isinstance(name, str) and ":" not in name for name in names)


def _rules(config: Config) -> list[Mapping[str, Any]]:
    client = config.client
    if client is None:
        return []
    return list(client) if isinstance(client, list) else [client]


def _federation(config: Config) -> FederationInfo:
    given = config.data.parties
    parties = None if given is None else given.of_one_shape(_SHAPE)
    clients = len(parties.shapes) if parties else (config.data.partition or {}).get("clients")
    number = clients if isinstance(clients, int) else _MANY
    held, held_out = {"@train": 100 * number, "@test": 100}, None
    if config.data.validation > 0:
        held["@validation"] = 10
    if config.data.validation > 0 and config.data.validation_from == "client":
        held_out = np.full(number, 10)
    sizes = np.full(number, 100)
    return FederationInfo(sizes, _classes(config), _SHAPE, held, held_out, parties=parties)


def _classes(config: Config) -> int:
    """Those of a target distribution if one is set: the number of the dataset's is not known yet."""
    targets = [table.get("target") for table in (config.algorithm, *_rules(config))]
    return next((len(target) for target in targets if isinstance(target, list)), _CLASSES)


def _small_model(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(shape[0], 2, 1),
        torch.nn.BatchNorm2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * shape[1] * shape[2], classes),
    )
