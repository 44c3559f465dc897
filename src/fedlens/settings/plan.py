"""Resolves the settings of an experiment and checks them, before any data is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedlens.aggregate.mean import AGGREGATES
from fedlens.aggregate.server_steps import SERVERS
from fedlens.algorithms.client_sampling import SELECTS
from fedlens.algorithms.registry import (
    ALGORITHMS,
    RULES,
    default_table,
    refuse_other_data,
    refuse_unused,
    unused_slots,
)
from fedlens.base.errors import ConfigError
from fedlens.base.registry import Registry
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.engine_base import BareEngine, EngineBase
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.partition.registry import PARTITIONS
from fedlens.engines.registry import ENGINES
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS
from fedlens.settings.config import Config, filled, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.resolve import Resolved, located, resolve
from fedlens.tasks.registry import TASKS

SLOT_REGISTRIES: Mapping[str, Registry] = {"select": SELECTS, "aggregate": AGGREGATES, "server": SERVERS}

OBSERVERS = Registry("observer", {})

_LABELLED = "evaluation.neighbours.dataset"
SERVER_TEST = "data.dataset.test"
"""The slot of a dataset at the server whose test images measure a model of sites."""


@dataclass(frozen=True)
class Plan:
    """An experiment whose settings are checked. Nothing is loaded yet; `config` has every setting filled in."""

    config: Config
    chosen: Mapping[str, Resolved]
    augments: Sequence[Resolved]
    rules: Sequence[Resolved]
    locate: Callable[[str], str]
    task: Callable[[DatasetInfo], Resolved]  # the task for a dataset
    overridden: frozenset[str] = frozenset()  # keys that were set on the command line
    observers: Sequence[Resolved] = ()
    notes: tuple[str, ...] = ()  # tables of the recipe that the algorithm set in its place does not use

    def engine(self) -> EngineBase:
        """A new engine, as the settings say; the caller closes it."""
        resolved = self.chosen["engine"]
        engine = resolved()
        wrapped: EngineBase = resolved.made(lambda: BareEngine.wrap(engine))
        return wrapped


def plan_of(source: Source) -> Plan:
    """The plan of settings as they were given. Raises `ConfigError` for a wrong name or setting."""
    return plan(read_config(source.values, source.locate), source)


def plan(config: Config, source: Source) -> Plan:
    """Resolves every factory and checks its settings. Raises `ConfigError` for a wrong name or setting."""
    tables: dict[str, tuple[Registry, Mapping[str, Any]]] = {
        "data.dataset": (DATASETS, config.data.dataset),
        "model": (MODELS, config.model),
        "algorithm": (ALGORITHMS, config.algorithm),
        "engine": (ENGINES, config.engine),
    }
    if config.data.partition is not None:
        tables["data.partition"] = PARTITIONS, config.data.partition
    neighbours = config.evaluation.neighbours
    if neighbours is not None:
        tables[_LABELLED] = DATASETS, neighbours.dataset
    if config.at_sites and (test := config.data.dataset.get("test")) is not None:
        tables[SERVER_TEST] = DATASETS, _named_test(test)
    slots, notes = _slots(config, source)
    try:
        refuse_unused(config.algorithm["name"], slots, config.local)
        refuse_other_data(config.algorithm["name"], config.data.parties is not None)
    except ConfigError as error:
        raise located(error, "", source.locate) from error
    tables |= {slot: (registry, slots[slot]) for slot, registry in SLOT_REGISTRIES.items() if slots[slot]}
    chosen = {
        key: resolve(registry, table, key, source, shared=Preparation if key == "model" else None)
        for key, (registry, table) in tables.items()
    }
    _refuse_task_settings(config.task, source)
    client = slots["client"]
    rule_tables = client if isinstance(client, list) else [client] if client is not None else []
    rules = [resolve(RULES, table, "client", source) for table in rule_tables]
    augments = [resolve(AUGMENTS, table, "data.augment", source) for table in config.data.augment]
    observers = [resolve(OBSERVERS, table, "observe", source) for table in config.observe]
    full = [rule.table() for rule in rules]
    with_defaults = {
        **slots,
        **{key: choice.table() for key, choice in chosen.items() if key != SERVER_TEST},
        "client": full if isinstance(client, list) else next(iter(full), None),
        "data.augment": [choice.table() for choice in augments],
        "observe": [observer.table() for observer in observers],
    }
    return Plan(
        filled(config, with_defaults),
        chosen,
        augments,
        rules,
        source.locate,
        partial(_task, config.task, source),
        source.overridden,
        observers,
        notes,
    )


def _named_test(test: Any) -> Mapping[str, Any]:
    return test if isinstance(test, Mapping) else {"name": test}


def _slots(config: Config, source: Source) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tables of single components, None for those that the algorithm decides, and notes on those left out.

    Of a recipe whose algorithm an override has replaced, the tables are left out that the new one does not use.
    """
    slots: dict[str, Any] = {**config.slots, "client": config.client}
    if "algorithm" not in source.renamed:
        return slots, ()
    name = config.algorithm["name"]
    left_out = [s for s in unused_slots(name) if slots[s] is not None and not _was_set(s, source)]
    slots |= dict.fromkeys(left_out)
    notes = tuple(f"'{name}' does not use the recipe's table [{slot}]: it is left out" for slot in left_out)
    select = slots["select"]
    if select and select["name"] == "uniform" and source.overridden.isdisjoint({"select", "select.name"}):
        # The selection in the recipe was the default of the recipe's algorithm.
        settings = {key: value for key, value in select.items() if key != "name"}
        slots["select"] = {**default_table("select", config.algorithm), **settings}
    return slots, notes


def _task(table: Mapping[str, Any], source: Source, info: DatasetInfo) -> Resolved:
    """The task that the settings name, or that the dataset's kind names. Raises `ConfigError` where there is none."""
    if "name" not in table and info.kind == "unlabelled":
        raise ConfigError(
            f"the images of '{info.name}' have no labels, so a task has to be named",
            where="task.name",
            hint="set task.name = 'simsiam' or 'moco-v2'",
        )
    if "name" not in table and info.kind not in TASKS:
        raise ConfigError(
            f"'{info.name}' is for {info.kind}, which fedlens cannot train on yet",
            where="data.dataset",
            hint="'fedlens partition' can make and show its partitions",
        )
    return resolve(TASKS, {"name": info.kind, **table}, "task", source)


def _refuse_task_settings(table: Mapping[str, Any], source: Source) -> None:
    """Raises `ConfigError` if no task has these settings: without a name, the dataset decides later which it is."""
    first: ConfigError | None = None
    for kind in [table["name"]] if "name" in table else TASKS:
        try:
            resolve(TASKS, {**table, "name": kind}, "task", source)
        except ConfigError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first


def _was_set(table: str, source: Source) -> bool:
    """Whether an override set this table or a key in it."""
    return any(key == table or key.startswith(f"{table}.") for key in source.overridden)
