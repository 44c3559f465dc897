"""The loss surface between models: random convex combinations of them, and the plane through three of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.analyses.client_drift import average_weights
from fedlens.analyses.model_evaluation import ModelEvaluator
from fedlens.base.errors import ConfigError
from fedlens.core.convex_combination import ModelMatrix, uniform_simplex
from fedlens.core.tree import Tree, part, select


@dataclass(frozen=True)
class SurfaceSample:
    """The losses of uniformly drawn convex combinations of models; see `sample_surface`.

    Attributes:
        losses, scores: of each combination; scores are empty for a task without a score.
        mean, deviation: of the losses; the deviation has n - 1 in its denominator.
        low, high: the 2.5 and the 97.5 percentile of the losses.
        average_loss, average_score: of the weighted average of the models.
    """

    losses: tuple[float, ...]
    scores: tuple[float, ...]
    mean: float
    deviation: float
    low: float
    high: float
    average_loss: float
    average_score: float | None


def sample_surface(
    models: Sequence[Tree],
    evaluator: ModelEvaluator,
    count: int = 1000,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> SurfaceSample:
    """Evaluates convex combinations of models that are drawn uniformly (chen2022, section 4.4 and figure 4).

    Args:
        models: the K local models of a round.
        evaluator: of the test data.
        count: the number of combinations.
        seed: of the draw; the same seed draws the same combinations.
        weights: the weights [K] of the plain average, such as numbers of examples; equal by default.

    If a loss is not finite, the statistics are not either.

    Raises `ConfigError` for fewer than two models, models of different shapes, or weights that fit no average.
    """
    if len(models) < 2:
        raise ConfigError(
            f"{len(models)} model was given, and the loss surface needs at least 2",
            where="models",
            hint="record the local models of a round with several clients",
        )
    matrix = ModelMatrix(models)
    shares = average_weights(len(models) * [1.0] if weights is None else weights, len(models)).float()
    generator = torch.Generator().manual_seed(seed)
    points = uniform_simplex(count, len(models), generator)
    losses, scores = _columns(evaluator, matrix.combinations(torch.cat([shares[None], points])))
    values = np.array(losses[1:])
    low, high = np.percentile(values, [2.5, 97.5]) if np.isfinite(values).all() else (math.nan, math.nan)
    with np.errstate(invalid="ignore"):
        mean, deviation = values.mean(), values.std(ddof=1) if count > 1 else 0.0
    return SurfaceSample(
        losses[1:],
        scores[1:],
        float(mean),
        float(deviation),
        float(low),
        float(high),
        losses[0],
        scores[0] if scores else None,
    )


def _columns(
    evaluator: ModelEvaluator, trees: Iterator[dict[str, Tensor]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The loss and the score of each tree; no scores for a task without one."""
    evaluator.require_loss()
    metrics = list(evaluator.several(trees))
    score = evaluator.task.score
    return (
        tuple(found["loss"] for found in metrics),
        () if score is None else tuple(found[score] for found in metrics),
    )


@dataclass(frozen=True)
class LossPlane:
    """The losses on a grid of the plane through three models; see `plane`.

    Attributes:
        x, y: the coordinates of the grid's columns and rows, in units of the weights' Euclidean norm.
        losses, scores: of each row, [points][points]; scores are empty for a task without a score.
        models: the coordinates (x, y) of the three models.
        model_losses: of the three models.
        average, average_loss: the coordinates and the loss of their weighted average.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    models: tuple[tuple[float, float], ...]
    model_losses: tuple[float, ...]
    average: tuple[float, float]
    average_loss: float

    def rows(self) -> list[dict[str, Any]]:
        """One row per point of the grid: `x`, `y`, `loss` and, if the task has one, `score`."""
        return [
            {"x": x, "y": y, "loss": self.losses[i][j]}
            | ({"score": self.scores[i][j]} if self.scores else {})
            for i, y in enumerate(self.y)
            for j, x in enumerate(self.x)
        ]


def plane(
    models: Sequence[Tree],
    evaluator: ModelEvaluator,
    points: int = 21,
    margin: float = 0.2,
    weights: Sequence[float] | None = None,
) -> LossPlane:
    """Evaluates the models on a grid of the plane through three models (Garipov et al. 2018, section 4).

    With u = theta_2 - theta_1 and v = (theta_3 - theta_1) - <theta_3 - theta_1, u> / |u|^2 u, the point (x, y) has the
    weights theta_1 + x u / |u| + y v / |v|. Running statistics outside of the triangle are those of a point inside it,
    because an extrapolated variance may be negative: negative shares of the models count as 0.

    Args:
        models: three trees.
        evaluator: of the test data.
        points: per axis.
        margin: of the grid around the triangle, as a share of its width and height.
        weights: of the models in their average, such as numbers of examples; equal by default.

    Raises `ConfigError` if there are not three models, if they lie on one line, or for weights that fit no average.
    """
    if len(models) != 3:
        raise ConfigError(
            f"{len(models)} models were given, and a plane goes through 3",
            where="models",
            hint="choose three",
        )
    names = part(evaluator.learner(models[0]).spec, "weight", "head", "arch")
    corners = ModelMatrix([select(model, names) for model in models])
    rest = ModelMatrix([{k: v for k, v in model.items() if k not in corners.names} for model in models])
    coordinates = _coordinates(corners.matrix)
    average = average_weights([1.0] * 3 if weights is None else weights, 3).numpy()
    spread = coordinates.max(0) - coordinates.min(0)
    x, y = (
        np.linspace(
            coordinates[:, k].min() - margin * spread[k], coordinates[:, k].max() + margin * spread[k], points
        )
        for k in (0, 1)
    )
    grid = np.stack([axis.ravel() for axis in np.meshgrid(x, y)], 1)
    shares = torch.from_numpy(
        np.concatenate([np.eye(3), average[None], _shares_at(grid, coordinates)])
    ).float()
    inside = shares.clamp(min=0)
    trees = zip(
        corners.combinations(shares), rest.combinations(inside / inside.sum(1, keepdim=True)), strict=True
    )
    losses, scores = _columns(evaluator, ({**weights, **others} for weights, others in trees))
    return LossPlane(
        tuple(x.tolist()),
        tuple(y.tolist()),
        _rows(losses[4:], points),
        _rows(scores[4:], points),
        tuple((float(at), float(height)) for at, height in coordinates),
        losses[:3],
        (float(average @ coordinates[:, 0]), float(average @ coordinates[:, 1])),
        losses[3],
    )


def _rows(values: Sequence[float], length: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(values[start : start + length]) for start in range(0, len(values), length))


def _coordinates(matrix: Tensor) -> NDArray[np.float64]:
    """float64 [3, 2]: the coordinates of three points [3, P] in the orthonormal basis of their plane."""
    first, second, third = matrix.double()
    u, other = second - first, third - first
    width = float(u.norm())
    along = float(other @ u) / width if width else 0.0
    height = float((other - along * u / width).norm()) if width else 0.0
    if not height > 1e-6 * width:  # also if a weight is not a number
        raise ConfigError(
            "the three models lie on one line, so no plane is defined by them",
            where="models",
            hint="choose three models of which none is a combination of the others",
        )
    return np.array([[0.0, 0.0], [width, 0.0], [along, height]])


def _shares_at(points: NDArray[np.float64], coordinates: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [N, 3]: the barycentric coordinates of points [N, 2] in the triangle."""
    width, (along, height) = coordinates[1, 0], coordinates[2]
    third = points[:, 1] / height
    second = (points[:, 0] - third * along) / width
    return np.stack([1 - second - third, second, third], 1)
