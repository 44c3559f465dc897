"""The engine `ray` on a real Ray: workers that die, addresses that do not answer, other versions."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlens.api import Experiment
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Client, Failure, Outcome, Payload
from fedlens.core.random import Rng
from tests.unit.engines.engine_kit import OPS, answers_to, ask, expected, same, vectors
from tests.unit.engines.ray_kit import NEEDS_RAY, all_ready, children, fresh, pids

pytestmark = NEEDS_RAY
ROOT = Path(__file__).parents[2]


class Stubborn:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return (int, ("stubborn",))

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({})


class Deadly:
    """Kills the process that unpickles it, until a folder holds `times` files."""

    def __init__(self, graves: Path, times: int) -> None:
        self.graves, self.times = graves, times

    def __reduce__(self) -> Any:
        return _arise, (self.graves, self.times)

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        return OPS["work"](payload, client, rng)


def _arise(graves: Path, times: int) -> Deadly:
    if len(list(graves.iterdir())) < times:
        (graves / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Deadly(graves, times)


@pytest.fixture(scope="module")
def gate() -> Iterator[Driver]:
    """Two small workers; the other engines of this file run on the same Ray."""
    before = children()
    with fresh(cpus=0.2) as open_gate:
        all_ready(open_gate)
        connection = open_gate.engine._cluster  # type: ignore[attr-defined]
        yield open_gate
    while children() - before:  # only the limit of the test bounds it
        time.sleep(0.05)
    assert connection.folder is None or not Path(connection.folder[0]).exists()


# -- workers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "times", "seconds"),
    [pytest.param("at the start", 2, 0.001, marks=pytest.mark.nightly), ("in the middle", 1, 1.0)],
)
def test_a_killed_worker_is_replaced_and_its_work_done_again(
    gate: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str], when: str, times: int, seconds: float
) -> None:
    gate.engine._pool._seconds = seconds  # type: ignore[attr-defined]
    wanted = ask(
        [{"die": when} if k == 3 else {} for k in range(8)], shared={"graves": str(tmp_path), "times": times}
    )
    found = answers_to(gate, wanted)
    assert len(list(tmp_path.iterdir())) == times
    assert same(vectors(found), expected(wanted))
    assert gate.tally.failed == 0
    said_nothing(capfd)


def said_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    said = capfd.readouterr()
    # On a busy machine it takes the next worker so long to start that the run says so, and Ray too.
    slow = re.compile("^no worker is left|have not registered within the timeout")
    assert [line for line in (said.out + said.err).splitlines() if not slow.search(line)] == []


@pytest.mark.nightly  # of local workers and, with the sentence of Ray's, on a fake Ray in ci
def test_a_block_that_kills_its_worker_each_time_fails_and_the_round_goes_on(
    gate: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate.engine._pool._seconds = 1.0  # type: ignore[attr-defined]
    wanted = ask(
        [{"die": "in the middle"} if k == 2 else {} for k in range(5)],
        shared={"graves": str(tmp_path), "times": 99},
    )
    found = answers_to(gate, wanted)
    assert isinstance(found[2], Failure)
    assert found[2].reason == "its worker ended 3 times: it exited, crashed, or ran out of memory"
    assert len(list(tmp_path.iterdir())) == 3
    rest = [0, 1, 3, 4]
    assert same(vectors([found[k] for k in rest]), [expected(wanted)[k] for k in rest])
    said_nothing(capfd)


def test_a_worker_that_hangs_is_replaced_and_its_work_done_again(gate: Driver, tmp_path: Path) -> None:
    engine: Any = gate.engine
    wanted = ask([{"hang": True} if k == 2 else {} for k in range(6)], shared={"graves": str(tmp_path)})
    before, before_failed, engine._pool.timeout = set(pids(gate)), gate.tally.failed, 2.0
    try:
        found = answers_to(gate, wanted)
    finally:
        engine._pool.timeout = 3600.0
    assert same(vectors(found), expected(wanted))
    assert gate.tally.failed == before_failed
    assert before - set(pids(gate))


@pytest.mark.nightly
def test_all_workers_killed_at_once(gate: Driver) -> None:
    gate.engine._pool._seconds = 1.0  # type: ignore[attr-defined]
    victims = pids(gate)
    timer = threading.Timer(0.2, lambda: [os.kill(pid, signal.SIGKILL) for pid in victims])
    wanted = ask([{"seconds": 0.15}] * 8)
    timer.start()
    assert same(vectors(answers_to(gate, wanted)), expected(wanted))
    timer.join()


@pytest.mark.nightly  # on a fake Ray in test_ray_workers
def test_a_worker_killed_as_it_starts_is_replaced(gate: Driver, tmp_path: Path) -> None:
    with fresh(ops={"work": Deadly(tmp_path, 1)}, workers=1, cpus=0.2) as there:
        assert same(vectors(answers_to(there, ask([{}] * 2))), expected(ask([{}] * 2)))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.nightly  # on a fake Ray in test_ray_workers
def test_workers_that_never_start_are_one_sentence(gate: Driver, tmp_path: Path) -> None:
    with (
        pytest.raises(RunFailed, match=r"^a worker on the local Ray died 3 times at start-up"),
        fresh(ops={"work": Deadly(tmp_path, 9)}, workers=1, cpus=0.2),
    ):
        pass


@pytest.mark.nightly  # another error on a fake Ray in test_ray_workers
def test_a_worker_that_cannot_read_the_program_says_why(
    gate: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed) as caught, fresh(ops={"work": Stubborn()}, workers=1, cpus=0.2):
        pass
    assert "a worker of Ray failed: ValueError: invalid literal for int()" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "_Unpickler" in capfd.readouterr().err  # where it was


@pytest.mark.nightly  # on a fake Ray in test_ray_workers
def test_other_versions_at_the_workers(gate: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver claims another version than the one that the worker finds."""
    import fedlens

    there = fedlens.__version__
    monkeypatch.setattr(fedlens, "__version__", "99.0")
    with pytest.raises(ConfigError) as caught, fresh(workers=1, cpus=0.2):
        pass
    assert f"a worker on the local Ray has fedlens {there}, but this process has fedlens 99.0" in str(
        caught.value
    )
    assert "torch" not in str(caught.value)


def test_no_room_for_a_worker(gate: Driver) -> None:
    with (
        pytest.raises(ConfigError, match=r"a worker takes 0.5 CPU and 0.5 GPU, but .* of 0 GPU are free"),
        fresh(workers=1, cpus=0.5, gpus=0.5, connect_timeout=0.5),
    ):
        pass


def test_another_cluster_than_the_one_that_this_process_is_on(gate: Driver) -> None:
    with (
        pytest.raises(ConfigError, match=r"already connected to Ray at .*, not to 127.0.0.1:1 "),
        fresh(address="127.0.0.1:1"),
    ):
        pass


# -- clusters -----------------------------------------------------------------------------------------------------

JOIN = """
import sys
from fedlens.base.errors import FedlensError
from fedlens.engines.ray import ray
for address in sys.argv[1:]:
    engine = ray(address=address, connect_timeout=1.0)
    try:
        engine.warm()
    except FedlensError as error:
        print(error)
    finally:
        engine.close()
"""


def test_an_address_that_does_not_answer() -> None:
    """In a process that has joined no cluster."""
    with socket.socket() as mute, socket.socket() as closed:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        closed.bind(("127.0.0.1", 0))
        where = [f"127.0.0.1:{peer.getsockname()[1]}" for peer in (mute, closed)]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", JOIN, *where],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.stderr == ""
    for sentence, address, why in zip(
        done.stdout.splitlines(), where, ["no answer within 1 seconds", "Connection refused"], strict=True
    ):
        assert sentence.startswith(f"no Ray cluster answers at {address}: ")
        assert why in sentence


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        Experiment.load("digits", ["engine.name=ray"]).run(tmp_path / "run")
    assert "pip install 'fedlens[ray]'" in str(caught.value)
    assert not (tmp_path / "run").exists()
