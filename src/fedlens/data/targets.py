"""Targets of a batch: a tensor whose first dimension is the examples, or an object with the same few operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Targets(Protocol):
    """The targets of n examples that do not fit in one tensor; `fedlens.vision.box_batch.BoxBatch` is one."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def take(self, at: Tensor, /) -> Self:
        """The targets of the examples at the positions `at`, int64 [k], which may repeat."""
        ...

    @classmethod
    def cat(cls, parts: Sequence[Self], /) -> Self:
        """The targets of several batches as those of one, in order."""
        ...

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        """The same on this device."""
        ...

    def to_payload(self) -> dict[str, Any]:
        """The targets as an operation sends them: tensors and plain values."""
        ...

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], /) -> Self:
        """The targets that an operation sent."""
        ...


Some = TypeVar("Some", Tensor, Targets)


def take(targets: Some, at: Tensor) -> Some:
    """The targets of the examples at the positions `at`, int64 [k].

    >>> take(torch.tensor([5, 6, 7]), torch.tensor([2, 0])).tolist()
    [7, 5]
    """
    if isinstance(targets, Tensor):
        return targets.index_select(0, at.to(targets.device))
    return targets.take(at)


def cat(parts: Sequence[Some]) -> Some:
    """The targets of several batches as those of one. Raises `ValueError` without parts.

    >>> cat([torch.tensor([5, 6]), torch.tensor([7])]).tolist()
    [5, 6, 7]
    """
    if not parts:
        raise ValueError("no targets to concatenate")
    head = parts[0]
    if isinstance(head, Tensor):
        return torch.cat(list(parts))
    return type(head).cat(parts)
