"""Calls the hooks of server rules, and checks what they do to their inputs and what they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.core.errors import HookError
from fedlens.core.input_checks import Inputs
from fedlens.core.protocol import RoundContext
from fedlens.core.reduction import Update
from fedlens.core.signatures import place_of
from fedlens.local.rules import ServerRule

_RESERVED = ("model", "lr", "schedule", "work")  # of the payload, for local training


def shared_by(name: str, half: ServerRule, state: Any, shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a server rule adds to the payload, under names that nothing else in it has.

    Raises `HookError` for a name that is taken, and if `shared` does not return a mapping.
    """
    if half.shared is None:
        return {}
    sent: Any = half.shared(state)
    who, where = f"`shared` of the server rule '{name}'", place_of(half.shared)
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
    name: str, half: ServerRule, state: Any, update: Update, ctx: RoundContext
) -> tuple[Any, Update]:
    """The result of a server rule's `after`, whose inputs must not change.

    Raises `HookError` if they do, and if `after` does not return a state and an `Update`.
    """
    assert half.after is not None
    inputs = Inputs({"state": state, "update": update.update})
    returned: Any = half.after(state, update, ctx)
    who, where = f"`after` of the server rule '{name}'", place_of(half.after)
    inputs.refuse(who, where)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Update):
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        raise HookError(f"{who} returned {kind}", where=where, hint="return the new state and the Update")
    new, bent = returned
    return new, bent
