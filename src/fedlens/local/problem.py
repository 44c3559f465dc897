"""The computations that a client rule may request besides local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor

from fedlens.base.threads import first
from fedlens.core.arithmetic import gradients_of
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.random import Rng, random_state_kept
from fedlens.core.tree import Tree
from fedlens.tasks.task import Task

Risk = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class BatchMean(list[tuple[float, Tensor]]):
    """A weighted mean: shares, and 0-dim values on a device. `float(mean)` synchronizes with the device.

    >>> float(BatchMean([(0.25, torch.tensor(4.0)), (0.75, torch.tensor(8.0))]))
    7.0
    """

    def __float__(self) -> float:
        return read([self])[0]


def read(means: Sequence[BatchMean]) -> list[float]:
    """Several means of values with one element, in float64, added in order; synchronizes once.

    >>> read([BatchMean([(1.0, torch.tensor([2.0]))]), BatchMean([(0.5, torch.tensor(3.0))])])
    [2.0, 1.5]
    """
    values = iter(torch.stack([value.reshape(()) for mean in means for _, value in mean]).tolist())
    return [reduce(lambda total, part: total + part[0] * next(values), mean, 0.0) for mean in means]


class Objective(NamedTuple):
    """The client's objective at a point: its gradient, its value, and the mean of the task's loss."""

    gradient: list[Tensor]
    value: BatchMean
    loss: BatchMean


@dataclass
class LocalProblem:
    """The client's model and data, for a rule's `start`, `grad`, `solve` and `finish`.

    Attributes:
        learner: the module in training.
        tree: its weights at the start: the global tree, and the client's own leaves of a personal model.
        data: the examples that it trains on this round.
        risk: (outputs, targets) -> the loss of a batch that the client minimizes: the task's, or FedIR's.
        task_loss: (outputs, targets) -> the task's mean loss, which is logged.
        task: the task, whose `losses` are those of each example.
        batch: the number of examples per batch.
        closing: clean-up at the end of local training, also after an error.
        seen: the number of gradient batches besides those of the steps; they count as the client's work.
        rng: the randomness of local training; problems made by hand in tests may have none.
        drop_last: whether `batches` leaves out the last batch of an epoch if it is smaller than the others.
        shared: returns `gradient` if it was computed for several clients together, otherwise None.
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
    task: Task
    seen: int = 0
    rng: Rng | None = None
    drop_last: bool = False
    shared: Callable[[], tuple[list[Tensor], float] | None] | None = None

    def twin(self, which: str, tree: Tree | None = None) -> Loadable:
        """A second module of the same model with weights `tree`, kept in the worker under this name.

        It has its own parameters and buffers, so it never changes the learner.
        """
        twin = loadable(self.model, self.client, which)
        twin.load(self.tree if tree is None else tree)
        return twin

    def gradient(
        self, at: Sequence[Tensor] | None = None, statistics: bool = False
    ) -> tuple[list[Tensor], SupportsFloat]:
        """The gradient of the client's objective over all its examples, and the mean of the task's loss there.

        The arguments are those of `objective`. `float` of the loss synchronizes with the device.
        """
        if self.shared is not None and at is None and not statistics:
            together = self.shared()
            if together is not None:
                self.seen += self.passes()
                return together
        found = self.objective(at, statistics)
        return found.gradient, found.loss

    def objective(
        self, at: Sequence[Tensor] | None = None, statistics: bool = False, over: Batch | None = None
    ) -> Objective:
        """The client's objective over all its examples.

        Args:
            at: the trainable weights; by default those that local training starts from.
            statistics: whether to update running statistics of the learner.
            over: one batch to use instead of all examples.

        It is the mean over the examples, in batches in their given order, without augmentation, and in training mode.
        It does not advance the random generators of training, except for `over`.
        """
        learner = self.learner if statistics else self.twin("gradient")
        if at is not None:
            with torch.no_grad():
                for own, value in zip(learner.trainable.values(), at, strict=True):
                    if own is not value:
                        own.copy_(value)
        learner.module.train()
        if over is not None:
            return self._mean(learner, [over], len(over[1]))
        with random_state_kept(self.client.device):
            return self._mean(learner, self.stretches(), len(self.data))

    def _mean(self, learner: Loadable, batches: Iterable[Batch], n: int) -> Objective:
        parameters = list(learner.trainable.values())
        total: list[Tensor] = []
        value, loss = BatchMean(), BatchMean()
        for inputs, targets in batches:
            outputs = self.task.outputs(learner.module, inputs, targets)
            share = len(targets) / n
            risk = self.risk(outputs, targets)
            gradients = gradients_of(risk, parameters, learner.autocast_dtype)
            value.append((share, risk.detach()))
            with torch.no_grad():
                loss.append((share, self.task_loss(outputs, targets)))
            if total:
                torch._foreach_add_(total, gradients, alpha=share)
            else:
                total = list(torch._foreach_mul(gradients, share))
            self.seen += 1
        return Objective(total, value, loss)

    def batches(self, most: int | None = None) -> Iterator[Batch]:
        """Batches, drawn and augmented like those of local steps; at most `most`, or endless."""
        assert self.rng is not None
        batches: Iterator[Batch] = self.data.batches(self.batch, self.rng, self.drop_last)
        return first(batches, most, self.closing)

    def stretches(self) -> Iterator[Batch]:
        """All examples in batches, in their given order, not augmented."""
        found: Iterator[Batch] = self.data.stretches(0, len(self.data), self.batch)
        return first(found, None, self.closing)

    def passes(self) -> int:
        """The number of batches of one full gradient."""
        return -(-len(self.data) // self.batch)
