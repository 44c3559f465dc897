"""A `Schema` as plain values, which a message can carry, and back; and the most bytes of a payload that fits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedlens.base.errors import DecodingError, HookError, one_line
from fedlens.core.schema import AskedField, Bound, Field, NumberField, Schema, TensorField, TreeField

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_STRUCTURE = (
    2**20
)  # bytes of a payload beside its tensors: names, shapes and numbers of a few thousand leaves


def to_plain(schema: Schema) -> dict[str, Any]:
    """The schema as texts, numbers, booleans, None, lists and mappings. Numbers may be infinite.

    >>> to_plain(Schema({"weight": NumberField(above=0)}))["fields"]
    {'weight': {'number': [0, inf]}}
    >>> schema = Schema({"w": TreeField({"bias": ((3,), torch.float32)})}, letter=Schema())
    >>> from_plain(to_plain(schema)) == schema
    True
    """
    fields = schema.fields
    return {
        "fields": None if fields is None else {name: _field_to_plain(each) for name, each in fields.items()},
        "typical": dict(schema.typical),
        "finite": schema.finite,
        "metrics": {name: [each.least, each.most, each.integer] for name, each in schema.metrics.items()},
        "letter": None if schema.letter is None else to_plain(schema.letter),
        "aligned": list(schema.aligned),
    }


def _field_to_plain(field: AskedField) -> dict[str, Any]:
    if isinstance(field, TreeField):
        return {"tree": {name: [list(shape), _name(dtype)] for name, (shape, dtype) in field.leaves.items()}}
    if isinstance(field, TensorField):
        return {"tensor": [list(field.shape), _name(field.dtype), field.low, field.high, field.most]}
    if not isinstance(field, NumberField) or field.whole:
        raise HookError(
            "`expect` has a field of a kind that replies do not have", hint="use trees, tensors and numbers"
        )
    return {"number": [field.above, field.most]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def from_plain(value: Any) -> Schema:
    """The schema of `to_plain`. Raises `DecodingError` with the place if `value` is anything else.

    >>> from_plain({"fields": {"w": {"tree": {"bias": [[-3], "float32"]}}}})
    Traceback (most recent call last):
    fedlens.base.errors.DecodingError: not a schema: it needs fields, typical, finite, metrics, letter, aligned
      (schema); send it again.
    """
    return _schema(value, "schema", letters=True)


def _schema(value: Any, place: str, letters: bool) -> Schema:
    names = ("fields", "typical", "finite", "metrics", "letter", "aligned")
    if not isinstance(value, Mapping) or value.keys() != set(names):
        raise _fault(f"it needs {', '.join(names)}", place)
    fields, letter = value["fields"], value["letter"]
    aligned = _list(value["aligned"], f"{place}.aligned", str)
    if not set(aligned) <= (fields if isinstance(fields, Mapping) else {}).keys():
        raise _fault("it aligns a field that it does not have", f"{place}.aligned")
    if type(value["finite"]) is not bool or (letter is not None and not letters):
        raise _fault("`finite` is true or false, and a letter has none itself", place)
    try:
        return Schema(
            fields=None if fields is None else _items(fields, f"{place}.fields", _field_from_plain),
            typical=_items(value["typical"], f"{place}.typical", _number),
            finite=value["finite"],
            metrics=_items(value["metrics"], f"{place}.metrics", _bound),
            letter=None if letter is None else _schema(letter, f"{place}.letter", letters=False),
            aligned=tuple(aligned),
        )
    except HookError as error:
        raise _fault(error.what, f"{place}.metrics") from None


def _field_from_plain(value: Any, place: str) -> Field:
    match value:
        case {"tree": leaves} if len(value) == 1:
            return TreeField(_items(leaves, place, lambda leaf, at: _leaf(leaf, at, 0)))
        case {"tensor": [shape, dtype, low, high, most]} if len(value) == 1:
            sizes = _leaf([shape, dtype], place, -1)
            return TensorField(*sizes, *(_number(each, place) for each in (low, high, most)))
        case {"number": [above, most]} if len(value) == 1:
            return NumberField(_number(above, place), _number(most, place))
    raise _fault("it is no tree, tensor or number", place)


def _leaf(value: Any, place: str, least: int) -> tuple[tuple[int, ...], torch.dtype]:
    match value:
        case [list(shape), str(dtype)] if dtype in _DTYPES and len(shape) <= 64:
            if all(type(extent) is int and least <= extent < 2**40 for extent in shape):
                return tuple(shape), _DTYPES[dtype]
    raise _fault("it needs a shape and the name of a dtype", place)


def _bound(value: Any, place: str) -> Bound:
    match value:
        case [least, most, bool(integer)]:
            return Bound(_number(least, place), _number(most, place), integer)
    raise _fault("a bound needs a least and a most value, and whether it is an integer", place)


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _fault("it is no number", place)
    return value


def _items(value: Any, place: str, each: Callable[[Any, str], Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _fault("it is not a mapping", place)
    return {name: each(item, f"{place}.{name}") for name, item in value.items()}


def _list(value: Any, place: str, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise _fault(f"it is not a list of {kind.__name__}", place)
    return value


def _fault(what: str, place: str) -> DecodingError:
    return DecodingError(f"not a schema: {one_line(what)}", where=one_line(place), hint="send it again")


def most_bytes(schema: Schema, most: int) -> int:
    """The bytes of the largest body that can fit the schema, at most `most`.

    >>> most_bytes(Schema({"w": TreeField({"bias": ((1000,), torch.float32)})}), 2**30) - 2**20
    4000
    """
    if schema.fields is None or schema.letter is not None:
        return most
    return int(min(most, sum(map(_largest, schema.fields.values())) + _STRUCTURE))


def _largest(field: AskedField) -> float:
    if isinstance(field, TreeField):
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in field.leaves.values())
    if isinstance(field, TensorField):
        return field.most if -1 in field.shape else math.prod(field.shape) * field.dtype.itemsize
    return 8
