"""Trees of several clients in stacked tensors [A, ...], and the tree of one client as a row of them.

A row is a mapping like any other tree. Code that recognizes rows can check, count and sum all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedlens.core.tree import finite_norm

Kind = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each leaf


class StackedTrees:
    """Trees of A clients, each leaf [A, ...].

    >>> rows = StackedTrees({"w": torch.tensor([[1.0, 2.0], [3.0, float("inf")]])}).rows()
    >>> dict(rows[0])
    {'w': tensor([1., 2.])}
    >>> [row.finite for row in rows], rows[0].nbytes
    ([True, False], 8)
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.leaves = leaves
        self._compared: tuple[Kind, bool] | None = None

    def rows(self) -> list[StackedRow]:
        """The trees, one for each client."""
        return [StackedRow(self, k) for k in range(len(next(iter(self.leaves.values()))))]

    def row(self, at: int) -> StackedRow:
        """The tree of one client."""
        return StackedRow(self, at)

    def like(self, kind: Kind) -> bool:
        """Whether each tree has exactly these leaves, with these shapes and dtypes."""
        if self._compared is None or self._compared[0] is not kind:
            own = {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in self.leaves.items()}
            self._compared = kind, own == dict(kind)
        return self._compared[1]

    @cached_property
    def norms(self) -> list[float]:
        """The Euclidean norm of each tree, computed like `fedlens.core.tree.finite_norm`."""
        floats = [leaf for leaf in self.leaves.values() if leaf.is_floating_point()]
        if not floats:
            return [0.0] * len(next(iter(self.leaves.values())))
        parts = [
            torch.linalg.vector_norm(leaf.flatten(1), dim=1) if leaf.dim() > 1 else leaf for leaf in floats
        ]
        norms: list[float] = torch.linalg.vector_norm(
            torch.stack([p.double() for p in parts]), dim=0
        ).tolist()
        return [
            norm if math.isfinite(norm) else finite_norm([leaf[k] for leaf in floats])
            for k, norm in enumerate(norms)
        ]

    @cached_property
    def finite(self) -> list[bool]:
        """For each tree, whether its floating-point leaves hold neither NaN nor an infinity."""
        return [math.isfinite(norm) for norm in self.norms]

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of one tree."""
        return sum(leaf[0].numel() * leaf.element_size() for leaf in self.leaves.values())


class StackedRow(Mapping[str, Tensor]):
    """The tree of client `at` in `stacked`; its leaves are views."""

    __slots__ = ("at", "stacked")

    def __init__(self, stacked: StackedTrees, at: int) -> None:
        self.stacked, self.at = stacked, at

    def __getitem__(self, name: str) -> Tensor:
        return self.stacked.leaves[name][self.at]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacked.leaves)

    def __len__(self) -> int:
        return len(self.stacked.leaves)

    @property
    def norm(self) -> float:
        """Its Euclidean norm; NaN or infinite if it holds such a value."""
        return self.stacked.norms[self.at]

    @property
    def finite(self) -> bool:
        """Whether it holds neither NaN nor an infinity."""
        return self.stacked.finite[self.at]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.stacked.row_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: value.clone() for name, value in self.items()},)  # alone, without the other rows


# One field of the payloads of several clients: a tree or a number of each, or one tree that all of them share.
Column = StackedTrees | list[float] | Mapping[str, Tensor]


def stack_of(trees: list[Any]) -> StackedTrees | None:
    """The `StackedTrees` that all of these are rows of; None if there is no such one."""
    first = trees[0].stacked if trees and isinstance(trees[0], StackedRow) else None
    return first if first and all(isinstance(t, StackedRow) and t.stacked is first for t in trees) else None


def row_of(columns: Mapping[str, Column], row: int) -> dict[str, Any]:
    """The payload of one client.

    >>> row_of({"weight": [3.0, 5.0], "buffers": {}}, 1)
    {'weight': 5.0, 'buffers': {}}
    """
    return {
        name: column.row(row)
        if type(column) is StackedTrees
        else column[row]
        if type(column) is list
        else column
        for name, column in columns.items()
    }
