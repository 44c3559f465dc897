"""The workers of a run on a Ray cluster: asked for, started, watched, and replaced where they are lost."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.errors import ConfigError, FedlensError, RunFailed
from fedlens.engines.ray_cluster import Cluster, one_line
from fedlens.engines.ray_worker import Report, outpost, user_sources, versions
from fedlens.engines.schedule import DEATHS, Job

_PAUSE = 30.0  # seconds after which a worker is asked for again in the place of one that could not start
_SILENT = 5.0  # seconds that a run without any worker says nothing: one that is replaced takes some to start


@dataclass(frozen=True)
class WorkerSize:
    """Of one worker."""

    threads: int
    cpus: float
    gpus: float
    group: int


@dataclass(eq=False)
class SentBlock:
    """A block of requests that a worker has."""

    job: Job
    block: int
    sent: float
    promise: Any


@dataclass(eq=False)
class RemoteWorker:
    """One worker, as the driver sees it. `blocks` are those it has not answered, the oldest first."""

    actor: Any
    asked: (
        Any  # the promise of what it finds as it starts, or that it is still there; None when it has said so
    )
    started: bool = False
    there: bool = False  # whether it was heard of since it began, and since any other was lost
    blocks: list[SentBlock] = field(default_factory=list)
    since: float = 0.0  # when it began with the first of its tasks (monotonic seconds)
    knows: set[int] = field(default_factory=set)  # asks whose shared part it has

    def awaited(self) -> list[Any]:
        """The promises that it has not kept."""
        return [sent.promise for sent in self.blocks] if self.asked is None else [self.asked]


class WorkerLost(Exception):
    """A worker, or what it answered, is gone. Says what Ray says."""


class RayPool:
    """The workers of a run.

    Args:
        ray: the package.
        cluster: that they are on.
        size: of each.
        wanted: how many.
        program: what they begin with, in the object store.
        patience: seconds that a run which has no worker left waits for one.
    """

    def __init__(
        self, ray: Any, cluster: Cluster, size: WorkerSize, wanted: int, program: Any, patience: float
    ) -> None:
        self._ray, self._cluster, self._size = ray, cluster, size
        self._wanted, self._program, self._patience = wanted, program, patience
        self._kind = ray.remote(outpost())
        self._sources, self._versions = user_sources(), versions()
        self._going = False  # whether one was ever ready
        self._stillborn = 0  # workers that died as they started, since the last one that did not
        self._odd = 0  # workers of other versions
        self._next = 0.0  # when those that are missing are asked for (monotonic seconds)
        self._none_since: float | None = None
        self._said: set[str] = set()
        self.workers = [self._new() for _ in range(wanted)]

    @property
    def ready(self) -> list[RemoteWorker]:
        """Those that take work."""
        return [worker for worker in self.workers if worker.there]

    def close(self) -> None:
        """Ends all of them."""
        workers, self.workers = self.workers, []
        for worker in workers:
            self._end(worker)

    def _new(self) -> RemoteWorker:
        size = self._size
        actor = self._kind.options(num_cpus=size.cpus, num_gpus=size.gpus, max_restarts=0).remote()
        # In a list, so that Ray hands on the promise and the worker looks at its versions before what it stands for.
        how = (size.threads, size.group)
        return RemoteWorker(actor, actor.start.remote(self._versions, how, self._sources, [self._program]))

    def _end(self, worker: RemoteWorker) -> None:
        with contextlib.suppress(Exception):  # it is gone, or the whole cluster is
            self._ray.kill(worker.actor, no_restart=True)

    # -- what they say --------------------------------------------------------------------------------------------

    def fetched(self, promise: Any) -> Any:
        """What a promise stands for; what was written meanwhile comes out on standard error.

        Raises `WorkerLost` where whoever made it is gone, `RunFailed` where it broke.
        """
        errors = self._ray.exceptions
        self._cluster.check_node()
        try:
            report: Report = self._ray.get(promise)
        except errors.RayTaskError as error:  # outside what a worker itself looks after
            cause = error.cause if isinstance(error.cause, BaseException) else error
            raise self._broken(f"{type(cause).__name__}: {one_line(cause)}", str(error)) from error
        except errors.RayError as error:
            raise WorkerLost(one_line(error)) from error
        value, written, fault = report
        if written:
            sys.stderr.write(written)
        if isinstance(fault, FedlensError):
            raise fault
        if fault is not None:
            raise self._broken(*fault)
        return value

    def _broken(self, why: str, trace: str) -> RunFailed:
        sys.stderr.write(f"{trace}\n")
        return RunFailed(
            f"a worker on {self._cluster} could not go on: {why}",
            hint="where is above; engine.name=inline runs without workers",
        )

    def heard(self, worker: RemoteWorker) -> None:
        """Takes in what a worker was asked for: that it has started, or is still there.

        Raises `ConfigError` where the first has other versions, `RunFailed` where workers die as they start.
        """
        try:
            found = self.fetched(worker.asked)
        except WorkerLost as lost:
            if worker.started:
                self.replace(worker)
            else:
                self._died(worker, lost)
            return
        if not worker.started:
            if found != self._versions:
                self._leave_odd(worker, found)
                return
            self._stillborn = 0
        worker.asked = None
        worker.started = worker.there = self._going = True

    # -- those that are lost, or cannot start ---------------------------------------------------------------------

    def replace(self, worker: RemoteWorker) -> None:
        """A new worker takes the place of one that is gone."""
        self._end(worker)
        self.workers.remove(worker)
        self.workers.append(self._new())

    def doubt(self) -> None:
        """No worker gets anything before it has been heard of: where one was lost, its node may be.

        A block that is sent to a dead worker is lost at once, and there may be as many of them as a node has room for.
        """
        for worker in self.workers:
            if worker.there:
                worker.there = False
                if not worker.blocks:
                    worker.asked = worker.actor.there.remote()

    def _died(self, worker: RemoteWorker, lost: WorkerLost) -> None:
        self._stillborn += 1
        if self._stillborn < DEATHS:
            self.replace(worker)
            return
        died = f"{DEATHS} workers on {self._cluster} died as they started (out of memory?): {lost}"
        if not any(other.started for other in self.workers):
            raise RunFailed(died, hint="engine.name=inline runs without them") from lost
        self._leave_out(worker)
        self._say_once(
            f"{died}; the run goes on with the others, and asks again every {_PAUSE:g} seconds", "died"
        )

    def _leave_odd(self, worker: RemoteWorker, theirs: dict[str, str]) -> None:
        differ = [name for name, ours in self._versions.items() if theirs[name] != ours]
        has = ", ".join(
            f"{name} {theirs[name]}" if theirs[name] != "none" else f"no {name}" for name in differ
        )
        here = ", ".join(f"{name} {self._versions[name]}" for name in differ)
        what = f"a worker on {self._cluster} has {has}, and this process has {here}"
        hint = "install the same on every node, where 'ray start' finds it, and start Ray there again"
        if not self._going:
            raise ConfigError(what, where="engine.address", hint=hint)
        self._odd += 1
        # Ray may put the next one on that node again: from some time on, none is asked for in its place.
        self._wanted -= self._odd > DEATHS
        self._leave_out(worker)
        if self._wanted == 0:
            raise RunFailed(what, where="engine.address", hint=hint)
        self._say_once(f"{what}: it is left out; {hint}")

    def _leave_out(self, worker: RemoteWorker) -> None:
        self._end(worker)
        self.workers.remove(worker)
        self._next = time.monotonic() + _PAUSE

    def watch(self, now: float) -> None:
        """Asks for those that are missing, when it is time. To be called every second or so.

        Raises `RunFailed` where no worker has been left for too long.
        """
        if now >= self._next or not self.workers:
            self.workers += [self._new() for _ in range(self._wanted - len(self.workers))]
        if not self._going or any(worker.started for worker in self.workers):
            self._none_since = None
            self._said.discard("none")
            return
        self._none_since = now if self._none_since is None else self._none_since
        if now - self._none_since > self._patience:
            error = no_room(self._ray, self._cluster, self._size, self._patience)
            raise RunFailed(f"all workers are lost, and {error.what}", where=error.where, hint=error.hint)
        if now - self._none_since > _SILENT:
            self._say_once(
                f"no worker is left on {self._cluster}: the run waits for room for one, {self._patience:g} seconds "
                "at most (engine.connect_timeout)",
                "none",
            )

    def _say_once(self, sentence: str, key: str | None = None) -> None:
        key = key or sentence
        if key not in self._said:
            self._said.add(key)
            sys.stderr.write(f"{sentence}\n")


def no_room(ray: Any, cluster: Cluster, size: WorkerSize, waited: float | None = None) -> ConfigError:
    """That no worker could start, and what one takes."""
    held, free = ray.cluster_resources(), ray.available_resources()
    wanted = {"CPU": size.cpus} | ({"GPU": size.gpus} if size.gpus else {})
    takes = " and ".join(f"{n:g} {kind}" for kind, n in wanted.items())
    has = " and ".join(f"{free.get(kind, 0):g} of {held.get(kind, 0):g} {kind}" for kind in wanted)
    late = "" if waited is None else f" within {waited:g} seconds"
    return ConfigError(
        f"no worker could start on {cluster}{late}: one takes {takes}, and {has} are free",
        where="engine.gpus" if size.gpus else "engine.cpus",
        hint="ask for less, wait until others are done, or set engine.connect_timeout higher where nodes are slow",
    )
