"""The outcomes of several clients that were computed together, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

from fedlens.core.protocol import Outcome
from fedlens.core.stacked import Column, row_of


class StackedOutcomes(Sequence[Outcome]):
    """The outcomes of A clients, in the order of their calls. Each `Outcome` is made when it is read.

    An executor reads the columns: it checks, counts and sums all clients at once.

    Args:
        payload: the fields of the payloads; see `fedlens.core.stacked.Column`.
        metrics: the numbers of the clients, by name, A each.
        rows: the row of each call in the columns.

    >>> outcomes = StackedOutcomes({"weight": [3.0, 5.0], "buffers": {}}, {"batches": [1.0, 2.0]}, [1, 0])
    >>> outcomes[0].payload, outcomes[0].metrics
    ({'weight': 5.0, 'buffers': {}}, {'batches': 2.0})
    """

    def __init__(
        self, payload: Mapping[str, Column], metrics: Mapping[str, Sequence[float]], rows: Sequence[int]
    ) -> None:
        self.payload, self.metrics, self.rows = payload, metrics, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> list[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | list[Outcome]:
        if isinstance(at, slice):
            return [self[k] for k in range(len(self))[at]]
        row = self.rows[at]
        return Outcome(
            row_of(self.payload, row), None, {name: values[row] for name, values in self.metrics.items()}
        )
