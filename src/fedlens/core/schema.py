"""Validates replies before they are aggregated.

Without these checks, one NaN update makes the global model NaN while the run reports success, a tensor of shape (1,) is
silently broadcast, and weights that are all zero divide by zero. A schema turns each into a counted failure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import HookError
from fedlens.base.format import computed
from fedlens.core.stacked import Column, StackedRow, StackedTrees
from fedlens.core.tree import NO_NORMS, TreeSpec, all_finite, finite_norm, finite_norms, part
from fedlens.core.wire.asked_fields import GroupField, ListField, RowField, SizedField, TextField

NORM_LIMIT = 1e4  # a tree of a reply whose norm is more than so many times the typical one is refused
LETTER = "letter."  # begins the names of the norms of letters
_NOT_FINITE = "holds NaN or Inf"
_BEYOND = f"times the median of accepted replies (limit: {NORM_LIMIT:,.0f} times)"
# A name, what is wrong with its structure, and the tensors to check for finite values; None if that is done elsewhere.
_Part = tuple[str, str | None, Sequence[Tensor] | None]
_MAPPINGS = (dict, Mapping)  # nearly all are dicts, and `isinstance` with an abstract class is much slower


@dataclass(frozen=True)
class TreeField:
    """A tree with exactly these leaves, in exactly these shapes and dtypes, with finite values."""

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
        return _first_fault([], [self.part(name, value)], {})

    def part(self, name: str, value: Any) -> _Part:
        """What is wrong with the leaves of `value`, or None; and the tensors that have its norm."""
        if type(value) is StackedRow and value.stacked.like(self.leaves):
            return name, None, [torch.tensor(value.norm, dtype=torch.float64)]  # known for all rows at once
        fault = self._misfit(name, value)
        return name, fault, [] if fault is not None else list(value.values())

    def _misfit(self, name: str, value: Any) -> str | None:
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
        return None


@dataclass(frozen=True)
class TensorField:
    """A tensor of this shape and dtype, with finite values from `low` to `high`.

    An extent of -1 is free: any size from 0. `most` bounds the bytes of the tensor.

    >>> TensorField((-1, 3), torch.float32, most=24).fault("hidden", torch.ones(4, 3))
    'hidden has 48 bytes where at most 24 are expected'
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float = -math.inf
    high: float = math.inf
    most: float = math.inf

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        fault = _tensor_fault(name, value, self.shape, self.dtype)
        if fault is None and (size := nbytes(value)) > self.most:
            fault = f"{name} has {size:,} bytes where at most {self.most:,} are expected"
        if fault is not None or not all_finite([value]):
            return fault or f"{name} {_NOT_FINITE}"
        if (self.low, self.high) == (-math.inf, math.inf):
            return None
        outside = value[(value < self.low) | (value > self.high)]
        return (
            f"{name} holds {float(outside[0]):g}, outside [{self.low:g}, {self.high:g}]"
            if len(outside)
            else None
        )


@dataclass(frozen=True)
class NumberField:
    """A finite number above `above` (exclusive) and at most `most`; only an `int` if `whole`."""

    above: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def fault(self, name: str, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} is {type(value).__name__}, not a number"
        if isinstance(value, int) and value.bit_length() > 1023:
            return f"{name} is a number of {value.bit_length()} bits"
        if self.whole and not isinstance(value, int):
            return f"{name} is {value!r}, not a whole number"
        if not math.isfinite(value):
            return f"{name} is {value}"
        if not self.above < value <= self.most:
            return f"{name} is {value:g}, outside ({self.above:g}, {self.most:g}]"
        return None


Field = TreeField | TensorField | NumberField
AskedField = Field | TextField | SizedField | ListField | RowField | GroupField
"""A field of what a client is asked; replies have those of `Field` alone."""


@dataclass(frozen=True)
class Bound:
    """The valid values of a metric: finite numbers from `least` to `most`, only integers if `integer`.

    >>> Bound(0, 1).fault("share", 1.5), Bound(0, integer=True).fault("batches", 7.0)
    ("its metric 'share' is 1.5, outside [0, 1]", None)
    """

    least: float = -math.inf
    most: float = math.inf
    integer: bool = False

    def fault(self, name: str, value: float) -> str | None:
        """What is wrong with `value`, or None."""
        if self.least <= value <= self.most and -math.inf < value < math.inf:
            return (
                f"its metric '{name}' is {value:g}, not a whole number"
                if self.integer and value % 1
                else None
            )
        if not math.isfinite(value):
            return f"its metric '{name}' {_NOT_FINITE}"
        return f"its metric '{name}' is {value:g}, outside [{self.least:g}, {self.most:g}]"


COUNT = Bound(0, 2**53, integer=True)
SHARE = Bound(0, 1)
METRICS: Mapping[str, Bound] = {"loss": Bound(), "examples": COUNT, "batches": COUNT}
"""The metrics that every operation may send; a run computes its local loss and its progress from them."""


@dataclass(frozen=True)
class Schema:
    """The fields that a reply's payload must have, and no others.

    With `fields=None`, the default, any payload with finite tensors is valid. `typical` bounds the Euclidean norms
    of trees: more than `NORM_LIMIT` times the typical norm of that name is rejected. The driver sets it from the
    replies accepted so far; see `fedlens.core.norm_bounds`. `MEASUREMENTS` also accepts values that are not finite,
    and bounds no norm: the loss of a model that diverged is a result.

    `letter` is the schema of the letters that come with the reply; `Ask.letter` sets it. `aligned` names tensors with
    a row for each of the same examples: they must have the same number of rows.

    `metrics` declares the metrics that the operation sends besides `loss`, `examples` and `batches`, each with its
    bounds. A reply with any other metric, or with one outside its bounds, is rejected.

    With `bounded=False` the driver sets no `typical` norm, as for replies whose norms the clients limit themselves:
    whether one is rejected then depends on that reply alone.

    `optional` names fields that may be missing, in what a client is asked; see `AlgorithmBase.takes`.

    `log` allows one more field of this name, a mapping: the client's log, which stays where it is; see `Ask.logged`.
    In what a client is asked it says that the operation has a log, which a site adds itself.

    Raises `HookError` if a metric has a name that the server computes, such as `test_accuracy`.

    >>> schema = Schema({"weight": NumberField(above=0)})
    >>> schema.fault({"weight": 0})
    'weight is 0, outside (0, inf]'
    >>> schema.fault({"weight": 3.0, "note": 1})
    'there is an extra note, which `expect` does not announce: add "note": NumberField() to it \
(from fedlens.rules import NumberField), and "note": "mean" to `fields` of a client rule for its mean'
    >>> Schema(typical={"update": 2.0}).fault({"update": {"w": torch.full((4,), 1e30)}})
    'update norm 2e+30 is 10^30 times the median of accepted replies (limit: 10,000 times)'
    >>> Schema(metrics={"sent_share": Bound(0, 1)}).metric_fault({"batches": 3.0, "sent_share": 2.0})
    "its metric 'sent_share' is 2, outside [0, 1]"
    >>> pair = {"features": TensorField((-1, 2), torch.float32), "targets": TensorField((-1,), torch.int64)}
    >>> schema = Schema(pair, aligned=("features", "targets"))
    >>> schema.fault({"features": torch.ones(3, 2), "targets": torch.tensor([1])})
    'targets has 1 rows where features has 3'
    """

    fields: Mapping[str, AskedField] | None = None
    typical: Mapping[str, float] = field(default_factory=dict)
    finite: bool = True
    metrics: Mapping[str, Bound] = field(default_factory=dict)
    letter: Schema | None = None
    aligned: tuple[str, ...] = ()
    log: bool = False
    bounded: bool = True
    optional: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.metrics:
            if computed(name) and name not in METRICS:
                raise HookError(
                    f"a schema declares the metric '{name}', a name of what the run itself computes",
                    hint="choose another name",
                )

    def metric_fault(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong with the first metric that is undeclared or outside its bounds; None if all are valid."""
        for name, value in metrics.items():
            bound = self._bound(name)
            if bound is None:
                where = "`metrics` of the ask's Schema or the client rule"
                return f"its metric '{name}' is not declared: add it to {where}"
            if (fault := bound.fault(name, value)) is not None:
                return fault
        return None

    def admits(self, columns: Mapping[str, Sequence[float]]) -> bool:
        """Whether all values of these metrics are valid; `metric_fault` says what is wrong with one reply."""
        for name, values in columns.items():
            bound = self._bound(name)
            if bound is None or any(bound.fault(name, value) is not None for value in set(values)):
                return False
        return True

    def _bound(self, name: str) -> Bound | None:
        return self.metrics.get(name) or METRICS.get(name)

    def fault(self, payload: Any) -> str | None:
        """Why this payload is rejected, or None if it is valid."""
        return self.check(payload)[0]

    def check(
        self, payload: Any, state: Any = None, known: Mapping[int, float] = NO_NORMS
    ) -> tuple[str | None, dict[str, float]]:
        """Why this payload is rejected, or None if it is valid; and the norms of its trees by name.

        A mapping as the client's new `state` is checked too: its tensors must be finite. All tensors on a GPU take one
        synchronization; those in `known` (`fedlens.core.tree.leaf_norms`) take none.
        """
        norms: dict[str, float] = {}
        if not isinstance(payload, _MAPPINGS):
            return f"the payload is {type(payload).__name__}, not a mapping", norms
        kept = _parts(state if isinstance(state, _MAPPINGS) else {})
        fault = _first_fault(self._parts(payload), kept, norms, known)
        if fault is None:
            large = (n for n, typical in self.typical.items() if norms.get(n, 0.0) > NORM_LIMIT * typical)
            fault = next((_excess(name, norms[name], self.typical[name]) for name in large), None)
        return fault, norms

    def _parts(self, payload: Mapping[str, Any]) -> list[_Part]:
        if self.fields is None:
            return _parts(payload) if self.finite else [("", kind_fault(payload), None)]
        if self.log and isinstance(payload.get("log"), _MAPPINGS):
            payload = {name: value for name, value in payload.items() if name != "log"}
        fields = self.fields
        if self.optional:
            fields = {n: each for n, each in fields.items() if n in payload or n not in self.optional}
        if payload.keys() != fields.keys():
            missing = next((name for name in fields if name not in payload), None)
            extra = next((name for name in payload if name not in fields), None)
            if missing is not None or extra is None:
                return [("", f"{missing} is missing", None)]
            what = f"there is an extra {extra}, which `expect` does not announce"
            made = _field_of(payload[extra])
            kind = re.split(r"\W", made)[0]
            how = f'add "{extra}": {made} to it (from fedlens.rules import {kind})'
            mean = f'"{extra}": "mean" to `fields` of a client rule for its mean'
            return [("", f"{what}: {how}, and {mean}", None)]
        parts: list[_Part] = [
            expected.part(name, payload[name])
            if isinstance(expected, TreeField)
            else (name, expected.fault(name, payload[name]), None)
            for name, expected in fields.items()
        ]
        if self.aligned and all(fault is None for _, fault, _ in parts):
            (first, rows), *others = ((name, len(payload[name])) for name in self.aligned)
            faults = [f"{name} has {n} rows where {first} has {rows}" for name, n in others if n != rows]
            parts += [("", fault, None) for fault in faults]
        return parts

    def passing(self, columns: Mapping[str, Column], rows: int) -> list[bool]:
        """For each row, whether its payload is certainly valid; for the others, call `fault`.

        >>> Schema({"weight": NumberField(above=0)}).passing({"weight": [2.0, 0.0]}, rows=2)
        [True, False]
        """
        if self.fields is None or self.aligned or columns.keys() != self.fields.keys():
            return [False] * rows
        good = [True] * rows
        for name, expected in self.fields.items():
            column = columns[name]
            if isinstance(column, StackedTrees):
                fits = isinstance(expected, TreeField) and column.like(expected.leaves)
                each = column.finite if fits else [False] * rows
                if fits and name in self.typical:
                    most = NORM_LIMIT * self.typical[name]
                    each = [norm <= most for norm in column.norms]  # false for NaN and infinity
            elif isinstance(column, list):
                known = {value: expected.fault(name, value) is None for value in set(column)}
                each = [known[value] for value in column]
            else:
                each = [Schema({name: expected}, self.typical).fault({name: column}) is None] * rows
            good = [a and b for a, b in zip(good, each, strict=True)]
        return good


MEASUREMENTS = Schema(finite=False)


def finite_fault(payload: Mapping[str, Any]) -> str | None:
    """What is wrong with the first tensors in a payload that are not dense and finite; None if all are."""
    return _first_fault([], _parts(payload), {})


def _parts(payload: Mapping[str, Any]) -> list[_Part]:
    return [
        (name, fault := kind_fault({name: value}), [] if fault is not None else tensors_in(value))
        for name, value in payload.items()
    ]


def _first_fault(
    parts: list[_Part], more: list[_Part], norms: dict[str, float], known: Mapping[int, float] = NO_NORMS
) -> str | None:
    """What is wrong with the first invalid part of `parts`, then of `more`; `norms` receives those of `parts`."""
    every = [*parts, *more]
    found = finite_norms([tensors or () for _, _, tensors in every], known)
    for at, ((name, fault, tensors), norm) in enumerate(zip(every, found, strict=True)):
        if fault is not None:
            return fault
        if not math.isfinite(norm):
            return f"{name} {_NOT_FINITE}"
        if tensors is not None and at < len(parts):
            norms[name] = norm
    return None


def kind_fault(payload: Mapping[str, Any]) -> str | None:
    """What is wrong with the first tensors in a payload that are not dense; None if all are."""
    found = (_kind_fault(name, tensor) for name, value in payload.items() for tensor in tensors_in(value))
    return next((fault for fault in found if fault is not None), None)


def column_norms(columns: Mapping[str, Column], rows: int) -> list[dict[str, float]]:
    """The norms of the trees in each row of these columns, by name.

    >>> column_norms({"update": StackedTrees({"w": torch.tensor([[3.0, 4.0], [0.0, 2.0]])}), "weight": [1.0, 1.0]}, 2)
    [{'update': 5.0}, {'update': 2.0}]
    """
    norms: list[dict[str, float]] = [{} for _ in range(rows)]
    for name, column in columns.items():
        if isinstance(column, StackedTrees):
            for row, norm in zip(norms, column.norms, strict=True):
                row[name] = norm
        elif isinstance(column, Mapping) and column:
            norm = finite_norm(list(column.values()))
            for row in norms:
                row[name] = norm
    return norms


def _excess(name: str, norm: float, typical: float) -> str:
    ratio = norm / typical
    times = f"{ratio:,.0f}" if ratio < 1e6 else f"10^{math.floor(math.log10(ratio))}"
    return f"{name} norm {norm:.2g} is {times} {_BEYOND}"


def beyond_bound(reason: str) -> bool:
    """Whether a reply was refused for a norm above the bound.

    >>> beyond_bound(Schema(typical={"g": 1.0}).fault({"g": torch.tensor([1e5])})), beyond_bound("weight is 0")
    (True, False)
    """
    return reason.endswith(_BEYOND)


def not_finite(reason: str) -> bool:
    """Whether a reply was refused for NaN or an infinite value.

    >>> not_finite(NumberField().fault("weight", math.nan)), not_finite("weight is 0, outside (0, 1]")
    (True, False)
    """
    return reason.endswith((_NOT_FINITE, *(f" is {value}" for value in (math.nan, math.inf, -math.inf))))


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
    """The bytes of tensors, byte strings and numbers in a payload: its size on a network without headers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, int | float):
        return 8
    if type(value) is StackedRow:
        return value.nbytes
    if isinstance(value, _MAPPINGS):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return len(value) if isinstance(value, bytes) else 0


def _field_of(value: Any) -> str:
    """The field that announces such a value, as Python code."""
    if isinstance(value, Tensor):
        return f"TensorField({tuple(value.shape)}, {value.dtype})"
    return "TreeField.weights(spec)" if isinstance(value, _MAPPINGS) else "NumberField()"


def _tensor_fault(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if not isinstance(value, Tensor):
        return f"{name} is {type(value).__name__}, not a tensor"
    fits = len(shape) == value.ndim and all(n in (m, -1) for n, m in zip(shape, value.shape, strict=True))
    if not fits:
        return f"{name} has shape {tuple(value.shape)} where {shape} is expected"
    if value.dtype != dtype:
        return f"{name} is {value.dtype} where {dtype} is expected"
    return _kind_fault(name, value)


def _kind_fault(name: str, value: Tensor) -> str | None:
    """What is wrong with a tensor that is not dense: sparse, quantized, nested or meta."""
    if value.layout != torch.strided:
        return f"{name} is a {str(value.layout).removeprefix('torch.')} tensor where a dense one is expected"
    if value.is_meta or value.is_quantized or value.is_nested:
        kind = "meta" if value.is_meta else "quantized" if value.is_quantized else "nested"
        return f"{name} is a {kind} tensor where a dense one is expected"
    return None
