"""From settings to objects. All that can be wrong is found here, before any work starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from fedlens.aggregate.mean import AGGREGATES
from fedlens.aggregate.server import SERVERS
from fedlens.algorithms import ALGORITHMS, WITHOUT_SLOTS
from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.selecting import SELECTS
from fedlens.core.errors import ConfigError, DataError, FedlensError
from fedlens.core.protocol import Algorithm, Engine, FederationInfo, ModelSpec
from fedlens.core.registry import Factory, Registry, settings_model
from fedlens.core.tree import count
from fedlens.data.datasets import DATASETS
from fedlens.data.federated import federate
from fedlens.data.holders import Holders
from fedlens.data.loading import loaded
from fedlens.data.partition import PARTITIONS
from fedlens.data.partition.partition import Partition
from fedlens.data.transforms import pad_crop_flip
from fedlens.engines import ENGINES
from fedlens.engines.answering import told
from fedlens.experiment.config import SLOTS, Config
from fedlens.experiment.faults import explained, no_such_setting, refuse_loose
from fedlens.experiment.sources import Source
from fedlens.local.rules import RULES
from fedlens.models import MODELS
from fedlens.tasks.classification import Classification

_SLOT_REGISTRIES = {"select": SELECTS, "client": RULES, "aggregate": AGGREGATES, "server": SERVERS}

# What a factory has to make, by what is used of it: a user's own file may make anything.
_PARTS = {
    "data.dataset": ("train", "test", "classes", "mean", "std"),
    "data.partition": ("ids", "indices", "offsets", "digest"),
    "algorithm": ("ops", "init", "round", "evaluate", "model"),
    "engine": ("open", "answer", "close"),
    "model": ("state_dict", "named_parameters"),
    "select": ("cohort", "size"),
    "client": ("loss", "grad", "finish"),
    "aggregate": ("weighting", "reduce", "fold"),
    "server": ("init", "step"),
}


@dataclass(frozen=True)
class Chosen:
    """A factory that the settings name, and its checked settings. `key` is where they stand."""

    factory: Factory
    name: str
    settings: dict[str, Any]
    key: str
    kind: str
    locate: Callable[[str], str]

    def __call__(self, *arguments: Any) -> Any:
        """What the factory makes. Raises `ConfigError` that says where, also where a user's own factory breaks."""
        return self.made(lambda: self.factory(*arguments, **self.settings))

    def made(self, make: Callable[[], Any]) -> Any:
        """What `make`, which calls the factory, gives; with the same errors."""
        try:
            made = make()
        except ConfigError as error:
            raise located(error, self.key, self.locate) from error
        except FedlensError:
            raise
        except Exception as error:
            raise self._fault(f"failed: {told(error)}") from error
        if made is None:
            raise self._fault("gave nothing back", hint="it has to 'return' what it makes")
        for part in _PARTS[self.key]:
            if not hasattr(made, part):
                raise self._fault(f"made a {type(made).__name__}, which has no '{part}'")
        return made

    def _fault(self, what: str, hint: str | None = None) -> ConfigError:
        where = self.locate(f"{self.key}.name")
        return ConfigError(f"the {self.kind} '{self.name}' {what}", where=where, hint=hint)

    def table(self) -> dict[str, Any]:
        """The table with every setting in it, as it stands in the run's config.toml."""
        return {"name": self.name, **self.settings}


@dataclass(frozen=True)
class Plan:
    """An experiment whose settings are checked, and nothing loaded yet. `config` has every setting filled in."""

    config: Config
    chosen: Mapping[str, Chosen]
    locate: Callable[[str], str]


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
    if "algorithm" in source.renamed and config.algorithm["name"] in WITHOUT_SLOTS:
        left = {slot: None for slot in SLOTS if not _was_set(slot, source)}
        config = config.model_copy(update=left)
    for slot in SLOTS:
        table = getattr(config, slot)
        if table is not None:
            tables[slot] = (_SLOT_REGISTRIES[slot], table)
    chosen = {key: _choose(registry, table, key, source) for key, (registry, table) in tables.items()}
    data = config.data.model_copy(
        update={"dataset": chosen["data.dataset"].table(), "partition": chosen["data.partition"].table()}
    )
    rest = {key: choice.table() for key, choice in chosen.items() if "." not in key}
    return Plan(config.model_copy(update={"data": data, **rest}), chosen, source.locate)


def _was_set(table: str, source: Source) -> bool:
    """Whether an override set this table or a key in it."""
    return any(key == table or key.startswith(f"{table}.") for key in source.overridden)


def _choose(registry: Registry, table: Mapping[str, Any], key: str, source: Source) -> Chosen:
    name = table["name"]
    if callable(name):
        factory, name = name, f"{name.__module__}:{name.__qualname__}"
    elif isinstance(name, str):
        factory = registry.find(name, where=source.locate(f"{key}.name"))
        file, _, attribute = name.rpartition(":")
        if file.endswith(".py"):
            # Written into the run's config.toml, so that it is found again from any directory.
            name = f"{Path(file).expanduser().resolve()}:{attribute}"
    else:
        where = source.locate(f"{key}.name")
        raise ConfigError(f"the name of the {registry.kind} is {name!r}, and has to be a word", where=where)
    model = _settings_model(factory, name, source.locate(f"{key}.name"))
    values = {setting: value for setting, value in table.items() if setting != "name"}
    if key in source.renamed:
        # The recipe's settings were meant for the thing it named; what the new one also has is kept.
        values = {
            setting: value
            for setting, value in values.items()
            if setting in model.model_fields or f"{key}.{setting}" in source.overridden
        }
    settings = _settings(model, values, key, f"the {registry.kind} '{name}'", source.locate)
    return Chosen(factory, name, settings, key, registry.kind, source.locate)


def _settings_model(factory: Factory, name: str, where: str) -> type[BaseModel]:
    try:
        return settings_model(factory)
    except Exception as error:
        raise ConfigError(
            f"the settings of '{name}' cannot be read off its signature: {type(error).__name__}: {error}",
            where=where,
            hint="a setting is a keyword-only parameter with a type: def make(parts, *, mu: float = 0.1)",
        ) from error


def _settings(
    model: type[BaseModel], values: Mapping[str, Any], key: str, thing: str, locate: Callable[[str], str]
) -> dict[str, Any]:
    known = list(model.model_fields)
    for name in values:
        if name not in known:
            raise no_such_setting(name, locate(f"{key}.{name}"), known, thing)
    try:
        checked = model.model_validate(dict(values))
    except ValidationError as error:
        raise explained(error, values, key, locate, lambda _: known) from None
    found = {name: getattr(checked, name) for name in known}
    # An infinite alpha is the prior itself (hsu2020 appendix B.1).
    refuse_loose(values, found, key, locate, finite=key != "data.partition")
    return found


def located(error: ConfigError, key: str, locate: Callable[[str], str]) -> ConfigError:
    """The same error, with the file and line of the setting that it names, `key` being the table that it is in."""
    name = error.where or ""
    full = name if name.partition(".")[0] in Config.model_fields else ".".join(filter(None, [key, name]))
    return ConfigError(error.what, where=locate(full) if full else None, hint=error.hint)


def build(planned: Plan, data_dir: Path, download: bool, engine: Engine | None = None) -> Built:
    """Loads the data, scatters it, and makes the algorithm and the engine.

    Raises `ConfigError` where the settings do not fit the data or each other, and `DataError` where the data are
    missing or damaged.
    """
    try:
        return _build(planned, data_dir, download, engine)
    except ConfigError as error:
        if error.where is None or error.where.partition(".")[0] not in Config.model_fields:
            raise
        raise located(error, "", planned.locate) from error


def _build(planned: Plan, data_dir: Path, download: bool, engine: Engine | None) -> Built:
    config, chosen = planned.config, planned.chosen
    dataset = chosen["data.dataset"](data_dir, download, config.seeds.data)
    if dataset.kind != "classification":
        raise ConfigError(
            f"'{dataset.name}' is for {dataset.kind}, and there is no training for that yet",
            where="data.dataset",
            hint="its partitions can be made and looked at with 'fedlens partition'",
        )
    dataset = loaded(dataset, int(config.data.cache * 2**30))
    data, partition = federate(
        dataset,
        lambda table: chosen["data.partition"](table, config.seeds.partition),
        config.data.validation,
        config.seeds.data,
        config.data.validation_from,
    )
    if len(data.test) == 0:
        raise DataError(
            f"the dataset '{dataset.name}' has no test images, so there is nothing to measure a model on",
            where="data.dataset",
        )
    if config.data.normalize == "unit":
        channels = len(data.mean)
        data = replace(data, mean=(0.0,) * channels, std=(1.0,) * channels)
    holders = Holders(data, pad_crop_flip if config.data.augment == "pad-crop-flip" else None)
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
    chosen["model"].made(model.build)
    parameters = count(parts.spec)
    algorithm = chosen["algorithm"](parts)
    select = getattr(algorithm, "select", None)
    size = select.size(federation) if select is not None and hasattr(select, "size") else None
    return Built(
        config,
        holders,
        partition,
        partition.census.dense() if partition.census else np.empty((0, 0)),
        algorithm,
        engine if engine is not None else chosen["engine"](),
        model,
        parameters,
        federation,
        task,
        size,
    )


def data_digest(built: Built) -> str:
    """SHA-256 in hexadecimal of the images and labels that are trained and tested on."""
    data = built.holders.data
    hashed = hashlib.sha256()
    for split in (data.train, data.test):
        split.feed(hashed)
    return hashed.hexdigest()


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


__all__ = ["Built", "Chosen", "Plan", "build", "data_digest", "data_directory", "measure", "plan"]
