"""Optimal convex aggregation: the weights of a combination of models that score best on some data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedlens.base.errors import ConfigError
from fedlens.base.threads import first
from fedlens.core.arithmetic import gradients_of
from fedlens.core.convex_combination import ModelMatrix, uniform_simplex
from fedlens.core.modules import Loadable
from fedlens.core.random import Rng
from fedlens.tasks.central_evaluation import measured
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task

SEARCH_RATE = 0.3  # of SGD in the softmax's inputs: at 1 and 3, losses on CIFAR-10 ended larger


@dataclass(frozen=True, eq=False)
class WeightCandidate:
    """Weights [K] of a combination, and how the combined model does on the data.

    `score` is the task's score, larger is better, and `loss` its mean loss; None where the task has none.
    """

    weights: Tensor
    score: float | None
    loss: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better: the score, then the negative loss. What is not a number comes last."""
        return _rank(self.score), _rank(None if self.loss is None else -self.loss)


@dataclass(frozen=True)
class OptimalWeights:
    """The candidates of a search: the average first, then the end of the search from each start."""

    candidates: Sequence[WeightCandidate]

    @property
    def average(self) -> WeightCandidate:
        """The average that the search was given."""
        return self.candidates[0]

    @property
    def best(self) -> WeightCandidate:
        """The candidate with the largest score; of equal scores, the one with the smallest loss, then the first."""
        return max(self.candidates, key=lambda candidate: candidate.rank)

    @property
    def weights(self) -> Tensor:
        """float64 [K]: the weights of the best candidate, at least 0, with the sum 1."""
        return self.best.weights

    @property
    def gain(self) -> float:
        """How much the best candidate's score is above the average's; of a task without a score, the loss below."""
        best, average = (part.rank[self.best.score is None] for part in (self.best, self.average))
        return best - average if best > average else 0.0

    @property
    def distance(self) -> float:
        """The total variation distance of the weights from the average, `sum_k |w_k - a_k| / 2`, in [0, 1]."""
        return float((self.weights - self.average.weights).abs().sum()) / 2


def optimal_weights(
    task: Task,
    learner: Loadable,
    data: Any,
    models: ModelMatrix,
    average: Tensor,
    *,
    lr: float,
    rng: Rng,
    epochs: int = 20,
    batch_size: int = 32,
    starts: int = 3,
    size: EvaluationSize = FULL,
) -> OptimalWeights:
    """The weights w on the simplex for which `sum_k w_k theta_k` scores best on the data (chen2022, Eq. 5, B.2).

    SGD descends the task's loss in z, with `w = softmax(z)`: `dL/dw_k = <theta_k, dL/dtheta>` of the combined model,
    and `dL/dz_k = w_k (dL/dw_k - sum_j w_j dL/dw_j)`. The first start is the center of the simplex, the others are
    drawn uniformly from it. The average is a candidate too, so the result is never worse than it on these data.

    A step is one forward and one backward pass of one combined model, in evaluation mode. Statistics of batch
    normalization are combined with the same weights, and no gradient flows through them. A detector, which returns
    losses only in training mode, is in training mode, with its batch normalization and dropout in evaluation mode.

    Args:
        task: gives the loss of a batch and the score.
        learner: the module, with the leaves that all models share already loaded. Afterwards it holds a candidate.
        data: examples with `batches` and `stretches`, as `fedlens.data.client_datasets.ClientDataset`.
        models: the K models, on the learner's device.
        average: [K], the weights of the plain average.
        lr: the learning rate in z, constant. The paper states one that is missing from our copy of its text.
        rng: of the starts and the order of the batches.
        epochs: passes over the data from each start.
        batch_size: examples in a step, and in a batch of an evaluation.
        starts: how many starts there are.
        size: of the images on which candidates are compared; the search descends on images of their stored size.

    Raises `ConfigError` without an example, without a start, or if `average` has another length than the models.

    >>> from fedlens.tasks.optimal_weights import OptimalWeights, WeightCandidate
    >>> half, first = (torch.tensor(w, dtype=torch.float64) for w in ([0.5, 0.5], [1.0, 0.0]))
    >>> found = OptimalWeights([WeightCandidate(half, 0.7, 1.0), WeightCandidate(first, 0.7, 0.9)])
    >>> found.weights.tolist(), found.distance
    ([1.0, 0.0], 0.5)
    """
    _refuse(data, models, average, starts)
    search = _Search(task, learner, data, models, lr, epochs, batch_size, size)
    average = average.detach().cpu().double()
    points = [average / average.sum()]
    if len(models) > 1:
        drawn = uniform_simplex(starts - 1, len(models), rng.torch("starts"))
        center = torch.full((1, len(models)), 1 / len(models))
        points += [
            search.descended(start, rng.child("start", at))
            for at, start in enumerate(torch.cat([center, drawn]))
        ]
    return OptimalWeights([search.candidate(weights) for weights in points])


def weight_gradient(task: Task, learner: Loadable, models: ModelMatrix, inputs: Any, targets: Any) -> Tensor:
    """float32 [K]: the gradient of a batch's loss in the weights of the combination that the learner holds.

    `dL/dw_k = <theta_k, dL/dtheta>`, over the trainable leaves of the K models. The module's mode is left as it is.
    """
    loss = task.loss(task.outputs(learner.module, inputs, targets), targets)
    names = [name for name in models.names if name in learner.trainable]
    gradients = gradients_of(loss, [learner.trainable[name] for name in names], learner.autocast_dtype)
    known = dict(zip(names, gradients, strict=True))
    device = models.matrix.device
    # No gradient flows through statistics and frozen leaves.
    none = {n: torch.zeros(learner.spec[n].shape, device=device) for n in models.names if n not in known}
    return models.matrix @ models.flattened({**none, **known})


def combine_gradient(weights: Tensor, gradient: Tensor) -> Tensor:
    """The gradient [K] in z of `weights = softmax(z)`, from the gradient [K] in the weights.

    >>> combine_gradient(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 3.0]))
    tensor([-0.5000,  0.5000])
    """
    return weights * (gradient - weights @ gradient)


@dataclass(frozen=True)
class _Search:
    """One search: its data and settings."""

    task: Task
    learner: Loadable
    data: Any
    models: ModelMatrix
    lr: float
    epochs: int
    batch_size: int
    size: EvaluationSize

    def descended(self, start: Tensor, rng: Rng) -> Tensor:
        """float64 [K]: the weights after all epochs; those of the last finite step if the loss is no number."""
        module, device = self.learner.module, self.models.matrix.device
        _differentiable(self.task, module)
        z = start.to(device).clamp(min=torch.finfo(start.dtype).tiny).log()
        steps = self.epochs * math.ceil(len(self.data) / self.batch_size)
        with ExitStack() as ending:
            for inputs, targets in first(self.data.batches(self.batch_size, rng), steps, ending):
                weights = z.softmax(0)
                self.learner.load(self.models.combined(weights))
                gradient = weight_gradient(self.task, self.learner, self.models, inputs, targets)
                step = self.lr * combine_gradient(weights, gradient)
                if not bool(step.isfinite().all()):
                    break
                z = z - step
        return z.cpu().double().softmax(0)

    def candidate(self, weights: Tensor) -> WeightCandidate:
        """The weights with the score and the loss of their model on all data."""
        self.learner.load(self.models.combined(weights.to(self.models.matrix.device)))
        found = measured(
            self.task, self.learner, self.data, self.batch_size, 0, len(self.data), size=self.size
        )
        metrics = self.task.metrics(found)
        score = None if self.task.score is None else metrics.get(self.task.score, math.nan)
        return WeightCandidate(weights, score, metrics.get("loss"))


def _differentiable(task: Task, module: nn.Module) -> None:
    """Evaluation mode; for a module that takes targets, training mode with normalization and dropout as in that."""
    module.eval()
    if task.takes_targets:
        module.train()
        for layer in module.modules():
            if isinstance(layer, _BatchNorm | _DropoutNd):
                layer.eval()


def _refuse(data: Any, models: ModelMatrix, average: Tensor, starts: int) -> None:
    """Raises `ConfigError` for arguments that leave nothing to search."""
    if len(average) != len(models):
        raise ConfigError(
            f"the average has {len(average)} weights, but there are {len(models)} models",
            where="average",
            hint="give one weight for each model",
        )
    if starts < 1:
        raise ConfigError(f"{starts} starts leave nothing to search", where="starts", hint="give at least 1")
    if not len(data):
        raise ConfigError(
            "no example was given to choose weights on", where="data", hint="hold out validation data"
        )


def _rank(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value
