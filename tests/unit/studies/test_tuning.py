"""Tuning in the plan of a study: which runs are due, which point follows, and what the result says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.results.rows import Row
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.study_plan import StudyPlan

BASE = {
    "rounds": 9,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}
Value = Callable[[PlannedRun, int], float | None]


def load(**settings: Any) -> StudyPlan:
    return StudyPlan.load({"base": BASE, **settings})


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(**settings)
    return str(error.value)


def peak(run: PlannedRun, round: int) -> float | None:
    """Best at a local rate of 0.1, with noise of the seed, and better from round to round."""
    noise = random.Random(f"{run.seed} {sorted(run.point.items())}").gauss(0, 0.01)
    return round / 20 - abs(math.log10(run.settings["local"]["lr"] / 0.1)) / 5 + noise


def line_of(due: DueRun, value: Value = peak) -> Row:
    rounds = due.run.settings["rounds"]
    until = rounds if due.until is None else min(rounds, due.until)
    values = [value(due.run, round) for round in range(until + 1)]
    failed = next((round for round, one in enumerate(values) if one is None), None)
    until = until if failed is None else failed - 1
    status = "failed" if failed is not None else "finished" if until == rounds else "stopped"
    columns = {"round": range(until + 1), "validation_accuracy": values, "test_accuracy": values}
    curve = {name: list(column)[: until + 1] for name, column in columns.items()}
    return Row(due.run.digest, due.run.directory, status, None, until, "test_accuracy", curve)  # type: ignore[arg-type]


def carried_out(plan: StudyPlan, value: Value = peak) -> dict[str, Row]:
    lines: dict[str, Row] = {}
    for _ in range(100):
        due = plan.due(lines)
        if not due:
            return lines
        assert len({one.run.digest for one in due}) == len(due)
        lines |= {one.run.digest: line_of(one, value) for one in due}
    raise AssertionError("the study does not end")


def chosen(plan: StudyPlan, lines: Mapping[str, Row]) -> dict[str, Any]:
    """The tuned values of the final runs by method."""
    return {run.method: dict(run.point) for run in plan.final_runs(lines)}


RATES = {"local.lr": [0.01, 0.1, 1.0]}
METHODS = {"fedavg": {}, "fedprox": {"set": {"algorithm.name": "fedprox", "algorithm.mu": 0.1}}}


def test_every_method_gets_the_best_of_its_own_points_and_the_budget_is_said() -> None:
    plan = load(grid=RATES, methods=METHODS, seeds=[0, 1], tune={"seeds": [100, 101]})
    lines = carried_out(
        plan, lambda run, round: run.settings["local"]["lr"] * (1 if run.method == "fedavg" else -1)
    )
    assert chosen(plan, lines) == {"fedavg": {"local.lr": 1.0}, "fedprox": {"local.lr": 0.01}}
    tuning = plan.info(lines).tuning
    assert (tuning["budget"], tuning["own_seeds"]) == (6, True)
    assert len(lines) == 2 * 6 + 2 * 2


def test_tuning_takes_seeds_that_the_results_do_not_use() -> None:
    plan = load(grid=RATES, methods=METHODS, seeds=[0, 100], tune={})
    assert plan.cells.tuning_seeds == {"fedavg": [101, 102], "fedprox": [101, 102]}
    assert plan.info({}).tuning["own_seeds"]
    kept = load(grid=RATES, methods=METHODS, seeds=[0, 100], tune={"refit": False})
    assert kept.cells.tuning_seeds == {"fedavg": [0, 100], "fedprox": [0, 100]}


def test_a_killed_study_makes_the_same_runs_in_any_order() -> None:
    rng = random.Random(0)
    rules: list[dict[str, Any]] = [
        {"tune": {"seeds": [7]}},
        {"tune": {"refit": False}},
        {"tune": {"seeds": [7, 8]}, "stop": {"halving": 2, "first": 2}},
        {"tune": {"refit": False}, "stop": {"halving": 3, "first": 3}},
    ]
    for rule in rules:
        plan = load(grid={"local.lr": [0.001, 0.01, 0.03]}, methods=METHODS, seeds=[0, 1], **rule)
        whole = carried_out(plan)
        for _ in range(4):
            lines: dict[str, Row] = {}
            while due := plan.due(lines):
                rng.shuffle(due)
                lines |= {one.run.digest: line_of(one) for one in due[: rng.randint(1, len(due))]}
            assert lines == whole
            assert plan.info(lines) == plan.info(whole)


def test_final_runs_of_a_cell_start_as_soon_as_its_point_is_chosen() -> None:
    plan = load(grid=RATES, methods=METHODS, seeds=[0], tune={"seeds": [100]})
    lines = {one.run.digest: line_of(one) for one in plan.due({}) if one.run.method == "fedavg"}
    assert {(one.run.method, one.run.role) for one in plan.due(lines)} == {
        ("fedavg", "final"),
        ("fedprox", "tune"),
    }


def test_without_refit_the_chosen_runs_of_halving_go_on_to_the_end_as_final_runs() -> None:
    plan = load(grid=RATES, seeds=[0, 1], tune={"refit": False}, stop={"halving": 3, "first": 2})
    lines = carried_out(plan)
    rounds = sorted((line.status, line.rounds) for line in lines.values())
    assert rounds == [("finished", 9)] * 2 + [("stopped", 2)] * 4
    assert {run.role for run in plan.final_runs(lines)} == {"final"}
    # The choice was made at round 2, and later rounds do not change it.
    assert chosen(plan, lines) == {"fedavg": {"local.lr": 0.1}}
    worse = {
        digest: line_of(DueRun(run), lambda run, round: peak(run, round) if round < 3 else 0.0)
        for run in plan.final_runs(lines)
        for digest in [run.digest]
    }
    assert chosen(plan, lines | worse) == chosen(plan, lines)


def test_a_final_run_that_fails_after_its_rung_leaves_the_choice_as_it_was() -> None:
    plan = load(grid=RATES, seeds=[0, 1], tune={"refit": False}, stop={"halving": 3, "first": 2})

    def fails(run: PlannedRun, round: int) -> float | None:
        return None if round > 2 and run.seed == 1 else peak(run, round)

    lines = carried_out(plan, fails)
    assert chosen(plan, lines) == {"fedavg": {"local.lr": 0.1}}
    assert [line.status for line in lines.values()].count("failed") == 1
    assert plan.due(lines) == []


def _planned(plan: StudyPlan, lines: Mapping[str, Row]) -> dict[str, PlannedRun]:
    from fedlens.studies.tuning import tuning_runs

    return {run.digest: run for run in tuning_runs(plan.cells, lines)}


def test_a_method_with_one_point_makes_no_tuning_run() -> None:
    plan = load(grid={"local.lr": [0.1]}, seeds=[0], tune={"seeds": [100]})
    assert [one.run.role for one in plan.due({})] == ["final"]
    assert plan.number_of_runs == {"tune": 0, "final": 1}
    untuned = load(grid={"local.lr": [0.1]}, seeds=[0, 1], tune={"refit": False})
    assert sum(untuned.number_of_runs.values()) == len(untuned.due({})) == 2


def test_the_first_rung_must_not_precede_the_first_evaluation() -> None:
    text = refused(grid=RATES, set={"evaluation.every": 3}, tune={}, stop={"halving": 3, "first": 2})
    assert "the first rung is round 2, but runs are first evaluated after round 3" in text


def test_points_are_compared_on_validation_data_where_the_study_names_a_metric_of_test_data() -> None:
    plan = load(grid=RATES, seeds=[0], tune={"seeds": [100]}, metric="test_accuracy")
    lines = {one.run.digest: line_of(one) for one in plan.due({})}
    opposite = {
        digest: replace(
            line, curve={**line.curve, "test_accuracy": [-(v or 0) for v in line.curve["test_accuracy"]]}
        )
        for digest, line in lines.items()
    }
    assert chosen(plan, opposite) == chosen(plan, lines) == {"fedavg": {"local.lr": 0.1}}


def test_a_run_without_the_metric_is_named_with_the_metrics_that_it_has() -> None:
    plan = load(grid=RATES, tune={"seeds": [100]}, metric="test_calibration_error")
    lines = {one.run.digest: line_of(one) for one in plan.due({})}
    with pytest.raises(ConfigError, match=r"'validation_calibration_error', which the run .* lacks"):
        plan.due(lines)
