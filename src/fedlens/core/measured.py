"""What a task measures on a batch: sums that add up, and rows that are laid end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """Measurements of a task. Adding those of two batches gives those of both.

    Attributes:
        sums: float64 or int64 tensors of any shape, by name; they are added.
        rows: tensors [k, ...] by name, where k may differ; they are concatenated in the order of the batches.

    A metric is computed from the sum over all batches, so it is never an average of averages. Sums of integers do not
    depend on the order of addition; those of floats are added in a fixed order.

    >>> one = Measured({"correct": torch.tensor(3)}, {"score": torch.tensor([0.5])})
    >>> both = one + Measured({"correct": torch.tensor(1)}, {"score": torch.tensor([0.25, 1.0])})
    >>> int(both.sums["correct"]), both.rows["score"].tolist()
    (4, [0.5, 0.25, 1.0])
    """

    sums: Mapping[str, Tensor]
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Measured) -> Measured:
        return total([self, other])

    def to_payload(self) -> dict[str, Any]:
        """The measurements as an operation sends them."""
        return {"sums": dict(self.sums), "rows": dict(self.rows)}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Measured:
        """The measurements that an operation sent."""
        return cls(payload["sums"], payload["rows"])


def total(parts: Sequence[Measured]) -> Measured:
    """The measurements of several batches together, added in order.

    Names that only some batches have count as zero, or as no rows, in the others. Raises `ValueError` without parts.
    """
    if not parts:
        raise ValueError("there are no measurements to add")
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in part.rows.items():
            rows.setdefault(name, []).append(value)
    joined = {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in rows.items()}
    return Measured(sums, joined)
