"""What an operation may do wrong, and what becomes of it: the same on every engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.base.errors import RunFailed
from fedlens.core.calls import StackedOutcomes
from fedlens.core.driver import Driver
from fedlens.core.protocol import (
    Ask,
    BatchedOp,
    Call,
    Client,
    ClientStates,
    Failure,
    Id,
    Outcome,
    Payload,
    Program,
    Reply,
    Request,
)
from fedlens.core.random import Rng
from fedlens.core.schema import NumberField, Schema, TensorField, TreeField
from fedlens.engines.executor import Executor, Item, foreign
from fedlens.engines.inline import inline
from fedlens.engines.shared_memory import Packer, Pool, Region, unpack
from tests.unit.engines.engine_kit import DECLARED, NoData, answers_to, ask, fresh, same, vectors

ENGINES = ["inline", "processes"]
pytestmark = pytest.mark.usefixtures("quick_workers")
W = torch.ones(3)
EXPECT = Schema(
    {
        "update": TreeField({"w": ((3,), torch.float32)}),
        "weight": NumberField(above=0, most=50),
        "v": TensorField((3,), torch.float32),
    }
)


def fail() -> Any:
    raise ValueError("the first line\nand a second")


OUTCOMES: dict[str, Callable[[], Any]] = {
    "good": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}),
    "nan": lambda: Outcome({"update": {"w": W * math.nan}, "weight": 1.0, "v": W}),
    "inf": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": torch.tensor([0, 0, -math.inf])}),
    "shape": lambda: Outcome({"update": {"w": torch.ones(1, 3)}, "weight": 1.0, "v": W}),
    "(1,)": lambda: Outcome({"update": {"w": W[:1]}, "weight": 1.0, "v": W}),
    "dtype": lambda: Outcome({"update": {"w": W.double()}, "weight": 1.0, "v": W}),
    "no tensor": lambda: Outcome({"update": {"w": [1.0, 1.0, 1.0]}, "weight": 1.0, "v": W}),
    "leaf missing": lambda: Outcome({"update": {}, "weight": 1.0, "v": W}),
    "leaf extra": lambda: Outcome({"update": {"w": W, "x": W}, "weight": 1.0, "v": W}),
    "missing": lambda: Outcome({"update": {"w": W}, "weight": 1.0}),
    "extra": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W, "x": 0}),
    "weight zero": lambda: Outcome({"update": {"w": W}, "weight": 0.0, "v": W}),
    "weight negative": lambda: Outcome({"update": {"w": W}, "weight": -2.0, "v": W}),
    "weight nan": lambda: Outcome({"update": {"w": W}, "weight": math.nan, "v": W}),
    "weight absurd": lambda: Outcome({"update": {"w": W}, "weight": 1e30, "v": W}),
    "weight word": lambda: Outcome({"update": {"w": W}, "weight": "3", "v": W}),
    "weight tensor": lambda: Outcome({"update": {"w": W}, "weight": torch.tensor(1.0), "v": W}),
    "state nan": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}, {"c": W * math.inf}),
    "state foreign": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}, {"c": {1, 2}}),
    "state keys": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}, {"c": {3: W}}),
    "state no mapping": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}, W),  # type: ignore[arg-type]
    "metric nan": lambda: Outcome(
        {"update": {"w": W}, "weight": 1.0, "v": W}, None, {"examples": 2, "loss": math.nan}
    ),
    "metric word": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}, None, {"loss": "low"}),  # type: ignore[dict-item]
    "metric score": lambda: Outcome(
        {"update": {"w": W}, "weight": 1.0, "v": W}, None, {"test_accuracy": 0.999}
    ),
    "metric count": lambda: Outcome({"update": {"w": W}, "weight": 1.0, "v": W}, None, {"examples": -5}),
    "a set": lambda: Outcome({"kinds": {1, 2}}),
    "nothing": lambda: None,
    "raises": fail,
    "exits": lambda: sys.exit("enough"),
}
REASONS = {
    "nan": "update holds NaN or Inf",
    "inf": "v holds NaN or Inf",
    "shape": "update.w has shape (1, 3) where (3,) is expected",
    "(1,)": "update.w has shape (1,) where (3,) is expected",
    "dtype": "update.w is torch.float64 where torch.float32 is expected",
    "no tensor": "update.w is list, not a tensor",
    "leaf missing": "update lacks w",
    "leaf extra": "update has an extra x",
    "missing": "v is missing",
    "extra": "there is an extra x",
    "weight zero": "weight is 0, outside (0, 50]",
    "weight negative": "weight is -2, outside (0, 50]",
    "weight nan": "weight is nan",
    "weight absurd": "weight is 1e+30, outside (0, 50]",
    "weight word": "weight is str, not a number",
    "weight tensor": "weight is Tensor, not a number",
    "state nan": "c holds NaN or Inf",
    "state foreign": "its state.c holds a set, which cannot be sent",
    "state keys": "its state.c holds a dict with keys that are no strings, which cannot be sent",
    "state no mapping": "its state is a Tensor, not a mapping",
    "metric nan": "its metric 'loss' holds NaN or Inf",
    "metric word": "ValueError: could not convert string to float: 'low'",
    "metric score": "its metric 'test_accuracy' is not declared: add it to `metrics` of the ask's Schema or",
    "metric count": "its metric 'examples' is -5, outside [0, 9.0072e+15]",
    "a set": "update is missing",
    "nothing": "TypeError: the operation 'misbehave' returned None: end it with "
    "return Outcome(payload, state, metrics)",
    "raises": "ValueError: the first line (test_executor.py, line ",
    "exits": "SystemExit: enough (test_executor.py, line ",
}


def misbehave(payload: Payload, client: Client, rng: Rng) -> Outcome:
    outcome: Outcome = OUTCOMES[payload["do"]]()
    return outcome


@pytest.fixture(scope="module", params=ENGINES)
def gate(request: pytest.FixtureRequest) -> Any:
    with fresh(request.param, ops={"misbehave": misbehave, "keep": keep}) as made:
        yield made


def keep(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Answers with memory that it works on in, as one does who sends a module's own parameters."""
    own = client.scratch.setdefault("own", torch.zeros(3, requires_grad=True))
    with torch.no_grad():
        own += 1 + client.id  # type: ignore[operator]
    return Outcome({"vector": own}, {"own": (own,)})


def test_each_fault_is_a_failure_of_its_client_and_the_others_count(gate: Driver) -> None:
    names = list(OUTCOMES)
    gate.states.restore({})
    gate.tally = type(gate.tally)()
    wanted = Ask(
        "misbehave", [Request(k, {"do": name}) for k, name in enumerate([*names, "good"])], expect=EXPECT
    )
    found = dict(zip([*names, "good again"], answers_to(gate, wanted), strict=True))
    for name, answer in found.items():
        if name.startswith("good"):
            assert isinstance(answer, Reply)
        else:
            assert isinstance(answer, Failure), name
            assert answer.reason.startswith(REASONS[name]), (name, answer.reason)
            assert "\n" not in answer.reason
    assert (gate.tally.clients, gate.tally.failed) == (2, len(names) - 1)
    assert gate.states.snapshot() == {}


def test_without_a_schema_what_cannot_be_sent_is_refused_all_the_same(gate: Driver) -> None:
    """`inline` sends nothing, and gives the same answer as the engines that do."""
    names = ["no tensor", "inf", "a set"]
    found = answers_to(gate, Ask("misbehave", [Request(k, {"do": name}) for k, name in enumerate(names)]))
    assert isinstance(found[0], Reply)
    assert [answer.reason for answer in found[1:] if isinstance(answer, Failure)] == [
        "v holds NaN or Inf",
        "the payload.kinds holds a set, which cannot be sent",
    ]
    assert foreign({"f": len}) == "the payload.f holds a builtin_function_or_method, which cannot be sent"
    assert foreign([{"a": (1, 2.0, b"x", "y", None, True, W)}]) is None
    assert foreign({"a": np.ones(3)}) == "the payload.a holds a ndarray, which cannot be sent"


def test_an_operation_that_there_is_not_is_named(gate: Driver) -> None:
    (answer,) = answers_to(gate, Ask("train", [Request(0)]))
    assert isinstance(answer, Failure)
    assert answer.reason == "the algorithm has no operation 'train'"


def test_memory_that_an_operation_works_on_in_is_not_what_it_answered(gate: Driver) -> None:
    found = answers_to(gate, Ask("keep", [Request(0), Request(0), Request(0)]))
    values = sorted(float(vector[0]) for vector in vectors(found))
    assert len(set(values)) == 3 or values == [1.0, 1.0, 2.0]  # two workers count each for themselves
    assert not any(vector.requires_grad for vector in vectors(found))
    assert isinstance(gate.states.get(0)["own"], tuple)


class Twice:
    """An engine whose every answer from client 1 comes twice."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def answer(self, *arguments: Any) -> Any:
        for answer in self.engine.answer(*arguments):
            yield answer
            if answer.client == 1:
                yield answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reply_that_comes_twice_counts_once(engine: str) -> None:
    wanted = ask([{}] * 3)
    with fresh(engine) as once:
        right = vectors(answers_to(once, wanted))
        once.states.restore({})
        twice = Driver(Twice(once.engine), once.states)
        assert same(vectors(answers_to(twice, wanted)), right)
    assert (twice.tally.clients, twice.tally.failed) == (3, 1)
    assert dict(twice.tally.failures[1]) == {"answered a request twice, or one that was not asked": 1}
    assert twice.states.get(1) == {"visits": 1}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_ask_in_arrival_order_is_sent_although_nobody_looks_yet(engine: str) -> None:
    with fresh(engine) as gate:

        def steps() -> Any:
            yield Ask("work", [Request(0)], order="arrival", expect=DECLARED)
            yield Ask("work", [Request(1)], expect=DECLARED)
            return [
                answer.client
                for answer in (yield Ask("work", [Request(2), Request(3)], order="arrival", expect=DECLARED))
            ]

        assert sorted(gate.drive(steps(), 1)) == [0, 2, 3]
        assert sorted(gate.states.snapshot()) == [0, 2, 3]  # nobody looked for the answer of 1
        assert gate.tally.clients == 3


def test_a_round_that_is_no_generator_is_said_so() -> None:
    with pytest.raises(RunFailed, match="returned a NoneType, not a generator of asks"):
        Driver(inline(), ClientStates()).drive(None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 100, 20_000])
def test_what_is_packed_comes_back(size: int) -> None:
    """Long lists and long bytes lie in the region beside the tensors; arrays keep it alive as tensors do."""
    payload = {
        "numbers": [float(k) for k in range(size)],
        "bytes": bytes(range(256)) * size,
        "tensor": torch.arange(size),
        "array": np.arange(size, dtype="<i4").reshape(1, size),
        "empty": torch.empty(0, 3),
    }
    packer = Packer(payload)
    assert len(packer.envelope) < 20_000
    region, freed = Region(packer.size), []
    packer.write(region.view())
    back = unpack(packer.envelope, region.view(freed=lambda: freed.append(True)))
    assert {name: back[name] for name in ("numbers", "bytes")} == {
        name: payload[name] for name in ("numbers", "bytes")
    }
    assert torch.equal(back["tensor"], payload["tensor"])
    array = back["array"]
    assert np.array_equal(array, payload["array"])
    assert array.dtype == np.int32
    assert back["empty"].shape == (0, 3)
    in_region = array.nbytes >= 4096
    del back
    assert freed == ([] if in_region else [True])
    del array
    assert freed == [True]
    region.close()


def test_threads_are_given_back_and_the_random_state_is_left_alone() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    engine, states = inline(threads=3), ClientStates()
    engine.open(Program({"misbehave": misbehave}, NoData(), 0), states)
    assert torch.get_num_threads() == 3
    answers_to(Driver(engine, states), Ask("misbehave", [Request(0, {"do": "good"})]))
    engine.close()
    engine.close()
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_deadline_inline() -> None:
    with fresh("inline") as gate:
        found = answers_to(gate, ask([{}, {"seconds": 0.3}, {}], deadline=0.2))
        assert [type(answer) for answer in found] == [Reply, Failure, Failure]
        assert gate.states.snapshot() == {0: {"visits": 1}}


def test_freed_memory_goes_back_once_after_the_first_heavy_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr("fedlens.engines.inline.HEAVY", 1000)
    monkeypatch.setattr("fedlens.engines.inline.release_freed_memory", lambda: released.append(1))
    with fresh("inline") as gate:
        counts = []
        for size in (16, 1000, 1000):  # an evaluation comes before the first training, and gives nothing away
            answers_to(gate, ask([{"size": size}] * 3))
            counts.append(len(released))
    assert counts == [0, 1, 1]


class Columns(BatchedOp):
    """Answers all calls in columns; the client in slot 1 counts its examples below zero."""

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        raise NotImplementedError

    def together(self, calls: Sequence[Call]) -> StackedOutcomes:
        counts = [5.0, -5.0, 5.0][: len(calls)]
        return StackedOutcomes({"weight": [1.0] * len(calls)}, {"examples": counts}, range(len(calls)))


def test_metrics_in_columns_are_checked_like_those_of_each_client() -> None:
    executor = Executor(Program({"columns": Columns()}, NoData(), seed=7))
    items = [Item(Id(1, 0, k), k, {}, {}) for k in range(3)]
    expect = Schema({"weight": NumberField(above=0)})
    answers = executor.together("columns", {}, items, expect)
    assert [type(answer) for answer in answers] == [Reply, Failure, Reply]
    assert isinstance(answers[1], Failure)
    assert answers[1].reason == "its metric 'examples' is -5, outside [0, 9.0072e+15]"
    good = executor.together("columns", {}, items[:1], expect)
    assert [answer.metrics for answer in good if isinstance(answer, Reply)] == [{"examples": 5.0}]


def test_a_tensor_made_in_shared_memory_has_its_place_there() -> None:
    pool = Pool()
    tree = pool.empty_like({"a": torch.ones(3), "b": torch.ones(2, 2)})
    region, start = pool.home(tree["a"]) or (None, -1)
    assert region is not None
    assert start == 0
    assert pool.home(tree["b"]) == (region, tree["b"].data_ptr() - tree["a"].data_ptr())
    assert pool.home(tree["b"].T) is None
    assert pool.home(torch.ones(3)) is None
