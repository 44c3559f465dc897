"""Schedules asks: cuts them into blocks, has each answered once, and passes on the answers in request order.

The schedule knows no workers: an engine takes blocks, has them computed, and reports the answers or the loss of a
block.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, Id, Reply
from fedlens.core.schema import nbytes
from fedlens.core.states import Version
from fedlens.engines.client_groups import whole_blocks
from fedlens.engines.executor import Item

DEATHS = 3  # a block that has ended this many workers fails instead of being tried again
LOSSES = 20  # likewise one that was lost with so many workers, even if it cannot be the cause
LATE = "the deadline passed"


def block_size(ask: Ask, group: int) -> int:
    """How many slots form a block: the slots reduced together, or as many multiples of those as a group holds.

    With a deadline, and in arrival order, each client is a block of its own.
    """
    block = ask.reduce.block if ask.reduce else 1
    alone = ask.deadline is not None or ask.order == "arrival"
    return block if alone else max(block, whole_blocks(group, block))


def primed(answers: Generator[Any, None, None]) -> Generator[Answer, None, None]:
    """A generator that has entered its `try`, so that closing it runs the `finally`."""
    next(answers)
    return answers


@dataclass(eq=False)
class Job:
    """An ask in progress. `shared` is for the engine: the shared part of the ask, wherever it is stored."""

    number: int
    ask: Ask
    round: int
    exchange: int
    due: float | None
    blocks: list[range]
    states: list[Version]  # of each slot's client, when it was asked
    shared: Any = None
    waiting: deque[int] = field(default_factory=deque)
    running: int = 0
    done: dict[int, list[Answer]] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # blocks passed on, or given up
    deaths: dict[int, int] = field(default_factory=dict)  # of workers, by the block that they were computing
    losses: dict[int, int] = field(default_factory=dict)  # of workers, by each block that they had
    closed: bool = False

    def failures(self, block: int, reason: str) -> list[Answer]:
        """A failure for each slot of a block."""
        return [
            Failure(Id(self.round, self.exchange, slot), self.ask.requests[slot].client, reason)
            for slot in self.blocks[block]
        ]

    def overdue(self) -> bool:
        """Whether its deadline has passed."""
        return self.due is not None and time.monotonic() > self.due


class Schedule:
    """The asks of one engine.

    Args:
        states: of the clients; each block is computed with those of the time when its ask was made.
        window: approximate bytes of finished replies that may wait for an earlier one.
        send: sends all blocks that may be sent; its argument is the job whose answers are read, None in arrival order.
        wait: waits until a message has arrived, or until the given moment (`time.monotonic`).
        retired: called once for each job, when no worker uses it any more.
    """

    def __init__(
        self,
        states: ClientStates,
        window: int,
        send: Callable[[Job | None], None],
        wait: Callable[[float | None], None],
        retired: Callable[[Job], None],
    ) -> None:
        self._states, self._window = states, window
        self._send, self._wait, self._retired = send, wait, retired
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._arrivals: deque[Job] = deque()  # arrival-order jobs with work left
        self._begun: list[Job] = []  # asks whose answers are not read yet: sent to workers that would idle
        self._block_bytes = 0  # the largest of the replies of a block so far

    def publish(self, ask: Ask, round: int, exchange: int, shared: Any, size: int) -> Job:
        """Adds an ask, cut into blocks of `size` slots; see `block_size`."""
        slots = len(ask.requests)
        blocks = [range(start, min(start + size, slots)) for start in range(0, slots, size)]
        due = None if ask.deadline is None else time.monotonic() + ask.deadline
        held = [self._states.hold(request.client) for request in ask.requests]
        job = Job(next(self._numbers), ask, round, exchange, due, blocks, held, shared)
        job.waiting.extend(range(len(blocks)))
        self._jobs[job.number] = job
        if ask.order == "request":
            self._begun.append(job)
        return job

    def answers(self, job: Job) -> Generator[Answer, None, None]:
        """The answers, computed as they are read; closing the generator drops the others (request order)."""
        if job.ask.order == "request":
            return primed(self._in_order(job))
        if job.blocks:
            self._arrivals.append(job)
        else:
            self._retire(job)  # it has no requests of its own, and receives late answers to earlier asks
        return self._as_they_come()

    def close(self) -> None:
        """Drops everything."""
        self._arrivals.clear()
        self._begun.clear()
        for job in list(self._jobs.values()):
            job.running = 0
            self._retire(job)

    # -- blocks for workers, and their results -------------------------------------------------------------------

    def next(self, current: Job | None, workers: int) -> Job | None:
        """The job whose next block is sent: the current job first, then asks in arrival order, then asks ahead."""
        # Even if no reply fits into the window, each worker may have one block.
        room = max(workers, self._window // max(self._block_bytes, 1))
        if current is not None and current.waiting:
            held = current.running + len(current.done)
            # If no block is running, the slot that is awaited was lost with its worker, and the window would stay full.
            return current if held < room or current.running == 0 else None
        held = sum(job.running + len(job.done) for job in self._arrivals)
        if held < room and (found := next((job for job in self._arrivals if job.waiting), None)) is not None:
            return found
        held = sum(job.running + len(job.done) for job in self._begun)
        return next((job for job in self._begun if job.waiting), None) if held < room else None

    def following(self, job: Job) -> tuple[int, list[Item]]:
        """The next block of a job and its requests, each with its client's state."""
        block, items = job.waiting[0], []
        for slot in job.blocks[block]:
            request, state = job.ask.requests[slot], self._states.read(job.states[slot])
            items.append(Item(Id(job.round, job.exchange, slot), request.client, request.payload, state))
        return block, items

    def begin(self, job: Job) -> None:
        """Marks that block as running, until `finished` or `lost`."""
        job.waiting.popleft()
        job.running += 1

    def finished(self, job: Job, block: int, answers: Sequence[Answer]) -> None:
        """Receives the answers of a block."""
        sizes = [a.nbytes + nbytes(a.state) + nbytes(a.letters) for a in answers if isinstance(a, Reply)] or [
            0
        ]
        # A sum has the size of one reply.
        reduced = max(sizes) if job.ask.reduce else 0
        single = 0 if job.ask.reduce and not job.ask.reduce.keep else sum(sizes)
        self._block_bytes = max(self._block_bytes, reduced + single)
        if not job.closed and block not in job.answered:
            job.done[block] = list(answers)
        self._left(job)

    def lost(self, job: Job, block: int, guilty: bool, reason: str) -> None:
        """Retries a block whose worker is gone, unless it was `guilty` of that too often, or lost too often."""
        if not job.closed and block not in job.answered and block not in job.done:
            job.deaths[block] = job.deaths.get(block, 0) + guilty
            job.losses[block] = job.losses.get(block, 0) + 1
            if job.deaths[block] >= DEATHS or job.losses[block] >= LOSSES:
                job.done[block] = job.failures(block, reason)
            else:
                job.waiting.appendleft(block)
        self._left(job)

    def _left(self, job: Job) -> None:
        job.running -= 1
        self._release(job)

    # -- answering ------------------------------------------------------------------------------------------------

    def _in_order(self, job: Job) -> Generator[Any, None, None]:
        try:
            yield None  # taken by `primed`
            self._begun.remove(job)
            for block in range(len(job.blocks)):
                while block not in job.done:
                    if job.overdue():
                        job.waiting.clear()
                        job.done[block] = job.failures(block, LATE)
                        break
                    self._send(job)
                    self._wait(job.due)
                answers = job.done.pop(block)
                job.answered.add(block)
                self._send(job)
                while answers:
                    yield answers.pop(0)
        finally:
            self._retire(job)

    def _as_they_come(self) -> Generator[Answer, None, None]:
        while self._arrivals:
            for job in list(self._arrivals):
                if job.overdue():
                    job.waiting.clear()
                    for block in sorted(set(range(len(job.blocks))) - job.answered - job.done.keys()):
                        job.done[block] = job.failures(block, LATE)
                for block in list(job.done):
                    answers = job.done.pop(block)
                    job.answered.add(block)
                    if len(job.answered) == len(job.blocks):
                        self._arrivals.remove(job)
                        self._retire(job)
                    self._send(None)
                    while answers:
                        yield answers.pop(0)
            if self._arrivals and not any(job.done for job in self._arrivals):
                self._send(None)
                self._wait(min((job.due for job in self._arrivals if job.due is not None), default=None))

    def _retire(self, job: Job) -> None:
        """Drops the rest of a job; it is removed once no worker uses it any more."""
        job.closed = True
        if job in self._begun:
            self._begun.remove(job)
        job.waiting.clear()
        job.done.clear()
        self._release(job)

    def _release(self, job: Job) -> None:
        if job.closed and job.running == 0 and self._jobs.pop(job.number, None) is not None:
            while job.states:
                self._states.release(job.states.pop())
            self._retired(job)
