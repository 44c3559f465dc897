"""Splits clients into groups for batched training, and retries with smaller groups when memory runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field

from fedlens.base.errors import ConfigError, HookError, RunFailed, out_of_memory, told
from fedlens.base.interrupts import from_code
from fedlens.core.arithmetic import Layout
from fedlens.core.protocol import (
    Answer,
    BatchedOp,
    ClientDataSource,
    ClientId,
    Failure,
    Op,
    Payload,
    Program,
    Reduce,
)
from fedlens.core.schema import Schema
from fedlens.engines.devices import Computing
from fedlens.engines.executor import Executor, Item, reduced

CPU = torch.device("cpu")
_CPU_MEMORY = 2**28  # bytes of a group on a CPU, unless its size is set
GPU_SHARE = 8  # a group takes 1/8 of a GPU's memory; so do the server, and clients' states
_LARGEST = 128  # clients; larger groups are no faster on a CPU
_ODD = 3  # groups that may fail without a failing client, before the run ends
AnswerItems = Callable[[Sequence[Item]], list[Answer]]
Group = Annotated[
    int,
    Field(
        ge=1,
        description="clients that a worker computes at once, as 'vectorized' does; 1 gives the same bits as 'inline'",
    ),
]


def check_stackable(
    ops: Mapping[str, Op],
    engine: str,
    where: str = "engine.name",
    hint: str = "choose 'inline' or 'processes'",
) -> None:
    """Raises `ConfigError` if these operations cannot train several clients at once."""
    batched = [op for op in ops.values() if isinstance(op, BatchedOp)]
    if not batched:
        raise ConfigError(
            f"the engine {engine} would train one client after the other: no operation of the algorithm takes several",
            where=where,
            hint=hint,
        )
    for op in batched:
        obstacle = op.obstacle()
        if obstacle is not None:
            raise ConfigError(
                f"the engine {engine} cannot train several clients at once here: {obstacle.what}",
                where=obstacle.where,
                hint=obstacle.hint,
            )


def whole_blocks(group: int, block: int) -> int:
    """The multiple of `block` clients nearest to `group`; a group smaller than a block is unchanged.

    >>> whole_blocks(50, 3), whole_blocks(2, 3)
    (51, 2)
    """
    return group if group < block else round(group / block) * block


def check_groups(ops: Mapping[str, Op], group: int, computing: Computing, engine: str) -> None:
    """Raises `ConfigError` if workers cannot compute clients in groups of this size."""
    if group > 1 and computing.channels_last is True:
        raise ConfigError(
            "batched clients cannot use the channels-last layout",
            where="engine.channels_last",
            hint="set it to 'auto' or false, or engine.group = 1",
        )
    if group > 1:
        check_stackable(
            ops, f"'{engine}' with engine.group = {group}", "engine.group", "set engine.group = 1"
        )


def layout_of(channels_last: Layout, group: int) -> Layout:
    """The layout of workers that compute `group` clients at once: stacked convolutions are contiguous."""
    return False if channels_last == "auto" and group > 1 else channels_last


def fitting(
    op: BatchedOp,
    data: ClientDataSource,
    clients: Sequence[ClientId],
    gpu: int | None = None,
    device: torch.device = CPU,
) -> int:
    """How many of these clients fit into the memory of a group, at least one.

    Args:
        gpu: the bytes of the GPU that the group shares; None for a group on the CPU.
        device: of a trial forward pass. Its memory is the same on all devices, but on a GPU it opens a CUDA context.
    """
    largest = data.largest or max((len(data.data_of(client)) for client in clients), default=1)
    each = max(1, op.footprint(device, largest, data.data_of(clients[0]) if clients else None))
    return max(1, (_CPU_MEMORY if gpu is None else gpu // GPU_SHARE) // each)


class Groups:
    """Answers requests in groups of clients.

    Args:
        size: clients of a group; None takes as many as fit into a group's memory.
    """

    def __init__(self, size: int | None = None) -> None:
        self._wanted = size
        self._sizes: dict[str, int] = {}
        self._odd = 0  # groups that failed without a failing client
        self._reported = False
        self._singly: set[str] = set()  # operations that run out of memory even in a group of one

    def size(self, program: Program, op: str, clients: Sequence[ClientId]) -> int:
        """How many of these clients are computed at once."""
        if op not in self._sizes:
            self._sizes[op] = self._wanted or self._fitting(program, op, clients)
        return self._sizes[op]

    def _fitting(self, program: Program, op: str, clients: Sequence[ClientId]) -> int:
        batched = program.ops[op]
        assert isinstance(batched, BatchedOp)
        device = torch.device(program.device)
        # From values that are the same in all rounds, so that a resumed run has the same groups.
        on_gpu = device.type == "cuda"
        memory: int | None = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
        size = fitting(batched, program.data, clients, memory, device)
        return size if on_gpu else min(size, _LARGEST)

    def answers(
        self,
        executor: Executor,
        op: str,
        shared: Payload,
        items: Sequence[Item],
        expect: Schema,
        reduce: Reduce | None = None,
    ) -> list[Answer]:
        """Answers these requests in groups; with `reduce`, the last answer of a group has its reduced payload."""

        def together(some: Sequence[Item]) -> list[Answer]:
            return executor.together(op, shared, some, expect, reduce)

        def one_by_one(some: Sequence[Item]) -> list[Answer]:
            # Copied at once: training the next client reuses the memory of this answer.
            answers = [executor.alone(op, shared, item, expect) for item in some]
            return answers if reduce is None else reduced(answers, reduce)

        if op in self._singly:
            return one_by_one(items)
        size = self.size(executor.program, op, [item.client for item in items])
        size = whole_blocks(size, reduce.block if reduce else 1)
        answers: list[Answer] = []
        for start in range(0, len(items), size):
            answers += self._group(op, items[start : start + size], together, one_by_one)
        return answers

    def _group(
        self, op: str, items: Sequence[Item], together: AnswerItems, one_by_one: AnswerItems
    ) -> list[Answer]:
        try:
            return together(items)
        except HookError:
            raise
        except BaseException as error:
            if not from_code(error):
                raise
            # The retry is outside of this block: the frames of the error keep the memory of the group alive.
            no_memory, reason = out_of_memory(error), told(error)
        if no_memory and len(items) > 1:
            half = (len(items) + 1) // 2
            self._halve(op, len(items), half)
            parts = items[:half], items[half:]
            return [answer for part in parts for answer in self._group(op, part, together, one_by_one)]
        # Computing one client at a time shows which client failed, if any.
        answers = one_by_one(items)
        if no_memory:
            self._singly.add(op)  # a group of one takes more memory than a single client
            return answers
        self._odd += not any(isinstance(answer, Failure) for answer in answers)
        if self._odd == _ODD:
            raise RunFailed(
                f"several clients cannot be computed at once: {reason}",
                hint="set engine.name = 'inline', or 'processes' with engine.group = 1",
            )
        return answers

    def _halve(self, op: str, many: int, half: int) -> None:
        self._sizes[op] = half
        torch.cuda.empty_cache()  # does nothing where no GPU is in use
        if not self._reported:
            print(  # noqa: T201  (a worker has no other way to report)
                f"out of memory with {many} clients at once; trying {half} at once, and fewer if necessary",
                file=sys.stderr,
            )
            self._reported = True
