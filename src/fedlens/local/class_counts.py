"""The number of examples of each class at a client."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import DataError
from fedlens.core.protocol import Client
from fedlens.data.dataset import Dataset
from fedlens.tasks.task import Task

_VALUES = 2**22  # the most targets and counts of a chunk, to limit memory
_NAMED = 5  # classes without test examples that are named
_KEPT = 2**22  # the most counts that a worker keeps for all its clients


def class_counts(task: Task, client: Client, classes: int) -> Tensor:
    """int64 [classes]: `counts_of` the client's own examples, cached in the worker.

    The cache is emptied when it takes too much memory.
    """
    kept: dict[object, Tensor] = client.scratch.setdefault("class-counts", {})
    key = client.id, classes
    if key not in kept:
        counts = counts_of(task, client.data, classes)
        if (len(kept) + 1) * classes > _KEPT:
            kept.clear()
        kept[key] = counts
    return kept[key]


def counts_of(task: Task, data: Any, classes: int) -> Tensor:
    """int64 [classes]: how often each class occurs in the targets of `data`, read in chunks."""
    n = len(data)
    chunk = _chunk(data.read_targets(0, min(1, n)), classes)
    chunks = (data.read_targets(start, min(start + chunk, n)) for start in range(0, n, chunk))
    counts = [task.counts(targets, classes).sum(0) for targets in chunks]
    return torch.stack(counts).sum(0).cpu() if counts else torch.zeros(classes, dtype=torch.int64)


def absent_classes(task: Task, data: Any, dataset: Dataset) -> list[str]:
    """A sentence that names the classes of the dataset that its test `data` lack, if any.

    Raises `DataError` if none of them has a class, although a task needs it.
    """
    names = dataset.classes
    if not task.counts_classes or not task.averages_classes:
        return []
    counts = counts_of(task, data, len(names))
    if task.placed and not counts.any():
        raise DataError(
            f"no test {task.example} of '{dataset.name}' has a class, so no metric is defined",
            where="data.dataset",
            hint="check the annotations of the test data: every pixel or image is without a class",
        )
    absent = [names[k] for k in (counts == 0).nonzero().flatten().tolist()]
    if not absent:
        return []
    more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    listed = ", ".join(f"'{name}'" for name in absent[:_NAMED])
    return [f"no test {task.example} has the class {listed}{more}: {task.absence}"]


def _chunk(one: object, classes: int) -> int:
    """The number of examples in a chunk, from the targets of one example: masks have a value for each pixel."""
    values = prod(one.shape[1:]) if isinstance(one, Tensor) else 1
    return max(1, _VALUES // max(classes, values, 1))
