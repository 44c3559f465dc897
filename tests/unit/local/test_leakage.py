"""The distance correlation: its formula by hand, and where it has to be 0 and 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlens.local.leakage import distance_correlation


def by_hand(x: Tensor, y: Tensor) -> float:
    """The statistic of Székely and Rizzo 2013, summed entry by entry."""
    n, centred = len(x), []
    for v in (x, y):
        d = [[float((p - q).norm()) for q in v] for p in v]
        rows, total = [sum(row) for row in d], sum(sum(row) for row in d)
        centred.append(
            {
                (i, j): d[i][j] - rows[i] / (n - 2) - rows[j] / (n - 2) + total / (n - 1) / (n - 2)
                for i in range(n)
                for j in range(n)
                if i != j
            }
        )
    a, b = centred
    xy, xx, yy = (sum(p[at] * q[at] for at in p) for p, q in ((a, b), (a, a), (b, b)))
    return float(max(xy / (xx * yy) ** 0.5, 0.0) ** 0.5)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_it_is_the_formula() -> None:
    x, y = drawn(12, 3), drawn(12, 2)
    y = x[:, :2] + 0.5 * y
    assert distance_correlation(x, y) == pytest.approx(by_hand(x, y), rel=1e-12)
    assert 0.1 < distance_correlation(x, y) < 0.95


def test_what_is_moved_scaled_or_turned_is_told_fully_and_what_is_independent_not() -> None:
    x = drawn(120, 1, 8, 8)
    turn, _ = torch.linalg.qr(drawn(64, 64))
    assert distance_correlation(x, 5 - 3 * x.flatten(1) @ turn) == pytest.approx(1.0, abs=1e-6)
    # Without the correction for bias this is about 0.9.
    assert distance_correlation(x, drawn(120, 200)) < 0.3
    assert distance_correlation(x, torch.ones(120, 5)) == 0.0
