"""Medians of pairs, and the interval around them."""

from __future__ import annotations

import math

import pytest

from fedlens.benchmark.comparison import Ratio, interval, ratio


def coverage(n: int, low: float, high: float) -> float:
    """The probability that the median lies between two order statistics of n, counted from 0."""
    return sum(math.comb(n, k) for k in range(int(low) + 1, int(high) + 1)) / 2**n


@pytest.mark.parametrize("n", [6, 7, 8, 11, 12, 13, 20, 30, 101])
def test_the_interval_holds_the_median_19_times_of_20_and_is_the_tightest_such(n: int) -> None:
    low, high = interval([float(k) for k in reversed(range(n))])
    assert low == n - 1 - high  # as much is left out at either end
    assert coverage(n, low, high) >= 0.95
    assert coverage(n, low + 1, high - 1) < 0.95


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_say_no_more_than_their_range(n: int) -> None:
    assert interval([float(k) for k in range(n)]) == (0.0, n - 1)


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    others, own = [1.0, 10.0, 100.0], [2.0, 5.0, 400.0]
    assert ratio(others, own) == Ratio(0.5, 0.25, 2.0)
    with pytest.raises(ValueError, match="longer"):
        ratio([1.0], [1.0, 2.0])


def test_a_ratio_is_written_with_its_interval() -> None:
    assert str(Ratio(0.98765, 0.9, 1.0)) == "0.988 [0.900, 1.000]"
    assert str(Ratio(52.34, 50, 60)) == "52.3 [50.0, 60.0]"
