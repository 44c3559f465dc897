"""One context for all stacked clients: the values that `start` saved, stacked along a client axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fedlens.base.errors import out_of_memory
from fedlens.local.rules import LocalContext, Tensors
from fedlens.local.settings import LocalSettings


class Unequal(Exception):
    """A value that `start` saved cannot be stacked for all clients."""


class StackedContext:
    """The context of a rule's `grad` that is called once for all clients, instead of a `LocalContext`.

    It has only values that are the same for all clients or have a client axis; any other attribute raises
    `RuntimeError`.

    Attributes:
        names, anchor, settings, lr, scales: as in a `LocalContext`; the same for all clients.
        payload: what the server sent to all clients; what it sent to single clients is not available.
        saved: what `start` saved, with a leading client axis in every tensor. A value that cannot be stacked raises
            `Unequal`; then `grad` is called client by client, which is always right.
        at_anchor: as in a `LocalContext`, with a client axis.
    """

    def __init__(self, one: LocalContext | StackedContext, payload: Partial, saved: Partial) -> None:
        self.names: list[str] = one.names
        self.anchor: Tensors = one.anchor
        self.settings: LocalSettings = one.settings
        self.lr: float = one.lr
        self.scales: Sequence[float] = one.scales
        self.payload, self.saved = payload, saved
        self.at_anchor: Tensors = []

    def inputs(self) -> Mapping[str, Any]:
        """The inputs that a hook must not change, by name."""
        return {"anchor": self.anchor, "payload": self.payload.values_by_name, "at_anchor": self.at_anchor}

    tree, listed = LocalContext.tree, LocalContext.listed

    def __getattr__(self, name: str) -> NoReturn:
        raise not_shared(name)

    def first(self, active: int) -> StackedContext:
        """The context of the first `active` clients."""
        values = {name: cut(value, active) for name, value in self.saved.values_by_name.items()}
        return StackedContext(self, self.payload, Partial(values, self.saved.errors))


class Partial(Mapping[str, Any]):
    """Values by name; reading a name in `errors` raises that error."""

    def __init__(self, values_by_name: Mapping[str, Any], errors: Mapping[str, Exception]) -> None:
        self.values_by_name, self.errors = values_by_name, errors

    def __getitem__(self, name: str) -> Any:
        if name in self.errors:
            raise self.errors[name]
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return chain(self.values_by_name, self.errors)

    def __len__(self) -> int:
        return len(self.values_by_name) + len(self.errors)


class Named(Partial):
    """Values whose names are the same for all clients: `in` raises no error."""

    def __contains__(self, name: object) -> bool:
        return name in self.values_by_name or name in self.errors


def common(what: str, columns: Sequence[Mapping[str, Any]]) -> Partial:
    """The values that are equal for all clients; reading any other raises an error."""
    values = {n: value for n, value in columns[0].items() if all(own.get(n) is value for own in columns)}
    others = {name for own in columns for name in own} - values.keys()
    return Partial(values, {name: not_shared(f"{what}[{name!r}]") for name in others})


def not_shared(what: str) -> RuntimeError:
    """The error of a hook that is called for all clients and reads a value of a single client."""
    return RuntimeError(
        f"context.{what} is not available to `grad` when clients train together: save what it needs in "
        "context.saved, in `start`"
    )


def stacked_context(contexts: Sequence[LocalContext]) -> StackedContext:
    """One context for all of them, with the values that `start` saved stacked.

    The anchor and the values from the server are the same for all, and have no client axis.
    """
    one = contexts[0]
    payload = common("payload", [context.payload for context in contexts])
    shapes = {name: value.shape for name, value in zip(one.names, one.anchor, strict=True)}
    saved, errors = dict[str, Any](), dict[str, Exception]()
    for name in {name: None for context in contexts for name in context.saved}:
        try:
            saved[name] = _stack([context.saved[name] for context in contexts], shapes)
        except Exception as error:  # values of a rule may raise anything
            if out_of_memory(error):
                raise
            errors[name] = Unequal(name)
    return StackedContext(one, payload, Partial(saved, errors))


Shapes = Mapping[str, torch.Size]  # of the trainable leaves


def _stack(values: Sequence[Any], shapes: Shapes) -> Any:
    one = values[0]
    if all(value is one for value in values):
        return _Same(one)
    if any(type(value) is not type(one) for value in values):
        raise Unequal
    if isinstance(one, Tensor):
        raise Unequal  # it belongs to no leaf, so another axis would broadcast against the wrong axes
    if isinstance(one, Mapping):
        if any(value.keys() != one.keys() for value in values):
            raise Unequal
        return {name: _leaf([value[name] for value in values], shapes.get(name), shapes) for name in one}
    if type(one) in (list, tuple):
        if any(len(value) != len(one) for value in values):
            raise Unequal
        each = list(shapes.values()) if len(one) == len(shapes) else [None] * len(one)
        return [_leaf(row, shape, shapes) for row, shape in zip(zip(*values, strict=True), each, strict=True)]
    if is_dataclass(one) and not isinstance(one, type):
        return replace(
            one, **{f.name: _stack([getattr(value, f.name) for value in values], shapes) for f in fields(one)}
        )
    if any(value != one for value in values):
        raise Unequal
    return one


def _leaf(values: Sequence[Any], shape: torch.Size | None, shapes: Shapes) -> Any:
    """Like `_stack`, for values of one leaf of this shape: tensors of that shape have its axes."""
    if shape is not None and all(isinstance(value, Tensor) and value.shape == shape for value in values):
        return _Same(values[0]) if all(value is values[0] for value in values) else torch.stack(list(values))
    return _stack(values, shapes)


class _Same(NamedTuple):
    """One object that all clients share, without a client axis."""

    value: Any


def cut(value: Any, active: int) -> Any:
    """A stacked value for the first `active` clients."""
    if isinstance(value, _Same):
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
