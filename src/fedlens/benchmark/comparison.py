"""Compares the candidates of a workload pair by pair: one row of numbers for each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.benchmark.interleave import Kind, Measurement
from fedlens.benchmark.limit import Workload

TARGET_MS, TARGET_SHARE = 1.0, 0.01  # overhead: milliseconds a client, plus this share of the limit


@dataclass(frozen=True)
class ComparisonRow:
    """One candidate on one workload. Where it did not run, all numbers are None and `reason` says why.

    The limit is the fastest layout of bare PyTorch in these turns.

    Attributes:
        to_limit, to_by_hand: how many times as fast the candidate is as the limit, and as the batched product written
            by hand.
        fedlens_to_it: how many times as fast `engine`, the fastest engine of fedlens, is as the candidate.
        overhead_ms: milliseconds a client, against the limit.
        within_target: whether the overhead is at most `TARGET_MS` a client plus `TARGET_SHARE` of the limit.
        first_round: seconds; the first round fills caches and is not among `seconds`.
    """

    workload: str
    name: str
    kind: Kind
    about: dict[str, Any] = field(default_factory=dict)
    start_up: float = 0.0
    seconds: tuple[float, ...] = ()
    images_per_s: float | None = None
    to_limit: Ratio | None = None
    to_by_hand: Ratio | None = None
    fedlens_to_it: Ratio | None = None
    engine: str | None = None
    overhead_ms: float | None = None
    within_target: bool | None = None
    reason: str | None = None
    first_round: float | None = None


def rows_of(workload: Workload, measurements: Sequence[Measurement]) -> list[ComparisonRow]:
    """The rows of a workload; the seconds of the measurements pair up turn by turn.

    A ratio to a candidate that did not run is None.
    """
    limit, by_hand, best = (_fastest(measurements, kind) for kind in ("limit", "by hand", "fedlens"))
    return [_row(workload, measurement, limit, by_hand, best) for measurement in measurements]


def _fastest(measurements: Sequence[Measurement], kind: Kind) -> Measurement | None:
    ran = [measurement for measurement in measurements if measurement.kind == kind and measurement.seconds]
    return min(ran, key=lambda measurement: statistics.median(measurement.seconds), default=None)


def _row(
    workload: Workload,
    measurement: Measurement,
    limit: Measurement | None,
    by_hand: Measurement | None,
    best: Measurement | None,
) -> ComparisonRow:
    row = {
        "workload": workload.name,
        "name": "limit" if measurement is limit else measurement.name,
        "kind": measurement.kind,
        "about": dict(measurement.about),
    }
    if not measurement.seconds:
        return ComparisonRow(**row, reason=measurement.reason)  # type: ignore[arg-type]
    seconds = measurement.seconds

    def beside(other: Measurement | None) -> Ratio | None:
        return ratio(other.seconds, seconds) if other is not None and other is not measurement else None

    overhead = within = None
    if limit is not None and limit is not measurement:
        more = [
            1000 * (mine - bare) / workload.cohort for bare, mine in zip(limit.seconds, seconds, strict=True)
        ]
        beyond = [
            1000 * (mine - (1 + TARGET_SHARE) * bare) / workload.cohort
            for bare, mine in zip(limit.seconds, seconds, strict=True)
        ]
        overhead, within = statistics.median(more), statistics.median(beyond) <= TARGET_MS
    return ComparisonRow(
        **row,  # type: ignore[arg-type]
        start_up=measurement.start_up,
        first_round=measurement.first_round,
        seconds=tuple(seconds),
        images_per_s=workload.images / statistics.median(seconds),
        to_limit=beside(limit),
        to_by_hand=beside(by_hand) if measurement.kind == "fedlens" else None,
        fedlens_to_it=ratio(seconds, best.seconds) if best and measurement.kind == "peer" else None,
        engine=best.name if best and measurement.kind == "peer" else None,
        overhead_ms=overhead,
        within_target=within,
    )


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
