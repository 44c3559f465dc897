"""How often each class occurs among a client's examples."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fedlens.core.protocol import Client
from fedlens.tasks.task import Task

_VALUES = 2**22  # targets and counts of a chunk, so that they take little memory
_KEPT = 2**22  # counts that a worker keeps of all its clients


def class_counts(task: Task, client: Client, classes: int) -> Tensor:
    """int64 [classes]: how often each class occurs among all the client's own examples.

    Counted in chunks, and kept for the worker's life as long as the counts of all its clients take little memory.
    """
    kept: dict[object, Tensor] = client.scratch.setdefault("class-counts", {})
    key = client.id, classes
    if key not in kept:
        n, counts = len(client.data), torch.zeros(classes, dtype=torch.int64)
        chunk = _chunk(client.data.read_targets(0, min(1, n)), classes)
        for start in range(0, n, chunk):
            targets = client.data.read_targets(start, min(start + chunk, n))
            counts += task.counts(targets, classes).sum(0).cpu()
        if (len(kept) + 1) * classes > _KEPT:
            kept.clear()
        kept[key] = counts
    return kept[key]


def _chunk(one: object, classes: int) -> int:
    """The examples of a chunk, from the targets of one example: masks have a value for each pixel."""
    values = prod(one.shape[1:]) if isinstance(one, Tensor) else 1
    return max(1, _VALUES // max(classes, values, 1))
