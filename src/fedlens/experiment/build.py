"""From settings to objects. All that can be wrong is found here, before any work starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.aggregate.mean import AGGREGATES
from fedlens.aggregate.server import SERVERS
from fedlens.algorithms import ALGORITHMS
from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.selecting import SELECTS
from fedlens.core.errors import ConfigError
from fedlens.core.protocol import Algorithm, Engine, FederationInfo, ModelSpec
from fedlens.core.registry import Factory, Registry, read_settings, settings_model
from fedlens.core.tree import count
from fedlens.data.datasets import DATASETS
from fedlens.data.federated import federate
from fedlens.data.holders import Holders
from fedlens.data.partition import PARTITIONS
from fedlens.data.partition.partition import Partition
from fedlens.engines import ENGINES
from fedlens.experiment.config import SLOTS, Config
from fedlens.experiment.sources import Source
from fedlens.local.rules import RULES
from fedlens.models import MODELS
from fedlens.tasks.classification import Classification

_SLOT_REGISTRIES = {"select": SELECTS, "client": RULES, "aggregate": AGGREGATES, "server": SERVERS}


@dataclass(frozen=True)
class Chosen:
    """A factory that the settings name, and its checked settings."""

    factory: Factory
    name: str
    settings: dict[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.factory(*arguments, **self.settings)

    def table(self) -> dict[str, Any]:
        """The table with every setting in it, as it stands in the run's config.toml."""
        return {"name": self.name, **self.settings}


@dataclass(frozen=True)
class Plan:
    """An experiment whose settings are checked, and nothing loaded yet. `config` has every setting filled in."""

    config: Config
    chosen: Mapping[str, Chosen]


@dataclass(frozen=True)
class Built:
    """An experiment that is ready to run."""

    config: Config
    holders: Holders
    partition: Partition
    class_counts: np.ndarray
    algorithm: Algorithm
    engine: Engine
    model: ModelSpec
    parameters: int
    federation: FederationInfo
    task: Classification
    clients_per_round: int | None


def plan(config: Config, source: Source) -> Plan:
    """Finds every factory and checks its settings."""
    tables: dict[str, tuple[Registry, Mapping[str, Any]]] = {
        "data.dataset": (DATASETS, config.data.dataset),
        "data.partition": (PARTITIONS, config.data.partition),
        "model": (MODELS, config.model),
        "algorithm": (ALGORITHMS, config.algorithm),
        "engine": (ENGINES, config.engine),
    }
    for slot in SLOTS:
        table = getattr(config, slot)
        if table is not None:
            tables[slot] = (_SLOT_REGISTRIES[slot], table)
    chosen = {key: _choose(registry, table, key, source) for key, (registry, table) in tables.items()}
    data = config.data.model_copy(
        update={"dataset": chosen["data.dataset"].table(), "partition": chosen["data.partition"].table()}
    )
    rest = {key: choice.table() for key, choice in chosen.items() if "." not in key}
    return Plan(config.model_copy(update={"data": data, **rest}), chosen)


def _choose(registry: Registry, table: Mapping[str, Any], key: str, source: Source) -> Chosen:
    name = table["name"]
    if callable(name):
        factory, name = name, f"{name.__module__}:{name.__qualname__}"
    elif isinstance(name, str):
        factory = registry.find(name, where=source.locate(f"{key}.name"))
    else:
        raise ConfigError(f"the name of a {registry.kind} is {name!r}, not a word", where=source.locate(key))
    values = {setting: value for setting, value in table.items() if setting != "name"}
    if key in source.renamed:
        # The recipe's settings were meant for the thing it named; what the new one also has is kept.
        values = {
            setting: value
            for setting, value in values.items()
            if setting in settings_model(factory).model_fields or f"{key}.{setting}" in source.overridden
        }
    try:
        return Chosen(factory, name, read_settings(factory, values, key))
    except ConfigError as error:
        raise ConfigError(error.what, where=source.locate(error.where or key), hint=error.hint) from None


def build(planned: Plan, data_dir: Path, download: bool, engine: Engine | None = None) -> Built:
    """Loads the data, scatters it, and makes the algorithm and the engine."""
    config, chosen = planned.config, planned.chosen
    dataset = chosen["data.dataset"](data_dir, download, config.seeds.data)
    data, partition = federate(
        dataset,
        lambda labels: chosen["data.partition"](labels, config.seeds.partition),
        config.data.validation,
        config.seeds.data,
    )
    if config.data.normalize == "unit":
        channels = len(data.mean)
        data = replace(data, mean=(0.0,) * channels, std=(1.0,) * channels)
    holders = Holders(data, config.data.augment)
    federation = FederationInfo(partition.sizes(), len(data.classes), data.input_shape, holders.held())
    model = ModelSpec(
        chosen["model"].factory,
        chosen["model"].name,
        chosen["model"].settings,
        data.input_shape,
        len(data.classes),
        config.seeds.initialization,
    )
    task = Classification()
    parts = Parts(
        model,
        task,
        config.local,
        federation,
        measure(config, federation),
        config.evaluation.batch_size,
        **{slot: chosen[slot]() for slot in SLOTS if slot in chosen},
    )
    parameters = count(parts.spec)
    algorithm = chosen["algorithm"](parts)
    _check_algorithm(algorithm, chosen["algorithm"].name)
    select = getattr(algorithm, "select", None)
    size = select.size(federation) if select is not None else None
    return Built(
        config,
        holders,
        partition,
        partition.class_counts(dataset.train.targets, len(data.classes)),
        algorithm,
        engine if engine is not None else chosen["engine"](),
        model,
        parameters,
        federation,
        task,
        size,
    )


def measure(config: Config, federation: FederationInfo) -> Sequence[str]:
    """What the server measures the model on."""
    wanted = (
        ["@test"]
        + ["@validation"] * ("@validation" in federation.held)
        + ["@train"] * config.evaluation.train
    )
    return tuple(wanted)


def data_directory(given: Path | None) -> Path:
    """`--data-dir`, else FEDLENS_DATA, else ~/.cache/fedlens."""
    if given is not None:
        return given.expanduser()
    return Path(os.environ.get("FEDLENS_DATA") or "~/.cache/fedlens").expanduser()


def _check_algorithm(algorithm: object, name: str) -> None:
    for part in ("ops", "init", "round", "evaluate", "model"):
        if not hasattr(algorithm, part):
            raise ConfigError(
                f"the algorithm '{name}' made a {type(algorithm).__name__}, which has no '{part}'",
                where="algorithm.name",
                hint="see the page 'add an algorithm'",
            )
    if not inspect.isgeneratorfunction(algorithm.round):  # type: ignore[attr-defined]
        raise ConfigError(
            f"the algorithm '{name}' has a round() that is no generator of asks", where="algorithm.name",
            hint="it has to 'yield' at least one Ask",
        )  # fmt: skip


__all__ = ["Built", "Chosen", "Plan", "build", "data_directory", "measure", "plan"]
