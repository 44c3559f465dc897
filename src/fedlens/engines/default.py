"""The engine of a run that names none: the fastest one with the bits of `inline`, or groups of clients on GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from fedlens.base.errors import HookError, RunFailed
from fedlens.base.memory import free_memory
from fedlens.core.engine_base import EngineBase, EngineWork
from fedlens.core.protocol import Answer, Ask, BatchedOp, ClientStates, Program
from fedlens.core.schema import nbytes
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.client_groups import fitting
from fedlens.engines.devices import (
    ChannelsLast,
    Computing,
    Device,
    PrecisionSetting,
    default_workers,
    freest,
    resolved,
    share_of_gpu,
)
from fedlens.engines.engine_choice import PAYS, Chosen
from fedlens.engines.hardware import multiplies_in_bf16
from fedlens.engines.inline import Inline, StateMemory, Threads
from fedlens.engines.processes import Processes, Timeout, Window, Workers
from fedlens.engines.schedule import primed
from fedlens.engines.shared_memory import Packer
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified

_START = 2.0  # seconds in which workers start
_TRIAL = 0.05  # approximate seconds of a longer trial
_MOST_STEPS = 64  # of a trial: a longer visit hides what a visit itself takes
_WORKER_MEMORY = 2**28  # bytes of a worker besides its trees
_TREES = 6  # trees of the model's size in a worker: weights, gradients, the optimizer's state, a reply
_FASTER = 1.3  # times, from which on a run is told of other settings
_TOGETHER = 64  # the most clients of a trial of training them together
_LONG = 1e6  # images of a run, above which several GPUs are used: workers take seconds to start


@declares(EngineTraits(exact=True))
def default(
    *,
    workers: Workers = 0,
    threads: Threads = 1,
    device: Device = "auto",
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = "auto",
    window: Window = 512,
    timeout: Timeout = 3600.0,
    state_memory: StateMemory = STATE_MEMORY,
    verify: Verify = 0,
) -> EngineBase:
    """On the CPU, `inline`, or `processes` if a few timed steps show that the run is long; the same bits either way.

    On GPUs, clients train together where they can, and in workers if several GPUs pay; see `OnGpus`.
    """
    computing = Computing(resolved(device, spread=True), precision, channels_last)
    more = {"threads": threads, "channels_last": channels_last, "window": window, "timeout": timeout}
    if computing.device != "cpu":
        return verified(OnGpus(state_memory, computing, {"workers": workers, **more}), verify, exact=False)
    most = workers or default_workers(computing, threads)
    return verified(Default(state_memory, computing, {"workers": most, **more}), verify, exact=True)


class Default(Chosen):
    """See `default`.

    If a trial shows that the run would take long in this process, workers start in the background and answer the asks
    after that. `inline` and `processes` give the same bits, so results do not depend on this, and config.toml does not
    have it. Asks in arrival order are
    always answered in this process: workers would answer them in another order.
    """

    def __init__(self, state_memory: int, computing: Computing, settings: Mapping[str, Any]) -> None:
        super().__init__(state_memory, computing, settings)
        self._inline = self.engine = Inline(self.common["threads"], state_memory, computing)
        self.table = None  # config.toml keeps `default`
        self._workers: Processes | None = (
            None  # also before their first ask, and while they end an earlier one
        )
        self._open = 0  # asks that workers are answering
        self._latest = 0  # the number of the last ask
        self._work: EngineWork | None = None
        self._left = 1.0  # the share of the run that is left
        self._told = False  # that memory is short
        self._paced: tuple[float, int] | None = (
            None  # images a second of one client in this process, by these steps
        )
        self._advised = False  # of what would be faster
        self._tell: Callable[[str | None, Mapping[str, Any]], None] = lambda line, facts: None

    def listen(self, tell: Callable[[str | None, Mapping[str, Any]], None]) -> None:
        """Sets the function that is told which engine works, and how many workers."""
        self._tell = tell

    def choose(self, work: EngineWork) -> None:
        """Notes the work; the choice itself is made when the run starts."""
        self._work = work

    def resume(self, done: int, rounds: int) -> None:
        """Leaves out what an earlier process has trained: workers must pay in the remaining rounds."""
        self._left = (rounds - done) / rounds

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program. Raises `ConfigError` as `check` does."""
        self._inline.open(program, states)
        self._program, self._states = program, states
        self._tell(None, {"name": "inline"})

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask, in this process or by workers."""
        self._latest += 1
        if ask.order == "arrival":
            return self._inline.answer(ask, round, exchange)
        if self.engine is self._inline and self._seconds > PAYS:
            self._advise()
            self._start(nbytes(ask.shared))
        if self.engine is not self._inline:
            try:
                answers = self.engine.answer(ask, round, exchange)
                return primed(self._by_workers(answers, ask, round, exchange))
            except RunFailed as failure:
                self._stay(failure)
        return self._inline.answer(ask, round, exchange)

    def close(self) -> None:
        """Ends the workers, if any, and restores the number of threads."""
        for engine in (self._workers, self._inline):
            if engine is not None:
                engine.close()

    def _by_workers(
        self, answers: Generator[Answer, None, None], ask: Ask, round: int, exchange: int
    ) -> Generator[Any, None, None]:
        """The answers of workers; from a request on that cannot be sent to them, those of this process."""
        number, slot = self._latest, 0
        self._open += 1
        try:
            yield None  # taken by `primed`
            for answer in answers:
                slot += 1
                yield answer
                del answer  # no variable keeps the reply while waiting for the next one
            return
        except HookError:
            raise
        except RunFailed as failure:
            if number != self._latest:
                raise  # clients' states may have changed since: a later ask has been answered
            self._stay(failure)
        finally:
            answers.close()
            self._open -= 1
            self._end_idle()
        yield from self._inline.answer(ask, round, exchange, slot)

    def _stay(self, failure: Exception) -> None:
        """Uses this process from now on."""
        self.engine, self._seconds = self._inline, 0.0
        self._tell(f"the run stays in one process: {failure}", {"name": "inline"})
        self._end_idle()

    def _end_idle(self) -> None:
        """Ends workers that get no further ask, once they have answered the earlier ones."""
        if self.engine is self._inline and self._workers is not None and not self._open:
            self._workers.close()
            self._workers = None

    @cached_property
    def _seconds(self) -> float:
        """About the seconds of training that are left in one process, if workers can help; else 0."""
        work, seconds, steps = self._work, 0.0, 1
        if work is None or sys.platform == "win32" or min(self.common["workers"], work.cohort or 1) < 2:
            return 0.0
        while True:
            found = self.timed("inline", {}, work.trial(steps), work, 1, rounds=2)
            seconds = self._left * work.images * found[0] / found[1] if found else 0.0
            self._paced = (found[1] / found[0], steps) if found else None
            longer = min(_MOST_STEPS, int(_TRIAL / found[0])) if found else 0
            if seconds < PAYS or steps > 1 or longer < 2:
                return seconds
            steps = longer

    def _advise(self) -> None:
        """Tells once what would train clearly faster and is not the default because it changes the last bits."""
        work, batched = self._work, [op for op in self._program.ops.values() if isinstance(op, BatchedOp)]
        if self._advised or self._left < 1 or work is None or self._paced is None or not batched:
            return
        self._advised = True
        (pace, steps), cohort = self._paced, work.cohort or 1
        trial = work.trial(steps)
        if trial.convolutions:
            if self.computing.precision != "fp32" or not multiplies_in_bf16():
                return
            change, found = (
                "engine.precision=bf16",
                self.timed("inline", {"precision": "bf16"}, trial, work, 1),
            )
        elif any(op.obstacle() for op in batched):
            return
        else:
            pace *= min(self.common["workers"], cohort)  # which the run may have
            change = "engine.name=vectorized"
            found = self.timed("vectorized", {}, trial, work, min(_TOGETHER, cohort))
        times = found[1] / found[0] / pace if found else 0.0
        if times >= _FASTER:
            line = f"--set {change} would train about {times:.1f} times as fast, by a few timed steps; results would "
            self._tell(line + "agree up to rounding", {"name": "inline"})

    @cached_property
    def _program_bytes(self) -> int:
        with suppress(Exception):  # what cannot be sent is reported when the workers open
            return Packer(self._program, code=True).size
        return 0

    def _start(self, tree: int) -> None:
        """Starts workers. They take over with the next ask after their start; at once if a round takes longer.

        Args:
            tree: bytes of the model.
        """
        assert self._work is not None
        try:
            if self._workers is None and (count := self._fitting(tree)) > 1:
                made, _ = self.make("processes", {"workers": count})
                assert isinstance(made, Processes)
                made.warm()
                self._workers = made
                line = f"about {self._seconds:,.0f} s of training are left in one process; {count} workers take over"
                self._tell(line, {"name": "processes", "workers": count})
            long = self._seconds > _START * self._left * self._work.rounds
            if self._workers is not None and (long or self._workers.started):
                self._workers.open(self._program, self._states)
                self.engine = self._workers
        except (RunFailed, OSError) as failure:
            self._stay(failure)

    def _fitting(self, tree: int) -> int:
        """The number of workers that have a client in a round and fit into the memory; says so if it is below two."""
        assert self._work is not None
        each = _WORKER_MEMORY + _TREES * tree
        # Without the trees of this process, and the copy of the program and its data that all workers read.
        left = free_memory() - _TREES * tree - self._program_bytes
        if left < 2 * each and not self._told:
            line = f"two workers would need {_mib(each)} each, but only {_mib(max(left, 0))} are free. "
            self._tell(line + "The run stays in one process until memory is free", {"name": "inline"})
            self._told = True
        return min(int(self.common["workers"]), self._work.cohort or 1, left // each)


def _mib(size: int) -> str:
    return f"{size // 2**20:,} MiB"


class OnGpus(Chosen):
    """`vectorized` on one GPU, `processes` with groups on several, or `inline` if only one client trains at a time.

    The choice depends on the experiment and on the free memory of the GPUs, not on timing. Groups change the last bits,
    so the choice is written to the run's config.toml, and a resumed run keeps it.
    """

    def choose(self, work: EngineWork) -> str:
        """Chooses the engine; returns one line with the choice, and the reason if not all GPUs are used."""
        device, cohort = self.computing.device, work.cohort or 1
        batched = [op for op in work.ops.values() if isinstance(op, BatchedOp)]
        workers, one_gpu = self._count(cohort, work)
        most = -(-cohort // workers)
        apart = self._apart(batched, most)
        if one_gpu:
            device = freest()
        group = 1
        if apart is None:
            # If this process trains, it may open a context on the GPU.
            free = share_of_gpu(device, workers) if workers > 1 else torch.cuda.mem_get_info(device)[0]
            steady = 1 << (max(free, 1).bit_length() - 1)  # a power of 2: a repeated run has the same groups
            sizes = [fitting(op, work.data, work.clients, steady) for op in batched]
            group = min(*sizes, most)
            apart = "the free memory of the GPU holds no group" if group == 1 else None
        name = "processes" if workers > 1 else "inline" if apart else "vectorized"
        self._take(name, {"device": device, "workers": workers, "group": group}, "")
        line = f"engine: {name}"
        line += f" on {device}, as {one_gpu}" if one_gpu else ""
        line += f", {workers} workers" if workers > 1 else ""
        if one_gpu and cohort == 1:
            return line  # which states the reason
        return f"{line}, one client at a time, as {apart}" if apart else f"{line}, groups of {group} clients"

    def _apart(self, batched: Sequence[BatchedOp], most: int) -> str | None:
        """Why clients cannot train together if a process has at most `most` of them; None if they can."""
        if most == 1 or not batched:
            return "no process has several clients to train together in a round"
        if self.common.get("channels_last") is True:
            return "batched clients cannot use the channels-last layout"
        return next((obstacle.what for op in batched if (obstacle := op.obstacle())), None)

    def _count(self, cohort: int, work: EngineWork) -> tuple[int, str]:
        """The number of workers (1: none), and why only one of several GPUs is used; empty if all are."""
        limit = int(self.common.get("workers", 0))
        several = self.computing.device == "cuda" and torch.cuda.device_count() > 1
        default = default_workers(self.computing, int(self.common.get("threads", 1))) if several else 1
        count, why = min(limit or default, cohort), ""
        if cohort == 1:
            why = "one client trains at a time"
        elif limit == 1:
            why = "engine.workers is 1"
        elif sys.platform == "win32":
            why = "workers need Linux or macOS"
        elif not limit and work.images < _LONG:
            why = "the run is short"
        elif count > 1:
            try:
                Packer(Program(work.ops, work.data, 0), code=True)
            except Exception:
                why = "the operations cannot be sent to workers"
        return (1, why if several else "") if why else (count, "")
