"""Checks the inputs and return values of the hooks of a client rule, in the first visits of a worker."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from fedlens.base.errors import HookError
from fedlens.base.signatures import place_of
from fedlens.core.input_checks import FIRST_VISITS, INSTEAD, Inputs, checksum, leaves
from fedlens.local.chain import chain
from fedlens.local.rules import HOOKS, ClientRule, Solved

_WATCHED = ("start", "risk", "references", "loss", "grad", "solve", "finish")
_EACH_STEP = ("context.at_anchor", "context.batch")  # new tensors in every step
_IN_STEPS = ("risk", "loss", "grad")  # the hooks that are called with the batch of a step
T = TypeVar("T")


@contextmanager
def watching(train: T, scratch: dict[Any, Any]) -> Iterator[T]:
    """The same training with checked hooks in the first visits of a worker; later `train` itself.

    Versions of tensors are compared at each call of a hook. Contents that last a visit, such as the anchor, are
    compared once, at its end. Contents of a step, such as its gradients, are compared in the calls 1, 2, 4, 8 and so on
    of a hook.

    Args:
        train: the operation, a `fedlens.local.training.Train`.
        scratch: the cache of the worker, which counts the visits.

    Raises:
        HookError: if the hooks of the visit changed the contents of an input.
    """
    operation: Any = train
    if operation.rule.plain:
        yield train
        return
    key = "watched", id(train)
    left, watched, contents = scratch.get(key) or (FIRST_VISITS, None, _Contents())
    if not left:
        yield train
        return
    watched = watched or replace(operation, rule=watched_rule(operation.rule, contents))
    scratch[key] = left - 1, *((watched, contents) if left > 1 else (None, None))
    contents.clear()
    yield watched
    contents.refuse_changes()
    contents.clear()


class _Contents:
    """Checksums of the tensors that the hooks of a visit received, each from before the first hook."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, str, int]] = {}  # by id: the tensor, its name, its checksum
        self._hooks: dict[str, str | None] = {}  # those that ran, and where they are written
        self._calls = Counter[str]()  # of each hook

    def clear(self) -> None:
        """Removes everything."""
        self._before, self._hooks = {}, {}
        self._calls.clear()

    def due(self, hook: str) -> bool:
        """Counts a call of a hook; whether the contents of its arguments are compared in it."""
        self._calls[hook] += 1
        return self._calls[hook].bit_count() == 1

    def note(self, hook: str, place: str | None, inputs: Mapping[str, Any]) -> None:
        """Takes the checksums of tensors that no hook has received before."""
        self._hooks[hook] = place
        for name, value in inputs.items():
            for path, leaf in leaves(value, name):
                if isinstance(leaf, Tensor) and id(leaf) not in self._before:
                    self._before[id(leaf)] = leaf, path, checksum(leaf)

    def refuse_changes(self) -> None:
        """Raises `HookError` with the hooks that ran if the contents of a tensor changed."""
        for tensor, name, before in self._before.values():
            if checksum(tensor) != before:
                *others, last = self._hooks
                who = f"{', '.join(others)} or {last}" if others else last
                place = self._hooks[last] if not others else None
                raise HookError(f"{who} changes its input {name} in place", where=place, hint=INSTEAD)


def watched_rule(rule: ClientRule, contents: _Contents | None = None) -> ClientRule:
    """The same rule, whose hooks raise `HookError` if they change an input or return a wrong type.

    Args:
        rule: the rule.
        contents: records the inputs of hooks, to find changes after the visit that no version shows.

    >>> import torch
    >>> from fedlens.local.rules import LocalContext
    >>> rule = ClientRule(name="mine", grad=lambda g, w, context: [a.sub_(b) for a, b in zip(context.anchor, w)])
    >>> one = [torch.ones(1)]
    >>> watched_rule(rule).grad(one, one, LocalContext(["w"], [torch.ones(1)], {}, {}, 0.1, 1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedlens.base.errors.HookError: `grad` of the client rule 'mine' changes its input context.anchor[0] in place (...
    """
    contents = contents or _Contents()
    if rule.links:
        return chain(*(watched_rule(link, contents) for link in rule.links))
    watched = copy.copy(rule)
    for name in _WATCHED:
        hook = vars(rule)[name]
        if hook is not None:
            object.__setattr__(watched, name, partial(_call, hook, name, rule.called, contents))
    return watched


def _call(hook: Any, name: str, who: str, contents: _Contents, *given: Any) -> Any:
    context = given[-1]
    caller = f"`{name}` of {who}"
    named = {f"context.{part}": value for part, value in context.inputs().items()}
    lasting = {part: value for part, value in named.items() if part not in _EACH_STEP}
    step = {part: value for part, value in named.items() if part in _EACH_STEP}
    inputs = Inputs(lasting)
    passing = Inputs({**dict(zip(HOOKS[name], given[:-1], strict=False)), **step}, contents.due(caller))
    contents.note(caller, place_of(hook), lasting)
    returned = hook(*given)
    after = {f"context.{part}": value for part, value in context.inputs().items()}
    kept = named if name in _IN_STEPS else lasting  # others may compute gradients, and so change the batch
    replaced = next((part for part, value in kept.items() if after[part] is not value), None)
    if replaced is not None:
        raise HookError(
            f"{caller} replaces its input {replaced}",
            where=place_of(hook),
            hint="keep values for other hooks in context.saved",
        )
    for checked in (inputs, passing):
        checked.refuse(caller, place_of(hook))
    fault = _FAULTS[name](returned, given)
    if fault is not None:
        what = f"{caller} returned {_described(returned)}"
        raise HookError(what, where=place_of(hook), hint=f"return {fault}")
    return returned


def _described(returned: Any) -> str:
    """What a hook returned, in words."""
    if returned is None:
        return "None"
    kind = type(returned).__name__
    if isinstance(returned, Tensor):
        apart = "" if returned.requires_grad else " without a gradient"
        return f"a {kind} of shape {list(returned.shape)}{apart}"
    if isinstance(returned, list | tuple):
        return f"a {kind} with {len(returned)} {'item' if len(returned) == 1 else 'items'}"
    return f"a {kind}"


def _nothing(returned: Any, given: Sequence[Any]) -> str | None:
    return None


def _loss(returned: Any, given: Sequence[Any]) -> str | None:
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        return "the loss to minimize, a tensor with one number"
    if given[0].requires_grad and not returned.requires_grad:
        return "a loss that is computed from the model's outputs, without detach() or torch.no_grad()"
    return None


def _gradients(returned: Any, given: Sequence[Any]) -> str | None:
    gradients = given[0]
    good = isinstance(returned, list | tuple) and len(returned) == len(gradients)
    good = good and all(map(_alike, returned, gradients))
    if not good and isinstance(returned, list | tuple) and len(returned) == len(gradients):
        at = next(k for k, t in enumerate(returned) if not _alike(t, gradients[k]))
        found = list(returned[at].shape) if isinstance(returned[at], Tensor) else type(returned[at]).__name__
        return (
            f"a list of {len(gradients)} tensors in the shapes of the gradients: item {at} is {found}, but "
            f"must be {list(gradients[at].shape)}"
        )
    return None if good else f"a list of {len(gradients)} tensors in the shapes of the gradients"


def _alike(tensor: Any, gradient: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == gradient.shape


def _mapping(returned: Any, given: Sequence[Any]) -> str | None:
    return None if isinstance(returned, Mapping) else "a mapping of names to models, each a tree of tensors"


def _solved(returned: Any, given: Sequence[Any]) -> str | None:
    return None if isinstance(returned, Solved) else "Solved(parameters, loss, examples, batches)"


def _pair(returned: Any, given: Sequence[Any]) -> str | None:
    good = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Mapping)
    good = good and (returned[1] is None or isinstance(returned[1], Mapping))
    return (
        None
        if good
        else "two things: a mapping of fields for the reply, and the changes of the state or None"
    )


_FAULTS = {
    "start": _nothing,
    "risk": _loss,
    "references": _mapping,
    "loss": _loss,
    "grad": _gradients,
    "solve": _solved,
    "finish": _pair,
}
