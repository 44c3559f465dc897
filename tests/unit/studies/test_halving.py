"""Successive halving: decisions at a rung depend on the curves up to that rung alone."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.base.errors import ConfigError
from fedlens.results.rows import Row
from fedlens.studies.planned import DueRun
from fedlens.studies.tuning import (
    SearchRules,
    best,
    check_rungs,
    has_reached,
    kept,
    reaching,
    rungs,
    searched,
    value_at,
)
from tests.unit.studies.fake_study import FakeCell, Point, line_of, played

NINE = [{"local.lr": lr / 10} for lr in range(1, 10)]
HALVING = SearchRules(halving=3, first=3)


def _constant(point: Point, seed: int, round: int) -> float:
    return 1 - abs(point["local.lr"] - 0.6)


def _crossing(point: Point, seed: int, round: int) -> float:
    """Small rates start slowly and win in the end."""
    return point["local.lr"] if round < 20 else 1 - point["local.lr"]


def test_nine_points_run_to_the_first_rung_then_three_then_one_is_chosen() -> None:
    outcome, lines = played(FakeCell(NINE), HALVING, _constant)
    rounds = sorted(line.rounds for line in lines.values())
    assert rounds == [3] * 6 + [9] * 3
    assert outcome.chosen == {"local.lr": 0.6}


@pytest.mark.parametrize("metric", ["validation_accuracy", "validation_loss"])
def test_a_run_whose_loss_is_lost_has_no_value_from_then_on(metric: str) -> None:
    accuracy, loss = [0.1, 0.8, 0.9, 0.1], [2.3, 0.2, None, None]
    curve = {"round": [0, 2, 4, 6], "validation_accuracy": accuracy, "validation_loss": loss}
    line = Row("d", "r", "finished", None, 6, "test_accuracy", curve)
    assert value_at(line, metric, rung=2) == (0.8 if metric == "validation_accuracy" else 0.2)
    assert value_at(line, metric, rung=4) is None
    assert value_at(line, metric) is None


def test_due_runs_name_the_round_of_the_rung() -> None:
    assert {one.until for one in searched(FakeCell(NINE), HALVING, {}).due} == {3}


def test_points_that_outlast_all_rungs_are_compared_after_the_last_round() -> None:
    outcome, lines = played(FakeCell(NINE, rounds=5), HALVING, _crossing)
    assert sorted(line.rounds for line in lines.values()) == [3] * 6 + [5] * 3
    assert outcome.chosen == {"local.lr": 0.9}


def test_a_first_rung_beyond_the_rounds_is_no_rung() -> None:
    _, lines = played(FakeCell(NINE, rounds=3), HALVING, _constant)
    assert {line.status for line in lines.values()} == {"finished"}


def test_a_run_that_came_further_for_another_reason_changes_no_decision() -> None:
    cell = FakeCell(NINE)
    outcome, lines = played(cell, HALVING, _crossing)
    assert outcome.chosen == {"local.lr": 0.9}
    rng = random.Random(0)
    for _ in range(30):
        further = {
            digest: line_of(DueRun(run, None), 27, _crossing) if rng.random() < 0.5 else lines[digest]
            for point in NINE
            for run in [cell.run(point, 0)]
            for digest in [run.digest]
        }
        assert searched(cell, HALVING, further) == outcome


def test_a_run_that_fails_after_its_rung_was_not_failing_at_it() -> None:
    def fails_late(point: Point, seed: int, round: int) -> float | None:
        return None if round > 9 else _constant(point, seed, round)

    cell = FakeCell(NINE)
    outcome, _ = played(cell, HALVING, fails_late)
    runs = [cell.run(point, 0) for point in NINE]
    further = {run.digest: line_of(DueRun(run, None), 27, fails_late) for run in runs}
    assert {line.status for line in further.values()} == {"failed"}
    assert searched(cell, HALVING, further) == outcome


def test_a_run_that_fails_before_its_rung_is_the_worst_there() -> None:
    def fails(point: Point, seed: int, round: int) -> float | None:
        return None if point == NINE[5] and round > 1 else _constant(point, seed, round)

    outcome, _ = played(FakeCell(NINE), HALVING, fails)
    assert outcome.chosen == {"local.lr": 0.5}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=30, unique=True),
    st.integers(2, 4),
    st.integers(1, 30),
    st.integers(1, 40),
    st.integers(1, 3),
)
def test_the_true_best_is_kept_where_values_do_not_change_with_rounds(
    values: list[float], eta: int, first: int, rounds: int, seeds: int
) -> None:
    points = [{"x": number} for number in range(len(values))]
    cell = FakeCell(points, seeds=range(seeds), rounds=rounds)
    tuning = SearchRules(halving=eta, first=first)
    outcome, lines = played(cell, tuning, lambda point, seed, round: values[point["x"]])
    assert outcome.chosen == {"x": values.index(max(values))}
    assert len(lines) == len(points) * seeds


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 300), st.integers(2, 5))
def test_the_numbers_at_the_rungs_are_those_of_the_runs(
    points: int, first: int, rounds: int, eta: int
) -> None:
    cell = FakeCell([{"x": number} for number in range(points)], rounds=rounds)
    _, lines = played(cell, SearchRules(halving=eta, first=first), lambda p, s, r: p["x"])
    reached = reaching(points, rounds, first, eta)
    assert reached == {
        rung: number
        for rung in rungs(rounds, first, eta)
        if (number := sum(line.rounds >= rung for line in lines.values()))
    }


def test_each_rung_keeps_the_given_share_and_at_least_one() -> None:
    assert [kept(number, 2) for number in (9, 8, 3, 2, 1)] == [4, 4, 1, 1, 1]


def test_the_best_keep_their_order_and_of_equal_ones_the_first_stay() -> None:
    assert best([(0, 3.0), (0, 1.0), (0, 2.0), (0, 1.0)], 3) == [1, 2, 3]
    assert best([(1, -9.0), (0, 5.0)], 1) == [1]


def test_values_after_the_rung_and_missing_ones_are_not_read() -> None:
    curve = {"round": [0, 5, 10, 15], "validation_accuracy": [0.1, None, 0.4, 0.8]}
    line = Row("d", "r", "stopped", None, 15, "test_accuracy", curve)
    assert value_at(line, "validation_accuracy", 12) == 0.4
    assert value_at(line, "validation_accuracy", 5) == 0.1
    assert value_at(line, "validation_accuracy", 15, last=2) == pytest.approx(0.6)
    assert has_reached(line, 15)
    assert not has_reached(line, 16)
    assert not has_reached(line, None)


def test_a_rung_reads_the_value_of_its_own_round_and_not_of_the_next() -> None:
    values = [0.1, 0.5, 0.6, 0.9, 0.7]
    curve = {"round": [0, 1, 2, 3, 4], "validation_accuracy": values}
    line = Row("d", "r", "finished", None, 4, "test_accuracy", curve)
    assert [value_at(line, "validation_accuracy", rung) for rung in range(5)] == values
    assert value_at(line, "validation_accuracy", 3, last=2) == pytest.approx(0.75)
    assert value_at(line, "validation_accuracy", 9) == value_at(line, "validation_accuracy") == 0.7


def test_a_rung_before_the_first_evaluation_is_refused() -> None:
    check_rungs(5, 5, 100)
    with pytest.raises(ConfigError, match="first evaluated after round 10"):
        check_rungs(5, 10, 100)


def test_a_rung_after_which_no_run_is_left_to_stop_is_refused() -> None:
    check_rungs(9, 1, 10)
    for first in (10, 11):
        with pytest.raises(ConfigError, match=f"the first rung is round {first}, but a run has 10 rounds"):
            check_rungs(first, 1, 10)


def test_a_run_that_diverged_in_the_round_of_the_rung_is_the_worst_there() -> None:
    curve = {"round": [0, 3], "validation_accuracy": [0.1, 0.9]}
    diverged = Row("d", "r", "failed", "diverged in round 3: ...", 3, "test_accuracy", curve)
    crashed = replace(diverged, reason="no client update of round 4 was accepted")
    assert value_at(diverged, "validation_accuracy", 3) is None
    assert value_at(crashed, "validation_accuracy", 3) == 0.9


def test_a_point_that_a_rung_left_behind_is_not_compared_with_values_of_later_rungs() -> None:
    def falling(point: Point, seed: int, round: int) -> float:
        return _constant(point, seed, round) - (0.5 if round > 3 else 0.0)

    outcome, _ = played(FakeCell(NINE), HALVING, falling)
    assert outcome.chosen == {"local.lr": 0.6}
