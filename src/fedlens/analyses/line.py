"""The loss along the line between two models, and the height of the barrier on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedlens.analyses.model_evaluation import ModelEvaluator
from fedlens.base.frozen import held
from fedlens.base.threads import first as first_of
from fedlens.core.convex_combination import ModelMatrix
from fedlens.core.random import Rng
from fedlens.core.tree import Tree, tree_of
from fedlens.run.build import Built

Batches = Sequence[tuple[Any, Any]]  # inputs and targets
Statistics = Literal["recomputed", "interpolated", "none"]


@dataclass(frozen=True)
class LossLine:
    """The loss on the line between two models; see `line`.

    Attributes:
        positions: t of each point, from 0 to 1.
        losses, scores: at each point; scores are empty for a task without a score.
        barrier: the largest height of the loss above the straight line between its ends, at least 0.
        statistics: of batch normalization: "recomputed" at each point, "interpolated" as the weights are, or "none" if
            the model has no batch normalization.
    """

    positions: tuple[float, ...]
    losses: tuple[float, ...]
    scores: tuple[float, ...]
    barrier: float
    statistics: Statistics

    def rows(self) -> list[dict[str, float]]:
        """One row per point: `t`, `loss` and, if the task has one, `score`."""
        return [
            {"t": t, "loss": self.losses[k]} | ({"score": self.scores[k]} if self.scores else {})
            for k, t in enumerate(self.positions)
        ]


def line(
    first: Tree, second: Tree, evaluator: ModelEvaluator, points: int = 21, statistics: Batches | None = None
) -> LossLine:
    """Evaluates the models (1 - t) a + t b, t from 0 to 1 (Frankle et al. 2020, section 2).

    The barrier is max_t [L(t) - ((1 - t) L(0) + t L(1))].

    Args:
        first, second: the models a and b. Without `statistics` the ends of the line are these models to the bit.
        evaluator: of the test data.
        points: on the line, both ends counted; at least 2.
        statistics: batches of training data, such as `training_batches`. The running statistics of batch normalization
            are recomputed on them at every point, the ends too. Without them they are interpolated.

    Raises `ConfigError` for models of different shapes.
    """
    evaluator.require_loss()
    positions = np.linspace(0, 1, max(2, points))
    matrix = ModelMatrix([first, second])
    shares = torch.from_numpy(np.stack([1 - positions, positions], 1))

    def trees() -> Iterator[Tree]:
        yield first
        yield from matrix.combinations(shares[1:-1])
        yield second

    normalized = bool(_normalizations(evaluator.learner(first).module))
    recomputing = normalized and statistics is not None
    along = (
        (with_statistics(tree, evaluator, statistics or ()) for tree in trees()) if recomputing else trees()
    )
    metrics, score = list(evaluator.several(along)), evaluator.task.score
    losses = np.array([found["loss"] for found in metrics])
    return LossLine(
        tuple(positions.tolist()),
        tuple(losses.tolist()),
        () if score is None else tuple(found[score] for found in metrics),
        barrier(losses.tolist()),
        "recomputed" if recomputing else "interpolated" if normalized else "none",
    )


def barrier(losses: Sequence[float]) -> float:
    """The largest height of losses at equal steps above the straight line between the first and the last one.

    >>> barrier([1.0, 4.0, 2.0])
    2.5
    >>> barrier([1.0, 0.0, 2.0])
    0.0
    """
    values, t = np.array(losses, dtype=np.float64), np.linspace(0, 1, len(losses))
    with np.errstate(invalid="ignore"):
        return float((values - ((1 - t) * values[0] + t * values[-1])).max())


def with_statistics(tree: Tree, evaluator: ModelEvaluator, batches: Batches) -> dict[str, torch.Tensor]:
    """The tree with the running statistics of batch normalization that the batches have, averaged over them.

    All other layers are in evaluation mode. Layers whose statistics are frozen keep them.
    """
    learner = evaluator.learner(tree)
    module = learner.module.eval()
    layers = _normalizations(module)
    momenta = [layer.momentum for layer in layers]
    with torch.no_grad(), evaluator.computing():
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
            layer.train()
        try:
            for inputs, targets in batches:
                evaluator.task.outputs(module, inputs.to(evaluator.device), targets.to(evaluator.device))
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
                layer.eval()
    return tree_of(module)


def _normalizations(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The layers of batch normalization with running statistics that training changes."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and layer.track_running_stats
        and not held(layer)
    ]


def training_batches(built: Built, count: int = 20, seed: int = 0) -> Batches:
    """Batches of the pooled training data in a random order, augmented as in training, of the run's batch size.

    A batch has at least two examples wherever the data have.
    """
    data, size = built.source.data_of("@train"), built.config.local.batch_size
    examples = len(data)
    n = examples if size == "all" else min(int(size), examples)
    with ExitStack() as ending:
        found = data.batches(max(2, n), Rng((seed, "line")), True)
        return list(first_of(found, min(count, max(1, examples // max(2, n))), ending))
