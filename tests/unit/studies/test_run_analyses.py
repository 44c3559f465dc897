"""Analyses that a study makes of its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import fedlens
from fedlens.analyses.analyze import analyze
from fedlens.analyses.repeat_rounds import repeat_rounds
from fedlens.base.errors import ConfigError
from fedlens.results.cells import cells
from fedlens.results.figures.study_figures import study_figure
from fedlens.results.rows import Results, Row
from fedlens.studies.study_plan import StudyPlan
from tests.unit.studies.study_kit import Heard, without_clock

STUDY: dict[str, Any] = {
    "base": {
        "rounds": 2,
        "model": "linear",
        "local": {"lr": 0.1},
        "data": {"dataset": "digits", "partition": {"name": "dirichlet", "clients": 3, "alpha": 0.3}},
    },
    "seeds": [0, 1],
    "analyses": ["dynamics"],
    "methods": {
        "fedavg": {"set": {"record.local_models": {"every": 1}}},
        "centralized": {"set": {"algorithm.name": "centralized"}},
    },
}


def run(folder: Path, jobs: int = 0, **changes: Any) -> Any:
    study = fedlens.Study(**{**STUDY, **changes})
    return study.run(folder, jobs=jobs, report=False, progress=Heard())


def runs_of(results: Results, method: str, case: Mapping[str, Any] = MappingProxyType({})) -> dict[int, Row]:
    [cell] = (each for each in cells(results) if (each.method, each.case) == (method, case))
    return cell.ended


@pytest.mark.usefixtures("quick_jobs")
def test_lines_have_the_rows_of_the_analyses_and_recordings_are_removed(tmp_path: Path) -> None:
    result = run(tmp_path / "s")
    lines = runs_of(result.results, "fedavg")
    rows = lines[0].analyses["dynamics"]
    assert [row["round"] for row in rows] == [1, 2]
    assert [row["after"] for row in rows] == lines[0].curve["test_accuracy"][1:]
    assert "clients" not in rows[0]
    assert runs_of(result.results, "centralized")[0].analyses == {}
    directory = tmp_path / "s" / "runs" / lines[0].run
    assert not (directory / "recordings").exists()
    assert "clients" in (directory / "analysis" / "dynamics.jsonl").read_text()
    run(tmp_path / "two", jobs=2)
    assert without_clock(tmp_path / "two") == without_clock(tmp_path / "s")


def test_recordings_that_are_made_again_give_the_same_rows(tmp_path: Path) -> None:
    result = run(tmp_path / "s", seeds=[0])
    [line] = runs_of(result.results, "fedavg").values()
    directory = tmp_path / "s" / "runs" / line.run
    repeat_rounds(directory, [1, 2], needs_models=True)
    made = analyze(directory, ["dynamics"], out=tmp_path / "again")
    assert made.rows["dynamics"][-1]["local"] == pytest.approx(
        line.analyses["dynamics"][-1]["local"], rel=1e-6
    )


def test_a_run_whose_line_was_lost_after_its_recordings_keeps_its_rows(tmp_path: Path) -> None:
    before = runs_of(run(tmp_path / "s", seeds=[0]).results, "fedavg")[0]
    (tmp_path / "s" / "results.jsonl").write_text("")
    assert runs_of(run(tmp_path / "s", seeds=[0]).results, "fedavg")[0].analyses == before.analyses


def test_the_figure_has_a_panel_a_cell_on_one_scale_and_the_mean_of_the_seeds(tmp_path: Path) -> None:
    changes = {
        "methods": None,
        "set": {"record.local_models": {"every": 1}},
        "grid": {"local.lr": [0.05, 0.3]},
    }
    results = run(tmp_path / "s", **changes).results
    figure = study_figure(results, {"kind": "analysis", "analysis": "dynamics", "over": "mean"})
    assert [panel.title for panel in figure.panels] == ["lr 0.05", "lr 0.3"]
    assert len({panel.y.limits for panel in figure.panels}) == 1
    assert "the mean over 2 seeds." in figure.caption
    case = {"local.lr": 0.05}
    after = [line.analyses["dynamics"][0]["after"] for line in runs_of(results, "fedavg", case).values()]
    shown = next(series for series in figure.panels[0].series if series.name == "global model")
    assert shown.y[1] == pytest.approx(sum(after) / 2)
    one = study_figure(results, {"kind": "analysis", "analysis": "dynamics", "where": {"lr": 0.3}})
    assert len(one.panels) == 1
    assert "at seed 0." in one.caption


def test_every_analysis_has_its_figures_of_one_seed_and_of_the_mean(tmp_path: Path) -> None:
    """Rows of layers and rounds are matched one by one, and a number of clients is no list over clients."""
    changes = {
        "methods": None,
        "set": {
            "record.local_models": {"every": 1},
            "record.updates": {"every": 1},
            "model": {"name": "mlp", "hidden": 8},
        },
        "analyses": {
            "drift": {},
            "representation": {"examples": 60},
            "calibration": {},
            "line": {"points": 3},
            "loss-surface": {"count": 4},
        },
    }
    results = run(tmp_path / "s", **changes).results
    lines = list(runs_of(results, "fedavg").values())
    for analysis, count in (("drift", 2), ("representation", 2), ("calibration", 1), ("line", 1)):
        for number in range(1, count + 1):
            spec = {"kind": "analysis", "analysis": analysis, "number": number}
            assert study_figure(results, spec).panels
    for analysis, number in (("drift", 2), ("representation", 1)):
        spec = {"kind": "analysis", "analysis": analysis, "number": number, "over": "mean"}
        (drawn,) = study_figure(results, spec).panels
        key = {"drift": "cosine", "representation": "between_clients"}[analysis]
        layer, _kind = drawn.cells.rows[0].split()
        found = [
            row[key]
            for line in lines
            for row in line.analyses[analysis]
            if (row["round"], row["layer"]) == (2, layer)
        ]
        assert len(found) == 2
        assert drawn.cells.values[0, 1] == pytest.approx(sum(found) / 2)
    assert {row["clients"] for row in lines[0].analyses["drift"]} == {3}
    assert all("by_client" not in row for row in lines[0].analyses["drift"])


@pytest.mark.parametrize("analysis", ["line", "calibration", "loss-plane"])
def test_analyses_of_other_clients_in_each_seed_have_no_mean(analysis: str) -> None:
    figure = {"kind": "analysis", "analysis": analysis, "over": "mean"}
    with pytest.raises(ConfigError, match=rf"'{analysis}' has no mean over seeds.*over = \"first\""):
        StudyPlan.load({**STUDY, "analyses": [analysis], "figures": [figure]})


def test_an_analysis_that_cannot_be_made_is_refused_before_any_run() -> None:
    with pytest.raises(ConfigError, match=r"unknown analysis 'dynamic'.*did you mean 'dynamics'"):
        StudyPlan.load({**STUDY, "analyses": ["dynamic"]})
    nothing = {**STUDY, "methods": {"fedavg": {}}}
    with pytest.raises(ConfigError, match=r'needs local models.*set "record.local_models" = \{ every = 5 \}'):
        StudyPlan.load(nothing)
    seldom = {**STUDY, "methods": {"fedavg": {"set": {"record.local_models": {"every": 5}}}}}
    with pytest.raises(ConfigError, match="needs local models, which no run of the study records"):
        StudyPlan.load(seldom)
    with pytest.raises(ConfigError, match="does not make the analysis 'drift'"):
        StudyPlan.load({**STUDY, "figures": [{"kind": "analysis", "analysis": "drift"}]})
    json.dumps(StudyPlan.load(STUDY).info({}).analyses)
