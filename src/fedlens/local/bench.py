"""What a client rule can have computed besides the steps of local training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.tree import Tree

Risk = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Bench:
    """The client's model and data, for a rule's `start`, `grad`, `solve` and `finish`.

    Attributes:
        learner: the module that is being trained.
        tree: what it was loaded with: the global tree, and the client's own leaves where the model has personal ones.
        data: the examples that it trains on this round.
        risk: (outputs, targets) -> the loss of a batch that the client minimizes: the task's, or FedIR's.
        task_loss: (outputs, targets) -> the task's mean loss, which is what is logged.
        batch: examples to look at a time.
        closing: what has to be undone when the visit ends, whichever way it does.
    """

    model: ModelSpec
    client: Client
    learner: Loadable
    tree: Tree
    data: Any
    risk: Risk
    task_loss: Risk
    batch: int
    closing: ExitStack

    def twin(self, which: str, tree: Tree | None = None) -> Loadable:
        """A second module of the same model, kept for the worker's life under this name, loaded with `tree`.

        Its parameters and buffers are its own: whatever is done with it leaves the learner as it is.
        """
        twin = loadable(self.model, self.client.scratch, self.client.device, which)
        twin.load(self.tree if tree is None else tree)
        return twin

    def gradient(
        self, at: Sequence[Tensor] | None = None, statistics: bool = False
    ) -> tuple[list[Tensor], float]:
        """The gradient of the client's objective over all its examples, and the mean of the task's loss there.

        Args:
            at: the trainable weights to take it at; by default those that local training starts from.
            statistics: whether running statistics of the learner are updated on the way.

        The mean over the examples in stretches of a batch, in their given order, never augmented; in training mode,
        as a step would see them. No random number of the training is used up.
        """
        learner = self.learner if statistics else self.twin("gradient")
        if at is not None:
            with torch.no_grad():
                for own, value in zip(learner.trainable.values(), at, strict=True):
                    if own is not value:
                        own.copy_(value)
        parameters, n = list(learner.trainable.values()), len(self.data)
        learner.module.train()
        total: list[Tensor] = []
        mean = 0.0
        random_state = torch.get_rng_state()
        for start in range(0, n, self.batch):
            inputs, targets = self.data.stretch(start, min(start + self.batch, n))
            outputs = learner.module(inputs)
            share = len(targets) / n
            gradients = gradients_of(self.risk(outputs, targets), parameters)
            mean += share * float(self.task_loss(outputs.detach(), targets))
            if total:
                torch._foreach_add_(total, gradients, alpha=share)
            else:
                total = list(torch._foreach_mul(gradients, share))
        torch.set_rng_state(random_state)
        return total, mean

    def passes(self) -> int:
        """How many batches one full gradient is."""
        return -(-len(self.data) // self.batch)


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each parameter; zero for one that the loss does not depend on."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
