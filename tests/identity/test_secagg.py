"""SecAgg beside the same sum without masks: equal to the bit, whoever drops out, and whenever the server is killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.secure.keys import digest
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.aggregate.secure.secagg import SecAgg
from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, SHARES, UNMASK
from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import RoundRefused
from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientStates, Failure, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import Vectorized
from fedlens.run.journal_file import JournalFile
from tests.covering import covering
from tests.identity.identity_kit import Course, course, model, parts, same, world
from tests.identity.stacked_kit import sizes_of_groups
from tests.identity.test_quantized import FAMILY, LOCAL, RANGES
from tests.unit.engines import ray_kit
from tests.unit.engines.ray_kit import NEEDS_RAY

STEPS = (KEYS, SHARES, MASKED, UNMASK)
FIVE = (3, 8, 6, 12, 11)
TWENTY = tuple(3 + k % 7 for k in range(20))
ENGINES: dict[str, Callable[[], Any]] = {
    "inline": inline, "processes": partial(processes, workers=2), "vectorized": partial(Vectorized, group=4),
}  # fmt: skip


class Lossy:
    """An engine that loses chosen requests, and is killed before it sends a chosen ask."""

    def __init__(
        self,
        engine: Any,
        lost: Callable[[str, Any], bool] = lambda op, client: False,
        kill: str | None = None,
    ) -> None:
        self._engine, self._lost, self._kill = engine, lost, kill

    def open(self, *given: Any) -> None:
        self._engine.open(*given)

    def close(self) -> None:
        self._engine.close()

    def answer(self, ask: Any, round: int, exchange: int) -> Any:
        if ask.op == self._kill:
            raise Killed
        for answer in self._engine.answer(ask, round, exchange):
            lost = self._lost(ask.op, answer.client)
            yield Failure(answer.id, answer.client, "lost") if lost else answer


class Killed(Exception):
    """The server is gone."""


def algorithm(
    name: str, kind: Any, sizes: tuple[int, ...], select: Any, norm: bool = True, **how: Any
) -> Any:
    plain, more = FAMILY[name]
    made = kind(plain, 16, RANGES | more, **how)
    spec = model(norm=norm, dropout=0.2 if norm else 0.0)
    return ALGORITHMS.find(name)(parts(world(sizes), LOCAL, spec, aggregate=made, select=select))


def run(
    name: str,
    kind: Any,
    *,
    sizes: Any = FIVE,
    select: Any = None,
    engine: Any = None,
    rounds: int = 3,
    **how: Any,
) -> Course:
    made = algorithm(name, kind, sizes, select or Uniform(4), **how)
    return course(made, world(sizes), rounds, engine=engine)


@pytest.mark.parametrize("name", FAMILY)
def test_it_is_the_sum_without_masks_to_the_bit(name: str) -> None:
    plain, secure = run(name, Quantized), run(name, SecAgg)
    for one, other in zip(plain.steps, secure.steps, strict=True):
        assert one.tally.replied == other.tally.replied
        assert digest(one.after) == digest(other.after)
    assert states_of(plain.states) == states_of(secure.states)


def states_of(states: ClientStates) -> list[bytes]:
    return [digest(states.get(client)) for client in range(len(FIVE))]


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param("ray", marks=[NEEDS_RAY, pytest.mark.nightly])])
def test_whoever_drops_out_the_others_are_summed(engine: str, quick_workers: None) -> None:
    draw, opened = random.Random(3), 0
    made = ENGINES.get(engine, partial(ray_kit.made, cpus=0.2))
    for attempt in range(6 if engine == "inline" else 2):
        rate = 0.08 if attempt % 2 == 0 else 0.25
        fates = [
            next((step for step in range(4) if draw.random() < rate), 4) for _ in TWENTY
        ]  # the first step that a client is lost in

        def lost(op: str, client: int, fates: Any = fates) -> bool:
            return fates[client] <= STEPS.index(op)

        def untrained(op: str, client: int, fates: Any = fates) -> bool:
            return fates[client] <= STEPS.index(MASKED)

        how: dict[str, Any] = {"sizes": TWENTY, "select": Everyone(), "rounds": 1, "norm": False}
        secure = partial(run, "scaffold", SecAgg, engine=Lossy(made(), lost), threshold=0.51, **how)
        if sum(fate == 4 for fate in fates) < 11:
            with pytest.raises(RoundRefused, match="and 11 must last"):
                secure()
            continue
        opened += 1
        assert same(
            secure().final,
            run("scaffold", Quantized, engine=Lossy(made(), untrained), **how).final,
        )
    assert opened >= 1


def test_groups_train_together(quick_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    together = sizes_of_groups(monkeypatch)
    grouped = run("fedavg", SecAgg, norm=False, engine=Vectorized(group=2))
    assert together == [2] * 6
    assert same(grouped.final, run("fedavg", Quantized, norm=False, engine=Vectorized(group=2)).final)


@pytest.mark.parametrize(("name", "kill"), covering(["scaffold", "fedadam"], [None, *STEPS]))
def test_a_killed_server_goes_on_to_the_same_bits(name: str, kill: str | None, tmp_path: Path) -> None:
    """The process ends before it sends an ask of round 2; another one continues from the states of round 1."""
    made, there = algorithm(name, SecAgg, FIVE, Uniform(4)), world(FIVE)
    journal, states = tmp_path / "journal", ClientStates()
    state = made.init(made.parts.model, there.info)

    def driven(round: int, engine: Any) -> Any:
        engine.open(Program(made.ops, there, 0), states)
        driver = Driver(engine, states, journal=(kept := JournalFile(journal)))
        context = RoundContext(round, 3, there.info, Rng((0, "round", round)), journal=kept)
        return driver.drive(made.round(state, context), round)

    for round in range(1, 4):
        if round == 2 and kill is not None:
            with pytest.raises(Killed):
                driven(round, Lossy(inline(), kill=kill))
        state = driven(round, inline())
        JournalFile(journal).saved(round)
    plain = run(name, Quantized)
    assert same(plain.final, state["model"])
    assert states_of(plain.states) == states_of(states)


@pytest.mark.parametrize("step", [MASKED, UNMASK])
def test_an_aborted_round_changes_no_state(step: str) -> None:
    made, there = algorithm("scaffold", SecAgg, FIVE, Uniform(4)), world(FIVE)
    engine, states = Lossy(inline(), lambda op, client: op == step and client > 1), ClientStates()
    engine.open(Program(made.ops, there, 0), states)
    state = made.init(made.parts.model, there.info)
    context = RoundContext(1, 3, there.info, Rng((0, "round", 1)))
    with pytest.raises(RoundRefused, match="and 3 must last"):
        Driver(engine, states).drive(made.round(state, context), 1)
    assert not any(states.get(client) for client in range(5))


def test_replies_say_nothing_of_single_clients() -> None:
    """No metrics, so that a client's own test_accuracy = 0.999 chooses nothing; no norms; no other vector."""
    found = run("fedavg", SecAgg, rounds=1)
    tally = found.steps[0].tally
    assert not tally.sums
    assert not tally.norms
    assert all(row.keys() == {"client", "exchange"} for row in tally.per_client)
    assert isinstance(found.algorithm.aggregate.of, Mean)
    assert {type(op).__name__ for name, op in found.algorithm.ops.items() if name in STEPS} == {
        "RoundKeys", "SendShares", "MaskedTrain", "Unmask",
    }  # fmt: skip
