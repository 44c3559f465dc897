"""The fields of a payload as texts, for a log: names and shapes, and no value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedlens.base.format import many

if TYPE_CHECKING:
    from fedlens.core.wire.census import SiteCensus

_MOST = 2**19  # characters of all fields


def answer_fields(payload: Mapping[str, Any], metrics: Mapping[str, Any], letters: Any = ()) -> list[str]:
    """The fields of an answer: its payload, metrics and letters. They are the same at the site and at the server.

    >>> answer_fields({"weight": 3.0}, {"loss": 0.5, "batches": 2})
    ['weight number', 'metrics.batches number', 'metrics.loss number']
    """
    return sent_fields({**payload, "metrics": dict(sorted(metrics.items())), "letters": list(letters)})


def census_fields(census: SiteCensus) -> list[str]:
    """The fields of a census."""
    names = ("name text", "examples number", "held_out number (always 0)")
    rest = {
        "versions": census.versions,
        "contract": census.contract,
        "sums": census.sums and vars(census.sums),
    }
    return [*(f"clients[{len(census.clients)}].{name}" for name in names), *sent_fields(rest)]


def sent_fields(payload: Mapping[str, Any]) -> list[str]:
    """Each value of a payload as its place and its shape.

    >>> import torch
    >>> sent_fields({"update": {"bias": torch.ones(2)}, "weight": 3.0, "key": b"abc", "sizes": [1, 2, 3]})
    ['update.bias float32[2]', 'weight number', 'key bytes[3]', 'sizes number[3]']
    """
    fields, room = [f"{place} {shape}" for place, shape, _ in fields_of(payload)], _MOST
    for listed, field in enumerate(fields):
        if (room := room - len(field.encode(errors="replace")) - 4) < 0:
            return [*fields[:listed], f"and {len(fields) - listed:,} more"]
    return fields


def in_short(fields: Sequence[str], most: int = 8) -> list[str]:
    """The fields with at most `most` tensors of a tree, whose others are counted. All numbers are named.

    >>> in_short(["update.a float32[2]", "update.b float32[1]", "weight number"], 1)
    ['update.a float32[2]', 'update.* 1 more tensor', 'weight number']
    """
    short, tensors = dict[str, str](), Counter[str]()
    for field in fields:
        tree = field.partition(".")[0]
        tensors[tree] += field.endswith("]") and not field.endswith("[]")
        if (more := tensors[tree] - most) > 0:
            short[tree] = f"{tree}.* {many(more, 'more tensor')}"
        else:
            short[field] = field
    return list(short.values())


def fields_of(value: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Each value of a payload: its place, its shape in words, and itself. Lists of numbers are one value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from fields_of(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, int | float) for item in value):
            yield place, f"number[{len(value)}]", value
        else:
            for at, item in enumerate(value):
                yield from fields_of(item, f"{place}[{at}]")
    elif isinstance(value, Tensor):
        shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        yield place, shape.replace(", ", ","), value
    elif isinstance(value, bytes | str):
        yield place, f"{'bytes' if isinstance(value, bytes) else 'text'}[{len(value)}]", value
    elif value is not None:
        yield place, "number", value
