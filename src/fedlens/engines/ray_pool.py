"""The workers of a run on a Ray cluster: created, given blocks of requests, and replaced when they are lost."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.base.errors import ConfigError, FedlensError, RunFailed, told
from fedlens.core.protocol import ClientStates, Reply
from fedlens.core.tree import copied
from fedlens.engines.ray_cluster import Cluster, import_ray, one_line
from fedlens.engines.ray_worker import Report, actor_class, pack, unpacked, user_sources
from fedlens.engines.schedule import DEATHS, Job, Schedule

_PAUSE = 30.0  # seconds until a worker that could not start is requested again
_SILENT = 5.0  # seconds without any worker before the run reports it: a restart takes some time
_SHORT = 0.2  # seconds; a worker with shorter blocks gets the next one before it has finished
_TICK = 1.0  # seconds between two checks of the cluster


@dataclass(frozen=True)
class RaySettings:
    """The settings of the engine, as in `fedlens.engines.ray.ray`; `cpus` of a worker are never 0."""

    address: str | None
    workers: int
    threads: int
    cpus: float
    gpus: float
    group: int
    window: int
    object_store: int
    connect_timeout: float
    timeout: float

    @property
    def needs(self) -> dict[str, float]:
        """What one worker takes of a node, by Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(eq=False)
class SentBlock:
    """A block of requests sent to a worker; `blameless` if it was queued behind one that ended the worker."""

    job: Job
    block: int
    sent: float
    promise: Any
    blameless: bool = False


@dataclass(eq=False)
class RemoteWorker:
    """One worker, as the driver sees it. `blocks` are the unanswered ones, the oldest first."""

    actor: Any
    hello: Any = None  # the object reference of a pending `hello`; None once it was answered
    started: bool = False  # whether this actor has answered a `hello`
    hung: bool = False  # whether it was killed because it did not answer in time
    blocks: list[SentBlock] = field(default_factory=list)
    since: float = 0.0  # when it began its oldest block (monotonic seconds)


class WorkerLost(Exception):
    """A worker or its answer is lost. The message is Ray's."""


class RayPool:
    """The workers of a run and the schedule of their blocks.

    Ray restarts a worker that dies (`max_restarts`), possibly on another node. A call in progress fails, and its block
    is sent again. A worker gets blocks once it has answered `hello`, which loads the program.

    Args:
        cluster: where the workers run.
        settings: of the engine.
        wanted: how many workers.
        program: the packed program, in the object store.
        states: of the clients.
    """

    def __init__(
        self, cluster: Cluster, settings: RaySettings, wanted: int, program: Any, states: ClientStates
    ) -> None:
        self._ray, self._cluster, self._settings, self._wanted = import_ray(), cluster, settings, wanted
        self.timeout, self._patience = settings.timeout, settings.connect_timeout
        self.schedule = Schedule(states, settings.window * 2**20, self.send, self.wait, self._retired)
        kind = actor_class()
        self._versions: dict[str, str] = kind.versions()
        # The program in a list: Ray passes the reference, and the worker checks its versions before it fetches it.
        self._hello = (self._versions, (settings.threads, settings.group), user_sources(), [program])
        # Ray starts a worker three times; it does not retry `work`, so that the schedule counts the attempts.
        self._kind = self._ray.remote(kind).options(
            num_cpus=settings.cpus, num_gpus=settings.gpus, max_restarts=DEATHS - 1, max_task_retries=0
        )
        self._seconds = 1.0  # a block's time, smoothed; starts long, so that blocks are not queued too early
        self._checked = 0.0  # when the cluster was last checked (monotonic seconds)
        self._any_started = False
        self._left_out: FedlensError | None = None  # why the last worker was left out
        self._refill = 0.0  # when missing workers are requested (monotonic seconds)
        self._last_there = 0.0  # when a worker was last available (monotonic seconds)
        self._said: set[str] = set()
        self.workers = [self._new() for _ in range(wanted)]

    @property
    def ready(self) -> list[RemoteWorker]:
        """The workers that accept blocks."""
        return [worker for worker in self.workers if worker.hello is None]

    def wait_for_a_worker(self) -> None:
        """Returns when one worker is ready; the others join when they are."""
        until = time.monotonic() + self._patience
        while not self.ready:
            if time.monotonic() > until:
                raise no_room(self._cluster, self._settings.needs, self._patience)
            self.wait(until)

    def close(self) -> None:
        """Ends all workers."""
        workers, self.workers = self.workers, []
        for worker in workers:
            self._kill(worker)
        self.schedule.close()

    # -- blocks ---------------------------------------------------------------------------------------------------

    def send(self, current: Job | None) -> None:
        """Sends blocks to every worker that has room for one."""
        depth = 2 if self._seconds < _SHORT else 1
        ready = self.ready
        while ready:
            worker = min(ready, key=lambda w: len(w.blocks))
            job = self.schedule.next(current, len(ready)) if len(worker.blocks) < depth else None
            if job is None:
                return
            block, items = self.schedule.following(job)
            packed = pack(items, f"a request of the ask '{job.ask.op}', or a client's state")
            # In the last attempt, clients are computed one by one, in case memory was the cause.
            alone = job.deaths.get(block, 0) == DEATHS - 1
            self._cluster.check_node()
            self.schedule.begin(job)
            promise = worker.actor.work.remote(job.number, [job.shared], packed, alone)
            now = time.monotonic()
            worker.since = worker.since if worker.blocks else now
            worker.blocks.append(SentBlock(job, block, now, promise))

    def wait(self, due: float | None) -> None:
        """Processes one answer; returns without one after a second, or when `due` (monotonic seconds) has passed."""
        self._cluster.check_node()
        now = time.monotonic()
        owners = {sent.promise: (worker, sent) for worker in self.workers for sent in worker.blocks}
        # A worker answers `hello` after its blocks, and is not given up before they are lost.
        hellos = {w.hello: w for w in self.workers if w.hello is not None and not w.blocks}
        done = self._first([*owners, *hellos], _TICK if due is None else min(_TICK, max(0.0, due - now)))
        if done in hellos:
            self._greeted(hellos[done])
        elif done is not None:
            self._answered(*owners[done])
        now = time.monotonic()
        # After processing answers, which may have waited while the driver did other work.
        self.watch(now)
        for worker in self.workers:
            late = worker.blocks and now - worker.since > self.timeout
            if late and self._first([worker.blocks[0].promise], 0.0) is None:
                worker.since, worker.hung = now, True
                self._kill(worker, restart=True)
                self._greet(worker)
        if now - self._checked > _TICK:  # even while answers arrive: workers survive the head for a while
            self._checked = now
            self._cluster.check(now)

    def _first(self, promises: Sequence[Any], timeout: float) -> Any:
        """The first of these references that is ready or failed within so many seconds, or None."""
        if not promises:
            time.sleep(timeout)  # Ray would return at once
            return None
        done, _ = self._ray.wait(promises, num_returns=1, timeout=timeout)
        return done[0] if done else None

    def _answered(self, worker: RemoteWorker, sent: SentBlock) -> None:
        guilty = sent is worker.blocks[0] and not sent.blameless  # the others waited
        worker.blocks.remove(sent)
        worker.since = time.monotonic()
        try:
            answers = unpacked(self._fetched(sent.promise))
        except WorkerLost:
            for other in worker.blocks:
                other.blameless = True
            late = f"no answer came within {self.timeout:g} s, {DEATHS} times"
            gone = f"its worker ended {DEATHS} times: it exited, crashed, or ran out of memory"
            self.schedule.lost(sent.job, sent.block, guilty, late if worker.hung else gone)
            # One block at a time for now: a worker can end before it sends the answer to its previous block, and
            # then the wrong block counts as the cause.
            self._seconds = 1.0
            # If one worker is lost, its node may be too: no worker gets a block before it has answered again.
            for other_worker in self.workers:
                self._greet(other_worker)
            return
        self._seconds += 0.2 * (worker.since - sent.sent - self._seconds)
        for answer in answers:
            if isinstance(answer, Reply) and (answer.state is not None or answer.letters):
                # A state outlives the round, a letter its ask: copied, so that the store can free its memory.
                answer.state, answer.letters = copied((answer.state, answer.letters))
        self.schedule.finished(sent.job, sent.block, answers)

    def _fetched(self, promise: Any) -> Any:
        """The value of a reference; output of the worker since the last one goes to standard error.

        Raises `WorkerLost` if the worker is gone, `RunFailed` if it failed.
        """
        self._cluster.check_node()
        try:
            report: Report | None = self._ray.get(promise)
        except self._ray.exceptions.RayTaskError as error:  # an error that the worker did not report itself
            sys.stderr.write(f"{error}\n")
            raise RunFailed(
                f"a worker on {self._cluster} failed: {told(error.cause)}",
                hint="its traceback is above; engine.name=inline runs without workers",
            ) from error
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(one_line(error)) from error
        if report is None:
            raise WorkerLost("it was restarted")
        value, written, failure = report
        sys.stderr.write(written)
        if failure is not None:
            raise failure
        return value

    def _retired(self, job: Job) -> None:
        for worker in self.workers:
            if worker.started:
                worker.actor.forget.remote(job.number)
        job.shared = None

    # -- workers that start, are lost, or cannot start ------------------------------------------------------------

    def _new(self) -> RemoteWorker:
        worker = RemoteWorker(self._kind.remote())
        self._greet(worker)
        return worker

    def _greet(self, worker: RemoteWorker) -> None:
        """Sends a `hello`: it is answered once the actor runs, even after restarts, and fails if it is dead."""
        if worker.hello is None:
            worker.hello = worker.actor.hello.options(max_task_retries=-1).remote(*self._hello)

    def _greeted(self, worker: RemoteWorker) -> None:
        """Processes that a worker runs, or is dead.

        Raises `ConfigError` if the first worker has other versions, `RunFailed` if it dies repeatedly.
        """
        hello, worker.hello = worker.hello, None
        try:
            versions = self._fetched(hello)
        except WorkerLost as lost:
            if worker.started:
                self.workers[self.workers.index(worker)] = self._new()
                return
            what = f"a worker on {self._cluster} died {DEATHS} times at start-up: {lost}"
            self._leave_out(worker, RunFailed(what, hint="engine.name=inline runs without workers"))
            return
        if versions != self._versions:
            self._leave_out(worker, self._other_versions(versions))
            return
        worker.started, worker.hung, self._any_started = True, False, True

    def _other_versions(self, theirs: dict[str, str]) -> ConfigError:
        differ = [name for name, version in self._versions.items() if theirs[name] != version]
        there = ", ".join(f"{name} {theirs[name]}" if theirs[name] else f"no {name}" for name in differ)
        here = ", ".join(f"{name} {self._versions[name]}" for name in differ)
        return ConfigError(
            f"a worker on {self._cluster} has {there}, but this process has {here}",
            where="engine.address",
            hint="install the same versions on every node, where 'ray start' finds them, and restart Ray there",
        )

    def _leave_out(self, worker: RemoteWorker, why: FedlensError) -> None:
        """Ends a worker that cannot start; it is requested again later. Raises `why` if none has started yet."""
        if not self._any_started:
            raise why
        self._kill(worker)
        self.workers.remove(worker)
        self._left_out = why
        self._refill = time.monotonic() + _PAUSE
        self._say_once(
            f"{why.what}: it is left out; fedlens asks for it again every {_PAUSE:g} seconds; {why.hint}"
        )

    def _kill(self, worker: RemoteWorker, restart: bool = False) -> None:
        with contextlib.suppress(Exception):  # the worker, or the whole cluster, is gone already
            self._ray.kill(worker.actor, no_restart=not restart)

    def watch(self, now: float) -> None:
        """Requests missing workers when it is time. Call it about every second.

        Raises `RunFailed` if there has been no worker for too long.
        """
        if now >= self._refill:
            self.workers += [self._new() for _ in range(self._wanted - len(self.workers))]
        # A worker with a block is available until the block is lost: it answers `hello` after it.
        if not self._any_started or any(worker.hello is None or worker.blocks for worker in self.workers):
            self._last_there = now
            self._said.discard("none")
            return
        if now - self._last_there > self._patience:
            none_left = None if self.workers else self._left_out
            why = none_left or no_room(self._cluster, self._settings.needs, self._patience)
            raise RunFailed(f"all workers are lost; {why.what}", where=why.where, hint=why.hint)
        if now - self._last_there > _SILENT:
            self._say_once(
                f"no worker is left on {self._cluster}: the run waits up to {self._patience:g} seconds "
                "(engine.connect_timeout) for a free slot",
                "none",
            )

    def _say_once(self, sentence: str, key: str | None = None) -> None:
        key = key or sentence
        if key not in self._said:
            self._said.add(key)
            sys.stderr.write(f"{sentence}\n")


def no_room(cluster: Cluster, needs: Mapping[str, float], waited: float | None = None) -> ConfigError:
    """The error that no worker could start: what a worker needs, and what is free."""
    ray = import_ray()
    total, free = ray.cluster_resources(), ray.available_resources()
    takes = " and ".join(f"{n:g} {kind}" for kind, n in needs.items())
    has = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}" for kind in needs)
    late = "" if waited is None else f" within {waited:g} seconds"
    return ConfigError(
        f"no worker could start on {cluster}{late}: a worker takes {takes}, but {has} are free",
        where="engine.gpus" if "GPU" in needs else "engine.cpus",
        hint="request less, wait until other runs end, or raise engine.connect_timeout if nodes start slowly",
    )
