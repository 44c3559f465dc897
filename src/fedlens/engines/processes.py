"""The engine of persistent local workers; data, weights and replies lie in memory that they share."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.core.errors import ConfigError, RunFailed
from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, Id, Op, Program, Reply
from fedlens.core.schema import nbytes
from fedlens.core.states import STATE_MEMORY, Version
from fedlens.engines.answering import Item, copied
from fedlens.engines.computing import ON_CPU, ChannelsLast, Computing, Device, PrecisionSetting
from fedlens.engines.grouping import Group, check_groups
from fedlens.engines.inline import StateMemory, Threads
from fedlens.engines.memory import keep_freed_memory
from fedlens.engines.placing import default_workers, devices_of
from fedlens.engines.schedule import block_size, primed
from fedlens.engines.shared import Packer, Pool, Region
from fedlens.engines.workers import Nursery, Worker

Workers = Annotated[
    int, Field(ge=0, le=1024, description="local worker processes; 0 takes one a core, or two a GPU")
]
Timeout = Annotated[
    float,
    Field(
        gt=0, description="seconds after which a worker that has not answered is taken for hung, and replaced"
    ),
]
Window = Annotated[
    int, Field(ge=1, description="MiB of finished replies that wait for an earlier one, at most")
]

_DEATHS = 3  # a task that has ended this many workers fails instead of being tried again
_KILLED = f"its worker process was killed {_DEATHS} times (out of memory?)"
_LATE = "the deadline passed"
_SHORT = 0.02  # seconds: below it a worker gets its next task before it has finished, so that it never waits


def processes(
    *,
    workers: Workers = 0,
    threads: Threads = 1,
    group: Group = 1,
    device: Device = "cpu",
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = False,
    window: Window = 512,
    timeout: Timeout = 3600.0,
    state_memory: StateMemory = STATE_MEMORY,
) -> Processes:
    """Persistent local workers, one thread each by default; bit-identical to `inline` with the same threads.

    On GPUs, two workers share each unless `workers` says otherwise, those with the most free memory first.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "the engine 'processes' needs Linux or macOS", where="engine.name", hint="use engine.name=inline"
        )
    computing = Computing(device, precision, channels_last)
    return Processes(workers, threads, window, state_memory, group, computing, timeout)


@dataclass(eq=False)
class _Job:
    """One ask on its way: cut into blocks of slots, each done once."""

    number: int
    ask: Ask
    round: int
    exchange: int
    due: float | None
    blocks: list[range]
    envelope: bytes = b""
    region: Region | None = None
    states: list[Version] = field(default_factory=list)  # of each slot's client, as it was when it was asked
    waiting: deque[int] = field(default_factory=deque)
    running: int = 0
    done: dict[int, list[Answer]] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # blocks handed to the gate, or given up
    closed: bool = False

    def failures(self, block: int, reason: str) -> list[Answer]:
        slots = self.blocks[block]
        return [Failure(Id(self.round, self.exchange, s), self.ask.requests[s].client, reason) for s in slots]


@dataclass
class _Task:
    job: _Job
    block: int
    region: Region | None
    sent: float


class Processes:
    """See `processes`.

    Workers take blocks of requests one at a time, so a slow client does not idle the others. Finished replies that
    must wait for an earlier slot stay in shared memory, within `window`; when it is full, no new block is begun.
    What was asked ahead, and nobody waits for yet, is done by workers that have nothing else to do.
    """

    ahead = True  # asks may be sent before their answers are looked for

    def __init__(
        self,
        workers: int,
        threads: int,
        window: int,
        state_memory: int = STATE_MEMORY,
        group: int = 1,
        computing: Computing = ON_CPU,
        timeout: float = math.inf,
    ) -> None:
        self.count = workers or default_workers(computing, threads)
        self.state_memory, self.group, self.computing, self.timeout = state_memory, group, computing, timeout
        self._window = window * 2**20
        self._nursery = Nursery(threads)
        self._workers: list[Worker] = []
        self._tasks: dict[int, _Task] = {}
        self._arrivals: deque[_Job] = deque()  # arrival-order jobs with work left
        self._begun: list[
            _Job
        ] = []  # what was asked and nobody waits for yet: done where a worker would idle
        self._numbers = itertools.count(1)
        self._deaths: dict[tuple[int, int], int] = {}
        self._pool = Pool()
        self._threads_before: int | None = None
        self._seconds = 1.0  # a task's time, smoothed: tasks are taken for long until shown otherwise
        self._task_bytes = 0  # of a task's replies, at most so far

    def warm(self) -> None:
        """Begins to start up in the background, before the program is known."""
        self._nursery.start()

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` where there is no such device, or clients cannot be computed in groups as asked."""
        self.computing.check()
        check_groups(ops, self.group, self.computing, "processes")

    def open(self, program: Program, states: ClientStates) -> None:
        """Puts the program into shared memory and starts the workers. Raises `ConfigError` as `check` does."""
        self.check(program.ops)
        self._states, program = states, self.computing.applied(program)
        self._joint = {name for name, op in program.ops.items() if self.group > 1 and hasattr(op, "together")}
        packer = _packed(program, "the algorithm's operations or its data", code=True)
        self._program = Region(max(packer.size, 4096))
        packer.write(self._program.view(), fresh=True)
        self._envelope = packer.envelope
        # What the server computes has the threads that the engine says, as with `inline`, so that it gets the same
        # bits; and with the usual one thread it does not spin where the workers compute.
        keep_freed_memory()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._nursery.threads)
        self._workers = [self._new_worker(device) for device in devices_of(self.computing.device, self.count)]

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask by the workers."""
        job = self._publish(ask, round, exchange)
        if ask.order == "arrival":
            if job.blocks:
                self._arrivals.append(job)
            else:
                self._retire(job)  # it asks for nothing new, only for what is still out
            return self._as_they_come()
        self._begun.append(job)
        return primed(self._in_order(job))

    def close(self) -> None:
        """Ends the workers and gives back the memory."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._nursery.close()
        self._pool.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if hasattr(self, "_program"):
            self._program.close()
        left = [*self._arrivals, *self._begun, *(task.job for task in self._tasks.values())]
        jobs = {job.number: job for job in left}
        for region in [
            *(task.region for task in self._tasks.values()),
            *(job.region for job in jobs.values()),
        ]:
            if region is not None:
                region.close()
        for job in jobs.values():
            self._let_go(job)
        self._tasks.clear()
        self._arrivals.clear()
        self._begun.clear()

    # -- what is asked ------------------------------------------------------------------------------------------

    def _publish(self, ask: Ask, round: int, exchange: int) -> _Job:
        size = block_size(ask, self.group if ask.op in self._joint else 1)
        slots = len(ask.requests)
        blocks = [range(first, min(first + size, slots)) for first in range(0, slots, size)]
        due = None if ask.deadline is None else time.monotonic() + ask.deadline
        job = _Job(next(self._numbers), ask, round, exchange, due, blocks, waiting=deque(range(len(blocks))))
        packer = _packed((ask.shared, ask.expect, ask.reduce), f"what the ask '{ask.op}' shares")
        job.envelope, job.region = packer.envelope, self._lay(packer)
        job.states = [self._states.hold(request.client) for request in ask.requests]
        return job

    def _lay(self, packer: Packer) -> Region | None:
        if packer.size == 0:
            return None
        region = self._pool.take(packer.size)
        packer.write(region.view())
        return region

    # -- answering ----------------------------------------------------------------------------------------------

    def _in_order(self, job: _Job) -> Generator[Any, None, None]:
        try:
            yield None  # taken by `primed`
            self._begun.remove(job)
            for block in range(len(job.blocks)):
                while block not in job.done:
                    if job.due is not None and time.monotonic() > job.due:
                        job.waiting.clear()
                        job.done[block] = job.failures(block, _LATE)
                        break
                    self._dispatch(job)
                    self._pump(job.due)
                answers = job.done.pop(block)
                job.answered.add(block)
                self._dispatch(job)
                while answers:
                    yield answers.pop(0)
        finally:
            self._retire(job)

    def _as_they_come(self) -> Generator[Answer, None, None]:
        while self._arrivals:
            for job in list(self._arrivals):
                if job.due is not None and time.monotonic() > job.due:
                    job.waiting.clear()
                    for block in sorted(set(range(len(job.blocks))) - job.answered - job.done.keys()):
                        job.done[block] = job.failures(block, _LATE)
                for block in list(job.done):
                    answers = job.done.pop(block)
                    job.answered.add(block)
                    if len(job.answered) == len(job.blocks):
                        self._arrivals.remove(job)
                        self._retire(job)
                    self._dispatch(None)
                    while answers:
                        yield answers.pop(0)
            if self._arrivals and not any(job.done for job in self._arrivals):
                self._dispatch(None)
                self._pump(min((job.due for job in self._arrivals if job.due is not None), default=None))

    def _retire(self, job: _Job) -> None:
        """Drops what is left of a job; its memory is free once no worker looks at it any more."""
        job.closed = True
        if job in self._begun:
            self._begun.remove(job)
        job.waiting.clear()
        job.done.clear()
        self._release(job)

    def _release(self, job: _Job) -> None:
        if job.closed and job.running == 0:
            for worker in self._workers:
                if job.number in worker.knows_asks:
                    worker.forget.append(job.number)
            self._let_go(job)
            if job.region is not None:
                self._pool.give(job.region)
                job.region = None

    def _let_go(self, job: _Job) -> None:
        while job.states:
            self._states.release(job.states.pop())

    # -- the workers --------------------------------------------------------------------------------------------

    def _dispatch(self, current: _Job | None) -> None:
        """Gives work to every worker that has room for it: the current ask's first, then what arrives when it does."""
        depth = 2 if self._seconds < _SHORT else 1
        while True:
            # Looked for anew each time: one that turns out to be dead is replaced while it is sent to.
            worker = min(self._workers, key=lambda w: len(w.tasks))
            if len(worker.tasks) >= depth:
                return
            job = self._next_job(current)
            if job is None:
                return
            self._send(worker, job, job.waiting.popleft())

    def _next_job(self, current: _Job | None) -> _Job | None:
        room = max(len(self._workers) + 1, self._window // max(self._task_bytes, 1))
        if current is not None and current.waiting:
            held = current.running + len(current.done)
            # With nothing on its way the window would stay full: the slot that all wait for was lost with its worker.
            return current if held < room or current.running == 0 else None
        held = sum(job.running + len(job.done) for job in self._arrivals)
        if held < room and (found := next((job for job in self._arrivals if job.waiting), None)) is not None:
            return found
        held = sum(job.running + len(job.done) for job in self._begun)
        return next((job for job in self._begun if job.waiting), None) if held < room else None

    def _send(self, worker: Worker, job: _Job, block: int) -> None:
        items = [
            Item(
                Id(job.round, job.exchange, s),
                request.client,
                request.payload,
                self._states.read(job.states[s]),
            )
            for s, request in ((s, job.ask.requests[s]) for s in job.blocks[block])
        ]
        packer = _packed(items, f"a request of the ask '{job.ask.op}', or a client's state")
        task = _Task(job, block, self._lay(packer), time.monotonic())
        number = next(self._numbers)
        self._tasks[number] = task
        job.running += 1
        try:
            if job.number not in worker.knows_asks:
                worker.send("ask", job.number, job.ask.op, job.envelope, worker.show(job.region))
                worker.knows_asks.add(job.number)
            # The last time they are computed one by one, in case that it was memory.
            alone = self._deaths.get((job.number, block), 0) == _DEATHS - 1
            worker.task(number, job.number, packer.envelope, task.region, alone)
        except OSError:
            if number not in worker.tasks:
                worker.tasks.append(number)
            self._replace(worker)

    def _pump(self, due: float | None) -> None:
        """Waits until at least one worker has something to say, and takes what it says."""
        hung = min(
            (worker.since + self.timeout for worker in self._workers if worker.tasks), default=math.inf
        )
        until = min(hung, math.inf if due is None else due)
        timeout = None if math.isinf(until) else max(0.0, until - time.monotonic())
        by_connection: dict[Any, Worker] = {worker.connection: worker for worker in self._workers}
        said = connection.wait(list(by_connection), timeout)
        if not said and time.monotonic() >= hung:
            self._end_the_hung()
        for ready in said:
            worker = by_connection[ready]
            try:
                number, answers = worker.receive()
            except (EOFError, OSError):
                self._replace(worker)
            else:
                self._finish(number, answers)

    def _end_the_hung(self) -> None:
        """Kills the workers that have sat at one task for too long, and replaces them."""
        late = time.monotonic() - self.timeout
        for worker in list(self._workers):
            if worker.tasks and worker.since <= late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                self._replace(worker, f"no answer came within {self.timeout:g} s, {_DEATHS} times")

    def _finish(self, number: int, answers: Sequence[Answer]) -> None:
        task = self._end(number)
        elapsed = time.monotonic() - task.sent
        self._seconds += 0.2 * (elapsed - self._seconds)
        sizes = [0]
        for answer in answers:
            if isinstance(answer, Reply):
                sizes.append(answer.nbytes + nbytes(answer.state))
                if answer.state is not None:
                    # A state outlives the round: a copy of its own lets the worker have its memory back.
                    answer.state = copied(answer.state)
        # What is folded has one reply's size, however many it is made of.
        self._task_bytes = max(self._task_bytes, max(sizes) if task.job.ask.reduce else sum(sizes))
        if not task.job.closed and task.block not in task.job.answered:
            task.job.done[task.block] = list(answers)

    def _end(self, number: int) -> _Task:
        task = self._tasks.pop(number)
        task.job.running -= 1
        if task.region is not None:
            self._pool.give(task.region)
        self._release(task.job)
        return task

    def _replace(self, dead: Worker, reason: str = _KILLED) -> None:
        """A worker is gone: its unfinished tasks go back to the front, and a new worker takes its place."""
        dead.close()
        self._workers.remove(dead)
        for number in reversed(dead.tasks):
            task = self._end(number)
            job, key = task.job, (task.job.number, task.block)
            if job.closed or task.block in job.answered:
                continue
            # Only the first of its tasks was being worked on; the others merely waited.
            if number == dead.tasks[0]:
                self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths.get(key, 0) >= _DEATHS:
                job.done[task.block] = job.failures(task.block, reason)
            else:
                job.waiting.appendleft(task.block)
        self._workers.append(self._new_worker(dead.device))

    def _new_worker(self, device: str) -> Worker:
        for _ in range(_DEATHS):
            worker = self._nursery.worker(device, self.group)
            try:
                worker.send("program", worker.show(self._program), self._envelope)
            except OSError:
                worker.close()  # killed as it started
            else:
                return worker
        raise RunFailed(
            f"{_DEATHS} local workers died as they started (out of memory?)",
            hint="engine.name=inline runs without them",
        )


def _packed(payload: Any, what: str, code: bool = False) -> Packer:
    try:
        return Packer(payload, code)
    except Exception as error:
        raise RunFailed(
            f"{what} cannot be sent to local workers: {type(error).__name__}: {error}",
            hint="take tensors, bytes, plain values, and lists or mappings of these; engine.name=inline sends nothing",
        ) from error
