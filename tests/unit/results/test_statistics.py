"""The statistics of studies against scipy and against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedlens.results.statistics import (
    Interval,
    PairedTest,
    holm,
    is_bold,
    paired_test,
    t_interval,
    tuned_on,
)

FIRST = {0: 0.71, 1: 0.74, 2: 0.69, 3: 0.75, 4: 0.70}
SECOND = {0: 0.70, 1: 0.71, 2: 0.69, 3: 0.70, 4: 0.68}


def test_the_paired_t_test_is_that_of_scipy() -> None:
    test = paired_test(FIRST, SECOND)
    expected = stats.ttest_rel([*FIRST.values()], [*SECOND.values()])
    assert test is not None
    assert test.p == pytest.approx(expected.pvalue, rel=1e-12)
    low, high = expected.confidence_interval(0.95)
    assert (test.difference.low, test.difference.high) == (pytest.approx(low), pytest.approx(high))


def test_values_are_paired_by_their_seed_and_not_by_their_order() -> None:
    turned = dict(reversed(SECOND.items()))
    assert paired_test(FIRST, turned) == paired_test(FIRST, SECOND)
    more = {**SECOND, 9: 0.1}  # a seed of one method alone is left out
    assert paired_test(FIRST, more) == paired_test(FIRST, SECOND)


def test_the_t_interval_is_that_of_scipy() -> None:
    values = [0.2, 0.5, 0.3, 0.35]
    found = t_interval(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_one_seed_has_neither_an_interval_nor_a_p() -> None:
    test = paired_test({0: 0.5}, {0: 0.25})
    assert test == PairedTest(Interval(0.25, None, None, 1), None)
    assert paired_test({0: 0.5}, {1: 0.25}) is None


def test_a_difference_without_noise_has_no_p_and_none_at_all_has_one() -> None:
    # 0.9 - 0.7 and 0.8 - 0.6 differ in their last bit: as noise, that would give a p of 1e-15.
    constant = paired_test({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.7, 1: 0.6, 2: 0.5})
    same = paired_test(FIRST, FIRST)
    assert constant is not None
    assert same is not None
    assert (constant.p, same.p) == (None, 1.0)
    assert same.difference == Interval(0.0, 0.0, 0.0, 5)


def test_holms_correction_by_hand() -> None:
    # Sorted: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 = 0.04 but at least 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([None, 0.02, None, 0.03]) == [None, 0.04, None, 0.04]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("n", "adjusted", "tuning", "bold"),
    [
        (5, 0.049, {}, True),
        (5, 0.051, {}, False),
        (4, 1e-6, {}, False),
        (5, 0.01, {"seeds": [100]}, False),
        (5, 0.01, {"seeds": [100, 100]}, False),
        (5, 0.01, {"seeds": [100, 101], "own_seeds": True}, True),
        (5, 0.01, {"seeds": [0, 1, 2, 3, 4], "own_seeds": False}, True),
        (5, None, {}, False),
    ],
)
def test_bold_needs_a_small_adjusted_p_and_five_seeds_and_tuning_on_several(
    n: int, adjusted: float | None, tuning: dict[str, object], bold: bool
) -> None:
    test = PairedTest(Interval(0.2, 0.1, 0.3, n), 0.001, adjusted)
    assert is_bold(test, tuning) is bold


@pytest.mark.parametrize(
    ("tuning", "seeds"),
    [
        ({}, None),
        ({"seeds": [7, 8, 9]}, 3),
        ({"seeds": [7, 8, 9], "seeds_by_method": {"a": [7, 8, 9], "b": [7, 8], "c": [7, 8, 9]}}, 2),
        ({"seeds_by_method": {"a": [7], "b": [7, 8, 9], "c": [7, 8]}, "untuned": ["a"]}, 2),
        ({"seeds_by_method": {"a": [7]}, "untuned": ["a"]}, None),
    ],
)
def test_settings_were_chosen_on_the_seeds_of_the_method_with_the_fewest(
    tuning: dict[str, object], seeds: int | None
) -> None:
    assert tuned_on(tuning) == seeds


def test_a_method_that_was_tuned_on_one_seed_stops_bold_for_all() -> None:
    test = PairedTest(Interval(0.2, 0.1, 0.3, 5), 0.001, 0.01)
    assert is_bold(test, {"seeds_by_method": {"a": [7, 8], "b": [7, 9]}})
    assert not is_bold(test, {"seeds_by_method": {"a": [7, 8], "b": [7]}})


def test_a_small_p_that_is_not_corrected_is_not_bold() -> None:
    assert not is_bold(PairedTest(Interval(0.2, 0.1, 0.3, 5), 0.001, 0.06), {})
