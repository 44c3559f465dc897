"""The engine that trains several clients as one batched computation, in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, BatchedOp, ClientStates, Id, Op, Program
from fedlens.core.random import random_state_kept
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.client_groups import Groups, check_stackable, whole_blocks
from fedlens.engines.devices import ON_CPU, Computing, Device, PrecisionSetting, resolved
from fedlens.engines.executor import taken
from fedlens.engines.inline import Inline, StateMemory, Threads, item_of
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified

Group = Annotated[
    int | None,
    Field(
        ge=1,
        description="clients computed at once; by default as many as fit into 256 MiB, or an eighth of a GPU's memory",
    ),
]


@declares(EngineTraits(place="process", groups=True))
def vectorized(
    *,
    threads: Threads = 1,
    group: Group = None,
    device: Device = "auto",
    precision: PrecisionSetting = "fp32",
    state_memory: StateMemory = STATE_MEMORY,
    verify: Verify = 0,
) -> EngineBase:
    """Several clients at once: their weights stacked, their batches padded and masked.

    For small models, whose rounds are mostly overhead. Results agree with `inline` up to rounding, and are reproducible
    to the bit.
    """
    computing = Computing(resolved(device), precision)
    return verified(Vectorized(threads, group, state_memory, computing), verify, exact=False)


class Vectorized(Inline):
    """See `vectorized`. Other operations run for one client after the other."""

    def __init__(
        self,
        threads: int = 1,
        group: int | None = None,
        state_memory: int = STATE_MEMORY,
        computing: Computing = ON_CPU,
    ) -> None:
        super().__init__(threads, state_memory, computing)
        self.group = group

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` if these operations cannot train several clients at once."""
        super().check(ops)
        check_stackable(ops, "'vectorized'")

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program. Raises `ConfigError` as `check` does."""
        super().open(program, states)
        self._groups = Groups(self.group)

    def _answers(self, ask: Ask, ids: Sequence[Id], due: float | None) -> Generator[Answer, None, None]:
        if not isinstance(self._executor.program.ops.get(ask.op), BatchedOp) or ask.deadline is not None:
            # With a deadline, each client is timed, so it trains alone.
            yield from super()._answers(ask, ids, due)
            return
        block = ask.reduce.block if ask.reduce else 1
        group = self._groups.size(
            self._executor.program, ask.op, [request.client for request in ask.requests]
        )
        size = max(block, whole_blocks(group, block))
        with random_state_kept(self._executor.device):
            for first in range(0, len(ids), size):
                items = [
                    item_of(ask, id, self._states.get(ask.requests[id.slot].client))
                    for id in ids[first : first + size]
                ]
                self._executor.groups = self._groups
                try:
                    answers = self._executor.block(ask.op, ask.shared, items, ask.expect, ask.reduce)
                finally:
                    self._executor.groups = None
                # A row is a view, which keeps the memory of its whole group alive.
                yield from answers if ask.reduce and not ask.reduce.keep else map(taken, answers)
