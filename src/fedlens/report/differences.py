"""Differences between runs over seeds, and what a few held-out images can tell: means and 95 % intervals."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TypeAlias

Values: TypeAlias = dict[int, float]  # by seed

UNSURE = "no clear difference"
LEAST_SEEDS = 3  # with two, the factor of t is 12.7, so that an interval spans most of what is possible
_Z = 1.959964  # the 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Difference:
    """The mean of a difference over seeds, paired by seed, and its interval, of 95 % by default.

    Args:
        low, high: see `difference`. None with a single seed.
        seeds: n.
        resolution: what one image changes.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    resolution: float = 0.0

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


def difference(
    first: Values,
    second: Values,
    most: float = math.inf,
    held_out: int = 0,
    resolution: float = 0.0,
) -> Difference | None:
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
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    values = [first[seed] - second[seed] for seed in seeds]
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Difference(mean, None, None, 1, resolution)
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(values) / math.sqrt(n)
    if held_out:
        shares = [statistics.fmean(of[seed] for seed in seeds) for of in (first, second)]
        half = math.hypot(half, _Z * math.sqrt(sum(_share_variance(share, held_out) for share in shares)))
    half = max(half, resolution, 1e-12)
    return Difference(mean, max(mean - half, -most), min(mean + half, most), n, resolution)


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


def verdict(joining: Difference | None) -> str | None:
    """Whether a client gains or loses by joining, from federated - local-only; None if it is unknown."""
    if joining is None or joining.sign is None:
        return None
    return {1: "gains", -1: "loses", 0: UNSURE}[joining.sign]
