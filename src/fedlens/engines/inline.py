"""The engine that does all work in this process, one client after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Annotated

import torch
from pydantic import Field

from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, Id, Program, Reply
from fedlens.engines.answering import Item, Site, copied
from fedlens.engines.memory import keep_freed_memory

Threads = Annotated[
    int, Field(ge=1, description="threads of one computation; results depend on it in the last bit")
]


def inline(*, threads: Threads = 1) -> Inline:
    """One process, one client after the other; the reference that every other engine is compared with."""
    return Inline(threads)


class Inline:
    """See `inline`.

    In arrival order, requests are worked off in the order in which they were asked, each when its answer is called
    for: what an asynchronous server would see from clients of equal speed.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._before: int | None = None
        self._queue: deque[tuple[Ask, Item, float | None]] = deque()

    def open(self, program: Program, states: ClientStates) -> None:
        """Takes the program and sets the number of threads."""
        self._site, self._states = Site(program), states
        keep_freed_memory()
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask in this process."""
        due = None if ask.deadline is None else time.monotonic() + ask.deadline
        items = (
            Item(Id(round, exchange, slot), request.client, request.payload, self._states.get(request.client))
            for slot, request in enumerate(ask.requests)
        )
        if ask.order == "arrival":
            self._queue.extend((ask, item, due) for item in items)
        return self._answers(ask, items, due)

    def _answers(self, ask: Ask, items: Iterator[Item], due: float | None) -> Generator[Answer, None, None]:
        random_state = torch.get_rng_state()
        try:
            if ask.order == "arrival":
                while self._queue:
                    earlier, item, until = self._queue.popleft()
                    yield from self._work(earlier, [item], until)
            else:
                for block in _blocks(items, ask.reduce.block if ask.reduce else 1):
                    yield from self._work(ask, block, due)
        finally:
            torch.set_rng_state(random_state)

    def _work(self, ask: Ask, items: list[Item], due: float | None) -> list[Answer]:
        late: list[Answer] = [Failure(item.id, item.client, "the deadline passed") for item in items]
        if due is not None and time.monotonic() > due:
            return late
        answers = self._site.block(ask.op, ask.shared, items, ask.expect, ask.reduce)
        for answer in answers:
            # As if it had been sent: the operation may work on in the memory that it answered with.
            if isinstance(answer, Reply) and ask.reduce is None:
                answer.payload, answer.state = copied(answer.payload), copied(answer.state)
        return late if due is not None and time.monotonic() > due else answers

    def close(self) -> None:
        """Gives back the number of threads that it found."""
        self._queue.clear()
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


def _blocks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    block: list[Item] = []
    for item in items:
        block.append(item)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block
