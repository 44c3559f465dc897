"""How often the statistics of studies are wrong, and how often they find what is there: simulations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scipy import stats

from benchmarks.error_rates import (
    COMPARISONS,
    bold_counts,
    bootstrap_errors,
    expected_power,
    simulated_cells,
)
from fedlens.results.cells import comparisons

CI, MANY = 300, 10_000
TABLES = [CI, pytest.param(MANY, marks=pytest.mark.nightly)]
CERTAIN = 0.999


def wrong(bold: Sequence[int]) -> int:
    return sum(count > 0 for count in bold)


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("cases", [1, COMPARISONS])
def test_without_a_true_difference_at_most_one_table_of_twenty_has_bold(
    tables: int, seeds: int, cases: int
) -> None:
    bold = bold_counts(tables, seeds, [0.0] * (COMPARISONS // cases), cases)
    assert wrong(bold) <= stats.binom.ppf(CERTAIN, tables, 0.05)
    assert wrong(bold) > 0  # a rule that never finds anything passes the bound as well


@pytest.mark.parametrize("tables", TABLES)
def test_a_true_difference_among_nine_that_are_none_does_not_raise_the_error_rate(tables: int) -> None:
    # The first is so large that it is always found; Holm then corrects the other nine for nine alone.
    bold = bold_counts(tables, 10, [20.0, *[0.0] * 9])
    assert min(bold) >= 1
    errors = sum(count > 1 for count in bold)
    assert errors <= stats.binom.ppf(CERTAIN, tables, 0.05)


def test_without_the_correction_a_third_of_such_tables_would_have_bold() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    small = 0
    for _ in range(CI):
        found = comparisons(simulated_cells(rng, 5, [0.0] * COMPARISONS), "m0", {})
        small += any(each.test is not None and (each.test.p or 1) < 0.05 for each in found)
    assert small / CI > 0.2


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(("seeds", "effect"), [(5, 2.0), (5, 3.0), (10, 1.0), (10, 2.0)])
def test_a_true_difference_is_found_with_the_power_of_the_t_test(
    tables: int, seeds: int, effect: float
) -> None:
    found = wrong(bold_counts(tables, seeds, [effect]))
    power = expected_power(seeds, effect)
    low, high = stats.binom.ppf([1 - CERTAIN, CERTAIN], tables, power)
    assert low <= found <= high


def test_the_power_is_the_error_rate_without_a_difference() -> None:
    assert expected_power(5, 0.0) == pytest.approx(0.05)


@pytest.mark.parametrize("tables", TABLES)
def test_a_percentile_bootstrap_at_ten_seeds_is_wrong_too_often(tables: int) -> None:
    single, table = bootstrap_errors(tables, 10)
    assert 0.07 < single < 0.12  # 5 % are promised
    corrected, corrected_table = bootstrap_errors(tables, 10, 1 - 0.05 / COMPARISONS)
    assert corrected > 4 * 0.05 / COMPARISONS
    assert 0.15 < corrected_table < 0.30 < table
