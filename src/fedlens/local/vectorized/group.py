"""The clients of a group, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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
