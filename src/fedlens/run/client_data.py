"""Reads the data of an experiment, and divides it among the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.federated import Partitioner, federate
from fedlens.data.loading import loaded
from fedlens.data.normalize import normalized
from fedlens.data.partition.iid import reassigned
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import ExamplesHere, federate_here, federate_sites
from fedlens.data.table import Table
from fedlens.data.vertical.feature_partition import AnyPartition
from fedlens.data.vertical.vertical_datasets import federate_parties
from fedlens.run.session import Session, SharedDataset
from fedlens.settings.augment_chain import attempt, augment_chain
from fedlens.settings.model_kind import (
    refuse_image_settings,
    refuse_other_kind,
)
from fedlens.settings.plan import SERVER_TEST, Plan
from fedlens.settings.resolve import Resolved
from fedlens.tasks.task import Task


class ClientData(NamedTuple):
    """The clients' data, their partition, the task, the tables that the data fill in, and what a session shares."""

    client_data: ClientDatasets
    partition: AnyPartition
    task: Task
    tables: dict[str, Any]
    shared: SharedDataset | None


def client_data_of(
    planned: Plan,
    data_dir: Path,
    download: bool,
    say: Callable[[str], None],
    session: Session | None,
    roster: Roster | None,
    here: ExamplesHere | None = None,
) -> ClientData:
    """Reads the dataset, decodes it, divides it among the clients, and adds normalization and augmentation."""
    config, chosen = planned.config, planned.chosen
    reader, seeds = chosen["data.dataset"], config.seeds
    shared = None if session is None else session.dataset(reader, data_dir, download, seeds.data)
    dataset = reader(data_dir, download, seeds.data) if shared is None else shared.dataset
    resolved = planned.task(dataset.info)
    task = _checked_task(resolved, dataset.info)
    refuse_other_kind(chosen["model"].name, chosen["model"].factory, dataset.info)
    refuse_image_settings(dataset.info, planned.augments, chosen["model"])
    cache = int(config.data.cache * 2**30)
    dataset = loaded(dataset, cache, say) if shared is None else shared.loaded(cache, say)
    augment, augment_notes = augment_chain(planned.augments, dataset, task)

    parties = config.data.parties
    held_out = (config.data.validation, seeds.data, config.data.validation_from)
    unit = None if config.privacy is None else config.privacy.column

    def federated() -> tuple[ClientDatasets, AnyPartition]:
        if dataset.at_sites and here is not None:
            return federate_here(dataset, _known(roster), here, *held_out[:2], unit)
        if dataset.at_sites:
            at_server = chosen[SERVER_TEST](data_dir, download, seeds.data) if SERVER_TEST in chosen else None
            return federate_sites(dataset, _known(roster), at_server, *held_out[:2])
        if parties is not None:
            return federate_parties(
                dataset,
                seeds.partition,
                *held_out[:2],
                **parties.model_dump(exclude={"align", "files"}),
            )
        return federate(dataset, partitioner(planned), *held_out, unit)

    if session is None or shared is None or dataset.at_sites:
        data, partition = federated()
    else:
        key = (
            cache,
            parties or chosen["data.partition"].identity,
            seeds.partition,
            config.data.reassign,
            *held_out,
            unit,
        )
        data, partition = session.federated(shared, key, federated)
    notes = (*dataset.notes, *augment_notes, *data.dataset.notes[len(dataset.notes) :])
    data = replace(
        data,
        dataset=replace(normalized(data.dataset, config.data.normalize), notes=notes),
        augment=augment,
        prefetch=config.data.prefetch,
        views=task.views,
    )
    if data.augment is not None and not data.augment.apart and not dataset.at_sites:
        attempt(data.augment, data.dataset, task)
    if len(dataset.test) == 0 and not dataset.at_sites:
        raise DataError(
            f"the dataset '{dataset.name}' has no test {task.example}s to evaluate a model on",
            where="data.dataset",
        )
    tables = {"task": resolved.table(), "data.dataset": {**config.data.dataset, **data.dataset.chosen}}
    return ClientData(data, partition, task, tables, shared)


def _known(roster: Roster | None) -> Roster:
    """The roster. Raises `ConfigError` without one: nothing has asked the sites who they are."""
    if roster is None:
        raise ConfigError(
            "the training data are at the sites, which only 'fedlens serve' asks",
            where="data.dataset",
            hint="start the experiment with 'fedlens serve'",
        )
    return roster


def partitioner(planned: Plan) -> Partitioner:
    """What draws the partition of a run."""
    seed, reassign = planned.config.seeds.partition, planned.config.data.reassign

    def drawn(table: Table) -> Partition:
        partition: Partition = planned.chosen["data.partition"](table, seed)
        return reassigned(partition, seed) if reassign else partition

    return drawn


def _checked_task(resolved: Resolved, info: DatasetInfo) -> Task:
    """The task, checked against the dataset."""
    task = resolved()
    if not isinstance(task, Task):
        raise ConfigError(
            f"the task '{resolved.name}' is of the class {type(task).__name__}, which does not inherit from Task",
            where="task.name",
            hint="inherit from fedlens.tasks.task.Task",
        )

    def validated() -> Task:
        task.validate(info)
        return task

    resolved.made(validated)
    return task.fitted(info)
