"""Local workers that die, dawdle or are told to stop."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.base.errors import RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, Failure, Reply, Request
from fedlens.engines.processes import Processes, processes
from fedlens.engines.schedule import DEATHS
from tests.unit.engines.engine_kit import (
    DECLARED,
    answers_to,
    ask,
    descriptors,
    expected,
    fresh,
    gone_within,
    opened,
    same,
    shared_bytes,
    vectors,
)

QUICK = pytest.mark.usefixtures("quick_workers")


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Processes, Any]]:
    """Two workers for all tests here, one after the other: what one leaves behind, the next would notice."""
    made = processes(workers=2)
    try:
        yield opened(made)
    finally:
        pids = [*made.pids, made._worker_pool._process.pid]  # type: ignore[attr-defined]
        made.close()
    assert gone_within(5, pids)


@pytest.fixture
def gate(engine: tuple[Processes, Any]) -> Driver:
    made, states = engine
    states.restore({})
    return Driver(made, states)


def slow_again(gate: Driver) -> None:
    """Makes the engine take tasks for long, so that a worker gets one at a time."""
    gate.engine._seconds = 1.0  # type: ignore[attr-defined]


def quick_again(gate: Driver) -> None:
    """Makes the engine take tasks for short, so that a worker gets the next before it has finished."""
    gate.engine._seconds = 0.001  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [slow_again, quick_again])
@pytest.mark.parametrize("when", ["at the start", "in the middle"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_worker_is_replaced_and_its_work_done_again(
    gate: Driver, tmp_path: Path, when: str, times: int, depth: Any
) -> None:
    depth(gate)
    wanted = ask(
        [{"die": when} if k == 3 else {} for k in range(8)], shared={"graves": str(tmp_path), "times": times}
    )
    found = answers_to(gate, wanted)
    assert len(list(tmp_path.iterdir())) == times
    assert same(vectors(found), expected(wanted))
    assert gate.tally.failed == 0
    assert all(gate.states.get(k) == {"visits": 1} for k in range(8))


@pytest.mark.parametrize("depth", [slow_again, quick_again])
def test_a_task_that_kills_its_worker_each_time_fails_and_the_round_goes_on(
    gate: Driver, tmp_path: Path, depth: Any
) -> None:
    depth(gate)
    wanted = ask(
        [{"die": "in the middle"} if k == 2 else {} for k in range(6)],
        shared={"graves": str(tmp_path), "times": 99},
    )
    found = answers_to(gate, wanted)
    assert isinstance(found[2], Failure)
    assert found[2].reason == "its worker process was killed by SIGKILL (out of memory?), 3 times"
    assert len(list(tmp_path.iterdir())) == 3
    rest = [k for k in range(6) if k != 2]
    assert same(vectors([found[k] for k in rest]), [expected(wanted)[k] for k in rest])
    assert gate.states.get(2) == {}
    assert {client: dict(reasons) for client, reasons in gate.tally.failures.items()} == {
        2: {found[2].reason: 1}
    }


def test_all_workers_killed_at_once_in_mid_round(gate: Driver) -> None:
    slow_again(gate)
    wanted = ask([{"seconds": 0.1}] * 8)

    def kill() -> None:
        for pid in gate.engine.pids:  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.15, kill)
    timer.start()
    before = set(gate.engine.pids)  # type: ignore[attr-defined]
    found = answers_to(gate, wanted)
    timer.join()
    assert same(vectors(found), expected(wanted))
    assert before.isdisjoint(gate.engine.pids)  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [slow_again, quick_again])
def test_workers_killed_while_they_are_idle(gate: Driver, depth: Any) -> None:
    """The driver hears of it when it sends them their next task; with short tasks it sends two."""
    for _ in range(2):
        depth(gate)
        before = list(gate.engine.pids)  # type: ignore[attr-defined]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert gone_within(5, before)
        wanted = ask([{}] * 6)
        assert same(vectors(answers_to(gate, wanted)), expected(wanted))


@QUICK
def test_more_workers_killed_while_they_are_idle_than_a_block_may_end() -> None:
    """They were gone before the block was sent to them: it is no fault of its own."""
    with fresh(workers=5) as gate:
        wanted = ask([{}] * 2)
        for _ in range(2):
            before = list(gate.engine.pids)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            assert gone_within(5, before)
            assert same(vectors(answers_to(gate, wanted)), expected(wanted))


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_workers_killed_again_and_again_from_outside(gate: Driver, seconds: float) -> None:
    slow_again(gate)
    wanted = ask([{"seconds": seconds}] * 12)
    right = expected(wanted)
    for _ in range(3):
        stop = threading.Event()

        def kill(stop: threading.Event = stop) -> None:
            for _ in range(DEATHS - 1):  # a block that loses more workers than that fails
                pids = [] if stop.wait(0.3) else gate.engine.pids  # type: ignore[attr-defined]
                if pids:
                    os.kill(pids[0], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            assert same(vectors(answers_to(gate, wanted)), right)
        finally:
            stop.set()
            thread.join()


def test_a_slow_client_does_not_idle_the_other_worker(gate: Driver, tmp_path: Path) -> None:
    """Its worker waits until the other worker has answered all other clients."""
    slow_again(gate)
    requests = [Request(k, {"files": 14 if k == 0 else 0}) for k in range(15)]
    found = answers_to(gate, Ask("held", requests, {"folder": str(tmp_path)}, DECLARED))
    slow, *quick = [answer.metrics for answer in found if isinstance(answer, Reply)]
    assert len(quick) == 14
    assert {m["pid"] for m in quick}.isdisjoint({slow["pid"]})
    assert max(m["ended"] for m in quick) < slow["ended"]
    assert [answer.client for answer in found] == list(range(15))


@QUICK
def test_replies_that_wait_for_their_turn_stay_within_the_window() -> None:
    size, window = 2**20, 16  # 4 MiB each; four of them fit
    with fresh(window=window) as gate:
        answers_to(gate, ask([{"size": size}] * 2))
        slow_again(gate)
        most, held, stop = 0, [], threading.Event()

        def watch() -> None:
            nonlocal most
            while not stop.wait(0.01):
                most = max(most, shared_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        wanted = ask([{"seconds": 0.6}, *[{}] * 23], shared={"size": size})

        def steps() -> Any:
            for answer in (yield wanted):
                assert isinstance(answer, Reply)
                held.append(float(answer.payload["vector"].sum()))

        gate.drive(steps(), 1)
        stop.set()
        thread.join()
    assert len(held) == 24
    room = window // 4 + 2  # the window's worth, and one in the hands of each worker
    assert most < (room + 1) * (4 * size + 2**16), most / (4 * size)


def test_replies_that_grow_beyond_the_window_do_not_stop_the_round(gate: Driver, tmp_path: Path) -> None:
    """The slot that all wait for has to be done again when the window is full already."""
    slow_again(gate)
    schedule = gate.engine._schedule  # type: ignore[attr-defined]
    schedule._window, schedule._block_bytes, before = 2**20, 1, schedule._window
    requests = [
        {"seconds": 0.5, "die": "in the middle"},
        *[{"seconds": 0.02, "size": 4}] * 6,
        {"seconds": 0.05, "size": 2**19},
        *[{"size": 4}] * 4,
    ]
    wanted = ask(requests, shared={"graves": str(tmp_path), "times": 1})
    try:
        assert same(vectors(answers_to(gate, wanted)), expected(wanted))
    finally:
        schedule._window, schedule._block_bytes = before, 0


@pytest.mark.timing
def test_what_is_not_there_at_the_deadline_is_a_failure_and_changes_nothing(
    gate: Driver, tmp_path: Path
) -> None:
    slow_again(gate)
    requests = [Request(k, {"files": 2 if k in (1, 2) else 0}) for k in range(5)]
    found = answers_to(gate, Ask("held", requests, {"folder": str(tmp_path)}, DECLARED, deadline=0.5))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]  # the slow ones are not waited for
    (tmp_path / "go").touch()
    assert [type(answer).__name__ for answer in found] == [
        "Reply",
        "Failure",
        "Failure",
        "Failure",
        "Failure",
    ]
    assert {f.reason for f in found if isinstance(f, Failure)} == {"the deadline passed"}
    again = answers_to(gate, ask([{}] * 5), round=2)  # the late replies come in the meantime
    assert same(vectors(again), expected(ask([{}] * 5), round=2))
    assert gate.states.snapshot() == {0: {"visits": 2}} | {k: {"visits": 1} for k in range(1, 5)}
    assert gate.tally.failed == 4


def test_nothing_new_is_begun_after_the_deadline(gate: Driver, tmp_path: Path) -> None:
    """Not even what was waiting for room in the window, of which there is plenty when all the rest is given up."""
    slow_again(gate)
    schedule = gate.engine._schedule  # type: ignore[attr-defined]
    schedule._window, schedule._block_bytes, before = 1, 2**20, schedule._window
    requests = [{"seconds": 0.5}, {}, {}, *[{"touch": True}] * 4]
    try:
        answers_to(gate, ask(requests, deadline=0.3, shared={"graves": str(tmp_path)}))
        answers_to(gate, ask([{"seconds": 0.02}] * 6), 2)
    finally:
        schedule._window, schedule._block_bytes = before, 0
    assert list(tmp_path.iterdir()) == []


def test_an_algorithm_that_stops_looking_drops_the_rest(gate: Driver) -> None:
    slow_again(gate)
    wanted = ask([{"seconds": 0.05}] * 10)

    def steps() -> Any:
        taken = []
        for answer in (yield wanted):
            taken.append(answer.client)
            if len(taken) == 3:
                break
        return taken

    assert gate.drive(steps(), 1) == [0, 1, 2]
    assert set(gate.states.snapshot()) == {0, 1, 2}
    assert same(vectors(answers_to(gate, ask([{}] * 4), 2)), expected(ask([{}] * 4), 2))
    assert gate.states.snapshot() == {0: {"visits": 2}, 1: {"visits": 2}, 2: {"visits": 2}, 3: {"visits": 1}}


def test_replies_that_are_kept_stay_as_they_were(gate: Driver) -> None:
    """A reply's memory is used again only when nobody looks at it any more, whatever part of it is kept."""
    kept, copies = [], []
    for round in range(1, 7):
        wanted = ask([{"size": 1000 + 100 * k} for k in range(6)])
        for k, vector in enumerate(vectors(answers_to(gate, wanted, round))):
            part = [vector, vector[3:], vector.view(-1, 10), vector.numpy(), vector[0]][(k + round) % 5]
            kept.append(part)
            copies.append(torch.as_tensor(part).clone())
        gc.collect()
    assert all(torch.equal(torch.as_tensor(a), b) for a, b in zip(kept, copies, strict=True))


def test_memory_does_not_grow_from_round_to_round(gate: Driver) -> None:
    def rounds(first: int, last: int) -> int:
        for round in range(first, last):
            answers_to(gate, ask([{"size": 50_000}] * 6), round)
        gc.collect()
        return shared_bytes()

    settled = rounds(1, 4)
    assert rounds(4, 34) < settled + 40 * 200_000  # of the 180 replies


def test_several_asks_in_arrival_order(gate: Driver) -> None:
    """Each answer comes once, those of an earlier ask beside those of a later one, each with its own numbers."""
    slow_again(gate)
    seen: list[Reply] = []

    def steps(round: int, requests: list[Request], take: int) -> Any:
        answers = yield Ask("work", requests, order="arrival", expect=DECLARED)
        for answer in answers:
            assert isinstance(answer, Reply)
            seen.append(answer)
            take -= 1
            if take == 0:
                break

    slow = {"seconds": 0.5}
    gate.drive(steps(1, [Request(0, slow), *[Request(k) for k in range(1, 4)]], 3), 1)
    assert [answer.client for answer in seen] == [1, 2, 3]
    gate.drive(steps(2, [Request(k, {"seconds": 0.05}) for k in range(4, 8)], 3), 2)
    gate.drive(steps(3, [], 2), 3)  # asks nothing new: takes what is still out
    assert sorted(answer.client for answer in seen) == list(range(8))
    assert [answer.client for answer in seen][-1] == 0
    assert {answer.client: answer.id[0] for answer in seen} == {k: 1 if k < 4 else 2 for k in range(8)}
    first = expected(Ask("work", [Request(k) for k in range(4)], expect=DECLARED), 1)
    assert all(torch.equal(a.payload["vector"], first[int(a.client)]) for a in seen if a.id.round == 1)
    gate.drive(steps(4, [], 0), 4)  # and nothing is out any more: no waiting for ever


def test_a_deadline_in_arrival_order(gate: Driver, tmp_path: Path) -> None:
    """The answers come while both workers still wait, and what is then left is not begun."""
    slow_again(gate)
    folder, graves = tmp_path / "held", tmp_path / "graves"
    folder.mkdir()
    graves.mkdir()
    requests = [
        Request(0, {"files": 1}),
        Request(1, {"files": 1}),
        Request(2, {"die": "at the start", "files": 0}),
    ]
    shared = {"folder": str(folder), "graves": str(graves)}
    found = answers_to(gate, Ask("held", requests, shared, DECLARED, order="arrival", deadline=0.3))
    assert list(folder.iterdir()) == []
    (folder / "go").touch()
    assert [type(answer) for answer in found] == [Failure] * 3
    assert gate.states.snapshot() == {}
    assert same(vectors(answers_to(gate, ask([{}] * 3), 2)), expected(ask([{}] * 3), 2))
    assert list(graves.iterdir()) == []


def test_long_messages_both_ways_do_not_wait_for_each_other(gate: Driver) -> None:
    """A socket holds some 200 kB: two that both want to write more, and read after that, would wait for ever."""
    long = [float(k) for k in range(60_000)]
    for _ in range(2):
        quick_again(gate)
        found = answers_to(gate, ask([{"more": {"long": long}}] * 8))
        assert all(isinstance(a, Reply) and a.payload["long"] == long for a in found)


def test_nothing_is_left_when_an_engine_is_closed(gate: Driver) -> None:
    """Processes, descriptors, shared memory: after an orderly end, and after an exception in mid-round."""
    answers_to(gate, ask([{}] * 2))  # what a first engine imports and opens for all is there

    def once(stop: bool) -> list[int]:
        with fresh() as gate:
            pids = [*gate.engine.pids, gate.engine._worker_pool._process.pid]  # type: ignore[attr-defined]

            def steps() -> Any:
                for answer in (
                    yield ask([{"seconds": 0.02, "size": 4096}] * 8, shared={"scale": torch.ones(4096)})
                ):
                    if stop and answer.client == 1:
                        raise ZeroDivisionError

            try:
                gate.drive(steps(), 1)
            except ZeroDivisionError:
                assert stop
            if stop:
                gate.drive(
                    _first_of(
                        Ask(
                            "work",
                            [Request(k, {"seconds": 1.0}) for k in range(4)],
                            order="arrival",
                            expect=DECLARED,
                        )
                    ),
                    2,
                )
        return pids

    gc.collect()
    before, pids = (descriptors(), shared_bytes()), [os.getpid()]
    for stop in (False, True):
        pids += once(stop)
        assert gone_within(5, pids[1:])
        gc.collect()
        assert (descriptors(), shared_bytes()) == before, stop
    # Named memory is called after the process that made it; other programs have theirs.
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


def _first_of(wanted: Ask) -> Any:
    (yield wanted).close()


@QUICK
def test_a_worker_that_hangs_is_replaced_and_its_work_done_again(tmp_path: Path) -> None:
    """The first that takes client 2 sleeps for a minute; the next finds its grave and does not."""
    wanted = ask([{"hang": True} if k == 2 else {} for k in range(6)], shared={"graves": str(tmp_path)})
    with fresh(timeout=2.0) as gate:
        before = set(gate.engine.pids)  # type: ignore[attr-defined]
        began = time.monotonic()
        found = answers_to(gate, wanted)
        assert time.monotonic() - began < 50
        assert same(vectors(found), expected(wanted))
        assert len(before - set(gate.engine.pids)) == 1  # type: ignore[attr-defined]


@QUICK
def test_work_that_always_hangs_fails_and_the_round_goes_on(tmp_path: Path) -> None:
    wanted = ask([{"hang": "always"} if k == 2 else {} for k in range(6)], shared={"graves": str(tmp_path)})
    with fresh(timeout=1.0) as gate:
        found = answers_to(gate, wanted)
    assert [type(answer) for answer in found] == [Failure if k == 2 else Reply for k in range(6)]
    assert found[2].reason == "no answer came within 1 s, 3 times"


@QUICK
def test_slow_work_in_a_queue_is_not_taken_for_hung() -> None:
    """Each task's time counts from when its worker began with it, not from when it was sent."""
    wanted = ask([{"seconds": 0.25} for _ in range(8)])
    with fresh(workers=1, timeout=1.5) as gate:
        quick_again(gate)
        (pid,) = gate.engine.pids  # type: ignore[attr-defined]
        assert len(vectors(answers_to(gate, wanted))) == 8
        assert gate.engine.pids == [pid]  # type: ignore[attr-defined]


@QUICK
def test_what_is_asked_ahead_is_done_by_a_worker_that_would_idle() -> None:
    """One slow client keeps one worker busy; the other does meanwhile what was asked before and nobody waits for."""
    with fresh() as gate:

        def steps(wanted: Ask) -> Any:
            return list((yield wanted))

        early = ask([{"stateless": True}] * 6)
        ahead = gate.begin(steps(early), 1)
        late = gate.drive(steps(ask([{"seconds": 1.5}])), 2)
        found = ahead.finish()
        assert same(vectors(found), expected(early))
        assert all(answer.metrics["ended"] < late[0].metrics["ended"] for answer in found)
        # Left unanswered, it holds up nothing, and nothing of it is left.
        gate.begin(unheard(ask([{}] * 3)), 3).finish()
        assert not gate.engine._schedule._jobs  # type: ignore[attr-defined]
        assert not gate._out
        assert len(vectors(gate.drive(steps(ask([{}] * 4)), 4))) == 4


def unheard(wanted: Ask) -> Any:
    """Asks and does not wait for the answers."""
    yield wanted
    return None


@QUICK
def test_what_cannot_go_on_beside_the_next_round_is_told() -> None:
    def twice() -> Any:
        list((yield ask([{"stateless": True}])))
        return list((yield ask([{"stateless": True}])))

    def changing() -> Any:
        return list((yield ask([{}])))

    for steps, what in ((twice, "asks several times"), (changing, "changes a client's state")):
        with fresh() as gate, pytest.raises(RunFailed, match=what) as caught:
            gate.begin(steps(), 1).finish()
        assert caught.value.hint == "set evaluation.overlap=false"


@QUICK
def test_a_worker_lays_its_large_replies_into_one_region_again_and_again() -> None:
    """Of a heavy model each region is a copy of it."""
    with fresh(workers=1) as gate:
        slow_again(gate)
        wanted = ask([{"seconds": 0.1}] * 6, shared={"size": 2**20})  # 4 MiB each
        answers = gate.exchange(wanted, 1, 0)
        for right in expected(wanted):
            answer = next(answers)
            assert isinstance(answer, Reply)
            assert torch.equal(answer.payload["vector"], right)
            del answer  # as who folds replies does
        (worker,) = gate.engine._workers
        assert len(worker._replies) == 1


def test_the_process_that_starts_workers_is_killed(gate: Driver) -> None:
    """The last test: the engine ends with workers of two such processes."""
    nursery = gate.engine._worker_pool._process  # type: ignore[attr-defined]
    wanted = ask([{"seconds": 0.02}] * 6)
    right = expected(wanted)
    os.kill(nursery.pid, signal.SIGKILL)
    assert same(vectors(answers_to(gate, wanted)), right)  # the workers it made go on without it
    dead = gate.engine.pids[0]  # type: ignore[attr-defined]
    os.kill(dead, signal.SIGKILL)
    assert same(vectors(answers_to(gate, wanted)), right)  # and a new one makes new workers
    assert gone_within(5, [dead, nursery.pid])
