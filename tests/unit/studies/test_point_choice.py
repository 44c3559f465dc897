"""The search for settings: by the mean over seeds, the same after any interruption."""

import itertools
import random
from dataclasses import replace

import pytest

from fedlens.base.errors import ConfigError
from fedlens.studies.planned import DueRun, each_once
from fedlens.studies.tuning import SearchRules, searched
from tests.unit.studies.fake_study import FakeCell, Point, line_of, played, played_with_kills

RATES = [{"local.lr": lr} for lr in (0.01, 0.1, 1.0)]
GRID = SearchRules()


def _peak(at: float, noise: float = 0.0):  # type: ignore[no-untyped-def]
    """An accuracy that is best where local.lr is `at`, the same after every round."""
    from math import log10

    def value(point: Point, seed: int, round: int) -> float:
        shift = noise * random.Random(f"{sorted(point.items())} {seed}").gauss(0, 1)
        return 0.9 - 0.1 * abs(log10(point["local.lr"] / at)) + shift

    return value


def test_all_points_of_the_grid_are_due_with_all_seeds_at_first() -> None:
    first = searched(FakeCell(RATES, seeds=(4, 5)), GRID, {})
    assert [(one.run.point["local.lr"], one.run.seed, one.until) for one in first.due] == [
        (lr, seed, None) for lr in (0.01, 0.1, 1.0) for seed in (4, 5)
    ]
    assert first.chosen is None


@pytest.mark.parametrize("best", [0.01, 0.1, 1.0])
def test_the_point_with_the_best_mean_over_the_seeds_is_chosen(best: float) -> None:
    outcome, lines = played(FakeCell(RATES, seeds=(0, 1, 2)), GRID, _peak(best))
    assert outcome.chosen == {"local.lr": best}
    assert len(lines) == 9


def test_one_seed_that_speaks_for_a_point_does_not_outweigh_the_others() -> None:
    values = {(0.01, 0): 0.9, (0.01, 1): 0.1, (0.1, 0): 0.6, (0.1, 1): 0.6}
    cell = FakeCell(RATES[:2], seeds=(0, 1))
    assert played(cell, GRID, lambda p, s, r: values[p["local.lr"], s])[0].chosen == RATES[1]
    alone = FakeCell(RATES[:2], seeds=(0,))
    assert played(alone, GRID, lambda p, s, r: values[p["local.lr"], s])[0].chosen == RATES[0]


def test_of_equal_points_the_first_is_chosen() -> None:
    for order in itertools.permutations(RATES):
        assert played(FakeCell(order, seeds=(0, 1)), GRID, lambda p, s, r: 0.5)[0].chosen == order[0]


def test_a_smaller_loss_is_better() -> None:
    cell, tuning = FakeCell(RATES), replace(GRID, metric="validation_loss")
    due = searched(cell, tuning, {}).due
    lines = {
        one.run.digest: line_of(one, 27, lambda p, s, r: 1 / p["local.lr"], "validation_loss") for one in due
    }
    assert searched(cell, tuning, lines).chosen == {"local.lr": 1.0}


def test_a_point_with_a_failed_run_is_worse_than_any_without() -> None:
    def value(point: Point, seed: int, round: int) -> float | None:
        if point["local.lr"] == 1.0 and seed == 1 and round > 5:
            return None
        return point["local.lr"]

    outcome, _ = played(FakeCell(RATES, seeds=(0, 1, 2)), GRID, value)
    assert outcome.chosen == {"local.lr": 0.1}


def test_where_all_runs_fail_a_point_is_chosen_all_the_same() -> None:
    assert played(FakeCell(RATES), GRID, lambda p, s, r: None)[0].chosen == RATES[0]


def test_one_point_needs_no_run() -> None:
    outcome = searched(FakeCell(RATES[1:2], seeds=(0, 1)), GRID, {})
    assert (outcome.due, outcome.chosen) == ([], RATES[1])


def test_the_last_values_of_a_curve_are_averaged() -> None:
    def value(point: Point, seed: int, round: int) -> float:
        return 0.9 if point == RATES[0] and round == 27 else 0.2 if point == RATES[0] else 0.6

    assert played(FakeCell(RATES), GRID, value)[0].chosen == RATES[0]
    assert played(FakeCell(RATES), replace(GRID, last=3), value)[0].chosen == RATES[1]


def test_a_run_without_the_metric_is_refused_with_those_that_it_has() -> None:
    cell, tuning = FakeCell(RATES), replace(GRID, metric="validation_mean_iou")
    lines = {one.run.digest: line_of(one, 27, _peak(0.1)) for one in searched(cell, tuning, {}).due}
    with pytest.raises(ConfigError, match=r"'validation_mean_iou'.* lacks.*validation_accuracy"):
        searched(cell, tuning, lines)


def test_a_study_killed_at_any_moment_makes_the_same_runs_and_the_same_choice() -> None:
    rng = random.Random(1)
    rules = [
        GRID,
        replace(GRID, halving=3, first=1),
        replace(GRID, halving=2, first=4, last=2),
        replace(GRID, halving=2, first=3),
    ]
    points = [{"local.lr": lr, "algorithm.mu": mu} for lr in (0.01, 0.03, 0.1) for mu in (0.0, 0.1, 1.0)]
    for tuning, peak in itertools.product(rules, [0.01, 0.05, 3.0]):
        cell, value = FakeCell(points, seeds=(0, 1)), _peak(peak, noise=0.02)
        whole, lines = played(cell, tuning, value)
        for _ in range(5):
            killed, others = played_with_kills(cell, tuning, value, rng)
            assert killed == whole
            assert others == lines


def test_due_runs_that_cells_share_are_due_once_and_as_far_as_the_furthest_needs() -> None:
    run = FakeCell(RATES).run(RATES[0], 0)
    other = FakeCell(RATES).run(RATES[1], 0)
    due = each_once([DueRun(run, 3), DueRun(other, 9), DueRun(run, None), DueRun(other, 3)])
    assert due == [DueRun(run, None), DueRun(other, 9)]
