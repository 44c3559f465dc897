"""What a good reply has, checked before it is folded.

In many tools one NaN update turns the global model to NaN while the run reports success, a tensor of shape (1,) is
silently broadcast, and a weight of zero everywhere divides by zero. A schema turns each into a counted failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.core.stacked import Column, Row, StackedTrees
from fedlens.core.tree import TreeSpec, all_finite, part

_MAPPINGS = (dict, Mapping)  # the one that nearly all are first: to ask an abstract class takes much longer


@dataclass(frozen=True)
class TreeField:
    """A tree with exactly these leaves, in exactly these shapes and dtypes, all of it finite."""

    leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def like(cls, spec: TreeSpec) -> TreeField:
        """The field for a tree of this spec."""
        return cls({name: (leaf.shape, leaf.dtype) for name, leaf in spec.items()})

    @classmethod
    def weights(cls, spec: TreeSpec) -> TreeField:
        """The field for a tree of the trainable weights of a model of this spec: an update, a gradient."""
        return cls.like({name: spec[name] for name in part(spec, "weight", trainable=True)})

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if type(value) is Row and value.stacked.like(self.leaves):
            return None if value.finite else f"{name} holds NaN or Inf"
        if not isinstance(value, _MAPPINGS):
            return f"{name} is {type(value).__name__}, not a tree"
        if value.keys() != self.leaves.keys():
            missing, extra = (
                sorted(self.leaves.keys() - value.keys()),
                sorted(value.keys() - self.leaves.keys()),
            )
            return f"{name} lacks {missing[0]}" if missing else f"{name} has an extra {extra[0]}"
        for leaf, (shape, dtype) in self.leaves.items():
            fault = _tensor_fault(f"{name}.{leaf}", value[leaf], shape, dtype)
            if fault:
                return fault
        return None if all_finite(list(value.values())) else f"{name} holds NaN or Inf"


@dataclass(frozen=True)
class TensorField:
    """A tensor of this shape and dtype, all of it finite, from `least` to `most`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    least: float = -math.inf
    most: float = math.inf

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        fault = _tensor_fault(name, value, self.shape, self.dtype)
        if fault is not None or not all_finite([value]):
            return fault or f"{name} holds NaN or Inf"
        if (self.least, self.most) == (-math.inf, math.inf):
            return None
        outside = value[(value < self.least) | (value > self.most)]
        return (
            f"{name} holds {float(outside[0]):g}, outside [{self.least:g}, {self.most:g}]"
            if len(outside)
            else None
        )


@dataclass(frozen=True)
class NumberField:
    """A finite number above `above` (exclusive) and at most `most`."""

    above: float = -math.inf
    most: float = math.inf

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} is {type(value).__name__}, not a number"
        if not math.isfinite(value):
            return f"{name} is {value}"
        if not self.above < value <= self.most:
            return f"{name} is {value:g}, outside ({self.above:g}, {self.most:g}]"
        return None


Field = TreeField | TensorField | NumberField


@dataclass(frozen=True)
class Schema:
    """The fields that a reply's payload must have, and no others.

    With `fields=None`, the default, any payload is good whose tensors are finite.

    >>> schema = Schema({"weight": NumberField(above=0)})
    >>> schema.fault({"weight": 0})
    'weight is 0, outside (0, inf]'
    >>> schema.fault({"weight": 3.0, "note": 1})
    'there is an extra note'
    """

    fields: Mapping[str, Field] | None = None

    def fault(self, payload: Any) -> str | None:
        """Why this payload is refused, or None if it is good."""
        if not isinstance(payload, _MAPPINGS):
            return f"the payload is {type(payload).__name__}, not a mapping"
        if self.fields is None:
            return finite_fault(payload)
        if payload.keys() != self.fields.keys():
            missing = next((name for name in self.fields if name not in payload), None)
            extra = next((name for name in payload if name not in self.fields), None)
            return f"{missing} is missing" if missing is not None else f"there is an extra {extra}"
        for name, field in self.fields.items():
            fault = field.fault(name, payload[name])
            if fault:
                return fault
        return None

    def passing(self, columns: Mapping[str, Column], rows: int) -> list[bool]:
        """For each row of these columns, whether its payload is certainly good; of the others `fault` decides.

        >>> Schema({"weight": NumberField(above=0)}).passing({"weight": [2.0, 0.0]}, rows=2)
        [True, False]
        """
        if self.fields is None or columns.keys() != self.fields.keys():
            return [False] * rows
        good = [True] * rows
        for name, field in self.fields.items():
            column = columns[name]
            if isinstance(column, StackedTrees):
                fits = isinstance(field, TreeField) and column.like(field.leaves)
                each = column.finite if fits else [False] * rows
            elif isinstance(column, list):
                known = {value: field.fault(name, value) is None for value in set(column)}
                each = [known[value] for value in column]
            else:
                each = [field.fault(name, column) is None] * rows
            good = [a and b for a, b in zip(good, each, strict=True)]
        return good


def finite_fault(payload: Mapping[str, Any]) -> str | None:
    """What is wrong with the first tensors in a payload that are not dense and finite; None if all are."""
    for name, value in payload.items():
        tensors = tensors_in(value)
        for tensor in tensors:
            if (fault := _kind_fault(name, tensor)) is not None:
                return fault
        if not all_finite(tensors):
            return f"{name} holds NaN or Inf"
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a payload, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []


def nbytes(value: Any) -> int:
    """The bytes of a payload's tensors and byte strings, which is what a network would carry but for the envelope."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, int | float):
        return 8
    if type(value) is Row:
        return value.nbytes
    if isinstance(value, _MAPPINGS):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return len(value) if isinstance(value, bytes) else 0


def _tensor_fault(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if not isinstance(value, Tensor):
        return f"{name} is {type(value).__name__}, not a tensor"
    if tuple(value.shape) != shape:
        return f"{name} has shape {tuple(value.shape)} where {shape} is expected"
    if value.dtype != dtype:
        return f"{name} is {value.dtype} where {dtype} is expected"
    return _kind_fault(name, value)


def _kind_fault(name: str, value: Tensor) -> str | None:
    """What is wrong with a tensor whose values do not lie in memory one by one: sparse, quantized, nested, meta."""
    if value.layout != torch.strided:
        return f"{name} is a {str(value.layout).removeprefix('torch.')} tensor where a dense one is expected"
    if value.is_meta or value.is_quantized or value.is_nested:
        kind = "meta" if value.is_meta else "quantized" if value.is_quantized else "nested"
        return f"{name} is a {kind} tensor where a dense one is expected"
    return None
