"""Surfaces between models whose loss is a known function of their weights, and uniform draws from the simplex."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlens.analyses.line import line
from fedlens.analyses.loss_surface import plane, sample_surface
from fedlens.base.errors import ConfigError
from fedlens.core.convex_combination import uniform_simplex
from tests.identity.landscape_kit import at, evaluator

BOWL = evaluator(lambda w: (w * w).sum(), 3)
CORNERS = [at(1, 0, 0), at(0, 1, 0), at(0, 0, 1)]


def test_simplex_points_are_uniform() -> None:
    # The 16 congruent triangles that three families of parallel lines cut from the simplex have equal areas.
    points = uniform_simplex(16_000, 3, torch.Generator().manual_seed(1))
    cells = (points * 4).floor().clamp(max=3).long()
    counts = torch.bincount(cells[:, 0] * 16 + cells[:, 1] * 4 + cells[:, 2])
    counts = counts[counts > 0].double()
    assert len(counts) == 16
    assert (
        float(((counts - 1000) ** 2 / 1000).sum()) < 37.7
    )  # 99.9 % of chi-squared with 15 degrees of freedom


def test_the_surface_of_a_quadratic_has_its_known_moments() -> None:
    # The loss of a combination of unit vectors is sum_k w_k^2. Of Dirichlet(1, 1, 1): its mean is 2 / (K + 1) and its
    # variance 4 (K - 1) / ((K + 1)^2 (K + 2) (K + 3)).
    sample = sample_surface(CORNERS, BOWL, 3000, seed=3, weights=[2, 1, 1])
    assert sample.mean == pytest.approx(0.5, abs=0.015)
    assert sample.deviation == pytest.approx((4 * 2 / (16 * 5 * 6)) ** 0.5, rel=0.05)
    assert min(sample.losses) >= 1 / 3 - 1e-6
    assert max(sample.losses) <= 1
    assert np.percentile(sample.losses, 2.5) == sample.low < sample.high == np.percentile(sample.losses, 97.5)
    assert sample.average_loss == pytest.approx(0.25 + 2 / 16)
    assert sample.average_score == -sample.average_loss
    assert sample.scores == tuple(-loss for loss in sample.losses)


def test_a_seed_draws_the_same_surface() -> None:
    first, again, other = (sample_surface(CORNERS, BOWL, 20, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.average_loss == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("models", "weights", "message"),
    [
        (CORNERS[:1], None, "at least 2"),
        (CORNERS, [1, 2], "do not fit"),
        (CORNERS, [0, 0, 0], "do not fit"),
        (CORNERS, [1, -1, 1], "do not fit"),
        ([at(1, 0, 0), at(1, 0)], None, "shapes"),
    ],
)
def test_models_without_a_surface_are_refused(models, weights, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_surface(models, BOWL, 5, weights=weights)


def test_a_plane_has_the_distances_of_the_space() -> None:
    models = [at(1, 0, 2), at(4, 4, 2), at(1, 5, 2)]
    found = plane(models, BOWL, points=5, margin=0.5)
    assert found.models[0] == (0, 0)
    assert found.models[1] == pytest.approx((5, 0))
    assert found.models[2] == pytest.approx((4, 3))
    assert found.model_losses == pytest.approx((5, 36, 30))
    assert (found.x[0], found.x[-1]) == pytest.approx((-2.5, 7.5))
    assert (found.y[0], found.y[-1]) == pytest.approx((-1.5, 4.5))
    u, v = np.array([3, 4, 0]) / 5, np.array([-4, 3, 0]) / 5
    for row in found.rows():
        weights = np.array([1, 0, 2]) + row["x"] * u + row["y"] * v
        assert row["loss"] == pytest.approx(float(weights @ weights), rel=1e-5)
        assert row["score"] == -row["loss"]


@pytest.mark.parametrize(
    "models",
    [
        [at(0, 0, 0), at(1, 1, 1), at(3, 3, 3)],
        [at(1, 0, 0), at(1, 0, 0), at(0, 0, 1)],
        [at(1, 0, 0), at(0, float("nan"), 0), at(0, 0, 1)],
        CORNERS[:2],
    ],
    ids=["line", "same", "nan", "two"],
)
def test_models_without_a_plane_are_refused(models) -> None:
    with pytest.raises(ConfigError, match=r"one line|goes through 3"):
        plane(models, BOWL)


def test_the_line_between_two_wells_has_their_barrier() -> None:
    wells = evaluator(
        lambda w: (w[0] ** 2 - 1) ** 2 + w[1], 2
    )  # 1 high between its minima -1 and 1, on a slope
    found = line(at(-1, 0), at(1, 0.5), wells, points=11)
    assert found.barrier == pytest.approx(1.0)
    assert (found.losses[0], found.losses[-1]) == (0, 0.5)
    assert found.positions == pytest.approx([k / 10 for k in range(11)])
    assert found.statistics == "none"
    for row in found.rows():
        assert row["loss"] == pytest.approx(((2 * row["t"] - 1) ** 2 - 1) ** 2 + row["t"] / 2, abs=1e-6)


def test_a_bowl_has_no_barrier() -> None:
    assert line(at(3, 0, 0), at(-1, 0, 2), BOWL).barrier == 0
