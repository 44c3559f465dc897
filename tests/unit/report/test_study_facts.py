"""Figures against a measured fact of the data: the mean EMD of the clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedlens.core.errors import ConfigError, DataError
from fedlens.report.figures import Figure
from fedlens.report.study_figure import StudyFigure
from fedlens.report.study_figures import check_figures, study_figure
from fedlens.report.study_results import StudyResults
from tests.unit.report.study_curves_fake import ALPHA, results

EMD = {0.0: 1.8, 1.0: 0.9, 100.0: 0.1}
SPEC = {"kind": "setting", "x": "emd"}


def study(known: bool = True) -> StudyResults:
    """Two methods and centralized training at three values of alpha, each with the EMD of its seed."""
    names = {"centralized": "Centralized", "fedavg": "FedAvg", "fedavgm": "FedAvgM"}
    cases = [{ALPHA: alpha} for alpha in EMD]
    finals = {(name, k): 0.8 - 0.1 * m - 0.1 * (2 - k) for m, name in enumerate(names) for k in range(3)}
    made = results(names, cases, finals, seeds=(0, 1))
    lines = dict(made.lines)
    for entry in made.info.entries:
        facts = {"emd": EMD[entry.case[ALPHA]] + 0.02 * entry.seed} if known else {}
        lines[entry.digest] = replace(lines[entry.digest], facts=facts)
    return replace(made, lines=lines)


def panel(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> Figure:
    """The only panel of the figure of the study."""
    kept: list[Figure] = []

    def keep(cls: type[StudyFigure], title: str, caption: str, panels: Any, *more: Any) -> None:
        kept.extend(panels)
        assert "mean EMD" in title

    monkeypatch.setattr(StudyFigure, "of_panels", classmethod(keep))
    study_figure(study(), {**SPEC, **spec})
    (only,) = kept
    return only


def x_of(figure: Figure) -> dict[str, list[float]]:
    return {series.name: list(series.x) for series in figure.series if series.kind == "line" and series.name}


def test_a_line_runs_over_the_mean_emd_of_the_seeds_and_alpha_makes_no_panels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [0.11, 0.91, 1.81]  # half of the 0.02 between the two seeds
    assert x_of(panel(monkeypatch))["FedAvg"] == pytest.approx(expected)


def test_relative_values_are_those_of_the_centralized_run_on_the_same_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, relative = (panel(monkeypatch, relative=flag) for flag in (False, True))
    y = {series.name: list(series.y) for series in plain.series if series.kind == "line"}
    ratio = next(series.y for series in relative.series if series.name == "FedAvg" and series.kind == "line")
    assert "Centralized" not in x_of(relative)
    assert list(ratio) == pytest.approx(
        [a / b for a, b in zip(y["FedAvg"], y["Centralized"], strict=True)], rel=0.01
    )


def test_runs_without_the_fact_are_not_drawn_and_the_figure_is_checked_before_there_are_any() -> None:
    with pytest.raises(DataError):
        study_figure(study(known=False), SPEC)
    planned = replace(study(), lines={})
    check_figures(replace(planned.info, figures=[SPEC]))
    with pytest.raises(ConfigError):
        check_figures(replace(planned.info, figures=[{**SPEC, "panels": ["emdd"]}]))
