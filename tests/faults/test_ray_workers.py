"""Workers of the engine `ray` that are lost, cannot start, fail or write something; on a fake Ray."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from typing import Any

import pytest

from fedlens.base import interrupts
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.engines import ray_pool, ray_worker
from fedlens.engines.ray_worker import Relay
from tests.unit.engines.engine_kit import answers_to, ask, expected, opened, same, vectors, work
from tests.unit.engines.fake_ray import FakeRay, on_fake_ray
from tests.unit.engines.ray_kit import all_ready


def until(gate: Driver, ready: int) -> None:
    """Waits until so many workers are ready."""
    engine: Any = gate.engine
    end = time.monotonic() + 100
    while len(engine._pool.ready) != ready and time.monotonic() < end:
        engine._pool.wait(None)
    assert len(engine._pool.ready) == ready


# -- those that are lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "dead", "seconds"), [(1, 8, 1.0), (60, 40, 0.001)])
def test_a_node_that_is_lost_with_all_its_workers_is_no_clients_fault(
    monkeypatch: pytest.MonkeyPatch, clients: int, dead: int, seconds: float
) -> None:
    """A block that is sent to a dead worker is lost at once: none may go from one dead worker to the next."""
    with on_fake_ray(monkeypatch, workers=dead + 1) as (gate, fake):
        all_ready(gate)
        engine: Any = gate.engine
        engine._pool._seconds = seconds
        lost: Counter[int] = Counter()
        schedule_lost = engine._pool.schedule.lost

        def counting(job: Any, block: int, *rest: Any) -> None:
            lost[block] += 1
            schedule_lost(job, block, *rest)

        engine._pool.schedule.lost = counting
        for actor in fake.actors[:dead]:
            actor.dead = True
        wanted = ask([{}] * clients)
        assert same(vectors(answers_to(gate, wanted)), expected(wanted))
        assert gate.tally.failed == 0
        assert lost
        assert max(lost.values()) <= 2
        until(gate, dead + 1)


def test_a_run_that_has_lost_all_workers_says_that_it_waits_and_then_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_pool, "_SILENT", -1.0)
    with on_fake_ray(monkeypatch, "well", "silent", workers=1, connect_timeout=0.4) as (gate, fake):
        fake.actors[0].dead = True
        with pytest.raises(RunFailed) as caught:
            answers_to(gate, ask([{}]))
    assert str(caught.value).startswith(
        "all workers are lost; no worker could start on the local Ray within 0.4 seconds: a worker takes 1 CPU"
    )
    assert caught.value.where == "engine.cpus"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "no worker is left on the local Ray: the run waits up to 0.4 seconds (engine.connect_timeout) for a free slot"
    )


def test_a_run_that_gets_a_worker_again_in_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted worker says nothing for two checks of the cluster, and then dies and is restarted again."""
    with on_fake_ray(monkeypatch, "well", "silent", "well", workers=1, connect_timeout=100.0) as (gate, fake):
        pool: Any = gate.engine._pool  # type: ignore[attr-defined]
        watch, checks = pool.watch, iter(range(3))

        def watched(now: float) -> None:
            watch(now)
            if pool.workers[0].hello is not None and next(checks, None) is None:
                fake.actors[0].dead = True
                pool.workers[0].hello = fake.actors[0].hello.remote(*pool._hello)

        monkeypatch.setattr(pool, "watch", watched)
        fake.actors[0].dead = True
        assert same(vectors(answers_to(gate, ask([{}] * 2))), expected(ask([{}] * 2)))
    assert fake.actors[0].lives == 3


def test_the_patience_begins_anew_once_a_worker_was_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_fake_ray(monkeypatch, "well", workers=1, connect_timeout=20.0) as (gate, _):
        pool: Any = gate.engine._pool  # type: ignore[attr-defined]
        for moment, hello in [
            (1000.0, None),
            (1001.0, "sent"),
            (1019.0, "sent"),
            (1021.0, None),
            (1022.0, "sent"),
            (1040.0, "sent"),
        ]:
            pool.workers[0].hello = hello
            pool.watch(moment)
        with pytest.raises(RunFailed, match=r"^all workers are lost"):
            pool.watch(1043.0)
    assert capsys.readouterr().err.count("no worker is left") == 2


def test_a_worker_with_a_long_block_is_there_while_it_has_not_answered_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked whether it runs when another is lost, and answers after its block."""
    with on_fake_ray(monkeypatch, "well", workers=1, connect_timeout=20.0) as (gate, _):
        pool: Any = gate.engine._pool  # type: ignore[attr-defined]
        worker = pool.workers[0]
        worker.hello, worker.blocks = "sent", ["a block"]
        pool.watch(1000.0)
        pool.watch(1030.0)
        worker.blocks = []
        pool.watch(1031.0)
        with pytest.raises(RunFailed, match=r"^all workers are lost"):
            pool.watch(1052.0)


def test_only_the_block_that_a_worker_was_at_counts_as_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_fake_ray(monkeypatch, workers=1) as (gate, fake):
        pool: Any = gate.engine._pool  # type: ignore[attr-defined]
        pool._seconds = 0.001  # two blocks at a time
        guilty: list[tuple[int, bool]] = []
        reasons: set[str] = set()
        lost = pool.schedule.lost

        def counting(job: Any, block: int, by_it: bool, why: str) -> None:
            guilty.append((block, by_it))
            reasons.add(why)
            lost(job, block, by_it, why)

        pool.schedule.lost = counting
        fake.actors[0].dead = True
        assert len(answers_to(gate, ask([{}] * 2))) == 2
        assert pool._seconds > ray_pool._SHORT  # from now on one at a time, so that the cause is certain
    assert guilty == [(0, True), (1, False)]
    assert reasons == {"its worker ended 3 times: it exited, crashed, or ran out of memory"}


def test_a_worker_that_was_restarted_unnoticed_gets_the_program_before_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_fake_ray(monkeypatch, workers=1) as (gate, fake):
        fake.actors[0].made = fake.actors[0]._kind()  # a new process, without the program
        assert same(vectors(answers_to(gate, ask([{}] * 3))), expected(ask([{}] * 3)))
        assert gate.tally.failed == 0


# -- those that cannot start --------------------------------------------------------------------------------------


def test_workers_that_die_as_they_start_do_not_end_a_run_that_has_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_pool, "_PAUSE", 1000.0)
    with on_fake_ray(monkeypatch, "well", *["dies"] * 6, "well", workers=3) as (gate, fake):
        pool: Any = gate.engine._pool  # type: ignore[attr-defined]
        while len(pool.workers) > 1:
            pool.wait(None)
        assert same(vectors(answers_to(gate, ask([{}] * 3))), expected(ask([{}] * 3)))
        assert [actor.lives for actor in fake.actors] == [1, 3, 3]  # none is asked for yet
        pool._refill = 0.0
        until(gate, 3)
        assert len(fake.actors) == 5
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("a worker on the local Ray died 3 times at start-up: it died: it is left out")


def test_workers_that_die_now_and_then_as_they_start_are_restarted_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_fake_ray(monkeypatch, "well", "dies", "dies", "well", "dies", "well", workers=2) as (gate, fake):
        until(gate, 2)
        fake.actors[0].dead = True
        assert len(answers_to(gate, ask([{}] * 4))) == 4
        until(gate, 2)
        assert [actor.lives for actor in fake.actors] == [3, 3]
    assert capsys.readouterr().err == ""


def test_a_worker_that_has_used_up_its_restarts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_fake_ray(monkeypatch, workers=1) as (gate, fake):
        for round in range(1, 6):
            fake.actors[-1].dead = True
            assert len(answers_to(gate, ask([{}]), round)) == 1
        assert [actor.lives for actor in fake.actors] == [3, 3]
    assert capsys.readouterr().err == ""


def test_workers_that_die_as_they_start_end_a_run_that_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(RunFailed, match=r"^a worker on the local Ray died 3 times at start-up"),
        on_fake_ray(monkeypatch, "dies", workers=2),
    ):
        pass


def test_a_node_of_other_versions_that_joins_later_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_pool, "_PAUSE", 1000.0)
    monkeypatch.setattr(ray_pool, "_SILENT", 1000.0)
    with on_fake_ray(monkeypatch, "well", "odd", workers=3, connect_timeout=0.4) as (gate, fake):
        pool: Any = gate.engine._pool  # type: ignore[attr-defined]
        for actors in (3, 5):
            pool._refill = 0.0
            while len(pool.workers) > 1 or len(fake.actors) < actors:
                pool.wait(None)
        assert len(fake.actors) == 5  # asked for once more
        assert [actor.dead for actor in fake.actors] == [False] + [True] * 4
        assert same(vectors(answers_to(gate, ask([{}] * 3))), expected(ask([{}] * 3)))
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert said[0].startswith("a worker on the local Ray has torch 0.1, but this process has torch ")
        assert (
            "it is left out; fedlens asks for it again every 1000 seconds; install the same versions"
            in said[0]
        )
        fake.actors[0].dead = True
        with pytest.raises(RunFailed, match=r"all workers are lost; a worker .* has torch 0\.1") as caught:
            answers_to(gate, ask([{}]))
        assert caught.value.where == "engine.address"


def test_a_first_worker_of_other_versions_ends_a_run_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        pytest.raises(ConfigError, match=r"a worker on the local Ray has torch 0\.1"),
        on_fake_ray(monkeypatch, "odd", workers=2),
    ):
        pass


# -- what they say, and those that break --------------------------------------------------------------------------


def test_what_a_call_writes_is_reported_also_where_it_breaks() -> None:
    relay, handlers = Relay(), []

    def writes(broken: BaseException | None) -> int:
        print("printed")  # noqa: T201
        sys.stderr.write("on standard error\n")
        if not handlers:
            handlers.append(logging.StreamHandler())
        handlers[0].handle(logging.makeLogRecord({"msg": "logged"}))
        if broken is not None:
            raise broken
        return 7

    everything = "printed\non standard error\nlogged\n"
    assert relay.report(writes, None) == (7, everything, None)
    value, written, fault = relay.report(writes, ValueError("no"))
    assert value is None
    assert written.startswith(f"{everything}Traceback")  # the handler was made in the first call
    assert "in writes" in written
    assert isinstance(fault, RunFailed)
    assert fault.what.startswith("a worker of Ray failed: ValueError: no")
    value, written, fault = relay.report(
        writes, ConfigError("it is odd", where="engine.name", hint="take another")
    )
    assert written == everything
    assert isinstance(fault, RunFailed)
    assert (fault.what, fault.where, fault.hint) == ("it is odd", "engine.name", "take another")


@pytest.mark.parametrize("end", [SystemExit(15), KeyboardInterrupt()])
def test_what_ends_a_worker_is_no_failure_of_the_run(
    end: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends() -> None:
        raise end

    monkeypatch.setattr(interrupts._Watch, "active", False)
    with pytest.raises(type(end)) as raised:
        Relay().report(ends)
    assert raised.value is end


def test_an_interrupt_that_code_raises_in_a_worker_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupts._Watch, "active", True)  # as `no_user` does in every worker
    monkeypatch.setattr(interrupts._Watch, "arrived", False)
    value, _, failure = Relay().report(ends)
    assert (value, isinstance(failure, RunFailed)) == (None, True)


def loud(payload: Payload, client: Client, rng: Rng) -> Outcome:
    print("printed")  # noqa: T201
    sys.stderr.write("on standard error\n")
    return work(payload, client, rng)


def test_what_workers_write_comes_out_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_fake_ray(monkeypatch, ops={"work": loud}, workers=1) as (gate, _):
        answers_to(gate, ask([{}]))
    assert capsys.readouterr() == ("", "printed\non standard error\n")


@pytest.mark.parametrize("when", ["__init__", "work"])
def test_an_error_of_a_workers_own_keeps_its_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    def breaks(*_: Any) -> None:
        sys.stderr.write("said before\n")
        raise ConfigError("this model is odd", where="engine.name", hint="take inline")

    monkeypatch.setattr(ray_worker.RayWorker, when, breaks)
    with pytest.raises(RunFailed) as caught, on_fake_ray(monkeypatch, workers=1) as (gate, _):
        answers_to(gate, ask([{}]))
    assert str(caught.value) == "this model is odd (engine.name); take inline."
    assert capsys.readouterr().err == "said before\n"


def test_any_other_error_of_a_worker_is_one_sentence_and_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: Any) -> None:
        sys.stderr.write("said before\n")
        raise ValueError("no such thing")

    monkeypatch.setattr(ray_worker.RayWorker, "work", breaks)
    with pytest.raises(RunFailed) as caught, on_fake_ray(monkeypatch, workers=1) as (gate, _):
        answers_to(gate, ask([{}]))
    assert str(caught.value).startswith("a worker of Ray failed: ValueError: no such thing")
    said = capsys.readouterr().err
    assert said.startswith("said before\nTraceback")
    assert "in breaks" in said


# -- a cluster with GPUs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "said"), [({"GPU": 2.0}, 1), ({}, 0)])
def test_gpus_of_the_cluster_that_no_worker_uses_are_named(
    gpus: dict[str, float], said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRay, "cluster_resources", lambda self: {"CPU": 4.0, **gpus})
    lines: list[str | None] = []
    with on_fake_ray(monkeypatch, workers=1) as (gate, _):
        gate.engine.close()
        gate.engine.listen(lambda line, facts: lines.append(line))
        opened(gate.engine)
    line = "the cluster's GPUs (2) are not used: set engine.gpus=1, or a part such as 0.5"
    assert lines == [line] * said
