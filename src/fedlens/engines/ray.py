"""The engine of workers on a Ray cluster, or of a Ray that is started on this machine for the run."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.core.errors import ConfigError, RunFailed
from fedlens.core.protocol import Answer, Ask, ClientStates, Op, Program, Reply
from fedlens.core.states import STATE_MEMORY
from fedlens.data.images import Store
from fedlens.engines.answering import copied
from fedlens.engines.computing import ChannelsLast, Computing, PrecisionSetting
from fedlens.engines.grouping import Group, check_groups
from fedlens.engines.inline import StateMemory, Threads
from fedlens.engines.memory import keep_freed_memory
from fedlens.engines.placing import usable_cores
from fedlens.engines.processes import Timeout, Window
from fedlens.engines.ray_cluster import Cluster, Lasting, found, one_line, sigterm_kept
from fedlens.engines.ray_worker import Emptied, Packed, outpost, pack, unpacked, user_sources, versions
from fedlens.engines.schedule import DEATHS, Job, Schedule, block_size

Address = Annotated[
    str | None,
    Field(
        pattern=r"^(auto|(ray://)?[^\s/:]+:\d+|(ray://)?\[[0-9a-fA-F:]+\]:\d+)$",
        description="of the cluster: `host:port`, `auto` for the one this machine is part of, or `ray://host:port`; "
        "left out, Ray is started on this machine for the run",
    ),
]
Workers = Annotated[
    int,
    Field(ge=0, le=100_000, description="workers on all nodes; 0 takes as many as the cluster has room for"),
]
Cpus = Annotated[float, Field(ge=0, description="CPUs of one worker; 0 takes as many as `threads`")]
Gpus = Annotated[
    float,
    Field(ge=0, description="GPUs of one worker; a fraction lets several share one, 0.25 four of them"),
]
Connecting = Annotated[
    float,
    Field(gt=0, description="seconds to wait for the cluster to answer, and for a first worker to have room"),
]
ObjectStore = Annotated[
    int,
    Field(
        ge=0,
        description="MiB of a local Ray's object store, at most; 0 takes 30 % of the memory, as Ray does",
    ),
]

_SHORT = 0.2  # seconds: below it a worker gets its next block before it has finished, so that it never waits
_GONE = f"its worker was lost {DEATHS} times (out of memory?)"
_TICK = 1.0  # seconds after which it is looked again whether the cluster is still there


def ray(
    *,
    address: Address = None,
    workers: Workers = 0,
    threads: Threads = 1,
    cpus: Cpus = 0.0,
    gpus: Gpus = 0.0,
    group: Group = 1,
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = False,
    window: Window = 512,
    state_memory: StateMemory = STATE_MEMORY,
    object_store: ObjectStore = 0,
    connect_timeout: Connecting = 60.0,
    timeout: Timeout = 3600.0,
) -> Ray:
    """Workers on a Ray cluster, on one machine or many; bit-identical to `inline` with the same threads."""
    found()
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            f"a worker cannot have {gpus:g} GPUs: more than one have to be whole ones",
            where="gpus",
            hint="a fraction below 1 lets workers share a GPU",
        )
    if 0 < object_store < 100:
        raise ConfigError(
            f"Ray's object store cannot be as small as {object_store} MiB",
            where="object_store",
            hint="give it 100 or more, or leave it out",
        )
    size = _Size(threads, cpus or float(threads), gpus, group)
    computing = Computing("cuda" if gpus else "cpu", precision, channels_last)
    return Ray(
        address, workers, size, window, state_memory, object_store, connect_timeout, timeout, computing
    )


@dataclass(frozen=True)
class _Size:
    """Of one worker."""

    threads: int
    cpus: float
    gpus: float
    group: int


@dataclass(eq=False)
class _Worker:
    """One worker, as the driver sees it. `tasks` are those it has not answered, the oldest first."""

    actor: Any
    starting: Any  # the promise of what it finds as it starts; None from then on
    tasks: list[_Task] = field(default_factory=list)
    since: float = 0.0  # when it began with the first of its tasks (monotonic seconds)
    knows: set[int] = field(default_factory=set)  # asks whose shared part it has


@dataclass(eq=False)
class _Task:
    job: Job
    block: int
    sent: float
    promise: Any


class Ray:
    """See `ray`.

    The program is laid into the object store once, what an ask shares once an ask, and Ray brings each to a node
    once, however many workers are on it. Blocks of requests go to workers that have started, so those that the
    cluster has no room for yet keep nobody waiting, and join when there is room.
    """

    ahead = True  # asks may be sent before their answers are looked for

    def __init__(
        self,
        address: str | None,
        workers: int,
        size: _Size,
        window: int,
        state_memory: int,
        object_store: int,
        connect_timeout: float,
        timeout: float,
        computing: Computing,
    ) -> None:
        self.state_memory, self.computing, self.timeout = state_memory, computing, timeout
        self._address, self._count, self._size = address, workers, size
        self._window, self._store, self._timeout = window * 2**20, object_store * 2**20, connect_timeout
        self._workers: list[_Worker] = []
        self._cluster: Cluster | None = None
        self._schedule: Schedule | None = None
        self._connecting: Lasting | None = None
        self._threads_before: int | None = None
        self._seconds = 1.0  # a block's time, smoothed: blocks are taken for long until shown otherwise
        self._checked = 0.0  # when the cluster was last seen to be there
        self._stillborn = 0  # workers that died as they started, since the last one that did not

    # -- beginning and ending -------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Begins to start Ray in the background, or joins a cluster at once, so that a wrong address is told early."""
        if self._address is not None:
            self._connect()
        elif self._cluster is None and self._connecting is None:
            self._connecting = Lasting(self._connect)

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` where clients cannot be computed as asked: in groups, or in this precision.

        The GPUs are the workers', and need not be here.
        """
        if self.computing.device == "cpu":
            self.computing.check()
        check_groups(ops, self._size.group, self.computing, "ray")

    def open(self, program: Program, states: ClientStates) -> None:
        """Lays the program into the object store and waits for a first worker.

        Raises `ConfigError` where no cluster answers or has other versions, and `RunFailed` where no worker starts.
        """
        self.check(program.ops)
        self._wait_for_connection()
        self._connect()
        assert self._cluster is not None
        self._ray = found()
        room = self._cluster.room(self._size.cpus, self._size.gpus)
        if room == 0 and self._cluster.local:
            raise self._no_room()
        self._joint = {name for name, op in program.ops.items() if hasattr(op, "together")}
        program = self.computing.applied(
            program
        )  # "cuda" where there are GPUs: Ray shows a worker its own alone
        count = self._count or max(1, room)
        code = pack(program, "the algorithm's operations or its data", code=True, instead=_emptied(count))
        self._program = self._ray.put(code)
        del code
        self._kind = self._ray.remote(outpost())
        self._sources, self._versions = user_sources(), versions()
        keep_freed_memory()
        # What the server computes has the threads that the engine says, as with `inline`: the same bits.
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._size.threads)
        self._schedule = Schedule(states, self._window, self._send, self._wait, self._retired)
        self._workers = [self._new_worker() for _ in range(count)]
        self._wait_for_a_worker()

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask by the workers."""
        assert self._schedule is not None
        assert self._cluster is not None
        shared = pack((ask.op, ask.shared, ask.expect, ask.reduce), f"what the ask '{ask.op}' shares")
        self._cluster.check_node()
        size = block_size(ask, self._size.group if ask.op in self._joint else 1)
        return self._schedule.answers(
            self._schedule.publish(ask, round, exchange, self._ray.put(shared), size)
        )

    def close(self) -> None:
        """Ends the workers, and a local Ray."""
        if self._connecting is not None:
            self._connecting.result()
            self._connecting = None
        workers, self._workers = self._workers, []
        for worker in workers:
            self._end(worker)
        if self._schedule is not None:
            self._schedule.close()
            self._schedule = None
        self._program = self._kind = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _connect(self) -> None:
        if self._cluster is None:
            size = self._size
            count = self._count or max(1, int(usable_cores() / size.cpus))
            cpus = max(usable_cores(), math.ceil(count * size.cpus))
            self._cluster = Cluster(self._address, cpus, self._store or None, size.threads, self._timeout)

    def _wait_for_connection(self) -> None:
        if self._connecting is not None:
            failed, self._connecting = self._connecting.result(), None
            with sigterm_kept():
                pass
            if failed is not None:
                raise failed

    def _wait_for_a_worker(self) -> None:
        """Until one is ready; the others join when they are."""
        until = time.monotonic() + self._timeout
        while all(worker.starting is not None for worker in self._workers):
            if time.monotonic() > until:
                raise self._no_room()
            self._wait(until)

    def _no_room(self) -> ConfigError:
        size, held, free = self._size, self._ray.cluster_resources(), self._ray.available_resources()
        wanted = {"CPU": size.cpus} | ({"GPU": size.gpus} if size.gpus else {})
        takes = " and ".join(f"{n:g} {kind}" for kind, n in wanted.items())
        has = " and ".join(f"{free.get(kind, 0):g} of {held.get(kind, 0):g} {kind}" for kind in wanted)
        late = "" if self._workers == [] else f" within {self._timeout:g} seconds"
        return ConfigError(
            f"no worker could start on {self._cluster}{late}: one takes {takes}, and {has} are free",
            where="engine.gpus" if size.gpus else "engine.cpus",
            hint="ask for less, wait until others are done, or set engine.connect_timeout higher where nodes are slow",
        )

    # -- the workers ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """How many workers have started."""
        return sum(worker.starting is None for worker in self._workers)

    def _new_worker(self) -> _Worker:
        size = self._size
        actor = self._kind.options(num_cpus=size.cpus, num_gpus=size.gpus, max_restarts=0).remote()
        # In a list, so that Ray hands on the promise and the worker looks at its versions before what it stands for.
        how = (size.threads, size.group)
        starting = actor.start.remote(self._versions, how, self._sources, [self._program])
        return _Worker(actor, starting)

    def _send(self, current: Job | None) -> None:
        """Gives blocks to every worker that has room for one."""
        assert self._schedule is not None
        assert self._cluster is not None
        depth = 2 if self._seconds < _SHORT else 1
        ready = [worker for worker in self._workers if worker.starting is None]
        while ready:
            worker = min(ready, key=lambda w: len(w.tasks))
            job = self._schedule.next(current, len(ready)) if len(worker.tasks) < depth else None
            if job is None:
                return
            block, items = self._schedule.following(job)
            packed = pack(items, f"a request of the ask '{job.ask.op}', or a client's state")
            shared = None if job.number in worker.knows else job.shared
            self._cluster.check_node()
            self._schedule.begin(job)
            worker.knows.add(job.number)
            # The last time they are computed one by one, in case that it was memory.
            alone = job.deaths.get(block, 0) == DEATHS - 1
            promise = worker.actor.work.remote(job.number, shared, packed, alone)
            if not worker.tasks:
                worker.since = time.monotonic()
            worker.tasks.append(_Task(job, block, time.monotonic(), promise))

    def _wait(self, due: float | None) -> None:
        """Takes in what comes first; comes back without anything after a while."""
        promises = {
            promise: worker
            for worker in self._workers
            for promise in (
                [task.promise for task in worker.tasks] if worker.starting is None else [worker.starting]
            )
        }
        assert self._cluster is not None
        self._cluster.check_node()
        now = time.monotonic()
        patience = _TICK if due is None else min(_TICK, max(0.0, due - now))
        came, _ = self._ray.wait(list(promises), num_returns=1, timeout=patience)
        if came:
            worker = promises[came[0]]
            if worker.starting is None:
                self._answered(worker, next(task for task in worker.tasks if task.promise == came[0]))
            else:
                self._started(worker)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.tasks and now - w.since > self.timeout]:
            if self._ray.wait([worker.tasks[0].promise], timeout=0)[0]:
                continue  # it has answered, and was not listened to
            # What it has done of the others is kept; the one that it sits at counts as one that ended it.
            self._replace(worker, why=f"no answer came within {self.timeout:g} s, {DEATHS} times")
        if now - self._checked > _TICK:  # also while answers come: workers go on for a while without the rest
            self._checked = now
            self._cluster.check(now)

    def _started(self, worker: _Worker) -> None:
        try:
            versions = self._fetched(worker.starting)
        except _Lost as lost:
            self._stillborn += 1
            if self._stillborn >= DEATHS:
                raise RunFailed(
                    f"{DEATHS} workers on {self._cluster} died as they started (out of memory?): {lost}",
                    hint="engine.name=inline runs without them",
                ) from lost
            self._replace(worker)
            return
        if versions != self._versions:
            raise self._other_versions(versions)
        worker.starting = None
        self._stillborn = 0

    def _other_versions(self, theirs: dict[str, str]) -> ConfigError:
        differ = [name for name, ours in self._versions.items() if theirs[name] != ours]
        there = ", ".join(
            f"{name} {theirs[name]}" if theirs[name] != "none" else f"no {name}" for name in differ
        )
        here = ", ".join(f"{name} {self._versions[name]}" for name in differ)
        return ConfigError(
            f"a worker on {self._cluster} has {there}, and this process has {here}",
            where="engine.address",
            hint="install the same on every node, where 'ray start' finds it, and start Ray there again",
        )

    def _answered(self, worker: _Worker, task: _Task) -> None:
        try:
            reply: tuple[Packed, str] = self._fetched(task.promise)
        except _Lost:
            self._replace(worker)
        else:
            worker.tasks.remove(task)
            worker.since = time.monotonic()
            self._take(task, reply)

    def _take(self, task: _Task, reply: tuple[Packed, str]) -> None:
        assert self._schedule is not None
        packed, printed = reply
        if printed:
            sys.stderr.write(printed)
        self._seconds += 0.2 * (time.monotonic() - task.sent - self._seconds)
        answers: list[Answer] = unpacked(packed)
        for answer in answers:
            if isinstance(answer, Reply) and answer.state is not None:
                # A state outlives the round: a copy of its own lets the object store have its memory back.
                answer.state = copied(answer.state)
        self._schedule.finished(task.job, task.block, answers)

    def _fetched(self, promise: Any) -> Any:
        """What a promise stands for. Raises `_Lost` where whoever made it is gone, `RunFailed` where it broke."""
        assert self._cluster is not None
        errors = self._ray.exceptions
        self._cluster.check_node()
        try:
            return self._ray.get(promise)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, RunFailed):
                raise cause from None
            sys.stderr.write(f"{error}\n")
            raise RunFailed(
                f"a worker on {self._cluster} could not go on: {type(cause).__name__}: {one_line(cause)}",
                hint="where is above; engine.name=inline runs without workers",
            ) from error
        except errors.RayError as error:
            raise _Lost(one_line(error)) from error

    def _replace(self, worker: _Worker, why: str = _GONE) -> None:
        """A worker is gone: what it has not answered is to be done again, and a new worker takes its place."""
        assert self._schedule is not None
        self._end(worker)
        self._workers.remove(worker)
        undone = []
        for task in worker.tasks:
            try:
                reply = self._fetched(task.promise)
            except _Lost:
                undone.append(task)
            else:
                self._take(task, reply)
        for task in reversed(undone):
            # Only the first was being worked on; the others merely waited.
            self._schedule.lost(task.job, task.block, task is undone[0], why)
        self._workers.append(self._new_worker())

    def _end(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):  # it is gone, or the whole cluster is
            self._ray.kill(worker.actor, no_restart=True)

    def _retired(self, job: Job) -> None:
        for worker in self._workers:
            if job.number in worker.knows:
                worker.knows.remove(job.number)
                worker.actor.forget.remote(job.number)
        job.shared = None


class _Lost(Exception):
    """A worker, or what it answered, is gone. Says what Ray says."""


def _emptied(workers: int) -> Any:
    return lambda value: Emptied(value, workers) if isinstance(value, Store) else None
