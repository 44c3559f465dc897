"""Statistics of pairs of measurements taken in turn: the median of their ratios, with an interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 3 if self.median < 10 else 1
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the median with a probability of at least 95 %, whatever the distribution.

    Its ends are order statistics, chosen by the binomial distribution. Fewer than six values are not enough for
    95 %: for them it is their range.

    >>> interval([float(k) for k in range(12)])
    (2.0, 9.0)
    """
    ordered, n = sorted(values), len(values)
    # How many values are excluded at either end, and the probability that the median is among them.
    left, outside = 0, 0.0
    while 2 * (outside + math.comb(n, left) / 2**n) <= 0.05:
        outside += math.comb(n, left) / 2**n
        left += 1
    left = max(0, left - 1)
    return ordered[left], ordered[n - 1 - left]


def ratio(others: Sequence[float], seconds: Sequence[float]) -> Ratio:
    """How many times as fast as the others a candidate is: their seconds over its own, pair by pair.

    >>> ratio([2.0, 2.0, 4.0], [1.0, 2.0, 1.0])
    Ratio(median=2.0, low=1.0, high=4.0)
    """
    ratios = [other / mine for other, mine in zip(others, seconds, strict=True)]
    return Ratio(statistics.median(ratios), *interval(ratios))
