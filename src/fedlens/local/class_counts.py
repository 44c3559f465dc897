"""How often each class occurs among a client's examples."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlens.core.protocol import Client
from fedlens.tasks.task import Task

_VALUES = 2**22  # counts of a chunk, [examples, classes], so that they take little memory
_KEPT = 2**22  # counts that a worker keeps of all its clients


def class_counts(task: Task, client: Client, classes: int) -> Tensor:
    """int64 [classes]: how often each class occurs among all the client's own examples.

    Counted in chunks, and kept for the worker's life as long as the counts of all its clients take little memory.
    """
    kept: dict[object, Tensor] = client.scratch.setdefault("class-counts", {})
    key = client.id, classes
    if key not in kept:
        chunk = max(1, _VALUES // classes)
        counts = torch.zeros(classes, dtype=torch.int64)
        for start in range(0, len(client.data), chunk):
            targets = client.data.read_targets(start, min(start + chunk, len(client.data)))
            counts += task.counts(targets, classes).sum(0).cpu()
        if (len(kept) + 1) * classes > _KEPT:
            kept.clear()
        kept[key] = counts
    return kept[key]
