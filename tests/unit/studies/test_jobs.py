"""Worker processes of a study: the same lines as in this process, and what happens when one is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedlens.results.rows import Row
from fedlens.studies import jobs as module
from fedlens.studies.carry_out import RunOptions
from fedlens.studies.jobs import WorkerJobs, cores_of, default_jobs
from fedlens.studies.planned import DueRun, PlannedRun
from tests.unit.studies.study_kit import FAILING, FixedPlan, Heard, carried_out, planned, without_clock

RUNS = [planned(seed, lr) for lr in (0.1, 0.2) for seed in (0, 1)]


def starting(folder: Path, jobs: int, heard: Any = None) -> Callable[[Sequence[DueRun]], WorkerJobs]:
    return lambda due: WorkerJobs(RunOptions(folder / "runs"), jobs, 1, heard)


@pytest.mark.usefixtures("quick_jobs")
def test_any_number_of_jobs_gives_the_same_file_in_the_same_order(tmp_path: Path) -> None:
    plan = FixedPlan([*RUNS, FAILING], rung=2)
    alone, several = tmp_path / "alone", tmp_path / "several"
    carried_out(alone, plan)
    carried_out(several, plan, starting(several, 3))
    assert without_clock(several) == without_clock(alone)
    assert [line["run"] for line in without_clock(alone)] == [run.directory for run in plan.runs]
    assert [line["status"] for line in without_clock(alone)] == [*["finished"] * 4, "failed"]
    assert [line["rounds"] for line in without_clock(alone)] == [4, 4, 4, 4, 0]
    assert "nowhere.safetensors" in without_clock(alone)[-1]["reason"]


class Killing(Heard):
    """Kills the worker of a run after its first round, so many times."""

    def __init__(self, key: str, times: int) -> None:
        super().__init__()
        self.key, self.times, self.jobs = key, times, None

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        super().round_done(run, round, rounds)
        if run.key == self.key and self.times:
            assert self.jobs is not None
            self.times -= 1
            worker = next(j.worker for j in self.jobs._jobs if j.due and j.due.run is run)
            os.kill(worker.pid, signal.SIGKILL)


def killed(folder: Path, times: int) -> tuple[dict[str, Row], Killing]:
    long = planned(5, rounds=40)
    heard = Killing(long.key, times)

    def start(due: Sequence[DueRun]) -> WorkerJobs:
        heard.jobs = starting(folder, 2, heard)(due)
        return heard.jobs

    store = carried_out(folder, FixedPlan([long, RUNS[0]]), start, heard)
    return {line.run.rpartition("-")[0]: line for line in store.lines.values()}, heard


@pytest.mark.usefixtures("quick_jobs")
def test_a_run_whose_worker_is_killed_once_is_resumed_and_finishes(tmp_path: Path) -> None:
    lines, heard = killed(tmp_path, times=1)
    assert {line.status for line in lines.values()} == {"finished"}
    assert heard.notes == [
        "the worker of fedavg-lr0.1-seed5 was killed by SIGKILL (out of memory?); the run is resumed once"
    ]
    assert lines["fedavg-lr0.1-seed5"].rounds == 40


@pytest.mark.usefixtures("quick_jobs")
def test_a_run_whose_worker_is_killed_twice_fails_with_the_reason_and_others_go_on(tmp_path: Path) -> None:
    lines, _ = killed(tmp_path, times=2)
    bad = lines["fedavg-lr0.1-seed5"]
    assert (bad.status, bad.reason) == (
        "failed",
        "its worker was killed by SIGKILL (out of memory?), 2 times",
    )
    assert lines["fedavg-lr0.1-seed0"].status == "finished"


@pytest.mark.usefixtures("quick_jobs")
def test_ctrl_c_saves_all_running_runs_and_the_same_call_continues(tmp_path: Path) -> None:
    plan = FixedPlan([planned(seed, rounds=40) for seed in (0, 1)])

    class Interrupting(Heard):
        sent = False

        def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
            super().round_done(run, round, rounds)
            if not self.sent and len({key for key, *_ in self.rounds}) == 2:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

    heard = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        carried_out(tmp_path, plan, starting(tmp_path, 2, heard), heard)
    folders = [tmp_path / "runs" / run.directory for run in plan.runs]
    assert all('"interrupted"' in (folder / "summary.json").read_text() for folder in folders)
    carried_out(tmp_path, plan)
    straight = tmp_path / "straight"
    carried_out(straight, plan)
    assert without_clock(tmp_path) == without_clock(straight)


@pytest.mark.nightly
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.faults.run_kit import environment

    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.unit.studies.study_kit import *\nfrom fedlens.studies.jobs import WorkerJobs\n"
        "folder = Path(sys.argv[1])\n"
        "class Say(Heard):\n"
        "    def round_done(self, run, round, rounds):\n"
        "        print(*[job.worker.pid for job in jobs._jobs], flush=True)\n"
        "def start(due):\n"
        "    global jobs\n"
        "    jobs = WorkerJobs(RunOptions(folder / 'runs'), 2, 1, Say())\n"
        "    return jobs\n"
        "carried_out(folder, FixedPlan([planned(s, rounds=100000) for s in (0, 1)]), start)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids: set[int] = set()
        while len(pids) < 2:
            pids |= set(map(int, process.stdout.readline().split()))
        process.kill()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_as_many_jobs_as_cores_memory_and_runs_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module, "free_memory", lambda: 10 * 2**30)
    assert default_jobs(1, 2**28, 100) == 8
    assert default_jobs(3, 2**28, 100) == 2
    assert default_jobs(1, 2**31, 100) == 4
    assert default_jobs(1, 2**40, 100) == 1
    assert default_jobs(1, 2**28, 3) == 3
    assert cores_of(planned(0, engine={"name": "processes", "threads": 2})) == 16
