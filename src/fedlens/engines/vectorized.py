"""The engine that trains several clients as one batched computation, in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.core.errors import ConfigError, told
from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, Id, Op, Program
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.answering import Fold, Item, copied
from fedlens.engines.inline import Inline, StateMemory, Threads, item_of, random_state_kept

_MEMORY = 2**28  # bytes of a group, unless its size is set
_LARGEST = 128  # more at once are no faster
_ODD = 3  # how often that may be a passing fault
Group = Annotated[
    int | None, Field(ge=1, description="clients computed at once; unless set, as many as fit 256 MiB")
]


def vectorized(
    *, threads: Threads = 1, group: Group = None, state_memory: StateMemory = STATE_MEMORY
) -> Vectorized:
    """Several clients at once: their weights stacked, their batches padded and masked.

    For small models, whose rounds are mostly overhead. Numbers agree with `inline` to rounding, and repeat to the bit.
    """
    return Vectorized(threads, group, state_memory)


class Vectorized(Inline):
    """See `vectorized`. Operations that cannot be done for several clients are done for one after the other."""

    def __init__(self, threads: int = 1, group: int | None = None, state_memory: int = STATE_MEMORY) -> None:
        super().__init__(threads, state_memory)
        self.group = group

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` where the training among these operations cannot be done for several clients at once."""
        for op in ops.values():
            found = op.obstacle() if hasattr(op, "obstacle") else None
            if found is not None:
                raise ConfigError(
                    f"the engine 'vectorized' cannot train several clients at once here: {found.what}",
                    where=found.where,
                    hint=found.hint,
                )

    def open(self, program: Program, states: ClientStates) -> None:
        """Takes the program. Raises `ConfigError` as `check` does."""
        self.check(program.ops)
        super().open(program, states)
        self._sizes: dict[str, int] = {}
        self._odd = 0  # groups that failed, and none of their clients did

    def _answers(self, ask: Ask, ids: Sequence[Id], due: float | None) -> Generator[Answer, None, None]:
        op = self._site.program.ops.get(ask.op)
        if not hasattr(op, "together") or ask.deadline is not None:
            # With a deadline each client counts by itself, and so trains by itself.
            yield from super()._answers(ask, ids, due)
            return
        block = ask.reduce.block if ask.reduce else 1
        group = self._size(ask, op)
        size = max(block, group // block * block)
        with random_state_kept():
            for first in range(0, len(ids), size):
                items = [
                    item_of(ask, id, self._states.get(ask.requests[id.slot].client))
                    for id in ids[first : first + size]
                ]
                answers: list[Answer] = []
                for start in range(0, len(items), group):
                    answers += self._group(ask, items[start : start + group])
                if ask.reduce is None:
                    yield from answers
                    continue
                for start in range(0, len(answers), block):
                    folding = Fold(ask.reduce)
                    folded = [folding.take(answer) for answer in answers[start : start + block]]
                    folded[-1].folded = folding.result()
                    yield from folded

    def _group(self, ask: Ask, items: Sequence[Item]) -> list[Answer]:
        try:
            answers = self._site.together(ask.op, ask.shared, items, ask.expect)
        except Exception as error:
            if len(items) > 1 and _out_of_memory(error):
                half = (len(items) + 1) // 2
                self._sizes[ask.op] = half
                return self._group(ask, items[:half]) + self._group(ask, items[half:])
            # One client after the other tells whose fault it was, or that it is nobody's: each is copied at once, as
            # the next one works on in the memory that it answered with.
            answers = [_own(self._site.answer(ask.op, ask.shared, item, ask.expect)) for item in items]
            self._odd += not any(isinstance(answer, Failure) for answer in answers)
            if self._odd == _ODD:
                raise ConfigError(
                    f"the engine 'vectorized' cannot train this model for several clients at once: {told(error)}",
                    where="engine.name",
                    hint="take engine.name = 'inline' or 'processes'",
                ) from error
            return answers
        # Rows of the group's memory would keep all of it.
        return answers if ask.reduce else [_own(answer) for answer in answers]

    def _size(self, ask: Ask, op: Any) -> int:
        """How many clients are computed at once."""
        if ask.op not in self._sizes and self.group is not None:
            self._sizes[ask.op] = self.group
        if ask.op not in self._sizes:
            data = self._site.program.data
            largest = max((len(data.holder(request.client)) for request in ask.requests), default=1)
            each = op.footprint(torch.device(self._site.program.device), largest)
            self._sizes[ask.op] = min(max(1, _MEMORY // max(1, each)), _LARGEST)
        return self._sizes[ask.op]


def _own(answer: Answer) -> Answer:
    """The answer with its payload and state in memory of their own."""
    if not isinstance(answer, Failure):
        answer.payload, answer.state = copied(answer.payload), copied(answer.state)
    return answer


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
