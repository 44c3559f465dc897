"""One visit that stands for those of all stacked clients: what `start` left there, with an axis of clients in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.local.rules import Visit


class _Unequal(Exception):
    """Something that is no tensor differs between clients."""


def stacked_visit(visits: Sequence[Visit]) -> Visit | None:
    """One visit that stands for all of them, what `start` left there stacked; None where that cannot be.

    The anchor and what the server sent are the same for all, and stand without an axis of clients.
    """
    try:
        own = _stack([visit.own for visit in visits])
    except Exception:  # of whatever kind: then it is done client by client, which is always right
        return None
    first = visits[0].payload
    common = {
        name: value for name, value in first.items() if all(v.payload.get(name) is value for v in visits)
    }
    return replace(visits[0], own=own, payload=common, state={}, labels=torch.empty(0))


def _stack(values: Sequence[Any]) -> Any:
    one = values[0]
    if all(value is one for value in values):
        return _Common(one)
    if any(type(value) is not type(one) for value in values):
        raise _Unequal
    if isinstance(one, Tensor):
        if not one.dim():
            raise _Unequal  # a number, which would stand against the wrong axis
        return torch.stack(list(values))
    if isinstance(one, Mapping):
        if any(value.keys() != one.keys() for value in values):
            raise _Unequal
        return {name: _stack([value[name] for value in values]) for name in one}
    if type(one) in (list, tuple):
        if any(len(value) != len(one) for value in values):
            raise _Unequal
        return [_stack(list(row)) for row in zip(*values, strict=True)]
    if is_dataclass(one) and not isinstance(one, type):
        return replace(
            one, **{f.name: _stack([getattr(value, f.name) for value in values]) for f in fields(one)}
        )
    if any(value != one for value in values):
        raise _Unequal
    return one


class _Common(NamedTuple):
    """What is one and the same object at all clients: it has no axis of clients to cut."""

    value: Any


def cut(value: Any, active: int) -> Any:
    """What was stacked, of the first so many clients."""
    if isinstance(value, _Common):
        return value.value
    if isinstance(value, Tensor):
        return value[:active]
    if isinstance(value, Mapping):
        return {name: cut(inner, active) for name, inner in value.items()}
    if isinstance(value, list):
        return [cut(inner, active) for inner in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: cut(getattr(value, f.name), active) for f in fields(value)})
    return value
