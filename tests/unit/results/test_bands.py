"""The ends of a band over seeds: they stay among the values that a metric can have."""

from __future__ import annotations

import pytest

from fedlens.results.figures.study_axes import spread


@pytest.mark.parametrize(
    ("metric", "values", "low", "high"),
    [
        ("test_accuracy", (0.1, 0.9), 0.0, 1.0),
        ("test_loss", (0.1, 0.9), 0.0, 5.58),
        ("train_loss", (-0.1, 0.9), -5.95, 6.75),  # such as a negative similarity
        ("", (0.1, 0.9), -4.58, 5.58),  # relative to centralized training
    ],
)
def test_a_band_stays_within_the_range_of_its_metric(
    metric: str, values: tuple[float, float], low: float, high: float
) -> None:
    assert spread(values, "interval", metric) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert spread(values[:1], "interval", metric) is None
