"""How local workers end when their driver does, and what they say when they cannot begin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import RunFailed
from fedlens.core.protocol import Ask, Client, ClientStates, Outcome, Payload, Program, Request
from fedlens.core.random import Rng
from fedlens.engines import worker_pool
from fedlens.engines.processes import processes
from tests.unit.engines.engine_kit import (
    NoData,
    answers_to,
    ask,
    expected,
    fresh,
    gone_within,
    opened,
    same,
    vectors,
    work,
)

ROOT = Path(__file__).parents[3]
DRIVER = """
from tests.unit.engines.engine_kit import answers_to, ask, fresh
with fresh() as gate:
    print(*gate.engine.pids, gate.engine._worker_pool._process.pid, flush=True)
    answers_to(gate, ask([{"print": "from a worker"}]))
    answers_to(gate, ask([{"seconds": 30.0, "touch": True}] * 4, shared={"graves": "."}))
"""
STARTING = """
import time
from fedlens.engines.processes import processes
engine = processes(workers=2)
try:
    engine.warm()
    print(engine._worker_pool._process.pid, flush=True)
    time.sleep(30)
finally:
    engine.close()
"""


def drive(code: str, cwd: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A driver in a process group of its own, and the process ids that it prints."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def busy(cwd: Path) -> None:
    """Waits until both workers are at work."""
    while len(list(cwd.iterdir())) < 2:
        time.sleep(0.01)


def test_workers_go_when_their_driver_is_killed(tmp_path: Path) -> None:
    process, pids = drive(DRIVER, tmp_path)
    try:
        assert len(pids) == 3
        busy(tmp_path)
        process.kill()
        assert gone_within(5, pids)
    finally:
        process.kill()
        out, err = process.communicate()
    # What a worker prints is not what the driver prints, and comes out at once; there is no traceback.
    assert (out, err) == ("", "from a worker\n")


@pytest.mark.parametrize("code", [DRIVER, pytest.param(STARTING, marks=pytest.mark.nightly)])
def test_ctrl_c_is_the_drivers_and_no_worker_complains(code: str, tmp_path: Path) -> None:
    process, pids = drive(code, tmp_path)
    try:
        if code == DRIVER:
            busy(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert gone_within(5, pids)
    assert out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "zygote" not in err
    assert "worker.py" not in err


@pytest.mark.nightly
def test_the_process_that_starts_workers_is_killed_before_it_has_begun() -> None:
    engine = processes(workers=1)
    try:
        engine.warm()
        first = engine._worker_pool._process
        assert first is not None
        killer = threading.Timer(0.2, lambda: os.kill(first.pid, signal.SIGKILL))
        killer.start()
        opened(engine)
        killer.join()
        assert len(engine.pids) == 1
    finally:
        engine.close()
    engine.close()


def test_where_no_worker_can_be_started_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    engine = processes(workers=1)
    with pytest.raises(RunFailed) as caught:
        opened(engine)
    engine.close()
    assert caught.value.what == "the process that starts local workers failed twice"
    assert caught.value.hint == "its last output is above; engine.name=inline runs without it"


class Stubborn:
    """Pickles well and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return (int, ("stubborn",))

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({})


def test_a_worker_that_cannot_read_the_program_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed) as caught, fresh(workers=1, ops={"work": Stubborn()}) as gate:
        answers_to(gate, ask([{}]))
    assert "a local worker failed: ValueError: invalid literal for int()" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.usefixtures("quick_workers")
def test_what_cannot_be_sent_to_workers_is_one_sentence() -> None:
    held = threading.Lock()
    engine = processes(workers=1)
    with pytest.raises(RunFailed, match=r"the algorithm's operations or its data cannot be sent .*lock"):
        engine.open(Program({"work": lambda *_: held}, NoData(), 0), ClientStates())
    engine.close()


@pytest.mark.usefixtures("quick_workers")
def test_an_ask_with_code_in_it_is_one_sentence() -> None:
    with fresh(workers=1) as gate:
        with pytest.raises(
            RunFailed, match="the shared payload of the ask 'work' cannot be sent to local workers"
        ):
            answers_to(gate, ask([{}], shared={"f": lambda: 0}))
        with pytest.raises(
            RunFailed, match="a request of the ask 'work', or a client's state cannot be sent"
        ):
            answers_to(gate, Ask("work", [Request(0, {"f": lambda: 0})]))
        assert len(answers_to(gate, ask([{}] * 2))) == 2


@pytest.mark.usefixtures("quick_workers")
def test_an_operation_of_a_notebook_runs_in_workers() -> None:
    """A function that no module has, with what it closes over."""
    scale = 2.0

    def own(payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({"vector": work(payload, client, rng).payload["vector"] * scale})

    with fresh("inline", ops={"work": own}) as here, fresh(ops={"work": own}) as there:
        wanted = ask([{}] * 3)
        assert same(vectors(answers_to(here, wanted)), vectors(answers_to(there, wanted)))


@pytest.mark.usefixtures("quick_workers")
def test_replies_that_move_to_ordinary_memory_stay_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of some sums depends on it."""
    monkeypatch.setattr(worker_pool, "_REGIONS", 0)
    wanted = ask([{"size": size} for size in (1, 16, 1000, 10**6)])
    with fresh() as gate:
        found = vectors(answers_to(gate, wanted))
    assert same(found, expected(wanted))
    assert [vector.data_ptr() % 64 for vector in found] == [0] * 4
