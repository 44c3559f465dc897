"""The engine of workers on a Ray cluster, or of a Ray that is started on this machine for the run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from fedlens.core.errors import ConfigError
from fedlens.core.protocol import Answer, Ask, BatchedOp, ClientStates, EngineBase, Op, Program, Reply
from fedlens.core.states import STATE_MEMORY
from fedlens.core.tree import copied
from fedlens.data.images import DecodedImages
from fedlens.engines.client_groups import Group, check_groups, layout_of
from fedlens.engines.devices import ChannelsLast, Computing, PrecisionSetting, usable_cores
from fedlens.engines.inline import StateMemory, Threads
from fedlens.engines.memory import keep_freed_memory
from fedlens.engines.processes import Timeout, Window
from fedlens.engines.ray_cluster import HOST_AND_PORT, NO_RAY_CLIENT, Cluster, import_ray, sigterm_kept
from fedlens.engines.ray_pool import RayPool, RemoteWorker, SentBlock, WorkerLost, WorkerSize, no_room
from fedlens.engines.ray_worker import Emptied, Packed, pack, unpacked
from fedlens.engines.schedule import DEATHS, Job, Schedule, block_size


def _whole_address(address: str | None) -> str | None:
    if address in (None, "auto") or re.fullmatch(HOST_AND_PORT, address):
        return address
    if address.startswith("ray://"):
        raise ValueError(NO_RAY_CLIENT)
    raise ValueError(
        "use 'host:port' or 'auto'; the head of a cluster has port 6379 unless it was given another"
    )


Address = Annotated[
    str | None,
    Field(
        description="of the cluster: `host:port`, or `auto` for the one this machine is part of; "
        "left out, Ray is started on this machine for the run",
    ),
    AfterValidator(_whole_address),
]
Workers = Annotated[
    int,
    Field(ge=0, le=100_000, description="workers on all nodes; 0 takes as many as the cluster has room for"),
]
Cpus = Annotated[float, Field(ge=0, description="CPUs of one worker; 0 takes as many as `threads`")]
Gpus = Annotated[
    float,
    Field(
        ge=0, description="GPUs of one worker: 1, or a fraction to let several share one, 0.25 four of them"
    ),
]
Connecting = Annotated[
    float,
    Field(
        gt=0,
        description="seconds to wait for the cluster to answer, and for room for a worker where there is none",
    ),
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
_LEAST = 0.0001  # of a CPU or a GPU, that Ray can count
# A local Ray ends with the thread that started it, so this thread stays.
_STARTER = ThreadPoolExecutor(1, "fedlens-ray")
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
    channels_last: ChannelsLast = "auto",
    window: Window = 512,
    state_memory: StateMemory = STATE_MEMORY,
    object_store: ObjectStore = 0,
    connect_timeout: Connecting = 60.0,
    timeout: Timeout = 3600.0,
) -> Ray:
    """Workers on a Ray cluster, on one machine or many; bit-identical to `inline` with the same threads."""
    import_ray()
    _check(address, cpus, gpus, object_store)
    size = WorkerSize(threads, cpus or float(threads), gpus, group)
    computing = Computing("cuda" if gpus else "cpu", precision, layout_of(channels_last, group))
    return Ray(
        address, workers, size, window, state_memory, object_store, connect_timeout, timeout, computing
    )


def _check(address: str | None, cpus: float, gpus: float, object_store: int) -> None:
    """Raises `ConfigError` about what Ray would not take, or a worker could not use."""
    if gpus > 1:
        raise ConfigError(
            f"a worker trains on one GPU at a time, and cannot have {gpus:g}",
            where="gpus",
            hint="take gpus=1, and more workers",
        )
    for name, number in (("cpus", cpus), ("gpus", gpus)):
        if 0 < number < _LEAST:
            raise ConfigError(
                f"a worker cannot have as little as {number:g} {name[:-1].upper()}",
                where=name,
                hint=f"Ray counts in parts of {_LEAST:g}",
            )
    if object_store and address is not None:
        raise ConfigError(
            f"the object store of the cluster at {address} is as large as its nodes were started with",
            where="object_store",
            hint="leave it out, and start the nodes with 'ray start --object-store-memory=BYTES'",
        )
    if 0 < object_store < 100:
        raise ConfigError(
            f"Ray's object store cannot be as small as {object_store} MiB",
            where="object_store",
            hint="give it 100 or more, or leave it out",
        )


class Ray(EngineBase):
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
        size: WorkerSize,
        window: int,
        state_memory: int,
        object_store: int,
        connect_timeout: float,
        timeout: float,
        computing: Computing,
    ) -> None:
        self.state_memory, self.computing, self.timeout = state_memory, computing, timeout
        self._address, self._count, self._size = address, workers, size
        self._window, self._store, self._connect_timeout = (
            window * 2**20,
            object_store * 2**20,
            connect_timeout,
        )
        self._pool: RayPool | None = None
        self._cluster: Cluster | None = None
        self._schedule: Schedule | None = None
        self._connecting: Future[None] | None = None
        self._threads_before: int | None = None
        self._seconds = 1.0  # a block's time, smoothed: blocks are taken for long until shown otherwise
        self._checked = 0.0  # when the cluster was last seen to be there

    # -- beginning and ending -------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Begins to start Ray in the background, or joins a cluster at once, so that a wrong address is told early."""
        if self._address is not None:
            self._connect()
        elif self._cluster is None and self._connecting is None:
            self._connecting = _STARTER.submit(self._connect)

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` where clients cannot be computed as asked: in groups, or in this precision.

        The GPUs are the workers', and need not be here.
        """
        if self.computing.device == "cpu":
            self.computing.check()
        check_groups(ops, self._size.group, self.computing, "ray")

    def applied(self, program: Program) -> Program:
        """The program on the workers' device, in this engine's arithmetic."""
        return self.computing.applied(program)

    def open(self, program: Program, states: ClientStates) -> None:
        """Lays the program into the object store and waits for a first worker.

        Raises `ConfigError` where no cluster answers or has other versions, and `RunFailed` where no worker starts.
        """
        self.check(program.ops)
        self._wait_for_connection()
        self._connect()
        assert self._cluster is not None
        self._ray = import_ray()
        room = self._cluster.room(self._size.cpus, self._size.gpus)
        if room == 0 and self._cluster.local:
            raise no_room(self._ray, self._cluster, self._size)
        self._joint = {name for name, op in program.ops.items() if isinstance(op, BatchedOp)}
        program = self.computing.applied(
            program
        )  # "cuda" where there are GPUs: Ray shows a worker its own alone
        count = self._count or max(1, room)
        code = pack(program, "the algorithm's operations or its data", code=True, instead=_emptied(count))
        laid = self._ray.put(code)
        del code
        keep_freed_memory()
        # What the server computes has the threads that the engine says, as with `inline`: the same bits.
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._size.threads)
        self._schedule = Schedule(states, self._window, self._send, self._wait, self._retired)
        self._pool = RayPool(self._ray, self._cluster, self._size, count, laid, self._connect_timeout)
        self._wait_for_a_worker()

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask by the workers."""
        assert self._schedule is not None
        assert self._cluster is not None
        shared = pack((ask.op, ask.shared, ask.expect, ask.reduce), f"what the ask '{ask.op}' shares")
        self._cluster.check_node()
        size = block_size(ask, self._size.group if ask.op in self._joint else 1)
        laid = self._ray.put(shared)
        return self._schedule.answers(self._schedule.publish(ask, round, exchange, laid, size))

    def close(self) -> None:
        """Ends the workers, and a local Ray."""
        if self._connecting is not None:
            self._connecting.exception()
            self._connecting = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        if self._schedule is not None:
            self._schedule.close()
            self._schedule = None
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
            memory = self._store or None
            self._cluster = Cluster(self._address, cpus, memory, size.threads, self._connect_timeout)

    def _wait_for_connection(self) -> None:
        if self._connecting is not None:
            wait([self._connecting])  # interrupted here, `close` still knows of it
            connecting, self._connecting = self._connecting, None
            with sigterm_kept():
                pass
            connecting.result()

    def _wait_for_a_worker(self) -> None:
        """Until one is ready; the others join when they are."""
        assert self._pool is not None
        assert self._cluster is not None
        until = time.monotonic() + self._connect_timeout
        while not self._pool.ready:
            if time.monotonic() > until:
                raise no_room(self._ray, self._cluster, self._size, self._connect_timeout)
            self._wait(until)

    # -- the workers ----------------------------------------------------------------------------------------------

    def _send(self, current: Job | None) -> None:
        """Gives blocks to every worker that has room for one."""
        assert self._schedule is not None
        assert self._cluster is not None
        assert self._pool is not None
        depth = 2 if self._seconds < _SHORT else 1
        ready = self._pool.ready
        while ready:
            worker = min(ready, key=lambda w: len(w.blocks))
            job = self._schedule.next(current, len(ready)) if len(worker.blocks) < depth else None
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
            if not worker.blocks:
                worker.since = time.monotonic()
            worker.blocks.append(SentBlock(job, block, time.monotonic(), promise))

    def _wait(self, due: float | None) -> None:
        """Takes in what comes first; comes back without anything after a while."""
        assert self._cluster is not None
        assert self._pool is not None
        self._cluster.check_node()
        now = time.monotonic()
        self._pool.watch(now)
        promises = {promise: worker for worker in self._pool.workers for promise in worker.awaited()}
        patience = _TICK if due is None else min(_TICK, max(0.0, due - now))
        came = self._cluster.first(list(promises), patience)
        if came is not None:
            worker = promises[came]
            if worker.asked is None:
                self._answered(worker, next(sent for sent in worker.blocks if sent.promise == came))
            else:
                self._pool.heard(worker)
        now = time.monotonic()
        for worker in [w for w in self._pool.workers if w.blocks and now - w.since > self.timeout]:
            if self._cluster.first([worker.blocks[0].promise], 0.0) is not None:
                continue  # it has answered, and was not listened to
            # What it has done of the others is kept; the one that it sits at counts as one that ended it.
            self._replace(worker, why=f"no answer came within {self.timeout:g} s, {DEATHS} times")
        if now - self._checked > _TICK:  # also while answers come: workers go on for a while without the rest
            self._checked = now
            self._cluster.check(now)

    def _answered(self, worker: RemoteWorker, sent: SentBlock) -> None:
        assert self._pool is not None
        try:
            reply: Packed = self._pool.fetched(sent.promise)
        except WorkerLost:
            self._replace(worker)
        else:
            worker.there = True
            worker.blocks.remove(sent)
            worker.since = time.monotonic()
            self._take(sent, reply)

    def _take(self, sent: SentBlock, packed: Packed) -> None:
        assert self._schedule is not None
        self._seconds += 0.2 * (time.monotonic() - sent.sent - self._seconds)
        answers: list[Answer] = unpacked(packed)
        for answer in answers:
            if isinstance(answer, Reply) and answer.state is not None:
                # A state outlives the round: a copy of its own lets the object store have its memory back.
                answer.state = copied(answer.state)
        self._schedule.finished(sent.job, sent.block, answers)

    def _replace(self, worker: RemoteWorker, why: str = _GONE) -> None:
        """A worker is gone: what it has not answered is to be done again, and a new worker takes its place."""
        assert self._schedule is not None
        assert self._pool is not None
        self._pool.replace(worker)
        undone = []
        for sent in worker.blocks:
            try:
                reply = self._pool.fetched(sent.promise)
            except WorkerLost:
                undone.append(sent)
            else:
                self._take(sent, reply)
        for sent in reversed(undone):
            # Only the first was being worked on; the others merely waited.
            self._schedule.lost(sent.job, sent.block, sent is undone[0], why)
        self._pool.doubt()

    def _retired(self, job: Job) -> None:
        for worker in self._pool.workers if self._pool else ():
            if job.number in worker.knows:
                worker.knows.remove(job.number)
                worker.actor.forget.remote(job.number)
        job.shared = None


def _emptied(workers: int) -> Any:
    return lambda value: Emptied(value, workers) if isinstance(value, DecodedImages) else None
