"""Statistics of studies: paired tests with Holm's correction, intervals, and when bold is allowed.

Values are paired by seed: a seed gives every method the same clients, initial weights and cohorts, so that the
difference at a seed has less noise than either value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.report.differences import Values, difference

LEVEL = 0.05  # of p values
FEWEST_BOLD = 5  # seeds; with fewer the t test rests on its assumption of normal values alone


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds and its interval; `low` and `high` are None with a single seed."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        """Half the width."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class PairedTest:
    """A paired comparison of two methods.

    Attributes:
        p: of the two-sided paired t test, not corrected. None with a single seed, and where the difference is the
            same at every seed and not 0: without noise the test says nothing.
        adjusted: p after Holm's correction over all comparisons of the table.
    """

    difference: Interval
    p: float | None
    adjusted: float | None = None


def t_interval(values: Sequence[float]) -> Interval:
    """The mean of `values` and its 95 % t interval: mean +- t s / sqrt(n), with n - 1 degrees of freedom.

    Raises `ConfigError` without values.

    >>> result = t_interval([0.70, 0.72, 0.77])
    >>> round(result.mean, 4), round(result.low, 4), round(result.high, 4)
    (0.73, 0.6404, 0.8196)
    """
    if not values:
        raise ConfigError("a mean of no values has no interval", hint="give at least one value")
    if len(values) > 1 and _no_noise(values):
        mean = statistics.fmean(values)
        return Interval(mean, mean, mean, len(values))
    # The difference to 0 is the value itself, up to rounding: x - 0.0 is x.
    result = difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert result is not None
    return Interval(result.mean, result.low, result.high, result.seeds)


def paired_test(first: Values, second: Values) -> PairedTest | None:
    """The paired t test of `first` - `second` over the seeds that both have; None if they share none.

    t = mean / (s / sqrt(n)) with n - 1 degrees of freedom, two-sided.

    >>> test = paired_test({0: 0.9, 1: 0.8, 2: 0.85}, {0: 0.7, 1: 0.65, 2: 0.6})
    >>> round(test.difference.mean, 4), round(test.p, 4)
    (0.2, 0.0202)
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    values = [first[seed] - second[seed] for seed in seeds]
    bounds = t_interval(values)
    if len(values) < 2:
        return PairedTest(bounds, None)
    if _no_noise(values):
        return PairedTest(bounds, 1.0 if abs(bounds.mean) <= 1e-12 else None)
    from scipy.special import stdtr

    t = abs(bounds.mean) / (statistics.stdev(values) / math.sqrt(len(values)))
    return PairedTest(bounds, min(1.0, 2 * float(stdtr(len(values) - 1, -t))))


def _no_noise(values: Sequence[float]) -> bool:
    """Whether all values are the same up to rounding."""
    return max(values) - min(values) <= 1e-12 * max(1.0, *map(abs, values))


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction (1979): adjusted p values that hold for all comparisons together.

    The k-th smallest of m p values is multiplied by m - k + 1; an adjusted value is at least that of every smaller p
    and at most 1. Entries that are None are no comparisons: they stay None and m does not count them.

    >>> [round(each, 3) for each in holm([0.01, 0.04, 0.03])], holm([None, 0.04])
    ([0.03, 0.06, 0.06], [None, 0.04])
    """
    order = sorted((value, k) for k, value in enumerate(p) if value is not None)
    adjusted: list[float | None] = [None] * len(p)
    largest = 0.0
    for rank, (value, k) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        adjusted[k] = largest
    return adjusted


def tuned_on(tuning: Mapping[str, Any]) -> int | None:
    """The number of seeds that settings were chosen on, of the method with the fewest; None if nothing was tuned.

    >>> tuned_on({}), tuned_on({"seeds": [0, 1], "seeds_by_method": {"a": [0], "b": [0, 1]}})
    (None, 1)
    >>> tuned_on({"seeds": [0, 1], "seeds_by_method": {"a": [0], "b": [0, 1]}, "untuned": ["a"]})
    2
    """
    if not tuning:
        return None
    by_method = tuning.get("seeds_by_method") or {}
    untuned = tuning.get("untuned") or ()
    lists = [seeds for method, seeds in by_method.items() if method not in untuned]
    if by_method and not lists:
        return None
    lists = lists or [tuning.get("seeds") or ()]
    return min(max(1, len(set(seeds))) for seeds in lists)


def is_bold(test: PairedTest | None, tuning: Mapping[str, Any]) -> bool:
    """Whether a difference is shown in bold: adjusted p below 0.05, at least 5 seeds, and fair tuning.

    Settings that were chosen on a single seed shift the values at all seeds together, which a test over seeds cannot
    see: no bold then.

    >>> clear = PairedTest(Interval(0.2, 0.1, 0.3, 5), 0.001, 0.01)
    >>> is_bold(clear, {}), is_bold(clear, {"seeds": [100]}), is_bold(clear, {"seeds": [100, 101]})
    (True, False, True)
    """
    if test is None or test.adjusted is None or tuned_on(tuning) == 1:
        return False
    return test.adjusted < LEVEL and test.difference.n >= FEWEST_BOLD
