"""A round in progress: what an algorithm and a listener know of it, and its new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlens.base.errors import HookError
from fedlens.base.format import computed
from fedlens.base.signatures import place_of
from fedlens.core.driver import Driver
from fedlens.core.input_checks import FIRST_VISITS, Inputs
from fedlens.core.protocol import ClientId, RoundContext, State
from fedlens.core.random import Rng
from fedlens.core.states import Journal
from fedlens.core.step_counts import Phase, Work
from fedlens.core.types import is_client
from fedlens.run.build import Built
from fedlens.run.run_state import placed


def round_context(
    built: Built, round: int, journal: Journal | None = None, available: Sequence[int] | None = None
) -> RoundContext:
    """The context that the algorithm gets in a round; without a journal, its notes are forgotten.

    A run that hides clients draws among all, also those that are not `available` and then fail: the probability of a
    client must not depend on who is there.
    """
    rng = Rng((built.config.seeds.selection, "round", round))
    kept = Journal() if journal is None else journal
    privacy = built.config.privacy
    among = None if privacy is not None and privacy.hides_clients else available
    return RoundContext(round, built.config.rounds, built.federation, rng, journal=kept, available=among)


def round_work(built: Built, phase: Phase, round: int, tell: Callable[[Work], None]) -> Work:
    """The work of a phase of a round; `tell` is called as it advances."""
    config, engine, sizes = built.config, built.engine, built.federation.sizes

    def weigh(clients: Sequence[ClientId]) -> list[float]:
        return [float(sizes[client]) if is_client(client) else 1.0 for client in clients]

    # Epochs take as many steps as a client has batches.
    equal = phase == "training" and (config.local.steps or config.local.examples)
    evaluations = config.rounds // config.evaluation.every
    return Work(
        phase,
        round,
        config.rounds,
        evaluations,
        None if equal else weigh,
        lambda: engine.local_steps,
        tell,
    )


def new_state(built: Built, driver: Driver, steps: Any, state: State, round: int) -> State:
    """The server state that a round ends with, where the engine sends it from.

    Raises `HookError` if it is no mapping or, in the first rounds, if the algorithm changes `state` in place.
    """
    inputs = Inputs({"state": state}, contents=True) if round <= FIRST_VISITS else None
    new: State = driver.drive(steps, round)
    if inputs is not None:
        algorithm = built.algorithm
        inputs.refuse(f"`round` of {type(algorithm).__name__}", place_of(algorithm.round))
    new = placed(built, new)
    refuse_no_mapping(new, "round", "the new state: a mapping of names to trees and values")
    return new


def own_metrics(ctx: RoundContext, blind: bool) -> dict[str, float]:
    """The numbers that the server's code has set in this round. A `blind` sum may also set those of its replies.

    Raises `HookError` for a name of a column that the run itself computes, and for a value that is no number.
    """
    found = {}
    for name, value in ctx.metrics.items():
        if not blind and computed(name):
            what = f"ctx.metrics has '{name}', a column that the run itself computes"
            raise HookError(what, hint="choose another name")
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            what = f"ctx.metrics['{name}'] is a {type(value).__name__}, and must be a number"
            raise HookError(what, hint="set one number, such as norm.item()") from error
    return found


def refuse_no_mapping(value: Any, method: str, expected: str) -> None:
    """Raises `HookError` if a method of the algorithm returned something else than a mapping."""
    if not isinstance(value, Mapping):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise HookError(f"`{method}` of the algorithm returned {kind}", hint=f"return {expected}")
