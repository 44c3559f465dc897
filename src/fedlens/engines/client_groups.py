"""Several clients answered as one batched computation: how many at once, and what if that does not go."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field

from fedlens.core.arithmetic import Layout
from fedlens.core.errors import ConfigError, out_of_memory, told
from fedlens.core.protocol import Answer, BatchedOp, ClientId, Failure, Op, Payload, Program
from fedlens.core.schema import Schema
from fedlens.engines.devices import Computing
from fedlens.engines.executor import Executor, Item

GROUP_MEMORY = 2**28  # bytes of a group, unless its size is set
_SHARE = 8  # of a GPU's memory, one part in so many is a group's
_LARGEST = 128  # more at once are no faster on a CPU
_ODD = 3  # how often that may be a passing fault
Group = Annotated[
    int,
    Field(
        ge=1,
        description="clients that a worker computes at once, as 'vectorized' does; with 1 the numbers are those of "
        "'inline' to the bit",
    ),
]


def check_stackable(ops: Mapping[str, Op], engine: str) -> None:
    """Raises `ConfigError` where the training among these operations cannot be done for several clients at once."""
    for op in ops.values():
        found = op.obstacle() if isinstance(op, BatchedOp) else None
        if found is not None:
            raise ConfigError(
                f"the engine {engine} cannot train several clients at once here: {found.what}",
                where=found.where,
                hint=found.hint,
            )


def whole_blocks(group: int, block: int) -> int:
    """As many clients as come nearest to a group in whole blocks of those that are folded; fewer than one stay so.

    >>> whole_blocks(50, 3), whole_blocks(2, 3)
    (51, 2)
    """
    return group if group < block else round(group / block) * block


def check_groups(ops: Mapping[str, Op], group: int, computing: Computing, engine: str) -> None:
    """Raises `ConfigError` where workers cannot compute clients in groups of this size."""
    if group > 1 and computing.channels_last is True:
        raise ConfigError(
            "clients that are computed together have no layout with the channels last",
            where="engine.channels_last",
            hint="set it to 'auto' or false, or engine.group = 1",
        )
    if group > 1:
        check_stackable(ops, f"'{engine}' with engine.group = {group}")


def layout_of(channels_last: Layout, group: int) -> Layout:
    """The layout of workers that compute `group` clients at once: stacked convolutions are contiguous."""
    return False if channels_last == "auto" and group > 1 else channels_last


class Groups:
    """How a site answers several clients at once.

    Args:
        size: how many; None takes as many as fit into a stretch of memory.
    """

    def __init__(self, size: int | None = None) -> None:
        self._wanted = size
        self._sizes: dict[str, int] = {}
        self._odd = 0  # groups that failed, and none of their clients did
        self._told = False
        self._singly: set[str] = set()  # operations for which memory runs out however few there are

    def size(self, program: Program, op: str, clients: Sequence[ClientId]) -> int:
        """How many clients of these are computed at once."""
        if op not in self._sizes:
            self._sizes[op] = self._wanted or self._fitting(program, op, clients)
        return self._sizes[op]

    def _fitting(self, program: Program, op: str, clients: Sequence[ClientId]) -> int:
        batched = program.ops[op]
        assert isinstance(batched, BatchedOp)
        device = torch.device(program.device)
        # Of what does not change from round to round, so that a resumed run has the same groups.
        largest = program.data.largest or max(
            (len(program.data.holder(client)) for client in clients), default=1
        )
        data = program.data.holder(clients[0]) if clients else None
        each = max(1, batched.footprint(device, largest, data))
        if device.type != "cuda":
            return min(max(1, GROUP_MEMORY // each), _LARGEST)
        whole: int = torch.cuda.get_device_properties(device).total_memory
        return max(1, whole // _SHARE // each)

    def answers(
        self, site: Executor, op: str, shared: Payload, items: Sequence[Item], expect: Schema, block: int = 1
    ) -> list[Answer]:
        """Answers these requests in groups; `block` of them are folded at a time."""
        size = whole_blocks(self.size(site.program, op, [item.client for item in items]), block)
        if op in self._singly:
            return [site.alone(op, shared, item, expect) for item in items]
        found: list[Answer] = []
        for start in range(0, len(items), size):
            found += self._group(site, op, shared, items[start : start + size], expect)
        return found

    def _group(
        self, site: Executor, op: str, shared: Payload, items: Sequence[Item], expect: Schema
    ) -> list[Answer]:
        try:
            return site.together(op, shared, items, expect)
        except Exception as error:
            # Nothing is tried in here: the error's frames hold all the memory that the group had.
            no_memory, reason = out_of_memory(error), told(error)
        if no_memory and len(items) > 1:
            half = (len(items) + 1) // 2
            self._halve(op, len(items), half)
            parts = items[:half], items[half:]
            return [a for part in parts for a in self._group(site, op, shared, part, expect)]
        # One client after the other tells whose fault it was, or that it is nobody's: each is copied at once, as the
        # next one works on in the memory that it answered with.
        answers = [site.alone(op, shared, item, expect) for item in items]
        if no_memory:
            self._singly.add(op)  # even one takes more together than alone
            return answers
        self._odd += not any(isinstance(answer, Failure) for answer in answers)
        if self._odd == _ODD:
            raise ConfigError(
                f"this model cannot be trained for several clients at once: {reason}",
                where="engine.name",
                hint="take engine.name = 'inline', or 'processes' with engine.group = 1",
            )
        return answers

    def _halve(self, op: str, many: int, half: int) -> None:
        self._sizes[op] = half
        torch.cuda.empty_cache()  # does nothing where no GPU is in use
        if not self._told:
            print(  # noqa: T201  (a worker has nobody else to tell)
                f"memory ran out for {many} clients at once; {half} at once are tried, and fewer if need be",
                file=sys.stderr,
            )
            self._told = True
