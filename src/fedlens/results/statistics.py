"""Means over seeds, their intervals, paired tests with Holm's correction, and when bold is allowed.

Values are paired by seed: a seed gives every method the same clients, initial weights and cohorts, so that the
difference at a seed has less noise than either value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fedlens.base.errors import ConfigError

Values: TypeAlias = Mapping[int, float]  # by seed
Spread: TypeAlias = Literal["interval", "deviation", "none"]
Band: TypeAlias = Spread | Literal["range"]

LEVEL = 0.05  # of p values
FEWEST_BOLD = 5  # seeds; with fewer the t test rests on its assumption of normal values alone
LEAST_SEEDS = 3  # with two, the factor of t is 12.7, so that an interval spans most of what is possible
UNSURE = "no clear difference"
_Z = 1.959964  # the 97.5 % quantile of the normal distribution


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known and finite; a single one as it is, None without any.

    >>> mean([0.5, None, 1.0]), mean([720]), mean([])
    (0.75, 720, None)
    """
    known = _known(values)
    return statistics.fmean(known) if len(known) > 1 else next(iter(known), None)


def deviation(values: Iterable[float | None]) -> float | None:
    """The sample standard deviation of the values that are known and finite; None with fewer than two.

    >>> deviation([1.0, None, 3.0]) == 2**0.5, deviation([1.0])
    (True, None)
    """
    known = _known(values)
    return statistics.stdev(known) if len(known) > 1 else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval.

    Args:
        low, high: None with a single seed.
        resolution: what one image changes; 0 where it is not known.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    resolution: float = 0.0

    @property
    def half(self) -> float | None:
        """Half the width."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def sign(self) -> int | None:
        """1 or -1 if the interval excludes 0, 0 if it does not, None with a single seed."""
        if self.low is None:
            return None
        return int(math.copysign(1, self.mean)) if self.certain else 0


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
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Interval(mean, None, None, 1)
    half = 0.0 if _no_noise(values) else max(_half_width(values), 1e-12)
    return Interval(mean, mean - half, mean + half, n)


def difference(
    first: Values,
    second: Values,
    most: float = math.inf,
    held_out: int = 0,
    resolution: float = 0.0,
) -> Interval | None:
    """`first` - `second` over the seeds that both have; None if they share none.

    Half the width of the interval is sqrt((t s / sqrt(n))^2 + (1.96 e)^2). The first term is the paired t test over
    seeds. The second is in addition for shares of the same `held_out` images in every seed: more seeds do not make
    these images more. e^2 = p (1 - p) / (m + 2) + q (1 - q) / (m + 2), with p and q the two mean shares after one
    right and one wrong image are added to the m images (Agresti and Caffo 2000). It is the variance for two models
    that fail independently of each other; models that fail on the same images differ less, so it is a safe bound.

    Args:
        most: the interval is cut at -`most` and `most`, the largest possible differences.
        held_out: m; 0 leaves the second term out.
        resolution: half the width is at least this.

    >>> d = difference({0: 0.9, 1: 0.8, 2: 0.85}, {0: 0.7, 1: 0.65, 2: 0.6})
    >>> round(d.mean, 4), round(d.low, 4), round(d.high, 4), d.sign
    (0.2, 0.0758, 0.3242, 1)
    >>> difference({0: 0.9, 1: 0.9, 2: 0.9}, {0: 0.76, 1: 0.76, 2: 0.76}, held_out=29).sign
    0
    """
    values = paired(first, second)
    if len(values) < 2:
        return Interval(values[0], None, None, 1, resolution) if values else None
    mean, half = statistics.fmean(values), _half_width(values)
    if held_out:
        seeds = first.keys() & second.keys()
        shares = [statistics.fmean(of[seed] for seed in seeds) for of in (first, second)]
        half = math.hypot(half, _Z * math.sqrt(sum(_share_variance(share, held_out) for share in shares)))
    half = max(half, resolution, 1e-12)
    return Interval(mean, max(mean - half, -most), min(mean + half, most), len(values), resolution)


def paired(first: Values, second: Values) -> list[float]:
    """`first` - `second` at each seed that both have, in the order of the seeds."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def half_width(values: Sequence[float], spread: Literal["interval", "deviation"]) -> float:
    """Half the 95 % t interval of the mean of at least two values, or their standard deviation."""
    return (t_interval(values).half or 0.0) if spread == "interval" else statistics.stdev(values)


def ratios(first: Values, second: Values) -> list[float]:
    """`first` / `second` at each seed that both have, if `second` is not 0 there.

    >>> ratios({0: 0.4, 1: 0.5}, {0: 0.8, 2: 1.0})
    [0.5]
    """
    return [first[seed] / second[seed] for seed in sorted(first.keys() & second.keys()) if second[seed]]


def _half_width(values: Sequence[float]) -> float:
    """t s / sqrt(n), with n - 1 degrees of freedom."""
    from scipy.special import stdtrit  # a third of the time that importing scipy.stats takes

    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def _share_variance(share: float, images: int) -> float:
    near = (share * images + 1) / (images + 2)
    return near * (1 - near) / (images + 2)


def share_interval(share: float, images: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share measured on so many images.

    >>> [round(bound, 3) for bound in share_interval(0.5, 10)], share_interval(1.0, 9)[1]
    ([0.237, 0.763], 1.0)
    """
    squared = _Z**2 / images
    middle = (share + squared / 2) / (1 + squared)
    half = math.sqrt(squared * share * (1 - share) + squared**2 / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_test(first: Values, second: Values) -> PairedTest | None:
    """The paired t test of `first` - `second` over the seeds that both have; None if they share none.

    t = mean / (s / sqrt(n)) with n - 1 degrees of freedom, two-sided.

    >>> test = paired_test({0: 0.9, 1: 0.8, 2: 0.85}, {0: 0.7, 1: 0.65, 2: 0.6})
    >>> round(test.difference.mean, 4), round(test.p, 4)
    (0.2, 0.0202)
    """
    if not (values := paired(first, second)):
        return None
    bounds, n = t_interval(values), len(values)
    if n < 2 or _no_noise(values):
        return PairedTest(bounds, 1.0 if n > 1 and abs(bounds.mean) <= 1e-12 else None)
    from scipy.special import stdtr

    t = abs(bounds.mean) / (statistics.stdev(values) / math.sqrt(n))
    return PairedTest(bounds, min(1.0, 2 * float(stdtr(n - 1, -t))))


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
    return test.adjusted < LEVEL and test.difference.seeds >= FEWEST_BOLD
