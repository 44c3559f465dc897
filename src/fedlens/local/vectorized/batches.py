"""The clients of a group and their batches: short ones are padded, and the padding has weight 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.base.threads import first
from fedlens.core.device_copies import uploaded
from fedlens.core.protocol import GroupExamples
from fedlens.core.random import Rng
from fedlens.local.rules import LocalContext, Tensors


@dataclass
class Group:
    """Clients with the same initial weights and learning rates, in descending order of steps.

    Attributes:
        names: the trainable leaves.
        anchor: the weights that all clients start from.
        lr: the learning rate.
        examples: the clients' examples, if they are read together; otherwise each context has its own.
        sizes: the clients' batch sizes.
        steps: the clients' numbers of steps.
        rngs: the randomness of the clients' batch orders.
        masks: the generators of the clients' dropout masks; None for a model without dropout.
        drop_last: whether the last batch of an epoch is left out if it is smaller than the others.
        contexts: the contexts of the rule's hooks, one per client; empty for a rule without hooks.
        scales: the learning rate of each leaf as a multiple of the step's; empty if all are 1.
    """

    names: list[str]
    anchor: Tensors
    lr: float
    examples: GroupExamples | None
    sizes: Sequence[int]
    steps: Sequence[int]
    rngs: Sequence[Rng]
    masks: Sequence[torch.Generator | None]
    drop_last: bool = False
    contexts: list[LocalContext] = field(default_factory=list)
    scales: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def rate(self, step: int) -> float:
        """The learning rate of a step, the same for all clients."""
        return self.contexts[0].rate(step) if self.contexts else self.lr

    @classmethod
    def of(
        cls, contexts: list[LocalContext], rngs: Sequence[Rng], masks: Sequence[torch.Generator | None]
    ) -> Group:
        """The group of the clients with these contexts."""
        first, problems = contexts[0], [context.problem for context in contexts]
        return cls(
            first.names,
            first.anchor,
            first.lr,
            first.problem.data.group([problem.data for problem in problems[1:]]),
            [problem.batch for problem in problems],
            [context.steps for context in contexts],
            rngs,
            masks,
            first.problem.drop_last,
            contexts,
            first.scales,
        )


class Batch(NamedTuple):
    """The batches of one step, for the A clients that take it.

    Attributes:
        inputs, targets: [A, B, ...].
        weights: [A, B]: 1 / the number of a client's examples, and 0 for padding.
        counts: the number of each client's examples.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    counts: list[int]


def batches(group: Group, like: Tensor) -> Iterator[Batch]:
    """The batches of all steps of these clients; weights have the dtype and the device of `like`."""
    if group.examples is not None:
        positions = group.examples.batches(group.sizes, group.rngs, group.steps, group.drop_last)
        return _read_together(group.examples, positions, like)
    problems = [context.problem for context in group.contexts]
    streams = [
        first(problem.data.batches(size, rng, group.drop_last), steps, problem.closing)
        for problem, size, rng, steps in zip(problems, group.sizes, group.rngs, group.steps, strict=True)
    ]
    return _side_by_side(streams, group.steps, like)


def held_bytes(data: Any, n: int) -> int:
    """The bytes of images that a client with n examples keeps in memory while it trains."""
    return 0 if data.group([]) is not None else int(data.held(n))


def stretches(contexts: Sequence[LocalContext], like: Tensor) -> Iterator[Batch]:
    """All examples of these clients in their own order; the client with the most batches comes first."""
    problems = [context.problem for context in contexts]
    steps = [problem.passes() for problem in problems]
    examples = problems[0].data.group([problem.data for problem in problems[1:]])
    if examples is not None:
        return _read_together(
            examples, examples.batches([problem.batch for problem in problems], None, steps), like
        )
    return _side_by_side([problem.stretches() for problem in problems], steps, like)


def _read_together(examples: GroupExamples, positions: Tensor, like: Tensor) -> Iterator[Batch]:
    """Reads the examples of all clients of a step at once, from the dataset that they share.

    Args:
        examples: of all clients.
        positions: of all steps, as `GroupExamples.batches` returns them.
        like: weights have its dtype and device.
    """
    real = positions >= 0
    # A short batch is padded with its own first example, because values of another client may be NaN.
    positions = torch.where(real, positions, positions[:, :, :1]).contiguous()
    counts = real.sum(2)
    # Moved once for all steps, so that no step waits for a copy.
    weights = uploaded(real.to(like.dtype) / counts.clamp(min=1).unsqueeze(2), like.device)
    positions, size = uploaded(positions, examples.device), positions.shape[2]
    for step, row in enumerate(counts.tolist()):
        active = len(row) - row.count(0)
        inputs, targets = examples.read(positions[step, :active].flatten())
        yield Batch(
            inputs.view(active, size, *inputs.shape[1:]),
            targets.view(active, size, *targets.shape[1:]),
            weights[step, :active],
            row[:active],
        )


def _side_by_side(
    streams: Sequence[Iterator[tuple[Tensor, Tensor]]], steps: Sequence[int], like: Tensor
) -> Iterator[Batch]:
    """Each client's own batches, padded to one length and stacked."""
    before: list[int] = []
    for step in range(steps[0]):
        active = sum(count > step for count in steps)
        pairs = [next(stream) for stream in streams[:active]]
        counts = [len(targets) for _, targets in pairs]
        size = max(counts)
        if counts != before:
            placed = torch.zeros(active, size, dtype=like.dtype)
            for k, count in enumerate(counts):
                placed[k, :count] = 1 / count
            weights, before = uploaded(placed, like.device), counts
        yield Batch(
            torch.stack([_padded(inputs, size) for inputs, _ in pairs]),
            torch.stack([_padded(targets, size) for _, targets in pairs]),
            weights,
            counts,
        )


def _padded(value: Tensor, size: int) -> Tensor:
    if len(value) == size:
        return value
    return torch.cat([value, value[:1].expand(size - len(value), *value.shape[1:])])
