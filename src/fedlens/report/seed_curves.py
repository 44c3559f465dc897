"""The curve of one setting over several seeds: the mean, and a band of one deviation to each side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedlens.results import chart as figures
from fedlens.results.run import Run


def seed_curve(
    runs: Sequence[Run], key: str, name: str, color: str, dash: str = "solid"
) -> list[figures.Series]:
    """The series of `key` for runs that differ in the seed alone; one run gives its own curve, without a band.

    With several runs the series are a band and the mean. Rounds in which a run has no finite value are left out. Empty
    without any value.
    """
    rounds, values = common_rounds(runs, key)
    if not rounds:
        return []
    means = [statistics.fmean(each) for each in values]
    line = figures.Series(rounds, means, name, color=color, dash=dash)
    if len(runs) == 1:
        # With the gaps that the run has.
        at, own = runs[0].series(key)
        return [figures.Series(at, own, name, color=color, dash=dash)]
    half = [statistics.stdev(each) for each in values]
    low = [mean - each for mean, each in zip(means, half, strict=True)]
    high = [mean + each for mean, each in zip(means, half, strict=True)]
    return [figures.band(rounds, low, high, name, color), line]


def common_rounds(runs: Sequence[Run], key: str) -> tuple[list[int], list[list[float]]]:
    """The rounds in which every run has a finite value, and the values of all runs in each of them."""
    by_run = [
        {at: value for at, value in zip(*run.series(key), strict=True) if value is not None} for run in runs
    ]
    shared = sorted(set.intersection(*(set(each) for each in by_run))) if by_run else []
    return shared, [[each[at] for each in by_run] for at in shared]
