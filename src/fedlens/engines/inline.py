"""The engine that does all work in this process, one client after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.base.memory import keep_freed_memory, release_freed_memory
from fedlens.core.device_copies import uploaded
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, Id, Op, Payload, Program, Reply
from fedlens.core.random import random_state_kept
from fedlens.core.schema import nbytes, tensors_in
from fedlens.core.states import STATE_MEMORY, Version
from fedlens.core.step_counts import StepCount
from fedlens.core.tree import HEAVY
from fedlens.engines.client_groups import GPU_SHARE
from fedlens.engines.devices import ON_CPU, ChannelsLast, Computing, Device, PrecisionSetting, resolved
from fedlens.engines.executor import Executor, Item, taken
from fedlens.engines.schedule import LATE
from fedlens.engines.traits import EngineTraits, declares

_STATES = 3  # times the size of the server's state: a reply, the sum and the next state, during a round
Threads = Annotated[
    int, Field(ge=1, description="threads per computation; results may differ in the last bits with it")
]
StateMemory = Annotated[
    int,
    Field(
        ge=1,
        description="maximum MiB of client states in memory; the least recently used ones beyond it "
        "are kept in files of the run",
    ),
]


@declares(EngineTraits(exact=True, place="process"))
def inline(
    *,
    threads: Threads = 1,
    device: Device = "auto",
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = "auto",
    state_memory: StateMemory = STATE_MEMORY,
) -> Inline:
    """One process, one client after the other; the reference that every other engine is compared with."""
    return Inline(threads, state_memory, Computing(resolved(device), precision, channels_last))


class Inline(EngineBase):
    """See `inline`.

    In arrival order, requests run in the order in which they were asked, each when its answer is read. This is what an
    asynchronous server sees from clients of equal speed.
    """

    def __init__(
        self, threads: int = 1, state_memory: int = STATE_MEMORY, computing: Computing = ON_CPU
    ) -> None:
        self.threads, self.state_memory, self.computing = threads, state_memory, computing
        self._before: int | None = None
        self._released = False  # whether the memory that a heavy model was built in is freed
        self._options = ExitStack()
        self._scratch: dict[Any, Any] = {}
        self._steps = StepCount()
        self._queue: deque[tuple[Ask, Id, Version, float | None]] = deque()

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` if this machine does not have the device, or the device not the precision."""
        self.computing.check()

    @property
    def local_steps(self) -> StepCount:
        """The local steps taken so far."""
        return self._steps

    def applied(self, program: Program) -> Program:
        """The program on this engine's device, in its arithmetic."""
        return self.computing.applied(program)

    def on_device(self, state: Payload) -> Payload:
        """The state on this engine's GPU if a share of its memory is enough for a round, or the state itself."""
        executor = self._executor
        if executor.device.type != "cuda":
            return state
        if not executor.stays:
            memory: int = torch.cuda.get_device_properties(executor.device).total_memory
            if _STATES * nbytes(state) > memory // GPU_SHARE:
                return state
            executor.stays, self._states.gpu_memory = True, memory // GPU_SHARE
        if all(tensor.is_cuda for tensor in tensors_in(state)):
            return state
        placed: Payload = uploaded(state, executor.device)
        return placed

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program and sets the number of threads. Raises `ConfigError` as `check` does."""
        self.check(program.ops)
        self._before = torch.get_num_threads()  # from here on, `close` restores it
        applied = self.applied(program)
        self._options.enter_context(applied.computing())
        self._scratch[StepCount] = self._steps
        self._executor, self._states = Executor(applied, self._scratch), states
        keep_freed_memory()
        torch.set_num_threads(self.threads)

    def answer(self, ask: Ask, round: int, exchange: int, first: int = 0) -> Generator[Answer, None, None]:
        """Answers an ask in this process, from the slot `first` on."""
        due = None if ask.deadline is None else time.monotonic() + ask.deadline
        ids = [Id(round, exchange, slot) for slot in range(first, len(ask.requests))]
        if ask.order == "arrival":
            # States are committed as answers are read, but each request sees the states from before its ask.
            held = [self._states.hold(request.client) for request in ask.requests]
            self._queue.extend((ask, id, version, due) for id, version in zip(ids, held, strict=True))
            return self._as_asked()
        return self._answers(ask, ids, due)

    def _answers(self, ask: Ask, ids: Sequence[Id], due: float | None) -> Generator[Answer, None, None]:
        size = ask.reduce.block if ask.reduce else 1
        with random_state_kept(self._executor.device):
            for first in range(0, len(ids), size):
                # Nothing is committed before the ask is answered, so each state is read when its request runs.
                items = [
                    item_of(ask, id, self._states.get(ask.requests[id.slot].client))
                    for id in ids[first : first + size]
                ]
                answers = self._work(ask, items, due)
                heavy = any(isinstance(answer, Reply) and answer.nbytes >= HEAVY for answer in answers)
                yield from answers
                del answers  # otherwise they stay in memory while the next ones are computed
                if heavy and not self._released:
                    # Once: the memory that the model was built in is not used again, see `Loadable.give`.
                    self._released = True
                    release_freed_memory()

    def _as_asked(self) -> Generator[Answer, None, None]:
        with random_state_kept(self._executor.device):
            while self._queue:
                ask, id, version, due = self._queue.popleft()
                item = item_of(ask, id, self._states.read(version))
                self._states.release(version)
                yield from self._work(ask, [item], due)

    def _work(self, ask: Ask, items: list[Item], due: float | None) -> list[Answer]:
        late: list[Answer] = [Failure(item.id, item.client, LATE) for item in items]
        if due is not None and time.monotonic() > due:
            return late
        answers = self._executor.block(ask.op, ask.shared, items, ask.expect, ask.reduce)
        for answer in answers:
            # Copied as if it had been sent: the operation may reuse the memory of its answer.
            if ask.reduce is None:
                taken(answer)
        return late if due is not None and time.monotonic() > due else answers

    def close(self) -> None:
        """Restores the number of threads, and returns the memory of the models to the system."""
        while self._queue:
            self._states.release(self._queue.popleft()[2])
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
            self._options.close()
            self._scratch.clear()
            release_freed_memory()


def item_of(ask: Ask, id: Id, state: Payload) -> Item:
    """The request of this slot, with the state of its client."""
    request = ask.requests[id.slot]
    return Item(id, request.client, request.payload, state)
