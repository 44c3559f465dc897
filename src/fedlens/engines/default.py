"""The default engine: starts in one process, and uses workers on all cores once they pay."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from fedlens.base.errors import HookError, RunFailed
from fedlens.base.memory import free_memory
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, ClientDataSource, ClientId, ClientStates, Op, Program, Reply
from fedlens.core.schema import nbytes
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.devices import (
    ChannelsLast,
    Computing,
    Device,
    PrecisionSetting,
    default_workers,
    resolved,
)
from fedlens.engines.forwarding import Forwarding
from fedlens.engines.inline import Inline, StateMemory, Threads
from fedlens.engines.on_gpus import OnGpus
from fedlens.engines.processes import Processes, Timeout, Window, Workers
from fedlens.engines.schedule import primed
from fedlens.engines.shared_memory import Packer
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified

_MEASURED = 0.5  # seconds of training that are timed before the decision
_PAYS = 10.0  # seconds of training left, above which workers pay
_WORKER_MEMORY = 2**28  # bytes of a worker besides its trees
_TREES = 6  # trees of the model's size in a worker: weights, gradients, the optimizer's state, a reply


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
    """On the CPU, begins as `inline` and continues as `processes` if the run is long; the same bits either way.

    On GPUs, clients train together where they can, and in workers if several GPUs pay; see `OnGpus`.
    """
    computing = Computing(resolved(device, spread=True), precision, channels_last)
    if computing.device != "cpu":
        more: dict[str, Any] = {"workers": workers, "threads": threads, "channels_last": channels_last}
        more |= {"window": window, "timeout": timeout}
        return verified(OnGpus(state_memory, computing, more), verify, exact=False)
    made = Default(
        Inline(threads, state_memory, computing),
        lambda count: Processes(count, threads, window, state_memory, 1, computing, timeout),
        workers or default_workers(computing, threads),
    )
    return verified(made, verify, exact=True)


class Default(Forwarding):
    """See `default`.

    The first clients are trained in this process and timed. If the rest of the run would take long, workers start in
    the background and take over at the next block of requests. `inline` and `processes` give the same bits, so results
    do not depend on when this happens. Asks in arrival order are always answered in this process: workers would answer
    them in another order.
    """

    def __init__(self, inline: Inline, processes: Callable[[int], Processes], workers: int) -> None:
        self._inline, self._make, self._workers = inline, processes, workers
        self.engine, self.state_memory = inline, inline.state_memory
        self._starting: Processes | None = None  # started, and not open yet
        self._processes: Processes | None = None
        self._unused: Processes | None = None  # gets no more asks, but still answers one
        self._latest = 0  # the number of the last ask
        self._unanswered: set[int] = set()  # numbers of the asks that workers are answering
        self._shared_bytes: int | None = None  # of the program and its data, once counted
        self._images = 0.0  # left to train in the run
        self._seconds = self._timed = 0.0  # of training in this process, and the images in it
        self._first = True
        self._widest = 0  # the most clients that an ask has trained
        self._cramped: int | None = None  # the number of the last ask without memory for workers
        self._tell: Callable[[str | None, Mapping[str, Any]], None] = lambda line, facts: None

    def listen(self, tell: Callable[[str | None, Mapping[str, Any]], None]) -> None:
        """Sets the function that is told which engine works, and how many workers."""
        self._tell = tell

    def choose(
        self,
        ops: Mapping[str, Op],
        data: ClientDataSource,
        clients: Sequence[ClientId],
        cohort: int | None,
        images: float,
    ) -> None:
        """Records how much there is to train; the choice itself is made during the run."""
        self._images = images

    def resume(self, done: int, rounds: int) -> None:
        """Leaves out what an earlier process has trained: workers must pay in the remaining rounds."""
        self._images *= (rounds - done) / rounds

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
        if self._processes is not None:
            return self._by_workers(self._processes, ask, round, exchange)
        return self._here(ask, self._inline.answer(ask, round, exchange), round, exchange)

    def close(self) -> None:
        """Ends the workers, if any, and restores the number of threads."""
        for engine in (self._starting, self._processes, self._unused, self._inline):
            if engine is not None:
                engine.close()

    def _here(
        self, ask: Ask, answers: Generator[Answer, None, None], round: int, exchange: int
    ) -> Generator[Answer, None, None]:
        """Answers in this process, until workers can take over."""
        block = ask.reduce.block if ask.reduce else 1
        slots = len(ask.requests)
        try:
            for slot in range(slots):
                if slot % block == 0 and ask.deadline is None and self._ready(ask, slots - slot):
                    break
                began = time.perf_counter()
                held = [next(answers)]
                self._first = self._first and slot < block
                if isinstance(held[0], Reply) and "batches" in held[0].metrics:
                    self._widest = max(self._widest, slots)
                self._note(held[0], time.perf_counter() - began)
                yield held.pop()  # no variable keeps the reply while the next one is computed
            else:
                return
        finally:
            answers.close()
        assert self._processes is not None
        yield from self._by_workers(self._processes, ask, round, exchange, slot)

    def _by_workers(
        self, processes: Processes, ask: Ask, round: int, exchange: int, first: int = 0
    ) -> Generator[Answer, None, None]:
        """Answers by workers, from the `first` slot on, or in this process if that cannot be sent to them."""
        try:
            answers = processes.answer(ask, round, exchange, first)
        except RunFailed as failure:
            self._stay(processes, failure)
            return self._inline.answer(ask, round, exchange, first)
        number = self._latest
        self._unanswered.add(number)

        def passed_on() -> Generator[Any, None, None]:
            slot = first
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
                self._unanswered.discard(number)
                self._stay(processes, failure)
            finally:
                answers.close()
                self._unanswered.discard(number)
            yield from self._inline.answer(ask, round, exchange, slot)

        return primed(passed_on())

    def _stay(self, processes: Processes, failure: Exception) -> None:
        """Uses this process from now on. The workers end, at once or after an earlier ask that they answer."""
        if self._unanswered:
            self._unused = processes
        else:
            processes.close()
        self._starting, self._processes, self.engine, self._workers = None, None, self._inline, 1
        self._tell(f"the run stays in one process: {failure}", {"name": "inline"})

    def _note(self, answer: Answer, seconds: float) -> None:
        """Counts what a client trained; the first block is not timed, because it fills the caches."""
        if not isinstance(answer, Reply) or "batches" not in answer.metrics:
            return
        images = answer.metrics.get("examples", 0.0)
        self._images -= images
        if not self._first:
            self._seconds, self._timed = self._seconds + seconds, self._timed + images

    def _ready(self, ask: Ask, left: int) -> bool:
        """Whether workers take over now; starts them if that pays."""
        if self._starting is None:
            self._start(ask)
            return False
        if not self._starting.started or left < 2:
            return False
        starting = self._starting
        try:
            starting.open(self._program, self._states)
        except (RunFailed, OSError) as failure:
            self._stay(starting, failure)
            return False
        self._starting, self._processes, self.engine = None, starting, starting
        return True

    def _program_bytes(self) -> int:
        if self._shared_bytes is None:
            try:
                self._shared_bytes = Packer(self._program, code=True).size
            except Exception:  # what cannot be sent is reported when the workers take over
                self._shared_bytes = 0
        return self._shared_bytes

    def _start(self, ask: Ask) -> None:
        if self._workers < 2 or self._timed <= 0 or self._seconds < _MEASURED or sys.platform == "win32":
            return
        seconds = self._seconds * self._images / self._timed
        if seconds < _PAYS:
            return
        if self._widest < 2 or self._cramped == self._latest:
            return
        trees = _TREES * nbytes(ask.shared)
        # Without the trees of this process, and the copy of the program and its data that all workers read.
        left = free_memory() - trees - self._program_bytes()
        count = min(self._workers, self._widest, left // (_WORKER_MEMORY + trees))
        if count < 2:
            if self._cramped is None:
                line = f"two workers would need {_mib(_WORKER_MEMORY + trees)} each, but only "
                line += f"{_mib(max(left, 0))} are free. The run stays in one process until memory is free"
                self._tell(line, {"name": "inline"})
            self._cramped = self._latest
            return
        starting = self._make(count)
        try:
            starting.warm()
        except OSError as error:
            self._stay(starting, error)
            return
        self._starting = starting
        self._tell(
            f"about {seconds:,.0f} s of training are left in one process; {count} workers take over",
            {"name": "processes", "workers": count},
        )


def _mib(size: int) -> str:
    return f"{size // 2**20:,} MiB"
