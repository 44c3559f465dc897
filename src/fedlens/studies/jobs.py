"""Carries out the due runs until none is left: in worker processes, several at once, or one by one in this process."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

from fedlens.base.errors import FedlensError, RunFailed
from fedlens.base.interrupts import postponed
from fedlens.base.memory import free_memory
from fedlens.base.threads import usable_cores
from fedlens.engines.devices import free_memory_of, next_gpu, resolved
from fedlens.engines.hardware import hardware
from fedlens.engines.traits import traits_of
from fedlens.engines.worker_pool import Worker, WorkerPool
from fedlens.results.rows import Row, failed_row, write_info
from fedlens.run.session import Session
from fedlens.studies.carry_out import RunOptions, carry_out, line_of_failure
from fedlens.studies.planned import DueRun, PlannedRun, pretraining_problem
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import StudyStore, working
from fedlens.studies.study_plan import StudyPlan

TRIES = 2  # of a run whose worker is killed
TICK = 1.0  # seconds between two looks at the clock, or at a cluster
SAVING = 120.0  # seconds that interrupted runs have to save their last round; after it they are killed
_SHARE = 0.8  # of the free memory, or of that of a GPU, that runs may take together
_PER_GPU = 2  # runs of one GPU: one computes while the other prepares its batches


Ended = Callable[[PlannedRun, Row], None]


class Jobs(Protocol):
    """Carries out due runs; one object serves a whole study."""

    def carry_out(self, due: Sequence[DueRun], ended: Ended) -> None:
        """Carries out the runs, and calls `ended` with the line of each. A run that fails is a line with the reason.

        Raises `StudyStopped` if the study cannot continue, and passes `KeyboardInterrupt` after all runs are saved.
        """
        ...

    def close(self) -> None:
        """Ends all processes that it started."""
        ...


def default_jobs(cores: int, memory: int, runs: int, on_gpus: int | None = None) -> int:
    """Returns the number of parallel runs that cores, memory and the number of runs allow, at least 1.

    Args:
        cores: that one run keeps busy.
        memory: bytes that one run takes.
        runs: number of due runs.
        on_gpus: how many runs the GPUs hold; None if no run trains on one.
    """
    at_once = usable_cores() // max(1, cores)
    room = int(_SHARE * free_memory() / memory) if memory > 0 else at_once
    return max(1, min(at_once, room, runs, runs if on_gpus is None else on_gpus))


def threads_of(run: PlannedRun) -> int:
    """The threads of one computation of a run."""
    return int(run.engine.get("threads", 1))


def cores_of(run: PlannedRun) -> int:
    """The cores that a run keeps busy: its threads, or all of its workers'.

    >>> run = PlannedRun("fedavg", {}, {}, "final", 0, {"engine": {"name": "processes", "workers": 3}}, "fedavg-seed0")
    >>> cores_of(run)
    3
    """
    if not traits_of(run.engine).has_workers:
        return threads_of(run)
    workers = run.engine.get("workers")
    return threads_of(run) * (workers if isinstance(workers, int) else usable_cores())


@dataclass(frozen=True)
class GpuMemory:
    """What a run takes of a GPU.

    Attributes:
        training: bytes of its process and of local training.
        data: bytes of its data, which lie on the GPU if they fit into half of the free memory.
    """

    training: int
    data: int

    def needed(self, free: int) -> int:
        """Bytes of a GPU with so many free bytes.

        >>> GpuMemory(training=10, data=40).needed(100), GpuMemory(training=10, data=40).needed(70)
        (50, 10)
        """
        return self.training + (self.data if 2 * self.data <= free else 0)


def device_of(run: PlannedRun) -> str:
    """The device of a run on this machine: 'cpu', 'cuda' for any GPU, or a certain one such as 'cuda:1'."""
    if traits_of(run.engine).place == "cluster":
        return "cpu"  # of this process: the cluster places the workers of the run
    return resolved(str(run.engine.get("device", "auto")), spread=True)


def runs_on_gpus(runs: Iterable[tuple[PlannedRun, GpuMemory | None]]) -> int | None:
    """How many of these runs the free memory of the GPUs holds at once, at least 1; None if none trains on a GPU.

    At most two runs share a GPU. A run whose clients train together fills one, and a run with workers uses all.

    Raises `RunFailed` if the free memory cannot be read.
    """
    kinds = {(device_of(run), traits_of(run.engine), memory) for run, memory in runs if memory}
    free = {device: free_memory_of(device) for device, _, _ in kinds}
    rooms = []
    for device, traits, memory in kinds:
        most = 0 if traits.place != "process" else 1 if traits.groups else _PER_GPU
        held = [min(most, int(_SHARE * bytes / memory.needed(bytes))) for bytes in free[device]]
        rooms.append(max(1, sum(held)))
    return min(rooms, default=None)


def gpus_to_share(runs: Iterable[PlannedRun], jobs: int) -> list[int]:
    """The free bytes of each GPU if so many parallel runs are distributed over several of them; else empty.

    Raises `RunFailed` if the free memory cannot be read.
    """
    several = jobs > 1 and len(hardware().gpus) > 1
    return free_memory_of("cuda") if several and any(device_of(run) == "cuda" for run in runs) else []


class InProcess:
    """Carries out runs in this process, one after the other: for debugging, and where no process may be started."""

    def __init__(
        self, options: RunOptions, progress: StudyProgress | None = None, session: Session | None = None
    ) -> None:
        self._options, self._progress = options, progress or StudyProgress()
        self._session = session or Session()

    def carry_out(self, due: Sequence[DueRun], ended: Ended) -> None:
        """See `Jobs.carry_out`."""
        with working(self._options.study):
            for one in due:
                self._progress.run_started(one.run)
                ended(one.run, carry_out(one, self._options, self._session, self._progress))

    def close(self) -> None:
        """Does nothing: this object starts no process."""


@dataclass(eq=False)
class _Job:
    """A worker process and its run; None while it has none.

    Attributes:
        gpu: the only one that the process sees; None if it sees all.
    """

    worker: Worker
    gpu: int | None = None
    due: DueRun | None = None


class WorkerJobs:
    """Carries out runs in worker processes, which end with this process, however it ends.

    Args:
        options: of all runs.
        jobs: the number of workers.
        threads: of a run; the libraries of a worker are limited to it before they are imported.
        progress: the listener.
        free: the free bytes of each GPU that runs are distributed over; empty if they choose themselves.
    """

    def __init__(
        self,
        options: RunOptions,
        jobs: int,
        threads: int,
        progress: StudyProgress | None = None,
        free: Sequence[int] = (),
    ) -> None:
        self._options, self._wanted, self._free = options, jobs, free
        self._threads, self._progress = threads, progress or StudyProgress()
        self._pool = WorkerPool(threads)
        self._pool.start()  # imports torch in the background
        self._jobs: list[_Job] = []

    def carry_out(self, due: Sequence[DueRun], ended: Ended) -> None:
        """See `Jobs.carry_out`. A run whose worker is killed is resumed once."""
        queue, deaths = deque(due), Counter[str]()
        try:
            while queue or self._busy:
                self._assign(queue)
                for job in self._answered(TICK):
                    with postponed():
                        self._take(job, queue, deaths, ended)
        except (KeyboardInterrupt, FedlensError):
            self._interrupt(ended)
            raise

    def _take(self, job: _Job, queue: deque[DueRun], deaths: Counter[str], ended: Ended) -> None:
        """Handles one message of a worker."""
        due, answer = job.due, self._answer(job)
        assert due is not None
        if answer is not None and answer[0] == "round":
            self._progress.round_done(due.run, *answer[1:])
            return
        if answer is not None:
            job.due = None
            if answer[0] == "line":
                ended(due.run, answer[1])
                return
            raise answer[1] if answer[0] == "stopped" else KeyboardInterrupt
        deaths[due.run.digest] += 1
        ending = self._pool.ending(job.worker.pid)
        self._remove(job)
        if deaths[due.run.digest] < TRIES:
            self._progress.note(f"the worker of {due.run.key} {ending}; the run is resumed once")
            queue.appendleft(due)
            return
        reason = f"its worker {ending}, {TRIES} times"
        ended(due.run, line_of_failure(due.run, self._options.runs / due.run.directory, reason))

    @property
    def _busy(self) -> list[_Job]:
        return [job for job in self._jobs if job.due is not None]

    def _assign(self, queue: deque[DueRun]) -> None:
        """Assigns runs to idle workers."""
        while queue and len(self._busy) < self._wanted:
            job = self._idle(self._gpu(queue[0].run))
            job.due = queue.popleft()
            try:
                with postponed():
                    job.worker.connection.send(job.due)
            except OSError:  # it has ended meanwhile: the run did not start
                queue.appendleft(job.due)
                self._remove(job)
                continue
            self._progress.run_started(job.due.run)

    def _gpu(self, run: PlannedRun) -> int | None:
        """The GPU that the worker of a run sees alone, the one with the most free memory; None if it sees all."""
        if not self._free or device_of(run) != "cuda":
            return None
        return next_gpu(self._free, [job.gpu for job in self._busy])

    def _idle(self, gpu: int | None) -> _Job:
        """An idle worker that sees this GPU: one that is there, or a new one in place of another."""
        idle = [job for job in self._jobs if job.due is None]
        if alike := [job for job in idle if job.gpu == gpu]:
            return alike[0]
        if len(self._jobs) >= self._wanted:
            self._remove(idle[0])
        return self._start(gpu)

    def _start(self, gpu: int | None) -> _Job:
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        worker = self._pool.worker(device, cores=self._threads, module="fedlens.studies.job_worker")
        worker.connection.send(self._options)
        self._jobs.append(_Job(worker, gpu))
        return self._jobs[-1]

    def _answered(self, seconds: float) -> list[_Job]:
        """The jobs that have sent a message, or whose worker has ended."""
        by_connection = {job.worker.connection: job for job in self._busy}
        ready: list[Any] = wait(list(by_connection), seconds) if by_connection else []
        return [by_connection[connection] for connection in ready]

    def _answer(self, job: _Job) -> tuple[Any, ...] | None:
        """The message of a worker, None if it has ended."""
        try:
            message: tuple[Any, ...] = job.worker.connection.recv()
        except (EOFError, OSError):
            return None
        return message

    def _remove(self, job: _Job) -> None:
        job.due = None
        job.worker.close()
        self._jobs.remove(job)

    def _interrupt(self, ended: Ended) -> None:
        """Makes all runs save their last complete round; runs that finish meanwhile count as finished."""
        until, signalled = time.monotonic() + SAVING, 0.0
        while self._busy and time.monotonic() < until:
            # Again: a worker that has just started ignores the first signal.
            if time.monotonic() - signalled >= TICK:
                signalled = time.monotonic()
                for job in self._busy:
                    with suppress(ProcessLookupError):
                        os.kill(job.worker.pid, signal.SIGINT)
            for job in self._answered(TICK / 10):
                due, answer = job.due, self._answer(job)
                if answer is None:
                    self._remove(job)
                elif answer[0] != "round":
                    job.due = None
                    if answer[0] == "line" and due is not None:
                        with suppress(FedlensError):  # the first error is more useful
                            ended(due.run, answer[1])

    def close(self) -> None:
        """Ends all workers."""
        for job in list(self._jobs):
            self._remove(job)
        self._pool.close()


def sweep(
    plan: StudyPlan,
    store: StudyStore,
    start: Callable[[Sequence[DueRun]], Jobs],
    progress: StudyProgress,
    check: Callable[[Row], None] = lambda line: None,
) -> None:
    """Carries out all runs of a plan that are not finished, and adds their lines to the store.

    All due runs end before the plan is asked again. The order in which they end, and so the number of jobs, changes no
    result.

    Args:
        store: locked by this process.
        start: starts the workers, given the first due runs; called only if a run is due.
        check: raises an error for the line of a run that shows that the study cannot have results.

    Raises `RunDirectoryError` if a run directory was edited, `StudyStopped` if the study cannot continue, and passes
    `KeyboardInterrupt` after all running runs are saved.
    """
    if failed := store.drop_failed():
        progress.note(f"{failed} failed {'run is' if failed == 1 else 'runs are'} tried again")
    info = plan.info(store.lines)
    store.check((), (*info.pretrained, *info.entries))
    for line in store.lines.values():
        check(line)
    jobs: Jobs | None = None
    try:
        while due := plan.due(store.lines):
            store.check(one.run for one in due)
            info = plan.info(store.lines)
            write_info(store.folder, info)
            # The folder can have lines of an earlier plan.
            planned = {entry.digest for entry in (*info.pretrained, *info.entries)}
            done = sum(digest in planned for digest in store.lines)
            progress.runs_due(len(due), done, sum(plan.number_of_runs.values()))
            before = dict(store.lines)

            def ended(run: PlannedRun, line: Row) -> None:
                store.add(line)
                progress.run_ended(run, line)
                check(line)

            ready = []
            for one in due:
                problem = pretraining_problem(one.run, store.lines)
                if problem is None:
                    ready.append(one)
                else:
                    ended(one.run, failed_row(one.run.digest, one.run.directory, problem))
            if ready:
                jobs = jobs or start(ready)
                jobs.carry_out(ready, ended)
            if all(store.lines.get(one.run.digest) == before.get(one.run.digest) for one in due):
                names = ", ".join(one.run.key for one in due[:3])
                raise RunFailed(f"the plan of the study does not advance: {names} were due and are so again")
    finally:
        if jobs is not None:
            jobs.close()
    info = plan.info(store.lines)
    write_info(store.folder, info)
    store.settle(info)
