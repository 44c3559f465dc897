"""Error rates of the statistics of studies, by simulation: how often bold is wrong, and how often it is missed.

python -m benchmarks.error_rates                 # a minute
python -m benchmarks.error_rates --tables 500    # a few seconds

A simulated value is method + case and seed + noise, all normal; the noise has deviation 1. A table has ten comparisons
with a baseline that they share. Nothing differs, except where a difference is given.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from fedlens.results.cells import Cell, comparisons

COMPARISONS = 10
RESAMPLES = 1000


def simulated_cells(
    rng: np.random.Generator, seeds: int, effects: Sequence[float], cases: int = 1
) -> list[Cell]:
    """The cells of a table: a baseline and one method for each effect, in each case.

    Args:
        effects: true differences to the baseline, in standard deviations of the noise.
    """
    cells = []
    for case in range(cases):
        shared = rng.normal(size=seeds)  # what a seed adds to all methods
        for k, effect in enumerate([0.0, *effects]):
            values = shared + effect + rng.normal(size=seeds)
            cells.append(Cell(f"m{k}", {"case": case}, dict(enumerate(values.tolist()))))
    return cells


def bold_counts(
    tables: int, seeds: int, effects: Sequence[float], cases: int = 1, seed: int = 0
) -> list[int]:
    """The number of bold comparisons in each of so many simulated tables."""
    rng = np.random.default_rng([seed, seeds, cases, len(effects)])
    return [
        sum(each.bold for each in comparisons(simulated_cells(rng, seeds, effects, cases), "m0", {}))
        for _ in range(tables)
    ]


def expected_power(seeds: int, effect: float, alpha: float = 0.05) -> float:
    """The power of the paired t test: the noncentral t distribution.

    The difference of two methods has deviation sqrt(2), so the noncentrality is effect / sqrt(2) * sqrt(seeds).

    >>> round(expected_power(5, 3.0), 3)
    0.936
    """
    t = stats.t.ppf(1 - alpha / 2, seeds - 1)
    shift = effect / math.sqrt(2) * math.sqrt(seeds)
    return float(stats.nct.sf(t, seeds - 1, shift) + stats.nct.cdf(-t, seeds - 1, shift))


def bootstrap_errors(tables: int, seeds: int, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """How often a percentile bootstrap interval leaves out the true difference, 0.

    Returns the share of wrong intervals, and the share of tables of ten with at least one.
    """
    rng = np.random.default_rng([seed, seeds])
    intervals = wrong_tables = 0
    for _ in range(tables):
        values = rng.normal(size=(seeds, COMPARISONS + 1))
        differences = values[:, 1:] - values[:, :1]
        means = differences[rng.integers(0, seeds, (RESAMPLES, seeds))].mean(axis=1)
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
        wrong = int(np.count_nonzero((low > 0) | (high < 0)))
        intervals += wrong
        wrong_tables += wrong > 0
    return intervals / (tables * COMPARISONS), wrong_tables / tables


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Simulate the error rates of the statistics of studies.")
    parser.add_argument("--tables", type=int, default=4_000, help="simulated tables for each number")
    tables: int = parser.parse_args().tables
    print(f"{tables:,} tables each\n")
    print("No true difference: tables with a bold comparison (at most 5 %)")
    for seeds in (5, 10):
        shared = bold_counts(tables, seeds, [0.0] * COMPARISONS)
        alone = bold_counts(tables, seeds, [0.0], cases=COMPARISONS)
        print(
            f"  {seeds:2} seeds: ten methods {_share(shared):.1%}, two methods in ten cases {_share(alone):.1%}"
        )
    print("A true difference, one comparison: tables where it is bold, and the power of the t test")
    for seeds, effect in ((5, 2.0), (5, 3.0), (10, 1.0), (10, 2.0)):
        found = _share(bold_counts(tables, seeds, [effect]))
        print(f"  {seeds:2} seeds, {effect:g} deviations: {found:.1%}, {expected_power(seeds, effect):.1%}")
    print("Percentile bootstrap, no true difference: wrong intervals, and tables of ten with one")
    for seeds in (10, 30):
        for level, name in ((0.95, "95 % each"), (1 - 0.05 / COMPARISONS, "95 % for all ten (Bonferroni)")):
            single, table = bootstrap_errors(tables, seeds, level)
            print(f"  {seeds:2} seeds, {name}: {single:.1%}, {table:.1%}")


def _share(bold: Sequence[int]) -> float:
    return sum(count > 0 for count in bold) / len(bold)


if __name__ == "__main__":
    main()
