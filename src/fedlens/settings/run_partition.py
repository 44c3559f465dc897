"""The partition that a run with given settings trains on, made without a model and without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.dataset import Dataset, marks_of, refuse_features
from fedlens.data.federated import hold_out, hold_out_each
from fedlens.data.loading import loaded
from fedlens.data.partition.iid import reassigned
from fedlens.data.partition.partition import Partition
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan


@dataclass(frozen=True)
class RunPartition:
    """The partition of a run, with its census, and the test images of each class.

    Attributes:
        test_counts: int64 [classes], how many test examples show each class.
    """

    partition: Partition
    test_counts: NDArray[np.int64]


def run_partition(settings: Mapping[str, Any], *, root: Path, download: bool = False) -> RunPartition:
    """The partition of the run with these settings, `data.validation` held out.

    Args:
        settings: those of an experiment, as nested tables.
        root: the data folder.

    Raises `ConfigError` if a setting is wrong, `DataError` if the data are missing or corrupt.

    >>> made = run_partition(
    ...     {"rounds": 1, "model": "linear", "local": {"lr": 0.1},
    ...      "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}, root=Path())
    >>> made.partition.sizes().tolist(), int(made.test_counts.sum())
    ([360, 359, 359, 359], 360)
    """
    source = Source(dict(settings))
    planned = plan(read_config(source.values, source.locate), source)
    config = planned.config
    dataset: Dataset = planned.chosen["data.dataset"](root, download, config.seeds.data)
    if dataset.on_error == "skip":
        # What cannot be decoded is left out of a run, and the positions are those of the rest.
        dataset = loaded(dataset, int(config.data.cache * 2**30))
    if "data.partition" not in planned.chosen:
        raise ConfigError(
            "parties hold parts of the same images, and have no classes of their own to count",
            where="data.parties",
            hint="set data.partition in its place",
        )
    table, share = dataset.table(), config.data.validation
    each = config.data.validation_from == "client"
    kept, held = hold_out(len(table), 0.0 if each else share, config.seeds.data)
    drawn: Partition = planned.chosen["data.partition"](
        table.take(kept) if len(held) else table, config.seeds.partition
    )
    refuse_features(dataset, drawn)
    if config.data.reassign:
        drawn = reassigned(drawn, config.seeds.partition)
    partition = replace(drawn, indices=kept[drawn.indices], dataset=dataset.name)
    if each and share:
        partition, _, _ = hold_out_each(partition, share, config.seeds.data)
    marks, _ = marks_of(dataset.test)
    counts = np.bincount(marks, minlength=len(dataset.classes)).astype(np.int64)
    return RunPartition(partition.counted(table), counts)
