"""Widening: further values while the best one lies at the edge of the grid."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.studies.point_search import SearchRules
from fedlens.studies.widening import following_values, further_points
from tests.unit.studies.fake_study import FakeCell, Point, played, played_with_kills


def _peak(at: float):  # type: ignore[no-untyped-def]
    return lambda point, seed, round: -abs(math.log(point["local.lr"] / at))


RATES = [{"local.lr": lr} for lr in (0.01, 0.03, 0.1)]


@pytest.mark.parametrize(
    ("values", "upper", "lower"),
    [
        ([0.01, 0.1, 1.0], 10.0, 0.001),
        ([0.01, 0.03, 0.1], 0.3, 0.003),
        ([0.03, 0.1, 0.3], 1.0, 0.01),
        ([1.0, 2.0, 5.0, 10.0], 20.0, 0.5),
        ([0.5, 1.0, 2.0], 4.0, 0.25),
        ([1e-3, 3e-3], 9e-3, 3.33e-4),
        ([1, 2, 4], 8, None),
        ([-2.0, -1.0, 0.0], 1.0, -3.0),
        ([0, 10, 20], 40, None),
    ],
)
def test_the_next_value_continues_the_step_of_the_grid(
    values: list[float], upper: float, lower: float | None
) -> None:
    assert following_values(values, values[-1])[:1] == [upper]
    assert [value for value in following_values(values, values[0]) if value > 0 or lower] == (
        [lower] if lower is not None else []
    )


def test_the_order_of_a_grid_has_no_influence() -> None:
    values = [0.001, 0.01, 0.1, 1.0]
    for _ in range(20):
        random.Random(0).shuffle(values)
        assert following_values(values, 1.0) == [10.0]


def test_a_momentum_beyond_its_bound_steps_towards_one() -> None:
    tried = [{"algorithm.momentum": beta} for beta in (0.0, 0.7, 0.9)]
    found = further_points(tried, tried[-1], lambda point: 0 <= point["algorithm.momentum"] < 1)
    assert found == [{"algorithm.momentum": 0.97}]


def test_a_setting_at_its_bound_is_not_widened() -> None:
    tried = [{"algorithm.mu": mu} for mu in (0.0, 0.01, 0.1)]
    assert further_points(tried, tried[0]) == []
    tried = [{"select.fraction": share} for share in (0.25, 0.5, 1.0)]
    assert further_points(tried, tried[-1], lambda point: 0 < point["select.fraction"] <= 1) == []


def test_each_setting_at_an_edge_gets_a_point_of_its_own() -> None:
    tried = [
        {"local.lr": lr, "local.epochs": e, "m": m} for lr in (0.1, 1.0) for e in (1, 2) for m in (3, 6, 9)
    ]
    best = {"local.lr": 1.0, "local.epochs": 2, "m": 6}
    assert further_points(tried, best) == [{**best, "local.lr": 10.0}, {**best, "local.epochs": 4}]


def test_names_and_single_values_are_not_widened() -> None:
    tried = [{"local.optimizer": name, "local.lr": 0.1} for name in ("sgd", "adam")]
    assert further_points(tried, tried[1]) == []


def test_the_grid_is_widened_until_the_best_lies_inside() -> None:
    outcome, lines = played(FakeCell(RATES, seeds=(0, 1)), SearchRules(widen=8), _peak(1.0))
    assert [point["local.lr"] for point in outcome.tried] == [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    assert (outcome.chosen, outcome.added) == ({"local.lr": 1.0}, 3)
    assert len(lines) == 12


def test_a_best_point_inside_the_grid_adds_no_run() -> None:
    outcome, lines = played(FakeCell(RATES), SearchRules(widen=8), _peak(0.03))
    assert (outcome.added, len(lines)) == (0, 3)


@pytest.mark.parametrize("widen", [0, 1, 2, 3, 5])
def test_widening_never_exceeds_the_runs_that_are_allowed(widen: int) -> None:
    outcome, lines = played(FakeCell(RATES, seeds=(0, 1)), SearchRules(widen=widen), _peak(1e9))
    assert len(lines) == 6 + widen // 2 * 2
    assert outcome.added == widen // 2


def test_with_rungs_further_points_run_to_the_rung_of_the_last_comparison() -> None:
    tuning = SearchRules(widen=8, halving=3, first=9)
    outcome, lines = played(FakeCell(RATES), tuning, _peak(0.3))
    assert outcome.chosen == {"local.lr": 0.3}
    assert {line.rounds for line in lines.values()} == {9}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=5, unique=True),
    st.integers(-6, 6),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_widening_ends_and_survives_kills(
    powers: list[int], peak: int, widen: int, rng: random.Random
) -> None:
    points: list[Point] = [{"local.lr": 10.0**power} for power in powers]
    cell, tuning = FakeCell(points), SearchRules(widen=widen)
    whole, lines = played(cell, tuning, _peak(10.0**peak))
    killed, others = played_with_kills(cell, tuning, _peak(10.0**peak), rng)
    assert (killed, others) == (whole, lines)
    tried = [point["local.lr"] for point in whole.tried]
    assert whole.chosen is not None
    inside = min(tried) < whole.chosen["local.lr"] < max(tried)
    assert inside or whole.added == widen
