"""Figures of studies: their numbers against hand calculations, what they lack, and wrong requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import checked_kind, settings_model
from fedlens.data.partition.partition import Partition
from fedlens.pages.plotly_figures import PlotlyFigure
from fedlens.pages.plotly_figures import draw as draw_panel
from fedlens.results.cells import cells
from fedlens.results.data_json import CasePopulation, population_values
from fedlens.results.figures.chart import Panel, Series
from fedlens.results.figures.named_cells import NamedCells, rates_of
from fedlens.results.figures.picture import chart_picture, style
from fedlens.results.figures.study_axes import x_scale
from fedlens.results.figures.study_figures import (
    FIGURES,
    check_figures,
    default_figures,
    draw,
    study_figure,
    study_figures,
    write_study_figures,
)
from fedlens.results.figures.study_figures import _common as figure_options
from fedlens.results.rows import Results, needs_populations
from fedlens.studies.reproductions import reproduction
from fedlens.studies.study_file import read_study
from fedlens.studies.study_plan import StudyPlan
from tests.unit.results.study_curves_fake import ALPHA, by_alpha, line, results, tuned

DOCUMENT: dict[str, Any] = {
    "source": "hsu2019",
    "values": [
        {
            "method": "fedavgm",
            "metric": "test_accuracy",
            "case": {ALPHA: 0.0},
            "low": 0.75,
            "where": "section 4.2",
        },
        {
            "method": "fedavg",
            "metric": "test_accuracy",
            "case": {ALPHA: 10.0},
            "value": 0.7,
            "where": "table 1",
        },
        {
            "method": "fedavg",
            "metric": "test_loss",
            "case": {ALPHA: 0.1},
            "value": 9.0,
            "where": "another metric",
        },
    ],
}


def finals(study: Results, method: str, case: Mapping[str, Any]) -> Mapping[int, float]:
    return next(cell.values for cell in cells(study) if (cell.method, cell.case) == (method, case))


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the panels of each figure that a test makes, in `PANELS`."""
    from fedlens.results.figures.chart import Chart

    make = Chart.__post_init__

    def keeping(chart: Chart) -> None:
        PANELS[:] = chart.panels
        make(chart)

    monkeypatch.setattr(Chart, "__post_init__", keeping)


PANELS: list[Any] = []


def panels(study: Results, **spec: Any) -> list[Any]:
    study_figure(study, spec)
    return list(PANELS)


def named(figure: Panel, name: str, kind: str = "line") -> Series:
    return next(series for series in figure.series if series.name == name and series.kind == kind)


def test_a_point_is_the_mean_over_seeds_and_its_band_the_t_interval_of_scipy() -> None:
    study = by_alpha()
    [panel] = panels(study, kind="setting", x="alpha")
    mean, band = named(panel, "FedAvg"), named(panel, "FedAvg", "band")
    for k, alpha in enumerate((0.0, 0.1, 1.0, 100.0)):
        values = list(finals(study, "fedavg", {ALPHA: alpha}).values())
        low, high = stats.t.interval(0.95, 4, statistics.fmean(values), stats.sem(values))
        assert mean.y[k] == pytest.approx(statistics.fmean(values))
        assert (band.y[k], band.y[7 - k]) == pytest.approx((high, low))


@pytest.mark.parametrize("kind", ["range", "deviation"])
def test_other_bands_are_what_the_caption_says(kind: str) -> None:
    study = by_alpha()
    [panel] = panels(study, kind="setting", x="alpha", band=kind)
    values = list(finals(study, "fedavg", {ALPHA: 0.1}).values())
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    wanted = {"range": (max(values), min(values)), "deviation": (mean + deviation, mean - deviation)}[kind]
    band = named(panel, "FedAvg", "band")
    assert (band.y[1], band.y[6]) == pytest.approx(wanted)


def test_zero_stands_a_step_below_the_smallest_value_of_a_logarithmic_axis_after_a_break() -> None:
    scale = x_scale(NamedCells.of(by_alpha()), ALPHA, [100.0, 0.0, 0.1, 1.0])
    zero, smallest = scale.at(0.0), scale.at(0.1)
    assert scale.kind == "log"
    assert smallest == 0.1
    assert 0 < zero < scale.axis.gap < smallest  # type: ignore[operator]
    assert list(scale.axis.names) == ["0", "0.1", "1", "100"]


def test_marks_stand_at_the_values_if_they_are_round_and_else_at_round_numbers() -> None:
    runs = NamedCells.of(by_alpha())

    def marks(*values: float, scale: Any = "auto") -> list[float]:
        return list(x_scale(runs, ALPHA, values, scale).axis.ticks)

    assert marks(0.03, 0.1, 0.3) == [0.03, 0.1, 0.3]
    assert marks(0.0316228, 0.1, 0.316228) == [0.05, 0.1, 0.2]
    assert marks(0.001, 0.0316228, 1.0) == [0.001, 0.01, 0.1, 1.0]
    assert marks(0.0, 0.0316228, 1.0)[1:] == [0.05, 0.1, 0.2, 0.5, 1.0]
    assert marks(0.683772, 0.9, scale="linear") == []


@pytest.mark.parametrize("limits", [(0.42, 0.64), (0.0, 0.4), (0.3, 1.0), (0.4, 0.5)])
def test_pictures_mark_steps_of_one_two_and_five(limits: tuple[float, float]) -> None:
    pytest.importorskip("matplotlib")
    heat = {"kind": "heat", "x": "alpha", "y": "effective_lr", "runs": "tune"}
    with style():
        curves = chart_picture(study_figure(by_alpha(), {"kind": "curves", "y": limits}))
        colours = chart_picture(study_figure(tuned(), heat))
    marks = [axes.get_yticks() for axes in (*curves.axes, colours.axes[-1])]
    steps = [min(b - a for a, b in pairwise(sorted(each))) for each in marks]
    assert {f"{step:.3e}"[:5] for step in steps} <= {"1.000", "2.000", "5.000"}


def test_numbers_of_a_narrow_range_stand_on_a_linear_axis_and_words_on_one_of_categories() -> None:
    runs = NamedCells.of(by_alpha())
    assert x_scale(runs, ALPHA, [1, 2, 5]).kind == "linear"
    assert x_scale(runs, ALPHA, ["iid", 2]).kind == "category"
    assert [x_scale(runs, ALPHA, ["b", "a"]).at(value) for value in ("b", "a")] == [0, 1]
    with pytest.raises(ConfigError, match="no log axis shows"):
        x_scale(runs, ALPHA, [-1, 2, 5], "log")


def test_relative_values_are_divided_by_the_centralized_run_of_the_same_seed_and_case() -> None:
    study = by_alpha(centralized=True)
    [panel] = panels(study, kind="setting", x="alpha", relative=True)
    own, bound = finals(study, "fedavg", {ALPHA: 0.1}), finals(study, "centralized", {ALPHA: 0.1})
    assert named(panel, "FedAvg").y[1] == pytest.approx(statistics.fmean(own[s] / bound[s] for s in own))
    assert not any(series.name == "Centralized" for series in panel.series)


def test_a_relative_value_is_that_of_the_seeds_that_both_have() -> None:
    study = by_alpha(centralized=True)
    whole = finals(study, "centralized", {ALPHA: 0.1})
    waiting = {
        key: row for key, row in study.lines.items() if key not in ("centralized-1-3", "centralized-1-4")
    }
    study = Results(study.info, waiting)
    [panel] = panels(study, kind="setting", x="alpha", relative=True)
    own = finals(study, "fedavg", {ALPHA: 0.1})
    ratios = [own[seed] / whole[seed] for seed in (0, 1, 2)]
    assert named(panel, "FedAvg").y[1] == pytest.approx(statistics.fmean(ratios))


def test_the_clients_by_their_emd_stand_above_the_metric_on_the_same_axis(tmp_path: Path) -> None:
    study = by_alpha(centralized=True)
    spec = {"kind": "setting", "x": "emd", "relative": True, "scale": "linear", "above": "emd"}
    assert needs_populations([spec], [])
    facts = {0.0: 1.8, 0.1: 1.0, 1.0: 0.5, 10.0: 0.3}
    lines = {
        entry.digest: replace(run, facts={**run.facts, "emd": facts[entry.case[ALPHA]]})
        for entry in study.info.entries
        if (run := study.lines[entry.digest]) and entry.case[ALPHA] in facts
    }
    study = Results(study.info, lines)
    with pytest.raises(DataError, match=r"data\.json has no populations"):
        study_figure(study, spec)
    # Two clients of one class each have the EMD 1, and two of both classes the EMD 0.
    apart, alike = (
        CasePopulation.of(Partition.of_owners(owners, 2).counted([0, 0, 1, 1]), {ALPHA: alpha})
        for alpha, owners in ((0.1, [0, 0, 1, 1]), (10.0, [0, 1, 0, 1]))
    )
    figure = study_figure(replace(study, data={"populations": population_values([apart, alike])}), spec)
    above, below = figure.panels
    steps = {series.name: (series.x, series.y) for series in above.series}
    assert steps["alpha 0.1"] == ([1.0, 1.0, 1.05, 1.05], [0, 2, 2, 0])
    assert steps["alpha 10"] == ([0.0, 0.0, 0.05, 0.05], [0, 2, 2, 0])
    assert above.x.limits == below.x.limits
    assert above.x.limits[0] < 0 < 1.8 < above.x.limits[1]
    assert [panel.shape for panel in figure.panels] == ["tall", "tall"]  # below each other on the page too
    with style():
        top, bottom = chart_picture(figure).axes
    assert top.get_ylabel() == "clients"
    assert bottom.get_ylabel() == "accuracy relative to centralized"


@pytest.mark.parametrize("figure", ["fig4a", "fig4b"])
def test_hsu2020_figure_4_has_its_row_of_clients(figure: str) -> None:
    [spec] = read_study(reproduction(f"hsu2020/{figure}")).settings.figures
    assert (spec["x"], spec["above"]) == ("emd", "emd")


@pytest.mark.parametrize("table", ["table2", "table3", "table4"])
@pytest.mark.parametrize("scale", ["minutes", "paper"])
def test_bars_of_the_starts_stand_below_the_numbers_of_the_paper(table: str, scale: str) -> None:
    info = StudyPlan.load(reproduction(f"chen2022/{table}"), scale).info({})
    curve = {"round": [1], info.metric or "test_accuracy": [0.4], "test_mean_iou": [0.4]}
    main = "test_mean_iou" if table == "table4" else "test_accuracy"
    lines = {e.digest: replace(line(e.digest, 0.4, e.seed), main=main, curve=curve) for e in info.entries}
    first = study_figures(Results(info, lines))[0]
    assert first.name == "fig1"
    assert first.figure is not None
    [panel] = first.figure.panels
    bars = [series for series in panel.series if series.kind == "bar"]
    marks = {(series.x[0], series.y[0]) for series in panel.series if series.kind == "open"}
    assert [series.name for series in bars] == list(info.methods.values())
    assert panel.y.limits[0] == 0.0
    places = {x for series in bars for x in series.x}
    if scale == "paper":
        assert {x for x, _ in marks} == places
    elif table == "table2":  # StyleGAN, which is not run, stands beside the last bar
        beside = max(places) + (max(places) - min(places)) / 5
        assert [x for x, y in marks if y == 0.792] == pytest.approx([beside])
    wanted = {value["value"] for value in info.document["values"]}
    assert {y for _, y in marks} == wanted
    trace = draw_panel(panel)["data"][0]
    assert trace["offset"] == -trace["width"] / 2  # bars beside each other, not where plotly would move them
    with style():
        heights = {patch.get_height() for patch in chart_picture(first.figure).axes[0].patches}
    assert max(heights) == pytest.approx(0.4) == min(heights)


def test_relative_values_need_a_centralized_method() -> None:
    with pytest.raises(ConfigError, match="a method named 'centralized'"):
        study_figure(by_alpha(), {"kind": "setting", "x": "alpha", "relative": True})


def test_a_curve_is_the_mean_at_the_rounds_that_all_seeds_have() -> None:
    study = by_alpha()
    short = study.lines["fedavg-0-2"]
    cut = {key: values[:7] for key, values in short.curve.items()}
    study = Results(study.info, {**study.lines, short.digest: replace(short, curve=cut)})
    panel = panels(study, kind="curves")[0]
    drawn = named(panel, "FedAvg")
    assert list(drawn.x) == [10, 20, 30, 40, 50, 60, 70]
    values = [study.lines[f"fedavg-0-{seed}"].curve["test_accuracy"][6] for seed in range(5)]
    assert drawn.y[6] == pytest.approx(statistics.fmean(values))  # type: ignore[arg-type]


@pytest.mark.parametrize("over", ["batches", "bytes", "bytes_client", "examples"])
def test_curves_stand_at_the_mean_over_seeds_of_what_they_are_drawn_over(over: str) -> None:
    study = by_alpha()
    drawn = named(panels(study, kind="curves", x=over)[0], "FedAvg")
    at = [study.lines[f"fedavg-0-{seed}"].curve[over][3] for seed in range(5)]
    assert drawn.x[3] == pytest.approx(statistics.fmean(at))  # type: ignore[arg-type]


def test_a_setting_that_is_on_no_axis_and_no_line_makes_panels() -> None:
    study = by_alpha()
    assert [panel.title for panel in panels(study, kind="curves")] == [
        "alpha 0",
        "alpha 0.1",
        "alpha 1",
        "alpha 100",
    ]
    found = panels(study, kind="curves", lines="alpha")
    assert [panel.title for panel in found] == ["FedAvg", "FedAvgM"]
    assert {s.name for s in found[0].series if s.name} == {
        "alpha 0",
        "alpha 0.1",
        "alpha 1",
        "alpha 100",
        "chance",
    }


def test_a_method_has_one_colour_in_all_panels_and_centralized_is_dashed() -> None:
    study = by_alpha(centralized=True)
    for panel in panels(study, kind="curves", methods=["fedavgm", "centralized"]):
        assert named(panel, "FedAvgM").color == "#f28e2b"
        assert named(panel, "Centralized").dash == "dash"


def test_a_failed_run_leaves_a_gap_and_its_reason_below() -> None:
    study = by_alpha()
    failed = replace(study.lines["fedavgm-1-0"], status="failed", reason="loss is not finite")
    study = Results(study.info, {**study.lines, failed.digest: failed})
    figure = study_figure(study, {"kind": "setting", "x": "alpha"})
    assert named(PANELS[0], "FedAvgM").y[1] is None
    assert figure.gaps[0] == "alpha 0.1, FedAvgM: 1 of 5 runs failed (loss is not finite)."
    # The point before the gap has no neighbour to draw a band to.
    assert named(PANELS[0], "FedAvgM").low[0] is not None


def test_a_study_that_is_running_draws_what_it_has_and_says_what_is_missing() -> None:
    study = by_alpha()
    some = {digest: each for digest, each in study.lines.items() if not digest.startswith("fedavgm-3")}
    some.pop("fedavg-0-4")
    figure = study_figure(Results(study.info, some), {"kind": "setting", "x": "alpha"})
    assert list(figure.gaps) == ["6 of 40 runs are not done yet.", "No results yet: alpha 100, FedAvgM."]
    assert named(PANELS[0], "FedAvgM").y[3] is None
    assert "4 to 5 seeds" in figure.caption


def test_without_a_result_a_figure_is_named_with_the_reason() -> None:
    study = Results(by_alpha().info, {})
    with pytest.raises(DataError, match="40 of 40 runs are not done yet"):
        study_figure(study, {"kind": "curves"})
    assert [(each.name, each.figure) for each in study_figures(study)] == [
        ("curves", None),
        ("setting-alpha", None),
    ]


def test_the_document_is_drawn_at_its_own_place_in_the_colour_of_its_line() -> None:
    [panel] = panels(by_alpha(document=DOCUMENT), kind="setting", x="alpha")
    bound, value = [series for series in panel.series if series.kind == "open"]
    line_m, line_a = named(panel, "FedAvgM"), named(panel, "FedAvg")
    assert (bound.symbol, bound.color, list(bound.y)) == ("up", line_m.color, [0.75])
    assert list(bound.x) == [line_m.x[0]]
    assert (value.symbol, value.color, list(value.x)) == ("circle", line_a.color, [10.0])
    assert (bound.name, value.group) == ("paper", "paper")


def test_the_document_is_a_level_of_the_curves_of_its_case() -> None:
    first, *others = panels(by_alpha(document=DOCUMENT), kind="curves")
    assert [list(s.y) for s in first.series if s.name == "paper"] == [[0.75, 0.75]]
    assert not any(series.name == "paper" for panel in others for series in panel.series)


def test_a_number_without_a_place_on_the_axis_holds_along_it() -> None:
    everywhere = {"method": "fedavg", "metric": "test_accuracy", "about": 0.5, "where": "text"}
    other = {"method": "centralized", "metric": "test_accuracy", "value": 0.86, "where": "section 4.2"}
    study = by_alpha(document={"source": "x", "values": [everywhere, other]})
    [panel] = panels(study, kind="setting", x="alpha")
    drawn = [(list(s.y), s.color) for s in panel.series if s.kind == "level" and s.name != "chance"]
    # A method that the study does not run is grey.
    assert drawn == [([0.5, 0.5], named(panel, "FedAvg").color), ([0.86, 0.86], "#77828f")]


def test_a_number_that_all_panels_share_stands_once_and_in_the_colour_of_no_line() -> None:
    central = {"method": "centralized", "metric": "test_accuracy", "value": 0.86, "where": "section 4.2"}
    study = by_alpha(document={"source": "x", "values": [central]})
    first, *others = panels(study, kind="curves")
    assert [(list(s.y), s.color) for s in first.series if s.name == "paper"] == [([0.86, 0.86], "#77828f")]
    assert others
    assert not any(series.name == "paper" for panel in others for series in panel.series)
    shared = "several panels share stands in the first"
    assert shared in " ".join(study_figure(study, {"kind": "curves"}).notes)
    assert shared not in " ".join(study_figure(by_alpha(document=DOCUMENT), {"kind": "curves"}).notes)
    [panel] = panels(study, kind="curves", lines="alpha", methods=["fedavg"])
    assert [s.color for s in panel.series if s.name == "paper"] == ["#77828f"], "not that of the first alpha"


def test_the_papers_line_of_guessing_is_not_drawn_over_ours() -> None:
    chance = {"method": "chance", "metric": "test_accuracy", "value": 0.1, "where": "caption of figure 4"}
    study = by_alpha(document={"source": "x", "values": [chance]})
    [panel] = panels(study, kind="setting", x="alpha")
    assert [series.name for series in panel.series if series.kind == "level"] == ["chance"]
    notes = " ".join(study_figure(study, {"kind": "setting", "x": "alpha"}).notes)
    assert "guessing (10 %)" in notes
    assert "the paper states" not in notes


def test_a_number_at_a_budget_stands_at_its_round_and_one_to_a_target_nowhere() -> None:
    entry = {
        "method": "fedavg",
        "metric": "test_accuracy",
        "case": {ALPHA: 1.0},
        "value": 0.6,
        "where": "table 2",
    }
    values = [{**entry, "at": {"rounds": 1000}}, {**entry, "value": 80, "at": {"target": 0.5}}]
    study = by_alpha(document={"source": "x", "values": values})
    found = [
        (s.x[0], s.y[0]) for panel in panels(study, kind="curves") for s in panel.series if s.kind == "open"
    ]
    assert found == [(1000, 0.6)]
    assert PANELS[0].x.limits[1] > 1000
    [panel] = panels(study, kind="setting", x="alpha")
    assert not [s for s in panel.series if s.kind in ("open", "level") and s.name != "chance"]


def test_a_figure_leaves_out_the_document_where_it_is_told_to() -> None:
    [panel] = panels(by_alpha(document=DOCUMENT), kind="setting", x="alpha", document=False)
    assert not any(series.kind == "open" for series in panel.series)


def test_guessing_is_drawn_where_it_does_not_squeeze_the_lines() -> None:
    near = panels(by_alpha(), kind="setting", x="alpha")
    assert any(series.name == "chance" for series in near[0].series)
    high = by_alpha(centralized=True)
    far = panels(high, kind="setting", x="alpha", methods=["centralized"])
    assert not any(series.name == "chance" for series in far[0].series)
    asked = panels(high, kind="setting", x="alpha", methods=["centralized"], chance=0.1)
    assert any(series.name == "chance" for series in asked[0].series)


def test_no_line_of_chance_is_drawn_beyond_the_ends_of_the_axis() -> None:
    for low, shown in ((0.0, True), (0.2, False)):
        (panel, *_) = panels(by_alpha(), kind="setting", x="alpha", y=[low, 1.0])
        assert any(series.name == "chance" for series in panel.series) is shown


def test_curves_over_batches_end_with_the_federated_methods() -> None:
    study = by_alpha(centralized=True)
    longer = {
        digest: replace(
            each, curve={**each.curve, "batches": [100 * (b or 0) for b in each.curve["batches"]]}
        )
        for digest, each in study.lines.items()
        if digest.startswith("centralized")
    }
    study = Results(study.info, {**study.lines, **longer})
    limits = panels(study, kind="curves", x="batches")[0].x.limits
    assert 1600 < limits[1] < 1800
    assert panels(study, kind="curves", x="batches", until=500)[0].x.limits[1] == pytest.approx(510)


def test_a_run_that_is_paused_is_not_done_and_one_that_diverged_has_failed() -> None:
    study = by_alpha()
    paused = replace(study.lines["fedavg-0-0"], status="stopped", reason="paused after round 50")
    loss = [*study.lines["fedavg-1-0"].curve["test_loss"][:-1], None]
    curve = {**study.lines["fedavg-1-0"].curve, "test_loss": loss}
    diverged = replace(study.lines["fedavg-1-0"], curve=curve)
    study = Results(study.info, {**study.lines, paused.digest: paused, diverged.digest: diverged})
    gaps = study_figure(study, {"kind": "setting", "x": "alpha"}).gaps
    assert gaps[0] == "alpha 0.1, FedAvg: 1 of 5 runs failed (test_loss is not finite in round 200)."
    assert gaps[1] == "1 of 40 runs are not done yet."


def test_a_wrong_figure_is_refused_before_any_run() -> None:
    check_figures(by_alpha(figures=[{"kind": "curves"}, {"kind": "setting", "x": "alpha"}]).info)
    for spec, message in (
        ({"kind": "setting", "x": "alhpa"}, r"figures\[0\]\.x"),
        ({"kind": "setting", "x": "alpha", "scale": "linear", "bars": True}, "axis of categories"),
        ({"kind": "setting", "x": "alpha", "above": "emd"}, "no place above 'alpha'"),
        ({"kind": "setting", "x": "alpha", "relative": True}, "centralized"),
        ({"kind": "heat", "x": "alpha", "y": "momentum"}, "no dimension 'momentum'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_figures(by_alpha(figures=[spec]).info)


def test_every_key_of_every_kind_stands_on_the_page_about_studies() -> None:
    text = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
    for kind, function in FIGURES.items():
        assert f"`{kind}`" in text, kind
        for key in settings_model(function).model_fields:
            assert f"`{key}`" in text, f"{kind}: {key}"


def test_a_heat_map_has_the_mean_of_each_cell_and_nan_where_there_is_none() -> None:
    study = by_alpha()
    some = {digest: each for digest, each in study.lines.items() if not digest.startswith("fedavgm-3")}
    study = Results(study.info, some)
    [found] = panels(study, kind="heat", x="alpha", y="method")
    found = found.cells
    assert (list(found.rows), list(found.columns)) == (["FedAvg", "FedAvgM"], ["0", "0.1", "1", "100"])
    assert found.values[0, 1] == pytest.approx(
        statistics.fmean(finals(study, "fedavg", {ALPHA: 0.1}).values())
    )
    assert math.isnan(found.values[1, 3])


def test_a_tuned_setting_on_an_axis_shows_the_runs_of_tuning() -> None:
    found = panels(tuned(), kind="heat", x="effective_lr", y="momentum")
    assert [panel.title for panel in found] == ["alpha 0.1", "alpha 1"]
    assert found[0].cells.title == "validation accuracy"
    assert found[0].cells.values.shape == (3, 6)


def test_the_best_effective_rate_is_marked_and_areas_follow_the_client_rate() -> None:
    study = tuned()
    panel = panels(study, kind="effective-lr")[0]
    points, cross = named(panel, "FedAvgM", "points"), named(panel, "best FedAvgM", "cross")
    best = max(range(len(points.y)), key=lambda k: points.y[k])  # type: ignore[arg-type, return-value]
    assert (list(cross.x), list(cross.y)) == ([points.x[best]], [points.y[best]])
    at = {(x, size) for x, size in zip(points.x, points.sizes, strict=True) if x == 1.0}
    # eta = 1 * (1 - beta) for beta 0.7, 0.9 and 0.97; the largest client rate of the study is 1.
    assert sorted(size for _, size in at) == pytest.approx([0.35, 0.7, 2.1])


def test_the_effective_rate_is_the_client_rate_over_one_minus_the_momentum() -> None:
    def of(keys: Mapping[str, Any], **facts: float) -> tuple[float, float] | None:
        from fedlens.results.cells import Cell

        return rates_of(Cell("fedavg", keys, runs={0: line("d", 0.5, 0, facts=facts)}))

    assert of({"local.lr": 0.1, "algorithm.momentum": 0.9}) == pytest.approx((1.0, 0.1))
    assert of({"effective_lr": 1.0, "server.momentum": 0.9}) == pytest.approx((1.0, 0.1))
    assert of({"local.lr": 0.1}) == (0.1, 0.1)
    assert of({"method": "x"}, local_lr=0.03, effective_lr=0.3) == (0.3, 0.03)
    assert of({"method": "x"}) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "a figure has no kind"),
        ({"kind": "curve"}, "unknown kind of figure 'curve'.*did you mean 'curves'"),
        ({"kind": "curves", "pannels": "alpha"}, "unknown setting 'pannels'.*did you mean 'panels'"),
        ({"kind": "setting"}, "the setting 'x' is missing"),
        ({"kind": "setting", "x": "alhpa"}, "no dimension 'alhpa'.*did you mean 'alpha'"),
        ({"kind": "setting", "x": "alpha", "band": "wide"}, "'band' is 'wide'"),
        ({"kind": "curves", "x": "epochs"}, "'x' is 'epochs'"),
        ({"kind": "curves", "columns": 0}, "'columns' is 0"),
        ({"kind": "curves", "where": {"alpha": 0.2}}, "no run has alpha = 0.2"),
        ({"kind": "curves", "methods": ["fedavgn"]}, "no method 'fedavgn'.*did you mean 'fedavg"),
        ({"kind": "curves", "title": 3}, "'title' is 3"),
    ],
)
def test_a_wrong_request_is_refused_with_what_to_write(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_figure(by_alpha(), spec)


def test_a_spec_is_checked_without_results() -> None:
    spec = {"kind": "curves", "x": "bytes", "name": "b"}
    assert checked_kind("figure", FIGURES, figure_options, spec, "figures")[1] == {"x": "bytes"}
    assert set(FIGURES) >= {"setting", "curves", "heat", "effective-lr"}


def test_a_study_without_figures_has_curves_and_one_figure_for_each_numeric_dimension() -> None:
    cases = [{ALPHA: alpha, "case": case} for alpha in (0.1, 1.0) for case in ("small", "large")]
    study = results({"fedavg": "FedAvg"}, cases, {("fedavg", k): 0.5 for k in range(4)}, seeds=[0])
    assert default_figures(study) == [
        {"kind": "curves"},
        {"kind": "setting", "x": ALPHA, "name": "setting-alpha"},
    ]


SPECS: list[tuple[str, dict[str, Any]]] = [
    ("alpha", {"kind": "setting", "x": "alpha", "reverse": True}),
    ("alpha", {"kind": "setting", "x": "method", "lines": "alpha"}),
    ("alpha", {"kind": "setting", "x": "alpha", "relative": True}),
    ("alpha", {"kind": "curves", "x": "bytes", "metric": "test_loss"}),
    ("alpha", {"kind": "heat", "x": "alpha", "y": "method"}),
    ("tuned", {"kind": "effective-lr"}),
    ("tuned", {"kind": "setting", "x": "effective_lr", "lines": "momentum"}),
]


@pytest.mark.pictures
@pytest.mark.parametrize(("of", "spec"), SPECS)
def test_every_kind_is_drawn_for_the_page_and_for_papers_with_the_same_bytes(
    of: str, spec: dict[str, Any], tmp_path: Path
) -> None:
    import plotly.graph_objects as go

    study = by_alpha(centralized=True, document=DOCUMENT) if of == "alpha" else tuned()
    for panel in study_figure(study, spec).panels:
        go.Figure(_without_variables(draw_panel(panel)))
    first, second = (draw(study, spec, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second


def _without_variables(figure: PlotlyFigure) -> PlotlyFigure:
    """Colours of the page's style are variables, which plotly's own checks do not know."""
    if isinstance(figure, dict):
        return {key: _without_variables(value) for key, value in figure.items() if key != "unifiedhovertitle"}
    if isinstance(figure, list):
        return [_without_variables(item) for item in figure]
    return "#123456" if isinstance(figure, str) and figure.startswith("var(") else figure


@pytest.mark.parametrize(("of", "spec"), SPECS)
def test_no_label_lies_over_another(of: str, spec: dict[str, Any]) -> None:
    study = by_alpha(centralized=True, document=DOCUMENT) if of == "alpha" else tuned()
    with style():
        picture = chart_picture(study_figure(study, spec))
        picture.canvas.draw()
        for axes in (axes for axes in picture.axes if axes.get_visible()):
            for scale in (axes.xaxis, axes.yaxis):
                boxes = [
                    t.get_window_extent() for t in scale.get_ticklabels() if t.get_text() and t.get_visible()
                ]
                inside = [b for b in boxes if b.width]
                for first, second in pairwise(inside):
                    assert not first.overlaps(second), [t.get_text() for t in scale.get_ticklabels()]


@pytest.mark.pictures
def test_the_figures_of_a_study_are_written_under_names_of_their_own(tmp_path: Path) -> None:
    study = by_alpha(
        figures=[{"kind": "curves"}, {"kind": "curves", "x": "bytes"}, {"kind": "curves", "name": "a b"}]
    )
    written = write_study_figures(study, tmp_path / "figures", ["svg"])
    assert [path.name for path in written] == ["curves.svg", "curves-2.svg", "a-b.svg"]
    with pytest.raises(ConfigError, match="unknown file format"):
        draw(study, {"kind": "curves"}, tmp_path / "x.bmp")


def test_a_measured_fact_on_the_axis_places_each_case_at_its_mean_over_seeds() -> None:
    study = by_alpha(document=DOCUMENT)
    emd = {0: 1.8, 1: 1.2, 2: 0.5, 3: 0.05}
    placed = {
        digest: replace(each, facts={**each.facts, "emd": emd[int(digest.split("-")[1])] + 0.01 * (k % 5)})
        for k, (digest, each) in enumerate(study.lines.items())
    }
    [panel] = panels(Results(study.info, placed), kind="setting", x="emd")
    drawn = named(panel, "FedAvg")
    assert list(drawn.x) == pytest.approx([0.07, 0.52, 1.22, 1.82])
    assert drawn.y[3] == pytest.approx(statistics.fmean(finals(study, "fedavg", {ALPHA: 0.0}).values()))
    # The document's number is about alpha 0, and stands where the runs of alpha 0 do.
    assert [list(s.x) for s in panel.series if s.symbol == "up"] == [pytest.approx([1.82])]
    check_figures(by_alpha(figures=[{"kind": "setting", "x": "emd"}]).info)


def test_the_points_of_a_methods_grid_are_one_line_of_effective_rates() -> None:
    methods = {
        f"fedavgm lr={lr} momentum={m}": f"FedAvgM, lr = {lr}, momentum = {m}"
        for lr in (0.01, 0.1)
        for m in (0, 0.9)
    }
    study = results(methods, [{ALPHA: 1.0}], {(m, 0): 0.5 + k / 20 for k, m in enumerate(methods)}, seeds=[0])
    facts = {
        f"{name}-0-0": (float(name.split("=")[1].split()[0]), float(name.split("=")[2])) for name in methods
    }
    lines = {
        digest: replace(each, facts={"local_lr": lr, "effective_lr": lr / (1 - beta)})
        for digest, each in study.lines.items()
        for lr, beta in [facts[digest]]
    }
    [panel] = panels(Results(study.info, lines), kind="effective-lr")
    assert list(named(panel, "FedAvgM", "points").x) == pytest.approx([0.01, 0.1, 0.1, 1.0])
    assert len([series for series in panel.series if series.kind == "cross"]) == 1


def test_budgets_of_a_document_far_beyond_the_rounds_make_the_axis_logarithmic() -> None:
    entry = {
        "method": "fedavg",
        "metric": "test_accuracy",
        "value": 0.6,
        "where": "table 2",
        "at": {"rounds": 5000},
    }
    study = by_alpha(document={"source": "x", "values": [entry]})
    axis = panels(study, kind="curves")[0].x
    assert axis.log
    assert axis.limits == pytest.approx((8, 6000))
    near = panels(
        by_alpha(document={"source": "x", "values": [{**entry, "at": {"rounds": 300}}]}), kind="curves"
    )
    assert not near[0].x.log
