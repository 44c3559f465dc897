"""Client states: each client keeps its own, and all requests of an ask see what was committed before it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, Client, ClientStates, Outcome, Payload, Program, Reduce, Reply, Request
from fedlens.core.random import Rng
from fedlens.run.state_files import StateFiles
from tests.covering import covering
from tests.seam.seam_kit import ENGINES, Points, gate


def reuse(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Answers with the same memory every time, as an operation does that hands out its module's parameters."""
    own = client.scratch.setdefault("own", torch.zeros(3))
    own.fill_(float(client.id))
    return Outcome({"x": {"w": own}, "extra": own, "weight": 1.0}, {"own": own})


def count(payload: Payload, client: Client, rng: Rng) -> Outcome:
    return Outcome({"seen": client.state.get("times", 0)}, {"times": client.state.get("times", 0) + 1})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block", [0, 1, 3])
def test_each_client_keeps_its_own(engine: str, block: int) -> None:
    reduce = Reduce({"x": "sum"}, block=block) if block else None

    def steps():
        return list((yield Ask("reuse", [Request(k) for k in range(8)], reduce=reduce)))

    with gate(engine, {"reuse": reuse}) as g:
        answers = g.drive(steps(), 1)
        assert [g.states.get(k)["own"].tolist() for k in range(8)] == [[float(k)] * 3 for k in range(8)]
    assert [answer.payload["extra"][0].item() for answer in answers] == list(range(8))
    if block:
        folded = [answer.reduced for answer in answers if answer.reduced is not None]
        assert sum(part["x"]["w"][0].item() for part in folded) == sum(range(8))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["request", "arrival"])
def test_an_ask_sees_the_states_from_before_it(engine: str, order: str) -> None:
    def steps():
        seen = []
        for _ in range(2):
            answers = yield Ask("count", [Request(0), Request(0), Request(1), Request(0)], order=order)
            seen.append([a.payload["seen"] for a in answers if isinstance(a, Reply)])
        return seen

    with gate(engine, {"count": count}) as g:
        assert g.drive(steps(), 1) == [[0, 0, 0, 0], [1, 1, 1, 1]]


def drift(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """What a client remembers grows out of what it remembered: a lost or mistaken state shows for ever after."""
    before = client.state.get("memory", torch.full((1000,), float(client.id)))
    memory = before * 1.5 + torch.randn(1000, generator=rng.torch("drift"))
    contexts = client.state.get("visits", 0) + 1
    # Every other client leaves its second visit out of account.
    left_out = isinstance(client.id, int) and client.id % 2 == 0 and contexts == 2
    return Outcome({"x": memory.sum()}, None if left_out else {"memory": memory, "visits": contexts})


ROUNDS = [[0, 1, 2, 3], [2, 5, 2], [7, 6, 5, 4], [0, 5, 0, 5, 1], [3, 2, 1]]


def remembered(engine: str, order: Any, states: ClientStates) -> list[Any]:
    """What comes of some rounds, one of them broken off: the answers by slot, and all states."""

    def steps(cohort: list[int], take: int) -> Any:
        seen = []
        for answer in (yield Ask("drift", [Request(k) for k in cohort], order=order)):
            assert isinstance(answer, Reply)
            seen.append((answer.id, answer.payload["x"].item()))
            if len(seen) == take:
                break
        return sorted(seen)

    made = ENGINES[engine]()
    made.open(Program({"drift": drift}, Points(), 0), states)
    try:
        drive = Driver(made, states).drive
        # In arrival order it is a matter of chance who comes last: each client once, and none broken off.
        takes = [9, 2, 9, 9, 9] if order == "request" else [9] * 5
        rounds = ROUNDS if order == "request" else [list(dict.fromkeys(cohort)) for cohort in ROUNDS]
        found: list[Any] = [
            drive(steps(cohort, take), n + 1)
            for n, (cohort, take) in enumerate(zip(rounds, takes, strict=True))
        ]
    finally:
        made.close()
    return [*found, {k: (v["visits"], v["memory"].tolist()) for k, v in sorted(states.snapshot().items())}]


@pytest.mark.parametrize(
    ("engine", "order", "memory"), covering([*ENGINES], ["request", "arrival"], [0, 4_100, 9_000])
)
def test_states_in_files_give_the_same_numbers(engine: str, order: str, memory: int, tmp_path: Path) -> None:
    """A state has 4,008 bytes, so there is room for none, for one or for two of eight."""
    files = StateFiles(tmp_path / "states")
    files.sweep(set(), set())
    states = ClientStates(files, memory)
    assert remembered(engine, order, states) == remembered("inline", order, ClientStates())
    assert states.used <= memory
    # Nothing is held for an ask that is over: there is a file for each state that is not in memory, and no others.
    states.commit(0, {})
    assert {path.stem for path in files.directory.iterdir()} == states.keys
    states.restore({})
    assert list(files.directory.iterdir()) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_closed_early_holds_nothing(engine: str, tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "states")
    files.sweep(set(), set())
    states = ClientStates(files, 0)
    for client in range(8):
        states.commit(client, {"memory": torch.full((1000,), float(client))})
    made = ENGINES[engine]()
    made.open(Program({"drift": drift}, Points(), 0), states)
    for order in ("arrival", "request"):
        answers = Driver(made, states).exchange(
            Ask("drift", [Request(k) for k in range(8)], order=order), 1, 0
        )
        next(answers)
    made.close()
    states.restore({})
    assert list(files.directory.iterdir()) == []


def test_an_ask_in_arrival_order_is_not_reduced() -> None:
    with pytest.raises(ValueError, match="arrival order"):
        Ask("train", [Request(0)], order="arrival", reduce=Reduce({"x": "sum"}))
