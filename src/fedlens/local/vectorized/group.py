"""The clients that are trained together, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedlens.core.random import Rng
from fedlens.local.rules import LocalContext, Tensors


@dataclass
class Group:
    """Clients that start from the same weights at the same rate, those with the most steps first.

    Attributes:
        names: the trainable leaves.
        anchor: the weights that they start from.
        lr: the learning rate.
        datas: the examples that each of them trains on.
        sizes: their batch sizes.
        steps: how many steps they take.
        rngs: where their batch orders come from.
        masks: the generators of their dropout masks; None for a model without dropout.
        contexts: what the rule's hooks see of each client; empty for a rule without hooks.
    """

    names: list[str]
    anchor: Tensors
    lr: float
    datas: Sequence[Any]
    sizes: Sequence[int]
    steps: Sequence[int]
    rngs: Sequence[Rng]
    masks: Sequence[torch.Generator | None]
    contexts: list[LocalContext] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.datas)

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
            [problem.data for problem in problems],
            [problem.batch for problem in problems],
            [context.steps for context in contexts],
            rngs,
            masks,
            contexts,
        )
