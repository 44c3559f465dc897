"""What a study will cost: numbers of runs and images are exact, disk and memory close, times of the right size."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens import Experiment
from fedlens.base.errors import DataError
from fedlens.results.rows import LINES, write_lines
from fedlens.run.session import Session
from fedlens.studies.carry_out import RunOptions, carry_out
from fedlens.studies.estimate import BASIS, estimate, mean_rounds
from fedlens.studies.progress import StudyProgress
from fedlens.studies.run_cost import EVALUATION, RunCost, RunCosts, Speed, _speed_of, _Timed
from fedlens.studies.study_plan import StudyPlan
from tests.contract.contract_kit import nightly_but

SETTINGS: dict[str, Any] = {
    "rounds": 6,
    "seed": 0,
    "model": "linear",
    "local": {"lr": 0.1, "epochs": 2, "batch_size": 10},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 8}},
    "engine": {"name": "inline", "threads": 1},
}
STUDY: dict[str, Any] = {
    "base": {key: value for key, value in SETTINGS.items() if key != "seed"},
    "seeds": [0, 1],
    "grid": {"local.lr": [0.1, 0.3]},
}
CASES: dict[str, dict[str, Any]] = {
    "all clients": {},
    "some clients": {"select": {"clients_per_round": 4}},
    "steps": {"local": {"lr": 0.1, "steps": 3, "batch_size": 10}},
    "centralized": {"algorithm": "centralized"},
    "centralized steps": {"algorithm": "centralized", "local": {"lr": 0.1, "steps": 3, "batch_size": 10}},
    "state at the clients": {"algorithm": "scaffold", "record": {"clients": True}},
    "clients measured": {
        "data": {**SETTINGS["data"], "validation": 0.25, "validation_from": "client"},
        "evaluation": {"clients": "all", "every": 4},
    },
}


class Broken(nn.Linear):
    """A model that fails on the batches of training, which have more than two images."""

    def forward(self, images: Tensor) -> Tensor:
        """Fails in training."""
        if self.training and torch.is_grad_enabled() and len(images) > 2:
            raise ValueError("no")
        return super().forward(images.flatten(1))


@pytest.mark.parametrize("case", nightly_but({"some clients", "centralized", "clients measured"}, CASES))
def test_images_and_disk_are_those_of_the_run(case: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, **CASES[case]}
    cost = RunCosts(Session()).of(settings)
    run = Experiment(**settings).run(tmp_path / "run", report=False)
    assert cost.images == pytest.approx(run.summary["totals"]["examples"], rel=0.01)
    size = sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file())
    assert size * 0.8 < cost.disk < size * 2
    assert cost.seconds is not None
    assert cost.seconds > 0
    assert 2**28 < cost.memory < 2**30


def test_the_seconds_of_a_run_are_its_work_over_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 clients of 179 or 180 images take 2 x 18 steps in each of 6 rounds; 360 test images are evaluated 7 times."""
    monkeypatch.setattr(RunCosts, "_measure", lambda *_: Speed(5.0, 0.5, 0.25, 0.125, 0, 0))
    costs = RunCosts(Session())
    visits, evaluated = 6 * 8, 7 * 360
    assert costs.of(SETTINGS).seconds == 5 + 0.5 * visits + 0.25 * 36 * visits + 0.125 * evaluated
    pooled = costs.of({**SETTINGS, "algorithm": "centralized"})
    assert pooled.seconds == 5 + 0.5 * 6 + 0.25 * 6 * 2 * ceil(1437 / 10) + 0.125 * evaluated
    held = costs.of({**SETTINGS, "data": {**SETTINGS["data"], "validation": 0.7}})
    assert held.seconds == 5 + 0.5 * visits + 0.25 * 12 * visits + 0.125 * 7 * (360 + round(0.7 * 1437))


def test_the_speed_of_a_step_is_what_further_steps_add() -> None:
    built = RunCosts(Session())._built(SETTINGS)
    one, many = _Timed(2.0, 3.0, 4, 1.0, 0.5, 0, 0), _Timed(8.0, 1.0, 4, 11.0, 0.25, 100, 7)
    assert _speed_of(one, many, built) == Speed(3.0, pytest.approx(0.35), pytest.approx(0.15), 0.25, 0, 0)
    alone = _speed_of(replace(one, image=None), None, built)
    assert alone == Speed(3.0, 0.0, 0.5, 0.5 / 10 / EVALUATION, 0, 0)


@pytest.mark.parametrize("algorithm", ["scaffold", {"name": "dsgd"}, {"name": "splitfed", "cut": 1}])
def test_every_kind_of_round_is_timed(algorithm: Any) -> None:
    """With gradients before the training, with letters between peers, and in two parts."""
    settings = {**SETTINGS, "model": "mlp", "algorithm": algorithm}
    speed = RunCosts(Session())._measure(settings, RunCosts(Session())._built(settings))
    assert speed is not None
    assert speed.step > 0
    assert speed.image > 0


def test_the_steps_of_a_blind_sum_are_those_of_its_clients() -> None:
    """Its replies have no metrics, and the server computes the steps itself."""
    settings = {**SETTINGS, "model": "mlp"}
    plain, blind = (
        _Timed.of(RunCosts(Session())._built({**settings, "aggregate": name}))
        for name in ("mean", "quantized")
    )
    assert blind.steps == plain.steps > 1


def test_runs_on_other_engines_are_timed_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and model are those of the run before, and the settings of its engine are not."""
    engines: list[str] = []
    real = _Timed.of

    def noted(built: Any) -> Any:
        engines.append(built.config.engine["name"])
        return real(built)

    monkeypatch.setattr(_Timed, "of", noted)
    costs = RunCosts(Session())
    assert costs.of({**SETTINGS, "engine": {"name": "vectorized"}}).seconds is not None
    assert costs.of(SETTINGS).seconds is not None
    assert engines == ["vectorized", "vectorized", "inline", "inline"]


def test_a_step_that_fails_leaves_the_time_open() -> None:
    def broken(input_shape: Any, classes: int) -> nn.Module:
        return Broken(64, classes)

    costs = RunCosts(Session())
    cost = costs.of({**SETTINGS, "model": broken})
    assert (cost.images, cost.seconds, cost.disk) == (6 * 2 * 1437, None, 0)


def test_nothing_is_timed_where_only_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RunCosts(Session()).of(SETTINGS)
    monkeypatch.setattr(RunCosts, "_measure", None)
    cost = RunCosts(Session(), timed=False).of(SETTINGS)
    assert (cost.images, cost.seconds, cost.memory) == (whole.images, None, whole.memory)


def test_fewer_rounds_cost_less_and_larger_models_more_memory() -> None:
    costs = RunCosts(Session())
    whole, half = costs.of(SETTINGS), costs.of(SETTINGS, rounds=3)
    assert half.images == whole.images / 2
    assert (half.seconds or 0) < (whole.seconds or 0)
    assert half.disk < whole.disk
    large = costs.of({**SETTINGS, "model": {"name": "mlp", "hidden": 2000}, "rounds": 1})
    assert large.memory > whole.memory + 4 * 2000 * 2000


def test_what_runs_share_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = RunCosts(Session())
    measured: list[Any] = []
    real = RunCosts._measure

    def counted(self: RunCosts, settings: Any, built: Any) -> Any:
        measured.append(settings)
        return real(self, settings, built)

    monkeypatch.setattr(RunCosts, "_measure", counted)
    for seed in range(3):
        for lr in (0.1, 0.2):
            costs.of({**SETTINGS, "seed": seed, "local": {"lr": lr, "batch_size": 10}})
    assert len(measured) == 1
    costs.of({**SETTINGS, "model": "mlp"})
    assert len(measured) == 2


def test_an_estimate_counts_the_runs_that_are_left(tmp_path: Path) -> None:
    plan = StudyPlan.load(STUDY)
    found = estimate(plan, tmp_path, jobs=2)
    assert (found.runs, found.left, found.jobs) == ({"final": 4}, 4, 2)
    assert found.images == 4 * 6 * 2 * 1437
    assert found.sentences[0] == "4 runs."
    assert found.sentences[2] == BASIS
    assert json.loads(json.dumps(vars(found)))["left"] == 4
    options = RunOptions(tmp_path / "runs")
    session = Session()
    lines = [carry_out(due, options, session, StudyProgress()) for due in plan.due({})[:3]]
    write_lines(tmp_path / LINES, lines)
    rest = estimate(plan, tmp_path, jobs=2)
    assert (rest.left, rest.sentences[0]) == (1, "4 runs; 3 of them are done.")
    assert rest.hours == rest.core_hours  # one run cannot be divided
    write_lines(tmp_path / LINES, [*lines, carry_out(plan.due({})[3], options, session, StudyProgress())])
    assert estimate(plan, tmp_path).sentences == ["4 runs; 4 of them are done."]


def test_tuning_counts_with_its_runs_and_the_runs_after_it(tmp_path: Path) -> None:
    tune = {"on": "validation", "share": 0.2, "over": ["local.lr"]}
    found = estimate(StudyPlan.load({**STUDY, "tune": tune}), tmp_path, jobs=1)
    assert (found.runs, found.left) == ({"tune": 4, "final": 2}, 6)
    assert found.sentences[0] == "4 tuning runs, then 2 final runs."
    assert found.images == 4 * 6 * 2 * round(0.8 * 1437) + 2 * 6 * 2 * 1437


def test_successive_halving_counts_with_the_rounds_it_leaves() -> None:
    assert mean_rounds(9, rounds=450, first=50, keep=3) == ceil((9 * 50 + 3 * 100) / 9)
    assert mean_rounds(1, rounds=100, first=10, keep=3) == 100


def test_a_disk_that_is_too_small_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunCosts, "of", lambda *_: RunCost(10.0, 7200.0, 2**62, 2**30))
    found = estimate(StudyPlan.load(STUDY), tmp_path, jobs=2)
    assert (found.core_hours, found.hours) == (8.0, 4.0)
    assert "4 h with 2 runs at once, 8 h one after the other" in found.sentences[1]
    assert found.sentences[3].endswith("Free some space, or name a folder on another disk with --out.")
    monkeypatch.setattr(RunCosts, "of", lambda *_: RunCost(10.0, None, 0, 2**30))
    assert "the time could not be measured" in estimate(StudyPlan.load(STUDY), tmp_path).sentences[1]


def test_data_that_are_missing_are_an_error(tmp_path: Path) -> None:
    study = {**STUDY, "set": {"data.dataset.name": "mnist"}}
    with pytest.raises(DataError, match="MNIST not found"):
        estimate(StudyPlan.load(study), tmp_path, data_dir=tmp_path)
