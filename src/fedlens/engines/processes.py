"""The engine of persistent local workers, with data, weights and replies in shared memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.base.memory import keep_freed_memory, release_freed_memory
from fedlens.base.threads import usable_cores
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, BatchedOp, ClientStates, Op, Program, Reply
from fedlens.core.states import STATE_MEMORY
from fedlens.core.tree import HEAVY, Tree, copied
from fedlens.engines.client_groups import Group, check_groups, layout_of
from fedlens.engines.devices import (
    ON_CPU,
    ChannelsLast,
    Computing,
    Device,
    PrecisionSetting,
    default_workers,
    devices_of,
    resolved,
)
from fedlens.engines.inline import StateMemory, Threads
from fedlens.engines.schedule import DEATHS, Job, Schedule, block_size
from fedlens.engines.shared_memory import Packer, Pool, Region
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified
from fedlens.engines.worker_pool import Worker, WorkerPool

Workers = Annotated[
    int, Field(ge=0, le=1024, description="local worker processes; 0: one per core, or two per GPU")
]
Timeout = Annotated[
    float,
    Field(
        gt=0, description="seconds after which a worker that has not answered is considered hung and replaced"
    ),
]
Window = Annotated[int, Field(ge=1, description="maximum MiB of finished replies that wait for earlier ones")]

_SHORT = 0.02  # seconds; a worker with shorter tasks gets the next one before it has finished, so that it never waits


@declares(EngineTraits(exact=True, place="workers"))
def processes(
    *,
    workers: Workers = 0,
    threads: Threads = 1,
    group: Group = 1,
    device: Device = "auto",
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = "auto",
    window: Window = 512,
    timeout: Timeout = 3600.0,
    state_memory: StateMemory = STATE_MEMORY,
    verify: Verify = 0,
) -> EngineBase:
    """Persistent local workers, one thread each by default; bit-identical to `inline` with the same threads.

    On GPUs, two workers share each GPU unless `workers` is set; GPUs with more free memory are used first.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "the engine 'processes' needs Linux or macOS", where="engine.name", hint="set engine.name=inline"
        )
    computing = Computing(resolved(device, spread=True), precision, layout_of(channels_last, group))
    made = Processes(workers, threads, window, state_memory, group, computing, timeout)
    return verified(made, verify, exact=group == 1)


@dataclass(frozen=True)
class _Shared:
    """The shared part of an ask, as workers receive it."""

    envelope: bytes
    region: Region | None
    homes: Sequence[tuple[Region, Tensor]]  # tensors that were in shared memory already; see `Packer.homes`


@dataclass(frozen=True)
class _Task:
    job: Job
    block: int
    region: Region | None
    sent: float


class Processes(EngineBase):
    """See `processes`.

    Workers take one block of requests at a time, so a slow client does not idle the others. Finished replies that wait
    for an earlier slot stay in shared memory, up to `window`; when it is full, no new block is sent. Asks sent ahead
    are answered by workers that would otherwise be idle.
    """

    ahead = True  # asks may be sent before their answers are read

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
        self._worker_pool = WorkerPool(threads)
        self._workers: list[Worker] = []
        self._schedule: Schedule | None = None
        self._tasks: dict[int, _Task] = {}
        self._numbers = itertools.count(1)
        self._pool = Pool()
        self._placed = False  # since the last ask
        self._program: Region | None = None
        self._threads_before: int | None = None
        self._seconds = 1.0  # of a task, smoothed; starts long, so that tasks are not queued too early

    def warm(self) -> None:
        """Starts workers in the background, before the program is known."""
        self._worker_pool.start()

    @property
    def started(self) -> bool:
        """Whether the start begun by `warm` is complete, so that `open` need not wait."""
        return self._worker_pool.started

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` if the device does not exist, or clients cannot be computed in such groups."""
        self.computing.check()
        check_groups(ops, self.group, self.computing, "processes")

    def applied(self, program: Program) -> Program:
        """The program on this engine's device, in its arithmetic."""
        return self.computing.applied(program)

    def open(self, program: Program, states: ClientStates) -> None:
        """Puts the program into shared memory and starts the workers. Raises `ConfigError` as `check` does."""
        self.check(program.ops)
        program = self.applied(program)
        self._schedule = Schedule(states, self._window, self._dispatch, self._pump, self._retired)
        self._joint = {
            name for name, op in program.ops.items() if self.group > 1 and isinstance(op, BatchedOp)
        }
        packer = _packed(program, "the algorithm's operations or its data", code=True)
        self._program = Region(max(packer.size, 4096))
        packer.write(self._program.view(), new=True)
        self._envelope = packer.envelope
        # The server computes with the engine's threads, as with `inline`: the same bits. With one thread, the default,
        # it does not spin on the cores of the workers.
        keep_freed_memory()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._worker_pool.threads)
        self._workers = [self._new_worker(device) for device in devices_of(self.computing.device, self.count)]

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask by workers."""
        assert self._schedule is not None
        if self._placed:
            self._placed = False
            release_freed_memory()  # the tree is not needed any more in its original memory
        what = f"the shared payload of the ask '{ask.op}'"
        packer = _packed((ask.shared, ask.expect, ask.reduce), what, home=self._pool.home)
        shared = _Shared(packer.envelope, self._lay(packer), packer.homes)
        size = block_size(ask, self.group if ask.op in self._joint else 1)
        return self._schedule.answers(self._schedule.publish(ask, round, exchange, shared, size))

    def place(self, tree: Tree) -> Tree:
        """The same tree in memory that workers read, if it is heavy enough for this to pay.

        An ask that shares it then needs no copy. The memory is reused once the last of its tensors is freed.
        """
        moving = {name: value for name, value in tree.items() if self._pool.home(value) is None}
        if self._schedule is None or sum(value.nbytes for value in moving.values()) < HEAVY:
            return tree
        self._placed = True
        placed = self._pool.empty_like(moving)
        return {**tree, **{name: value.copy_(moving[name]) for name, value in placed.items()}}

    def close(self) -> None:
        """Ends the workers and frees the memory."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._worker_pool.close()
        for task in self._tasks.values():
            if task.region is not None:
                task.region.close()
        self._tasks.clear()
        if self._schedule is not None:
            self._schedule.close()
            self._schedule = None
        self._pool.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self._program is not None:
            self._program.close()

    def _lay(self, packer: Packer) -> Region | None:
        if packer.size == 0:
            return None
        region = self._pool.take(packer.size)
        packer.write(region.view())
        return region

    def _retired(self, job: Job) -> None:
        """Frees the shared part of a job that no worker uses any more."""
        for worker in self._workers:
            if job.number in worker.knows_asks:
                worker.forget.append(job.number)
        if job.shared.region is not None:
            self._pool.give(job.shared.region)

    # -- the workers --------------------------------------------------------------------------------------------

    def _dispatch(self, current: Job | None) -> None:
        """Sends work to every worker that has room for it."""
        assert self._schedule is not None
        depth = 2 if self._seconds < _SHORT else 1
        while True:
            # Searched each time: sending to a dead worker replaces it.
            worker = min(self._workers, key=lambda w: len(w.tasks))
            if len(worker.tasks) >= depth:
                return
            job = self._schedule.next(current, len(self._workers))
            if job is None:
                return
            self._send(worker, job)

    def _send(self, worker: Worker, job: Job) -> None:
        assert self._schedule is not None
        block, items = self._schedule.following(job)
        packer = _packed(items, f"a request of the ask '{job.ask.op}', or a client's state")
        task = _Task(job, block, self._lay(packer), time.monotonic())
        number = next(self._numbers)
        self._tasks[number] = task
        self._schedule.begin(job)
        try:
            if job.number not in worker.knows_asks:
                shared: _Shared = job.shared
                for home, _ in shared.homes:
                    worker.show(home)
                worker.send("ask", job.number, job.ask.op, shared.envelope, worker.show(shared.region))
                worker.knows_asks.add(job.number)
            # In the last attempt, clients are computed one by one, in case memory was the cause.
            alone = job.deaths.get(block, 0) == DEATHS - 1
            worker.task(number, job.number, packer.envelope, task.region, alone)
        except OSError:
            if number not in worker.tasks:
                worker.tasks.append(number)
            self._replace(worker, unsent=number)

    def _pump(self, due: float | None) -> None:
        """Waits for a message of at least one worker, and processes all that have arrived."""
        for worker in self._workers:
            worker.tell_freed()
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
        """Kills and replaces workers that have spent too long on one task."""
        late = time.monotonic() - self.timeout
        for worker in list(self._workers):
            if worker.tasks and worker.since <= late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                self._replace(worker, f"no answer came within {self.timeout:g} s, {DEATHS} times")

    def _finish(self, number: int, answers: Sequence[Answer]) -> None:
        assert self._schedule is not None
        task = self._end(number)
        self._seconds += 0.2 * (time.monotonic() - task.sent - self._seconds)
        for answer in answers:
            if isinstance(answer, Reply) and (answer.state is not None or answer.letters):
                # A state outlives the round, a letter its ask: copied, so that the worker can reuse its memory.
                answer.state, answer.letters = copied((answer.state, answer.letters))
            if isinstance(answer, Reply) and answer.nbytes >= HEAVY:
                answer.allocate = self._pool.empty_like
        self._schedule.finished(task.job, task.block, answers)

    def _end(self, number: int) -> _Task:
        task = self._tasks.pop(number)
        if task.region is not None:
            self._pool.give(task.region)
        return task

    def _replace(self, dead: Worker, reason: str | None = None, unsent: int | None = None) -> None:
        """Replaces a worker that is gone; its unfinished tasks go back to the front of the queue.

        The task that was `unsent` cannot be the cause.
        """
        assert self._schedule is not None
        dead.close()
        self._workers.remove(dead)
        reason = reason or f"its worker process {self._worker_pool.ending(dead.pid)}, {DEATHS} times"
        for number in reversed(dead.tasks):
            task = self._end(number)
            # Only the first of its tasks was running; the others waited.
            guilty = number == dead.tasks[0] and number != unsent
            self._schedule.lost(task.job, task.block, guilty, reason)
        self._workers.append(self._new_worker(dead.device))

    def _new_worker(self, device: str) -> Worker:
        for _ in range(DEATHS):
            worker = self._worker_pool.worker(device, self.group, usable_cores() // self.count)
            try:
                worker.send("program", worker.show(self._program), self._envelope)
            except OSError:
                worker.close()  # killed as it started
                how = self._worker_pool.ending(worker.pid)
            else:
                return worker
        raise RunFailed(
            f"{DEATHS} local workers died at start-up: the last one {how}",
            hint="engine.name=inline runs without them",
        )


def _packed(
    payload: Any,
    what: str,
    code: bool = False,
    home: Callable[[Tensor], tuple[Region, int] | None] | None = None,
) -> Packer:
    try:
        return Packer(payload, code, home=home)
    except Exception as error:
        raise RunFailed(
            f"{what} cannot be sent to local workers: {type(error).__name__}: {error}",
            hint="use tensors, bytes, plain values, and lists or mappings of these; engine.name=inline sends nothing",
        ) from error
