"""Parallel runs of a study on GPUs: how many the free memory holds, and the GPU of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.engines import devices
from fedlens.engines.hardware import Hardware
from fedlens.studies import jobs
from fedlens.studies.carry_out import RunOptions
from fedlens.studies.jobs import GpuMemory, device_of, gpus_to_share, runs_on_gpus
from fedlens.studies.planned import DueRun, PlannedRun
from tests.unit.studies.study_kit import planned

GB = 10**9
SMALL = GpuMemory(training=1 * GB, data=3 * GB)


def run(name: str = "inline", seed: int = 0, **engine: Any) -> PlannedRun:
    return planned(seed, engine={"name": name, **engine})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*free: int) -> None:
        here = Hardware(tuple(f"GPU {k}" for k in range(len(free))))
        for module in (devices, jobs):
            monkeypatch.setattr(module, "hardware", lambda: here)
        monkeypatch.setattr(
            jobs,
            "free_memory_of",
            lambda device: list(free) if device == "cuda" else [free[int(device[-1])]],
        )

    return put


def test_a_run_is_on_the_gpus_unless_it_names_another_device(gpus: Callable[..., None]) -> None:
    gpus(GB, GB)
    named = [
        run(),
        run(device="auto"),
        run(device="cuda"),
        run(device="cuda:1"),
        run(device="cpu"),
        run("ray"),
    ]
    assert [device_of(each) for each in named] == ["cuda", "cuda", "cuda", "cuda:1", "cpu", "cpu"]
    gpus()
    assert device_of(run()) == "cpu"


def test_as_many_runs_as_the_free_memory_of_the_gpus_holds(gpus: Callable[..., None]) -> None:
    gpus(10 * GB, 70 * GB)
    assert runs_on_gpus([(run(), SMALL), (run(seed=1), SMALL)]) == 4
    assert runs_on_gpus([(run(), GpuMemory(5 * GB, 0))]) == 3  # one on the first, two on the second
    assert runs_on_gpus([(run(), GpuMemory(20 * GB, 0))]) == 2
    assert runs_on_gpus([(run(), GpuMemory(500 * GB, 0))]) == 1
    assert runs_on_gpus([(run(device="cuda:0"), GpuMemory(5 * GB, 0))]) == 1
    assert runs_on_gpus([(run(), SMALL), (run("vectorized"), SMALL)]) == 2
    assert runs_on_gpus([(run("processes"), SMALL)]) == 1
    assert runs_on_gpus([(run(device="cpu"), None)]) is None


def test_images_count_where_they_lie_on_the_gpu() -> None:
    assert SMALL.needed(6 * GB) == 4 * GB
    assert SMALL.needed(5 * GB) == 1 * GB


def test_runs_are_distributed_where_several_of_them_can_choose_among_gpus(gpus: Callable[..., None]) -> None:
    gpus(GB, 2 * GB)
    assert gpus_to_share([run()], 2) == [GB, 2 * GB]
    assert gpus_to_share([run()], 1) == []
    assert gpus_to_share([run(device="cpu")], 2) == []
    gpus(GB)
    assert gpus_to_share([run()], 2) == []


@dataclass
class FakePool:
    """Starts nothing, and keeps the devices that workers were asked for."""

    threads: int
    asked: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def start(self) -> None: ...

    def worker(self, device: str, **_: Any) -> Any:
        self.asked.append(device)
        connection = SimpleNamespace(send=lambda message: None)
        return SimpleNamespace(connection=connection, close=lambda: self.closed.append(device))


def test_each_worker_sees_the_gpu_with_the_most_free_memory(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    gpus(30 * GB, 90 * GB)
    monkeypatch.setattr(jobs, "WorkerPool", FakePool)
    made = jobs.WorkerJobs(RunOptions(tmp_path), 3, 1, free=[30 * GB, 90 * GB])
    pool: Any = made._pool
    made._assign(deque(DueRun(run(seed=seed)) for seed in range(3)))
    assert pool.asked == ["cuda:1", "cuda:1", "cuda:0"]
    made._jobs[1].due = None  # it has ended: the next run takes its place, in the same process
    made._assign(deque([DueRun(run(seed=4))]))
    assert pool.asked == ["cuda:1", "cuda:1", "cuda:0"]
    made._jobs[0].due = None  # a run with a device of its own needs a process that sees all GPUs
    made._assign(deque([DueRun(run(device="cuda:0"))]))
    assert (pool.asked[3:], pool.closed) == (["cpu"], ["cuda:1"])
    assert len(made._jobs) == 3
