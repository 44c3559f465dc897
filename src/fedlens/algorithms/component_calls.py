"""Calls a user's components (aggregate, server step, server rules) and checks their inputs and what they return."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedlens.aggregate.mean import Aggregate, AggregateContext, checked
from fedlens.base.errors import HookError, RoundRefused
from fedlens.base.signatures import place_of
from fedlens.core.input_checks import FIRST_VISITS, INSTEAD, Inputs, PassedInputs
from fedlens.core.protocol import Answer, Answers, Ask, ClientId, FederationInfo, Payload, Reply, RoundContext
from fedlens.core.reduction import How, Refusal, Update
from fedlens.core.tree import Tree
from fedlens.local.rules import ClientRule, ServerRule


def first_state(init: Any, weights: Tree, *more: Any) -> Payload:
    """The first state of a component, from its `init`.

    Raises `HookError` if it changes the weights, or returns no mapping.
    """
    inputs = Inputs({"weights": weights}, contents=True)
    state: Any = init(weights, *more)
    inputs.refuse(f"`init` of {type(init.__self__).__name__}", place_of(init))
    if not isinstance(state, Mapping):
        raise wrong(init, state, "the state before the first step, a mapping: {} if there is none")
    return state


def exchanged(
    aggregate: Aggregate, ask: Ask, rule: ClientRule, ctx: RoundContext, state: Payload
) -> Generator[Ask, Answers, Update | None]:
    """The asks of `aggregate.exchange`, and the update that it returns; None without an accepted reply.

    Raises `RoundRefused` with the reason if it returns one in place of an update, and `HookError` if it changes its
    inputs, or leaves out a field that the client rule needs. Later readers of the replies, such as recordings and
    server rules, would see other numbers.
    """
    fields: dict[str, How] = {**rule.fields, **({"tau": "mean"} if aggregate.normalized else {})}
    inputs = Inputs({"ctx.state": state}, contents=ctx.round <= FIRST_VISITS)
    steps: Any = aggregate.exchange(ask, fields, AggregateContext.of(ctx, state))
    if ctx.round <= FIRST_VISITS and isinstance(steps, Generator):
        steps = _compared(steps, aggregate)
    update = checked(aggregate.exchange, (yield from steps))
    who, where = f"the aggregate {type(aggregate).__name__}", place_of(_method(aggregate))
    inputs.refuse(who, where)
    if isinstance(update, Refusal):
        raise RoundRefused(f"{who} gave no update in round {ctx.round}: {update.reason}")
    if update is None:
        return None
    missing = next((name for name in rule.fields if name not in update.more), None)
    if missing is not None:
        raise HookError(
            f"{who} returned an Update whose `more` lacks '{missing}', which {rule.called} needs",
            where=where,
            hint="aggregate all `fields`, as fedlens.aggregate.custom.ByWeights and ByColumn do",
        )
    kept: Any = update.state
    if kept is not None and not isinstance(kept, Mapping):
        kind = type(kept).__name__
        raise HookError(f"{who} returned an Update whose `state` is a {kind}", where=where, hint="use a dict")
    return update


def _compared(steps: Any, aggregate: Aggregate) -> Generator[Ask, Answers, Any]:
    """The asks of an exchange and its result. Raises `HookError` if a reply has changed when it returns."""
    passed = PassedInputs()
    try:
        asked = next(steps)
        while True:
            asked = steps.send(_noted((yield asked), passed))
    except StopIteration as end:
        changed = passed.changed()
        if changed is not None:
            method = _method(aggregate)
            who = f"`{method.__name__}` of {type(aggregate).__name__}"
            what = f"{who} changes its input {changed} in place"
            raise HookError(what, where=place_of(method), hint=INSTEAD) from None
        return end.value
    finally:
        steps.close()


def _method(aggregate: Aggregate) -> Any:
    """The method that aggregates, as errors name it."""
    return aggregate.aggregate if type(aggregate).exchange is Aggregate.exchange else aggregate.exchange


def _noted(answers: Answers, passed: PassedInputs) -> Iterator[Answer]:
    """The answers. Partial sums of workers are left out: they are added up in their own memory."""
    for answer in answers:
        if isinstance(answer, Reply) and answer.reduced is None:
            passed.add(f"answers[{answer.client!r}].payload", answer.payload)
        yield answer
        del answer  # frees its tree before the next answer comes


def wrong(method: Any, returned: Any, expected: str) -> HookError:
    """The error for a method of a component that returned something else than it must."""
    who = f"`{method.__name__}` of {type(method.__self__).__name__}"
    what = "None" if returned is None else f"a {type(returned).__name__}"
    return HookError(f"{who} returned {what}", where=place_of(method), hint=f"return {expected}")


_RESERVED = ("model", "lr", "schedule", "work")  # of the payload, for local training


def begun_by(name: str, server_rule: ServerRule, weights: Tree, federation: FederationInfo) -> Payload:
    """The first state of a server rule. Raises `HookError` if its `init` changes the weights."""
    inputs = Inputs({"weights": weights}, contents=True)
    state = server_rule.init(weights, federation)
    inputs.refuse(f"`init` of the server rule '{name}'", place_of(server_rule.init))
    return state


def prepared_by(
    name: str,
    server_rule: ServerRule,
    state: Any,
    shared: Mapping[str, Any],
    cohort: Sequence[ClientId],
    ctx: RoundContext,
) -> Generator[Ask, Answers, Payload | None]:
    """The asks of a server rule before local training, and its new state. Raises `HookError` if it changes an input."""
    assert server_rule.prepare is not None
    inputs = Inputs({"state": state, "shared": shared}, contents=ctx.round <= FIRST_VISITS)
    prepared: Payload | None = yield from server_rule.prepare(state, shared, cohort, ctx)
    inputs.refuse(f"`prepare` of the server rule '{name}'", place_of(server_rule.prepare))
    return prepared


def shared_by(
    name: str, server_rule: ServerRule, state: Any, shared: Mapping[str, Any], ctx: RoundContext
) -> Mapping[str, Any]:
    """What a server rule adds to the payload, under names that nothing else in it has.

    Raises `HookError` for a name that is taken, if `shared` changes the state, and if it does not return a mapping.
    """
    if server_rule.shared is None:
        return {}
    inputs = Inputs({"state": state}, contents=ctx.round <= FIRST_VISITS)
    sent: Any = server_rule.shared(state)
    who, where = f"`shared` of the server rule '{name}'", place_of(server_rule.shared)
    inputs.refuse(who, where)
    if not isinstance(sent, Mapping):
        kind = "None" if sent is None else f"a {type(sent).__name__}"
        hint = "return a mapping of names to values, {} if there are none"
        raise HookError(f"{who} returned {kind}", where=where, hint=hint)
    taken = next((key for key in sent if key in shared or key in _RESERVED), None)
    if taken is not None:
        known = ", ".join(sorted({*_RESERVED, *shared}))
        raise HookError(f"{who} overwrites '{taken}'", where=where, hint=f"choose a name other than {known}")
    return sent


class _Fields(dict[str, Any]):
    """The aggregated fields of a client rule; a missing one is an error that names `fields`."""

    def __init__(self, fields: Mapping[str, Any], who: str, where: str | None) -> None:
        super().__init__(fields)
        self._who, self._where = who, where

    def __missing__(self, name: str) -> Any:
        raise HookError(
            f"{self._who} reads '{name}', which `update.more` lacks: `fields` of the client rule does not aggregate it",
            where=self._where,
            hint=f'add "{name}": "mean" or "sum" to `fields`',
        )


def updated_by(
    name: str, server_rule: ServerRule, state: Any, update: Update, ctx: RoundContext
) -> tuple[Any, Update]:
    """The result of a server rule's `after`, whose inputs must not change.

    Raises `HookError` if they do, if `after` reads a field that is not aggregated, and if it does not return a state
    and an `Update`.
    """
    assert server_rule.after is not None
    inputs = Inputs({"state": state, "update": update.update}, contents=ctx.round <= FIRST_VISITS)
    who, where = f"`after` of the server rule '{name}'", place_of(server_rule.after)
    returned: Any = server_rule.after(state, replace(update, more=_Fields(update.more, who, where)), ctx)
    inputs.refuse(who, where)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Update):
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        raise HookError(f"{who} returned {kind}", where=where, hint="return the new state and the Update")
    new, changed = returned
    return new, changed
