"""The fields of a payload as texts, for a log: names and shapes, and no value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_MOST = 2**19  # characters of all fields


def answer_fields(payload: Mapping[str, Any], metrics: Mapping[str, Any], letters: Any = ()) -> list[str]:
    """The fields of an answer: its payload, metrics and letters. They are the same at the site and at the server.

    >>> answer_fields({"weight": 3.0}, {"loss": 0.5, "batches": 2})
    ['weight number', 'metrics.batches number', 'metrics.loss number']
    """
    return sent_fields({**payload, "metrics": dict(sorted(metrics.items())), "letters": list(letters)})


def sent_fields(payload: Mapping[str, Any]) -> list[str]:
    """Each value of a payload as its place and its shape.

    >>> import torch
    >>> sent_fields({"update": {"bias": torch.ones(2)}, "weight": 3.0, "key": b"abc", "sizes": [1, 2, 3]})
    ['update.bias float32[2]', 'weight number', 'key bytes[3]', 'sizes number[3]']
    """
    fields, room = list(_fields(payload, "")), _MOST
    for listed, field in enumerate(fields):
        if (room := room - len(field.encode(errors="replace")) - 4) < 0:
            return [*fields[:listed], f"and {len(fields) - listed:,} more"]
    return fields


def _fields(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _fields(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, int | float) for item in value):
            yield f"{place} number[{len(value)}]"
        else:
            for at, item in enumerate(value):
                yield from _fields(item, f"{place}[{at}]")
    elif isinstance(value, Tensor):
        yield f"{place} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}".replace(", ", ",")
    elif isinstance(value, bytes | str):
        yield f"{place} {'bytes' if isinstance(value, bytes) else 'text'}[{len(value)}]"
    elif value is not None:
        yield f"{place} number"
