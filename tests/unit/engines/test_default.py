"""The default engine: one process at first, workers once they pay, and the same bits whenever it changes over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens.api import Experiment, Result, resume
from fedlens.base.errors import RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.engines import default as module
from fedlens.engines.default import Default, default
from fedlens.engines.processes import Processes
from tests.unit.engines.engine_kit import answers_to, ask, children, expected, opened, same, vectors


def trains(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """As `work` of the kit, with the numbers of a training."""
    vector = torch.rand(16, generator=rng.torch("work"))
    return Outcome({"vector": vector}, None, {"examples": 1, "batches": 1})


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers pay at once."""
    monkeypatch.setattr(module, "_MEASURED", 0.0)
    monkeypatch.setattr(module, "_PAYS", 0.0)


WAITED = threading.Event()


@pytest.fixture
def quick_start(quick_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, which start quickly here, can take over from when a test waits for them."""
    WAITED.clear()
    monkeypatch.setattr(Processes, "started", property(lambda engine: WAITED.is_set()))


def waiting(engine: Default) -> None:
    """Returns when the workers that were started can take over."""
    if engine._starting is not None:
        WAITED.set()
    end = time.monotonic() + 60
    while engine._starting is not None and not engine._starting.started:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("change", [3, pytest.param(7, marks=pytest.mark.nightly)])
def test_workers_take_over_in_the_middle_of_an_ask_with_the_same_bits(change: int) -> None:
    engine, told = default(workers=2), []
    engine.listen(lambda line, facts: told.append((line, facts)))
    engine._images = 1e9
    wanted = ask([{}] * 10)
    try:
        driver = Driver(*opened(engine, {"work": trains}))

        def steps() -> Any:
            answers = []
            for number, answer in enumerate((yield wanted)):
                answers.append(answer)
                if number == change:
                    waiting(engine)
            return answers

        found = driver.drive(steps(), 1)
        assert engine.running is engine._processes
        assert engine.ahead
        assert [answer.id.slot for answer in found] == list(range(10))
        assert same(vectors(found), expected(wanted))
        assert same(vectors(answers_to(driver, wanted, 2)), expected(wanted, 2))
    finally:
        engine.close()
    assert [facts for _, facts in told] == [{"name": "inline"}, {"name": "processes", "workers": 2}]
    assert told[0][0] is None
    assert "2 workers take over" in told[1][0]


@pytest.mark.usefixtures("eager", "quick_start")
def test_where_workers_cannot_load_the_program_the_run_stays_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*about: Any, **more: Any) -> Any:
        raise RunFailed("a worker cannot read the program")
        yield

    monkeypatch.setattr("fedlens.engines.processes.Processes.answer", broken)
    engine, told = default(workers=2), []
    engine.listen(lambda line, facts: told.append((line, facts)))
    engine._images = 1e9
    wanted = ask([{}] * 6)
    try:
        driver = Driver(*opened(engine, {"work": trains}))

        def steps() -> Any:
            answers = []
            for answer in (yield wanted):
                answers.append(answer)
                waiting(engine)
            return answers

        found = driver.drive(steps(), 1)
        assert [answer.id.slot for answer in found] == list(range(6))
        assert same(vectors(found), expected(wanted))
        assert engine.running is engine._inline
        assert not engine.ahead
    finally:
        engine.close()
    assert told[-1] == ("the run stays in one process: a worker cannot read the program.", {"name": "inline"})


@pytest.mark.usefixtures("eager", "quick_start")
@pytest.mark.parametrize("bad", ["request", "shared"])
def test_what_cannot_be_sent_after_the_change_is_answered_in_this_process(bad: str) -> None:
    engine, told = default(workers=2), []
    engine.listen(lambda line, facts: told.append((line, facts)))
    engine._images = 1e9
    lock = threading.Lock()  # which cannot be pickled
    wanted = ask([{}] * 6)
    if bad == "request":
        odd = ask([{"odd": lock} if slot == 4 else {} for slot in range(6)])
    else:
        odd = ask([{}] * 6, shared={"odd": lock})
    try:
        driver = Driver(*opened(engine, {"work": trains}))

        def steps() -> Any:
            answers = []
            for answer in (yield wanted):
                answers.append(answer)
                waiting(engine)
            return answers

        driver.drive(steps(), 1)
        assert engine.running is engine._processes
        found = answers_to(driver, odd, 2)
        assert [answer.id.slot for answer in found] == list(range(6))
        assert same(vectors(found), expected(wanted, 2))
        assert engine.running is engine._inline
        assert not engine.ahead
        assert same(vectors(answers_to(driver, wanted, 3)), expected(wanted, 3))
    finally:
        engine.close()
    assert "the run stays in one process" in told[-1][0]
    assert told[-1][1] == {"name": "inline"}


@pytest.mark.usefixtures("eager", "quick_start")
def test_workers_that_an_earlier_ask_needs_answer_it_first() -> None:
    """An evaluation beside a round whose requests cannot be sent: the workers finish it, and then end."""
    engine = default(workers=2)
    engine._images = 1e9
    wanted = ask([{}] * 6)
    odd = ask([{"odd": threading.Lock()} if slot == 2 else {} for slot in range(6)])
    try:
        driver = Driver(*opened(engine, {"work": trains}))

        def steps(one: Any) -> Any:
            answers = []
            for answer in (yield one):
                answers.append(answer)
                waiting(engine)
            return answers

        driver.drive(steps(wanted), 1)
        workers = engine._processes
        beside = driver.begin(steps(wanted), 2, ahead=True)
        assert same(vectors(driver.drive(steps(odd), 3)), expected(wanted, 3))
        assert engine.running is engine._inline
        assert engine._unused is workers
        assert same(vectors(beside.finish()), expected(wanted, 2))
    finally:
        engine.close()
    assert workers is not None
    assert workers.pids == []


@pytest.mark.usefixtures("eager", "quick_start")
def test_an_ask_that_fails_after_a_later_one_was_answered_in_this_process_ends_the_run() -> None:
    """Answered again in this process, it would see what the later ask has made of the clients' states."""
    engine = default(workers=2)
    engine._images = 1e9
    wanted, lock = ask([{}] * 6), threading.Lock()  # which cannot be pickled
    bad_request = ask([{"odd": lock} if slot == 5 else {} for slot in range(6)])
    try:
        driver = Driver(*opened(engine, {"work": trains}))

        def steps(one: Any) -> Any:
            answers = []
            for answer in (yield one):
                answers.append(answer)
                waiting(engine)
            return answers

        driver.drive(steps(wanted), 1)
        beside = driver.begin(steps(bad_request), 2, ahead=True)
        later = ask([{}] * 6, shared={"odd": lock})
        assert same(vectors(driver.drive(steps(later), 3)), expected(wanted, 3))
        with pytest.raises(RunFailed, match="cannot be sent to local workers"):
            beside.finish()
    finally:
        engine.close()


@pytest.mark.usefixtures("eager")
def test_the_program_and_this_process_count_in_the_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers fit beside nothing, and not beside a program of 64 MiB."""
    room = 2 * module._WORKER_MEMORY + 2**22
    monkeypatch.setattr(module, "free_memory", lambda: room)
    for size, starts in ((1, True), (2**24, False)):
        engine = default(workers=2)
        engine._images, engine._widest = 1e9, 2
        engine._seconds = engine._timed = 1.0
        engine._make = lambda count: SimpleNamespace(warm=lambda: None, close=lambda: None)  # type: ignore
        opened(engine, {"work": Heavy(torch.zeros(size))})
        engine._start(ask([{}] * 2))
        assert (engine._starting is not None) == starts, size
        engine.close()


@pytest.mark.usefixtures("eager")
def test_memory_is_asked_for_once_an_ask_and_too_little_of_it_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, told = [], []
    monkeypatch.setattr(module, "free_memory", lambda: looks.append(1) or 2**28)
    engine = default(workers=2)
    engine.listen(lambda line, facts: told.append(line))
    engine._images = 1e9
    try:
        driver, wanted = Driver(*opened(engine, {"work": trains})), ask([{}] * 6)
        for round in (1, 2, 3):
            assert same(vectors(answers_to(driver, wanted, round)), expected(wanted, round))
    finally:
        engine.close()
    assert len(looks) == 3
    assert told == [
        None,
        "two workers would need 256 MiB each, but only 256 MiB are free. "
        "The run stays in one process until memory is free",
    ]


@dataclass(frozen=True)
class Heavy:
    """An operation that carries so much with it."""

    load: torch.Tensor

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        return trains(payload, client, rng)


def test_only_the_rounds_that_are_left_count_when_a_run_is_resumed(tmp_path, monkeypatch) -> None:
    left: list[float] = []
    resumed = Default.resume

    def noted(self: Default, done: int, rounds: int) -> None:
        before = self._images
        resumed(self, done, rounds)
        left.append(self._images / before)

    monkeypatch.setattr(Default, "resume", noted)
    with pytest.raises(KeyboardInterrupt):
        whole().run(tmp_path / "run", progress=Stop(3))
    assert left == []
    resume(tmp_path / "run")
    assert left == [0.25]


def test_a_short_run_starts_nothing() -> None:
    import os

    engine = default(workers=2)
    engine._images = 100.0
    try:
        driver, wanted = Driver(*opened(engine, {"work": trains})), ask([{}] * 5)
        before = children(os.getpid())
        assert same(vectors(answers_to(driver, wanted)), expected(wanted))
        assert engine.running is engine._inline
        assert engine._starting is None
        assert children(os.getpid()) == before
    finally:
        engine.close()


@pytest.mark.usefixtures("eager")
def test_asks_in_arrival_order_stay_in_this_process() -> None:
    engine = default(workers=2)
    engine._images = 1e9
    try:
        driver, wanted = Driver(*opened(engine, {"work": trains})), ask([{}] * 6, order="arrival")
        assert [answer.id.slot for answer in answers_to(driver, wanted)] == list(range(6))
        assert engine._processes is None
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


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `eager`, and each client waits until the workers can take over, so that they do in the first round."""
    note = Default._note

    def patient(self: Default, answer: Any, seconds: float) -> None:
        note(self, answer, seconds)
        waiting(self)

    monkeypatch.setattr(module, "_MEASURED", 0.0)
    monkeypatch.setattr(module, "_PAYS", 0.0)
    monkeypatch.setattr(Default, "_note", patient)


@pytest.mark.usefixtures("at_once", "quick_start")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_that_changes_over_is_that_of_inline(overlap: bool, tmp_path) -> None:
    more = {"evaluation": {"overlap": overlap}}
    ref = whole(engine="inline", **more).run(tmp_path / "inline")
    run = whole(engine={"name": "default", "workers": 2}, **more).run(tmp_path / "default")
    assert engine_of(run) == {"name": "processes", "workers": 2}
    assert run.config["engine"]["name"] == "default"
    assert numbers(run) == numbers(ref)


@pytest.mark.usefixtures("quick_start")
def test_a_resumed_run_may_choose_differently(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = whole(engine="inline").run(tmp_path / "inline")
    stopped = Stop(2)
    with pytest.raises(KeyboardInterrupt):
        whole(engine={"name": "default", "workers": 2}).run(tmp_path / "run", progress=stopped)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["engine"] == {"name": "inline"}
    monkeypatch.setattr(module, "_MEASURED", 0.0)
    monkeypatch.setattr(module, "_PAYS", 0.0)
    note = Default._note
    monkeypatch.setattr(Default, "_note", lambda self, *given: (note(self, *given), waiting(self))[0])
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
