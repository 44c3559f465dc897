"""Calls the hooks of server rules, and checks what they do to their inputs and what they return."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fedlens.base.errors import HookError
from fedlens.base.signatures import place_of
from fedlens.core.input_checks import FIRST_VISITS, Inputs
from fedlens.core.protocol import Answers, Ask, ClientId, FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.tree import Tree
from fedlens.local.rules import ServerRule

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


def updated_by(
    name: str, server_rule: ServerRule, state: Any, update: Update, ctx: RoundContext
) -> tuple[Any, Update]:
    """The result of a server rule's `after`, whose inputs must not change.

    Raises `HookError` if they do, and if `after` does not return a state and an `Update`.
    """
    assert server_rule.after is not None
    inputs = Inputs({"state": state, "update": update.update}, contents=ctx.round <= FIRST_VISITS)
    returned: Any = server_rule.after(state, update, ctx)
    who, where = f"`after` of the server rule '{name}'", place_of(server_rule.after)
    inputs.refuse(who, where)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Update):
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        raise HookError(f"{who} returned {kind}", where=where, hint="return the new state and the Update")
    new, bent = returned
    return new, bent
