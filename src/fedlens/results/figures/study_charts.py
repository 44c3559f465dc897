"""Figures of a study's values: against a setting, over rounds, by two settings, and by the effective learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from fedlens.base.errors import ConfigError
from fedlens.base.format import is_share, smaller_is_better
from fedlens.results.cells import METHOD, Cell
from fedlens.results.figures import chart as figures
from fedlens.results.figures.chart import GREY, Axis, Cells, Chart, Series, Values, banded, matrix, mean_curve
from fedlens.results.figures.named_cells import FACTS, NamedCells, Names, bare, rates_of, runs_of, selected
from fedlens.results.figures.study_axes import (
    Limits,
    Scale,
    XScale,
    decades,
    metric_title,
    spread,
    x_scale,
)
from fedlens.results.figures.study_panels import (
    Columns,
    LineCells,
    StudyPanels,
    arrange,
    no_values,
    with_marks,
)
from fedlens.results.figures.study_population_figures import emd_row, shown_populations
from fedlens.results.rows import Results, Role, Row
from fedlens.results.statistics import Band, mean

_LARGEST, _SMALLEST = 7.0, 0.35  # areas of markers
_MOST_NAMED = 5  # decades of an axis
_BEYOND = 2.0  # the rounds of a paper over those of the curves, from where on the axis is logarithmic
Over: TypeAlias = Literal["round", "batches", "bytes", "bytes_client", "examples"]

_OVER: dict[str, tuple[str, Literal["count", "bytes"]]] = {
    "round": ("round", "count"),
    "batches": ("batches of the busiest client", "count"),
    "bytes": ("bytes sent", "bytes"),
    "bytes_client": ("bytes of one client", "bytes"),
    "examples": ("training images", "count"),
}


def heat_figure(
    study: Results,
    *,
    x: str,
    y: str,
    panels: Names | None = None,
    where: dict[str, Any] | None = None,
    methods: list[str] | None = None,
    metric: str | None = None,
    runs: Role | None = None,
    relative: bool = False,
    columns: Columns | None = None,
) -> Chart:
    """A metric by two settings, one colour a cell (hsu2020, figure 8): the mean of the final values over seeds.

    Methods and settings that are on no axis make panels. Arguments as in `setting_figure`; a tuned setting on an axis
    shows the runs of tuning.

    Raises `ConfigError` if a name is unknown, and `DataError` if no run has values.
    """
    shown = runs_of(study, runs, [x, y])
    across, up = shown.key(x, "figures.x"), shown.key(y, "figures.y")
    name, about = metric or shown.metric, f"by {shown.label(across)} and {shown.label(up)}"
    chosen = [
        cell for cell in selected(shown, where, methods, relative) if across in cell.keys and up in cell.keys
    ]
    drawing = arrange(shown, chosen, [across, up], [], panels, name, about, relative)
    title = drawing.title
    means = {id(cell): statistics.fmean(each) for cell in chosen if (each := drawing.finals(cell))}
    if not means:
        raise no_values(title, drawing.gaps)
    low, high = min(means.values()), max(means.values())
    limits = (low, high) if high > low else (low - 0.05, high + 0.05)
    columns_of, rows = _present(shown, across, chosen), _present(shown, up, chosen)
    named = ([shown.words(up, v) for v in rows], [shown.words(across, v) for v in columns_of])
    form: Values = "share" if is_share(bare(name)) or relative else "number"
    built = []
    for panel in drawing.panels:
        values = np.full((len(rows), len(columns_of)), np.nan)
        for line in panel.lines:
            for cell in line.cells:
                row, column = rows.index(cell.keys[up]), columns_of.index(cell.keys[across])
                values[row, column] = means.get(id(cell), np.nan)
        cells = Cells(values, *named, metric_title(name, relative), limits, form, rising=True)
        built.append(
            matrix(panel.title, f"{title} {panel.title}", cells, *map(Axis, map(shown.label, (across, up))))
        )
    return drawing.captioned(built, columns)


def effective_rate_figure(
    study: Results,
    *,
    lines: Names = METHOD,
    panels: Names | None = None,
    where: dict[str, Any] | None = None,
    methods: list[str] | None = None,
    metric: str | None = None,
    runs: Role | None = None,
    y: Limits | None = None,
    chance: float | None = None,
    columns: Columns | None = None,
) -> Chart:
    """A metric against the effective learning rate eta / (1 - beta) (hsu2019, figure 6).

    A marker is the mean over seeds of one combination of settings, and its area is proportional to the client rate
    eta. A cross marks the best combination of each line. Runs of tuning are shown if the study tunes. Other arguments
    as in `setting_figure`.

    Raises `ConfigError` if a name is unknown, and `DataError` if no run has a value and a rate.
    """
    tuned = any(entry.role == "tune" for entry in study.info.entries)
    shown = NamedCells.of(study, runs or ("tune" if tuned else "final")).by_family()
    name, about = metric or shown.metric, "against effective learning rate"
    chosen = selected(shown, where, methods)
    drawing = arrange(shown, chosen, _rate_keys(shown), lines, panels, name, about)
    largest = max((rates[1] for cell in chosen if (rates := rates_of(cell))), default=1.0)
    drawn = [
        [each for line in panel.lines for each in _markers(drawing, line, largest)]
        for panel in drawing.panels
    ]
    at = [x for panel in drawn for series in panel for x in series.x]
    if not at:
        raise no_values(drawing.title, drawing.gaps)
    limits = (min(at) / 1.6, max(at) * 1.6)
    ticks = decades(*limits)
    every = 2 if len(ticks) > _MOST_NAMED else 1  # 0.0001 and 0.001 would run into each other
    names = ["" if place % every else f"{each:g}" for place, each in enumerate(ticks)]
    axis = Axis("effective learning rate", log=True, limits=limits, ticks=ticks, names=names)
    chart = drawing.chart(axis, drawn, y, chance, columns)
    notes = [
        *chart.notes,
        "The effective rate is the client rate / (1 - momentum of the server).",
        "Areas are proportional to the client rate, down to a smallest size; a cross marks the best.",
    ]
    return replace(chart, notes=notes)


def _rate_keys(shown: NamedCells) -> list[str]:
    """The keys that make up the effective rate: markers differ in them, panels do not."""
    keys = sorted({key for cell in shown.cells for key in cell.keys})
    return [key for key in keys if key in ("effective_lr", "local.lr") or key.endswith(".momentum")]


def _present(shown: NamedCells, key: str, cells: Sequence[Cell]) -> list[Any]:
    values = [cell.keys[key] for cell in cells]
    return [value for value in shown.all_values(key) if value in values]


def _markers(drawing: StudyPanels, line: LineCells, largest: float) -> list[Series]:
    points = []
    for cell in line.cells:
        rates, values = rates_of(cell), drawing.finals(cell)
        if rates is not None and values:
            points.append((*rates, statistics.fmean(values)))
    if not points:
        return []
    points.sort()
    pick = min if smaller_is_better(bare(drawing.metric)) else max
    best = pick(points, key=lambda point: point[2])
    effective, local, values = (list(column) for column in zip(*points, strict=True))
    sizes = [max(_SMALLEST, _LARGEST * rate / largest) for rate in local]
    texts = [f"client rate {rate:.3g}" for rate in local]
    markers = Series(effective, values, line.name, "points", line.color, texts=texts, sizes=sizes)
    cross = Series(
        [best[0]], [best[2]], f"best {line.name}", "cross", line.color, group=line.name,
        texts=[f"client rate {best[1]:.3g}, the best"],
    )  # fmt: skip
    return [markers, cross]


def setting_figure(
    study: Results,
    *,
    x: str,
    lines: Names = METHOD,
    panels: Names | None = None,
    where: dict[str, Any] | None = None,
    methods: list[str] | None = None,
    metric: str | None = None,
    runs: Role | None = None,
    relative: bool = False,
    band: Band = "interval",
    scale: Scale = "auto",
    reverse: bool = False,
    y: Limits | None = None,
    chance: float | None = None,
    columns: Columns | None = None,
    above: Literal["emd"] | None = None,
    bars: bool = False,
) -> Chart:
    """A metric against a setting: final values, their mean over seeds, and a band (hsu2019, figures 2 and 5).

    Args:
        x: the setting, a dimension of the cases, or a tuned setting, which shows the runs of tuning; or what was
            measured: "emd" (hsu2020, figure 4), "clients", "parameters", "multiply_adds".
        lines, panels: the settings that lines and panels differ in. Other settings that differ make panels too.
        where: the cases that are shown, by setting: a value or a list of values.
        methods: those that are shown; all by default.
        metric: another column than the study's metric.
        runs: "final" or "tune".
        relative: divides by the value of the method `centralized` at the same case (hsu2020, section 6).
        band: the 95 % t interval over seeds, their range, one deviation, or none.
        scale: of the axis of `x`. "auto" is logarithmic for positive values that span a factor of 8.
        reverse: the largest value stands on the left.
        y: the ends of the axis of the metric, [low, high].
        chance: the value of guessing, as a dotted line; by default where it lies near the values.
        columns: of panels beside each other.
        above: "emd" draws the clients of each case by their EMD above the panel, on the axis x = "emd" (hsu2020,
            figure 4, top row).
        bars: draws bars from 0 up on an axis of categories (chen2022, figure 1).

    Raises `ConfigError` if a name is unknown, and `DataError` if no run has values.
    """
    shown = runs_of(study, runs, [x, *([lines] if isinstance(lines, str) else lines)])
    measured = x in FACTS
    shown = shown.with_fact(x) if measured else shown
    key = x if measured else shown.key(x, "figures.x")
    name, about = metric or shown.metric, f"against {shown.label(key)}"
    asked = [cell for cell in selected(shown, where, methods, relative) if measured or key in cell.keys]
    chosen = [cell for cell in asked if key in cell.keys]
    # A fact follows from the settings, so that they differ from point to point.
    drawing = arrange(shown, chosen, [key], lines, panels, name, about, relative, points=measured)
    drawing = with_marks(replace(drawing, asked=asked, band=band), key)
    missing = no_values(f"{metric_title(name)} {about}", drawing.gaps)
    values = [cell.keys[key] for cell in chosen] + [mark.x for mark in drawing.stated if mark.x is not None]
    if not values:
        raise missing
    place = x_scale(shown, key, sorted(values, key=_order(shown, key)), scale, reverse, marks=not measured)
    _refuse_misplaced(above, x, bars, place.kind)
    above_panels = [emd_row(shown_populations(study, None, where), place.axis)] if above else []
    if above_panels:
        place = replace(place, axis=above_panels[0].x)
    texts = not (place.kind == "linear" or (place.axis.gap is None and place.kind == "log"))
    drawn = [
        [
            series
            for k, line in enumerate(panel.lines)
            for series in _setting_line(drawing, line, key, place, k, len(panel.lines), texts)
        ]
        for panel in drawing.panels
    ]
    means = [s.y for panel in drawn for s in panel if s.kind in ("line", "points")]
    if all(value is None for values in means for value in values):
        raise missing
    drawn = _as_bars(drawn) if bars else drawn
    unified = not texts and place.kind != "category"
    columns = 1 if above_panels else columns
    chart = drawing.chart(place.axis, drawn, y, chance, columns, place, unified, above_panels)
    above_notes = ["Above: the clients of each case by their EMD."] if above_panels else []
    return replace(chart, notes=[*chart.notes, *above_notes])


def _refuse_misplaced(above: str | None, x: str, bars: bool, kind: str) -> None:
    if above and x != above:
        what = f"the EMD of clients has no place above '{x}'"
        raise ConfigError(what, where="figures.above", hint="write x = 'emd'")
    if bars and kind != "category":
        what = "bars stand on an axis of categories alone"
        raise ConfigError(what, where="figures.bars", hint="write scale = 'category'")


def _as_bars(drawn: Sequence[Sequence[Series]]) -> list[list[Series]]:
    """The series of each panel as bars, as wide as the panel with the most leaves them."""
    width = 0.46 / max(3, *map(len, drawn))
    return [[replace(each, kind="bar", bar=width) for each in series_of] for series_of in drawn]


def curve_figure(
    study: Results,
    *,
    x: Over = "round",
    lines: Names = METHOD,
    panels: Names | None = None,
    where: dict[str, Any] | None = None,
    methods: list[str] | None = None,
    metric: str | None = None,
    runs: Role = "final",
    band: Band = "interval",
    y: Limits | None = None,
    until: float | None = None,
    chance: float | None = None,
    columns: Columns | None = None,
) -> Chart:
    """Learning curves: the mean over seeds and a band, against rounds, batches, bytes or images.

    Batches and bytes differ by seed; a point stands at their mean over seeds. Runs that failed are left out, and named.
    `until` is the last value of the axis of `x`; by default the curves of the federated methods end there.
    Other arguments as in `setting_figure`.

    Raises `ConfigError` if a name is unknown, and `DataError` without values.
    """
    shown = runs_of(study, runs, [lines] if isinstance(lines, str) else lines)
    name, about = metric or shown.metric, f"over {_OVER[x][0] if x != 'round' else 'rounds'}"
    chosen = selected(shown, where, methods)
    drawing = replace(arrange(shown, chosen, [], lines, panels, name, about), band=band)
    drawn = [
        [
            series
            for line in panel.lines
            for cell in line.cells
            for series in _curve(line, cell, name, x, band)
        ]
        for panel in drawing.panels
    ]
    ends = [max(series.x) for panel in drawn for series in panel]
    # A round of centralized training has as many batches as there are data, and sends nothing.
    compared = [max(series.x) for panel in drawn for series in panel if x == "round" or series.color != GREY]
    last = until or max(compared or ends, default=0.0)
    if last <= 0:
        raise no_values(drawing.title, drawing.gaps)
    drawing = with_marks(drawing, None, rounds=x == "round")
    beyond = max((mark.x for mark in drawing.stated if mark.x is not None), default=0.0)
    wide = until is None and beyond > _BEYOND * last
    last = until or max(last, beyond)
    # Budgets of a paper that are far beyond the rounds of this scale would squeeze the curves.
    first = min((x for panel in drawn for series in panel for x in series.x if x > 0), default=1.0)
    limits = (0.8 * first, 1.2 * last) if wide else figures.x_limits(last)
    words, form = _OVER[x]
    whole = x == "round" and 0 < last < 10
    axis = Axis(words, form, log=wide, limits=limits, ticks=range(int(last) + 1) if whole else ())
    chart = drawing.chart(axis, drawn, y, chance, columns, unified=True)
    if not any(cell.lost and cell.done for cell in chosen):
        return chart
    biased = "A curve with failed runs is the mean of the other seeds, which makes it look better."
    return replace(chart, gaps=[*chart.gaps, biased])


def _order(shown: NamedCells, key: str) -> Callable[[Any], int]:
    order = [repr(value) for value in shown.all_values(key)]
    return lambda value: order.index(repr(value)) if repr(value) in order else len(order)


def _setting_line(
    drawing: StudyPanels, line: LineCells, key: str, place: XScale, number: int, lines: int, texts: bool
) -> list[Series]:
    shown = drawing.shown
    cells = sorted(line.cells, key=lambda cell: place.at(cell.keys[key]))
    values = [drawing.finals(cell) for cell in cells]
    means = [*map(mean, values)]
    ends = [spread(each, drawing.band, "" if drawing.relative else drawing.metric) for each in values]
    x = [place.beside(cell.keys[key], number, lines) for cell in cells]
    words = [f"{shown.label(key)} {shown.words(key, cell.keys[key])}" for cell in cells]
    if place.kind == "category":
        # No line joins values that have no order.
        low, high = ([end and end[side] for end in ends] for side in (0, 1))
        return [Series(x, means, line.name, "points", line.color, texts=words, low=low, high=high)]
    return banded(x, means, ends, line.name, line.color, line.dash, words if texts else ())


def _curve(line: LineCells, cell: Cell, metric: str, over: Over, band: Band) -> list[Series]:
    """The curve of some seeds at the rounds that all of them have evaluated."""
    runs = [by_round for run in cell.done.values() if (by_round := _by_round(run, metric, over))]
    return mean_curve(runs, lambda values: spread(values, band, metric), line.name, line.color, line.dash)


def _by_round(run: Row, metric: str, over: Over) -> dict[int, tuple[float, float]]:
    """(place, value) by round."""
    rounds = run.curve.get("round", ())
    at = run.curve.get(over, [None] * len(rounds))
    points = {}
    for k, value in run.series(metric):
        place, number = at[k], rounds[k]
        if place is not None and number is not None:
            points[int(number)] = (float(place), value)
    return points
