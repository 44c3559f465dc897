"""The default engine: workers if a trial shows that they pay, else one process, and the same bits."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.api import Experiment, Result, resume
from fedlens.base.errors import RunFailed
from fedlens.core.driver import Driver
from fedlens.core.engine_base import EngineWork
from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.engines import default as module
from fedlens.engines.default import Default, default
from fedlens.engines.inline import Inline
from fedlens.engines.processes import Processes
from tests.identity.identity_kit import parts, world
from tests.unit.engines.engine_kit import (
    NoData,
    answers_to,
    ask,
    children,
    expected,
    gone_within,
    opened,
    same,
    vectors,
)


def trains(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """As `work` of the kit, with the numbers of a training."""
    vector = torch.rand(16, generator=rng.torch("work"))
    return Outcome({"vector": vector}, None, {"examples": 1, "batches": 1})


def training(cohort: int | None = 10, images: float = 1e9, rounds: int = 10) -> EngineWork:
    """A run of the kit's clients, which cannot be timed."""
    return EngineWork({"work": trains}, NoData(), range(10), cohort, rounds, images, nothing)


def nothing(steps: int) -> Any:
    raise AssertionError("a trial was made")


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All training would take long in one process."""
    monkeypatch.setattr(Default, "_seconds", 100.0)


def begun(workers: int = 2, **work: Any) -> tuple[Default, Driver, list[Any]]:
    """The engine of a run, what sends it asks, and what it tells."""
    engine, told = default(workers=workers), []
    assert isinstance(engine, Default)
    engine.listen(lambda line, facts: told.append((line, facts)))
    engine.choose(training(**work))
    return engine, Driver(*opened(engine, {"work": trains})), told


@pytest.mark.usefixtures("long", "quick_workers")
def test_workers_answer_a_long_run_from_the_first_ask_on_with_the_same_bits() -> None:
    engine, driver, told = begun()
    wanted = ask([{}] * 10)
    try:
        for round in (1, 2):
            found = answers_to(driver, wanted, round)
            assert [answer.id.slot for answer in found] == list(range(10))
            assert same(vectors(found), expected(wanted, round))
        assert isinstance(engine.engine, Processes)
        assert engine.ahead
    finally:
        engine.close()
    assert [facts for _, facts in told] == [{"name": "inline"}, {"name": "processes", "workers": 2}]
    assert told[0][0] is None
    assert told[1][0] == "about 100 s of training are left in one process; 2 workers take over"


@pytest.mark.usefixtures("long", "quick_workers")
def test_workers_of_a_run_of_short_rounds_take_over_between_two_asks_once_they_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = [False]
    monkeypatch.setattr(Processes, "started", property(lambda engine: started[0]))
    engine, driver, told = begun(rounds=1000)
    wanted = ask([{}] * 6)

    def waits() -> Any:
        found = []
        for answer in (yield wanted):
            found.append(answer)
            started[0] = True
        return found

    try:
        assert same(vectors(answers_to(driver, wanted)), expected(wanted))
        assert told[-1][1] == {"name": "processes", "workers": 2}
        assert same(vectors(driver.drive(waits(), 2)), expected(wanted, 2))
        assert stays(engine)
        assert same(vectors(answers_to(driver, wanted, 3)), expected(wanted, 3))
        assert isinstance(engine.engine, Processes)
    finally:
        engine.close()
    assert len(told) == 2


@pytest.mark.usefixtures("long", "quick_workers")
def test_where_workers_cannot_load_the_program_the_run_stays_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*about: Any, **more: Any) -> Any:
        raise RunFailed("a worker cannot read the program")
        yield

    monkeypatch.setattr("fedlens.engines.processes.Processes.answer", broken)
    engine, driver, told = begun()
    wanted = ask([{}] * 6)
    try:
        found = answers_to(driver, wanted)
        assert [answer.id.slot for answer in found] == list(range(6))
        assert same(vectors(found), expected(wanted))
        assert stays(engine)
    finally:
        engine.close()
    assert told[-1] == ("the run stays in one process: a worker cannot read the program.", {"name": "inline"})


def stays(engine: Default) -> bool:
    """Whether the engine answers in this process."""
    return isinstance(engine.engine, Inline) and not engine.ahead


@pytest.mark.usefixtures("long", "quick_workers")
def test_a_program_that_cannot_be_sent_stays_in_this_process() -> None:
    engine, told = default(workers=2), []
    engine.listen(lambda line, facts: told.append(line))
    engine.choose(training())
    wanted = ask([{}] * 6)
    try:
        driver = Driver(*opened(engine, {"work": Heavy(threading.Lock())}))
        assert same(vectors(answers_to(driver, wanted)), expected(wanted))
        assert stays(engine)
    finally:
        engine.close()
    assert "the run stays in one process: the algorithm's operations or its data cannot be sent" in told[-1]


@pytest.mark.usefixtures("long", "quick_workers")
@pytest.mark.parametrize("bad", ["request", "shared"])
def test_what_cannot_be_sent_to_workers_is_answered_in_this_process(bad: str) -> None:
    engine, driver, told = begun()
    lock = threading.Lock()  # which cannot be pickled
    wanted = ask([{}] * 6)
    if bad == "request":
        odd = ask([{"odd": lock} if slot == 4 else {} for slot in range(6)])
    else:
        odd = ask([{}] * 6, shared={"odd": lock})
    try:
        assert same(vectors(answers_to(driver, wanted)), expected(wanted))
        assert isinstance(engine.engine, Processes)
        workers = engine.engine.pids
        found = answers_to(driver, odd, 2)
        assert [answer.id.slot for answer in found] == list(range(6))
        assert same(vectors(found), expected(wanted, 2))
        assert stays(engine)
        assert gone_within(10, workers)
        assert same(vectors(answers_to(driver, wanted, 3)), expected(wanted, 3))
        assert stays(engine)
    finally:
        engine.close()
    assert "the run stays in one process" in told[-1][0]
    assert told[-1][1] == {"name": "inline"}


@pytest.mark.usefixtures("long", "quick_workers")
def test_workers_that_an_earlier_ask_needs_answer_it_first() -> None:
    """An evaluation beside a round whose requests cannot be sent: the workers finish it, and end."""
    engine, driver, _ = begun()
    wanted = ask([{}] * 6)
    odd = ask([{"odd": threading.Lock()} if slot == 2 else {} for slot in range(6)])
    try:
        answers_to(driver, wanted)
        workers = engine.engine
        assert isinstance(workers, Processes)
        beside = driver.begin(steps(wanted), 2, ahead=True)
        assert same(vectors(driver.drive(steps(odd), 3)), expected(wanted, 3))
        assert stays(engine)
        assert len(workers.pids) == 2
        assert same(vectors(beside.finish()), expected(wanted, 2))
        assert workers.pids == []
        assert same(vectors(answers_to(driver, wanted, 4)), expected(wanted, 4))
    finally:
        engine.close()


def steps(one: Any) -> Any:
    return list((yield one))


@pytest.mark.usefixtures("long", "quick_workers")
def test_an_ask_that_fails_after_a_later_one_was_answered_in_this_process_ends_the_run() -> None:
    """Answered again in this process, it would see what the later ask has made of the clients' states."""
    engine, driver, _ = begun()
    wanted, lock = ask([{}] * 6), threading.Lock()  # which cannot be pickled
    bad_request = ask([{"odd": lock} if slot == 5 else {} for slot in range(6)])
    try:
        answers_to(driver, wanted)
        beside = driver.begin(steps(bad_request), 2, ahead=True)
        later = ask([{}] * 6, shared={"odd": lock})
        assert same(vectors(driver.drive(steps(later), 3)), expected(wanted, 3))
        with pytest.raises(RunFailed, match="cannot be sent to local workers"):
            beside.finish()
    finally:
        engine.close()


@pytest.mark.usefixtures("long")
def test_the_program_and_this_process_count_in_the_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers fit beside nothing, and not beside a program of 64 MiB."""
    room, made = 2 * module._WORKER_MEMORY + 2**22, []
    monkeypatch.setattr(module, "free_memory", lambda: room)
    monkeypatch.setattr(Processes, "warm", lambda engine: None)
    monkeypatch.setattr(Processes, "open", lambda engine, *program: made.append(engine.count))
    for size in (1, 2**24):
        engine = default(workers=2)
        engine.choose(training())
        opened(engine, {"work": Heavy(torch.zeros(size))})
        engine._start(0)
        engine.close()
    assert made == [2]


@pytest.mark.usefixtures("long")
def test_memory_is_asked_for_once_an_ask_and_too_little_of_it_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    monkeypatch.setattr(module, "free_memory", lambda: looks.append(1) or 2**28)
    engine, driver, told = begun()
    wanted = ask([{}] * 6)
    try:
        for round in (1, 2, 3):
            assert same(vectors(answers_to(driver, wanted, round)), expected(wanted, round))
    finally:
        engine.close()
    assert len(looks) == 3
    assert [line for line, _ in told] == [
        None,
        "two workers would need 256 MiB each, but only 256 MiB are free. "
        "The run stays in one process until memory is free",
    ]


@dataclass(frozen=True)
class Heavy:
    """An operation that carries something with it."""

    load: Any

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        return trains(payload, client, rng)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trials of two images of which each takes a millisecond a step; gives their steps."""
    seen: list[int] = []

    def timed(
        self: Any, name: str, table: Any, trial: int, work: Any, many: int, rounds: int
    ) -> tuple[float, float]:
        seen.append(trial)
        return 1e-3 * trial, 2.0 * trial

    monkeypatch.setattr(Default, "timed", timed)
    return seen


def seconds_of(work: EngineWork, workers: int = 2, left: float = 1.0) -> float:
    engine = default(workers=workers)
    assert isinstance(engine, Default)
    engine.choose(replace(work, trial=lambda steps: steps))  # type: ignore
    engine.resume(round(4 * (1 - left)), 4)
    return engine._seconds


def test_the_seconds_of_a_long_run_are_those_of_its_images_at_the_speed_of_a_longer_trial(
    times: list[int],
) -> None:
    assert seconds_of(training(images=1e5)) == pytest.approx(50)
    assert times == [1, 50]


def test_a_run_that_one_step_shows_to_be_short_is_tried_no_further(times: list[int]) -> None:
    assert seconds_of(training(images=1e4)) == pytest.approx(5)
    assert times == [1]


def test_only_the_rounds_that_are_left_count_when_a_run_is_resumed(times: list[int]) -> None:
    assert seconds_of(training(images=1e5), left=0.25) == pytest.approx(12.5)
    assert seconds_of(training(images=1e5), left=0.0) == 0


@pytest.mark.parametrize("more", [{"cohort": 1}, {"cohort": None}])
def test_nothing_is_timed_where_workers_cannot_help(more: Any, times: list[int]) -> None:
    assert seconds_of(training(**more)) == 0
    assert seconds_of(training(), workers=1) == 0
    assert times == []


def test_a_run_whose_step_fails_stays_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Default, "timed", lambda *_, **__: None)
    assert seconds_of(training()) == 0


def test_a_short_run_starts_nothing() -> None:
    import os

    made = ALGORITHMS.find("fedavg")(parts(world(), {"lr": 0.1}))
    engine = default(workers=2)
    assert isinstance(engine, Default)
    engine.choose(EngineWork(made.ops, world(), range(6), 4, 10, 100.0, made.train.trial))
    try:
        driver, wanted = Driver(*opened(engine, {"work": trains})), ask([{}] * 5)
        before = children(os.getpid())
        assert same(vectors(answers_to(driver, wanted)), expected(wanted))
        assert 0 < engine._seconds < 10
        assert stays(engine)
        assert children(os.getpid()) == before
    finally:
        engine.close()


@pytest.mark.usefixtures("long")
def test_asks_in_arrival_order_stay_in_this_process() -> None:
    engine, driver, _ = begun()
    try:
        wanted = ask([{}] * 6, order="arrival")
        assert [answer.id.slot for answer in answers_to(driver, wanted)] == list(range(6))
        assert stays(engine)
    finally:
        engine.close()


SETTINGS: Mapping[str, Any] = {
    "rounds": 4,
    "model": "small-cnn",
    "algorithm": "scaffold",
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 8}},
    "select": {"clients_per_round": 4},
    "local": {"lr": 0.05, "epochs": 1, "batch_size": 32},
}


def numbers(result: Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in result.metrics]


def whole(**more: Any) -> Experiment:
    return Experiment(**{**SETTINGS, **more})


def engine_of(result: Result) -> Any:
    return json.loads((result.directory / "environment.json").read_text())["engine"]


@pytest.mark.usefixtures("long", "quick_workers")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_by_workers_is_that_of_inline(overlap: bool, tmp_path) -> None:
    more = {"evaluation": {"overlap": overlap}}
    ref = whole(engine="inline", **more).run(tmp_path / "inline")
    run = whole(engine={"name": "default", "workers": 2}, **more).run(tmp_path / "default")
    assert engine_of(run) == {"name": "processes", "workers": 2}
    assert run.config["engine"]["name"] == "default"
    assert numbers(run) == numbers(ref)


@pytest.mark.parametrize("algorithm", ["fedavg", "dsgd"])
def test_the_trial_leaves_nothing_behind(algorithm: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the numbers nor in this process; also where the algorithm has its own operation of training."""
    tried: list[float] = []
    timed = Default.timed

    def watched(*given: Any, **more: Any) -> Any:
        before = torch.get_num_threads(), torch.get_rng_state().tolist(), random.getstate()
        found = timed(*given, **more)
        assert before == (torch.get_num_threads(), torch.get_rng_state().tolist(), random.getstate())
        tried.append(found[1])
        return 2e-3, found[1]  # as if steps were short, however busy the machine is

    monkeypatch.setattr(Default, "timed", watched)
    monkeypatch.setattr(module, "PAYS", 0.0)  # a longer trial follows
    monkeypatch.setattr(Default, "_start", lambda self, tree: None)
    made = {key: value for key, value in SETTINGS.items() if key != "select" or algorithm == "fedavg"}
    ref = Experiment(**{**made, "algorithm": algorithm, "engine": "inline"}).run(tmp_path / "inline")
    run = Experiment(**{**made, "algorithm": algorithm, "engine": {"name": "default", "workers": 2}})
    assert numbers(run.run(tmp_path / "default")) == numbers(ref)
    assert len(tried) == 2
    assert tried[0] < tried[1]


@pytest.mark.usefixtures("quick_workers")
def test_a_resumed_run_may_choose_differently(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = whole(engine="inline").run(tmp_path / "inline")
    stopped = Stop(2)
    with pytest.raises(KeyboardInterrupt):
        whole(engine={"name": "default", "workers": 2}).run(tmp_path / "run", progress=stopped)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["engine"] == {"name": "inline"}
    monkeypatch.setattr(Default, "_seconds", 100.0)
    run = resume(tmp_path / "run")
    assert engine_of(run) == {"name": "processes", "workers": 2}
    assert numbers(run) == numbers(ref)


class Stop:
    """A listener that interrupts the run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def started(self, outline: Any) -> None: ...
    def note(self, sentence: str) -> None: ...
    def finished(self, summary: Any) -> None: ...

    def round_done(self, line: Mapping[str, Any]) -> None:
        if line["round"] == self.round:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("model", "bf16", "speeds", "said"),
    [
        (
            "linear",
            True,
            {"inline": 100, "vectorized": 700},
            "engine.name=vectorized would train about 3.5 times",
        ),
        ("linear", True, {"inline": 100, "vectorized": 210}, None),  # two workers are as fast
        (
            "small-cnn",
            True,
            {"inline": 100, "bf16": 190},
            "engine.precision=bf16 would train about 1.9 times",
        ),
        ("small-cnn", True, {"inline": 100, "bf16": 110}, None),
        ("small-cnn", False, {"inline": 100, "bf16": 190}, None),
    ],
)
def test_a_long_run_is_told_once_what_would_train_faster(
    model: str,
    bf16: bool,
    speeds: Mapping[str, float],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []
    monkeypatch.setattr(
        Default, "timed", lambda engine, name, table, *_, **__: (1.0, speeds[table.get("precision", name)])
    )
    monkeypatch.setattr(
        Default, "listen", lambda engine, tell: setattr(engine, "_tell", lambda line, _: told.append(line))
    )
    monkeypatch.setattr(Default, "_start", lambda engine, tree: None)
    monkeypatch.setattr(module, "PAYS", 0.0)
    monkeypatch.setattr(module, "multiplies_in_bf16", lambda: bf16)
    made = {**SETTINGS, "model": model, "engine": {"name": "default", "workers": 2}}
    Experiment(**made).run(tmp_path / "run", report=False)
    assert [line.partition(", by")[0] for line in told if line] == ([f"--set {said} as fast"] if said else [])
