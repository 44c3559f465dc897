"""A study that was changed after runs of it were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.results.rows import LINES, Row, write_info, write_lines
from fedlens.studies.changed_study import changed_study, refuse_changed
from fedlens.studies.study_plan import StudyPlan

STUDY: dict[str, Any] = {
    "base": "digits",
    "set": {"rounds": 3},
    "seeds": [0, 1],
    "grid": {"data.partition.clients": [5, 10]},
    "methods": {"fedavg": {}, "scaffold": {"set": {"algorithm.name": "scaffold"}}},
}
TUNED = {**STUDY, "grid": {**STUDY["grid"], "local.lr": [0.1, 0.3]}, "tune": {"seeds": [7]}}


def line(digest: str, value: float = 0.5) -> Row:
    curve = {"round": [1], "test_accuracy": [value], "validation_accuracy": [value]}
    return Row(digest, "run", "finished", None, 1, "test_accuracy", curve)


def made(folder: Path, study: dict[str, Any], runs: int | None = None) -> None:
    """The folder of a study of which `runs` runs were made; None for all."""
    plan = StudyPlan.load(study)
    lines: dict[str, Row] = {}
    while (due := plan.due(lines)) and (runs is None or len(lines) < runs):
        lines |= {
            one.run.digest: line(one.run.digest, one.run.point.get("local.lr", 0)) for one in due[:runs]
        }
    write_info(folder, plan.info(lines))
    write_lines(folder / LINES, lines.values())
    if "base" in study:
        import tomli_w

        (folder / "study.toml").write_text(tomli_w.dumps(study))


def sentence(folder: Path, study: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        refuse_changed(folder, StudyPlan.load(study))
    return str(error.value).replace(str(folder), "FOLDER")


def test_another_end_of_runs_that_diverge_is_a_change(tmp_path: Path) -> None:
    made(tmp_path, STUDY)
    text = "Finished runs stay as they are, though stop.diverged is true instead of false."
    assert text in sentence(tmp_path, {**STUDY, "stop": {}})
    write_info(tmp_path, replace(StudyPlan.load(STUDY).info({}), stop_diverged=None))
    assert not refuse_changed(tmp_path, StudyPlan.load({**STUDY, "stop": {}}))


@pytest.mark.parametrize("study", [STUDY, TUNED])
@pytest.mark.parametrize("runs", [None, 3])
def test_the_same_study_is_continued(tmp_path: Path, study: dict[str, Any], runs: int | None) -> None:
    made(tmp_path, study, runs)
    assert not refuse_changed(tmp_path, StudyPlan.load(study))
    words = {**study, "title": "x", "target": 0.5, "baseline": "scaffold", "tables": [{"kind": "summary"}]}
    assert not refuse_changed(tmp_path, StudyPlan.load(words))


def test_a_folder_without_runs_takes_any_study(tmp_path: Path) -> None:
    assert not refuse_changed(tmp_path, StudyPlan.load(STUDY))
    write_info(tmp_path, StudyPlan.load(STUDY).info({}))
    assert not refuse_changed(tmp_path, StudyPlan.load({**STUDY, "seeds": [5]}))


def test_new_cells_are_named(tmp_path: Path) -> None:
    made(tmp_path, STUDY)
    study = {**STUDY, "grid": {"data.partition.clients": [5, 10, 20]}}
    assert sentence(tmp_path, study) == (
        "the study has changed since the runs in FOLDER were made\n"
        "Changed: grid data.partition.clients: 5, 10, 20 instead of 5, 10\n"
        "New: 4 runs (fedavg (data.partition.clients = 20): 2, scaffold (data.partition.clients = 20): 2).\n"
        "Undo the change, continue with --accept-changes, or write to another folder with --out."
    )
    change = refuse_changed(tmp_path, StudyPlan.load(study), accept_changes=True)
    assert len(change.new) == 4
    assert change.gone == []


def test_runs_that_no_longer_belong_are_named(tmp_path: Path) -> None:
    made(tmp_path, STUDY)
    text = sentence(tmp_path, {**STUDY, "seeds": [1], "methods": {"fedavg": {}}})
    assert "Changed: seeds: 1 instead of 2; methods: fedavg instead of fedavg, scaffold" in text
    assert "No longer part of the study: 6 runs (fedavg (data.partition.clients = 5): 1, " in text
    assert "the runs that are no longer part of it stay in 'runs', but not in the results" in text
    assert "New:" not in text


def test_a_changed_setting_makes_new_runs_of_all_cells_that_it_is_in(tmp_path: Path) -> None:
    made(tmp_path, STUDY)
    methods = {**STUDY["methods"], "scaffold": {"set": {"algorithm.name": "scaffold", "local.lr": 0.2}}}
    change = changed_study(tmp_path, StudyPlan.load({**STUDY, "methods": methods}))
    assert {entry.method for entry in [*change.new, *change.gone]} == {"scaffold"}
    assert (len(change.new), len(change.gone)) == (4, 4)
    assert change.settings == ["scaffold, local.lr: 0.2 instead of not set"]


def test_other_seeds_ranges_and_an_added_method_are_each_named_once(tmp_path: Path) -> None:
    drawn = {"number": 2, "local.lr": {"low": 0.01, "high": 0.1}}
    made(tmp_path, {**STUDY, "random": drawn})
    ranges = {**drawn, "seed": 1, "local.lr": {"low": 0.01, "high": 0.2}}
    methods = {**STUDY["methods"], "fedprox": {"set": {"algorithm.name": "fedprox"}}}
    study = {**STUDY, "seeds": [0, 2], "random": ranges, "methods": methods}
    assert changed_study(tmp_path, StudyPlan.load(study)).settings == [
        "seeds: 0, 2 instead of 0, 1",
        "methods: fedavg, scaffold, fedprox instead of fedavg, scaffold",
        'random local.lr: {"high": 0.2, "low": 0.01} instead of {"high": 0.1, "low": 0.01}',
        "random seed: 1 instead of not set",
    ]


def test_runs_that_were_only_planned_are_not_missed(tmp_path: Path) -> None:
    made(tmp_path, STUDY, runs=1)
    change = changed_study(tmp_path, StudyPlan.load({**STUDY, "seeds": [5]}))
    assert len(change.gone) == 1


def test_tuned_points_and_seeds_are_compared(tmp_path: Path) -> None:
    made(tmp_path, TUNED)
    more = {**TUNED, "grid": {**TUNED["grid"], "local.lr": [0.1, 0.3, 0.5]}}
    change = changed_study(tmp_path, StudyPlan.load(more))
    assert {(entry.role, entry.point["local.lr"]) for entry in change.new} == {("tune", 0.5)}
    assert change.gone == []
    other = changed_study(
        tmp_path, StudyPlan.load({**TUNED, "grid": {**TUNED["grid"], "local.lr": [0.1, 0.2]}})
    )
    assert {(entry.role, entry.point["local.lr"]) for entry in other.gone} == {("tune", 0.3), ("final", 0.3)}
    seeds = changed_study(tmp_path, StudyPlan.load({**TUNED, "seeds": [0, 1, 2]}))
    assert {(entry.role, entry.seed) for entry in seeds.new} == {("final", 2)}


def test_a_metric_that_changes_the_choice_is_named(tmp_path: Path) -> None:
    made(tmp_path, TUNED)
    text = sentence(tmp_path, {**TUNED, "metric": "test_loss"})
    assert (
        "The points that tuning chooses can change: metric is test_loss instead of that of the task" in text
    )
    made(tmp_path, STUDY)
    assert not changed_study(tmp_path, StudyPlan.load({**STUDY, "metric": "test_loss"}))


def test_points_that_an_earlier_version_added_beyond_the_grid_belong_no_more(tmp_path: Path) -> None:
    made(tmp_path, TUNED)
    plan = StudyPlan.load(TUNED)
    wider = plan.cells.run(plan.cells.methods[0], plan.cells.cases[0], {"local.lr": 0.9}, "tune", 7)
    info = plan.info({})
    write_info(tmp_path, replace(info, entries=[*info.entries, wider.entry]))
    write_lines(tmp_path / LINES, [line(wider.digest)])
    assert len(changed_study(tmp_path, StudyPlan.load(TUNED)).gone) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stop": {"halving": 2, "first": 1}}, "stop.halving is 2 instead of not set"),
        ({"tune": {"seeds": [7], "refit": False}}, "tune.refit is false instead of true"),
    ],
)
def test_rules_of_tuning_that_change_the_choice_are_named(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    made(tmp_path, TUNED)
    assert words in sentence(tmp_path, {**TUNED, **change})
