"""Measurements of a task on a batch: sums, which are added, and rows, which are concatenated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedlens.core.device_copies import downloaded

_DENSE = 4096  # values up to which a tensor is always sent densely


@dataclass(frozen=True, eq=False)
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
        """The measurements as a payload; large sums that are mostly zero are sent as their other values.

        Large sums are copied to the CPU, where counting zeros needs no synchronization. The others stay on their
        device.
        """
        dense, sparse = dict[str, Tensor](), dict[str, Any]()
        large = downloaded({name: value for name, value in self.sums.items() if value.numel() > _DENSE})
        for name, value in {**self.sums, **large}.items():
            if name in large and int(value.count_nonzero()) * 4 < value.numel():
                flat = value.reshape(-1)
                at = flat.nonzero().view(-1)
                sparse[name] = {"at": at, "values": flat[at], "shape": list(value.shape)}
            else:
                dense[name] = value
        return {"sums": dense, "sparse": sparse, "rows": dict(self.rows)}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], most: float = math.inf) -> Measured:
        """The measurements in a payload, on the devices of its tensors.

        Raises `ValueError` if its sparse sums have more than `most` values in all: a few bytes can name any shape.
        """
        sums = dict(payload["sums"])
        shapes = [part["shape"] for part in payload["sparse"].values()]
        if any(extent < 0 for shape in shapes for extent in shape):
            raise ValueError("sums of a negative size")
        if (values_of := sum(map(prod, shapes))) > most:
            raise ValueError(f"sums of {values_of:,} values, where at most {most:,.0f} are expected")
        for name, part in payload["sparse"].items():
            values: Tensor = part["values"]
            flat = torch.zeros(prod(part["shape"]), dtype=values.dtype)
            flat[part["at"]] = values
            sums[name] = flat.view(part["shape"])
        return cls(sums, payload["rows"])

    def downloaded(self) -> Measured:
        """The same measurements on the CPU, with one synchronization."""
        return Measured(*downloaded((self.sums, self.rows)))


class Total:
    """The measurements of several batches together, added in order.

    A name that only some batches have counts as zero, or as no rows, in the others.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self.count = 0  # how many were added

    def add(self, part: Measured) -> None:
        """Adds the next batch. Raises `ValueError`, and adds nothing, if the shapes of its measurements do not fit."""
        sums = [(name, self._sums[name], value) for name, value in part.sums.items() if name in self._sums]
        rows = [
            (name, self._rows[name][0][:0], value[:0])
            for name, value in part.rows.items()
            if name in self._rows
        ]
        for name, before, value in sums + rows:
            if value.shape != before.shape or not torch.can_cast(value.dtype, before.dtype):
                said = f"{value.dtype} {[*value.shape]}, but {before.dtype} {[*before.shape]} before"
                raise ValueError(f"the measurement '{name}' is {said}")
        self.count += 1
        for name, value in part.sums.items():
            if name in self._sums:
                self._sums[name] += value
            else:
                self._sums[name] = value.clone()
        for name, value in part.rows.items():
            self._rows.setdefault(name, []).append(value)

    def result(self) -> Measured:
        """The sum. Raises `ValueError` if nothing was added."""
        if not self.count:
            raise ValueError("no measurements to add")
        rows = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in self._rows.items()}
        return Measured(self._sums, rows)


def total(parts: Iterable[Measured]) -> Measured:
    """The sum of the measurements, added in order. Raises `ValueError` if there are none."""
    summed = Total()
    for part in parts:
        summed.add(part)
    return summed.result()
