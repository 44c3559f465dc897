"""Figures of a study without lines: two settings as a heat map, and the effective learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.base.format import capitalized, is_share, smaller_is_better
from fedlens.report.study_groups import CENTRALIZED, SeedGroups, bare, rates_of
from fedlens.report.study_panels import (
    Columns,
    Limits,
    LineRuns,
    Names,
    arrange,
    decades,
    metric_title,
    no_values,
    selected,
)
from fedlens.report.study_values import StudyPanels, runs_of
from fedlens.results.cells import METHOD, Cell
from fedlens.results.chart import Axis, Cells, Chart, Series, Values, matrix
from fedlens.results.rows import Results, Role

_LARGEST, _SMALLEST = 7.0, 0.35  # areas of markers
_MOST_NAMED = 5  # decades of an axis


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
    name = metric or shown.metric
    chosen = [g for g in selected(shown, where, methods) if across in g.keys and up in g.keys]
    if relative:
        chosen = [group for group in chosen if group.keys[METHOD] != CENTRALIZED]
    layout = arrange(shown, chosen, [across, up], [], panels)
    title = f"{capitalized(metric_title(name, relative))} by {shown.label(across)} and {shown.label(up)}"
    drawing = StudyPanels(shown, chosen, layout, title, name, relative)
    means = {id(group): statistics.fmean(each) for group in chosen if (each := drawing.finals(group))}
    if not means:
        raise no_values(title, shown.gaps(chosen))
    low, high = min(means.values()), max(means.values())
    limits = (low, high) if high > low else (low - 0.05, high + 0.05)
    columns_of, rows = _present(shown, across, chosen), _present(shown, up, chosen)
    named = ([shown.words(up, v) for v in rows], [shown.words(across, v) for v in columns_of])
    form: Values = "share" if is_share(bare(name)) or relative else "number"
    built = []
    for panel in layout.panels:
        values = np.full((len(rows), len(columns_of)), np.nan)
        for line in panel.lines:
            for group in line.groups:
                row, column = rows.index(group.keys[up]), columns_of.index(group.keys[across])
                values[row, column] = means.get(id(group), np.nan)
        cells = Cells(values, *named, metric_title(name, relative), limits, form, rising=True)
        built.append(
            matrix(panel.title, f"{title} {panel.title}", cells, *map(Axis, map(shown.label, (across, up))))
        )
    return Chart(title, drawing.caption(), built, shown.gaps(chosen), columns)


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
    shown = SeedGroups.of(study, runs or ("tune" if tuned else "final")).by_family()
    name = metric or shown.metric
    chosen = selected(shown, where, methods)
    layout = arrange(shown, chosen, _rate_keys(shown), lines, panels)
    title = f"{capitalized(metric_title(name))} against effective learning rate"
    drawing = StudyPanels(shown, chosen, layout, title, name)
    largest = max((rates[1] for group in chosen if (rates := rates_of(group))), default=1.0)
    drawn = [
        [each for line in panel.lines for each in _markers(drawing, line, largest)] for panel in layout.panels
    ]
    at = [x for panel in drawn for series in panel for x in series.x]
    if not at:
        raise no_values(title, shown.gaps(chosen))
    limits = (min(at) / 1.6, max(at) * 1.6)
    ticks = decades(*limits)
    every = 2 if len(ticks) > _MOST_NAMED else 1  # 0.0001 and 0.001 would run into each other
    names = ["" if place % every else f"{each:g}" for place, each in enumerate(ticks)]
    axis = Axis("effective learning rate", log=True, limits=limits, ticks=ticks, names=names)
    chart = drawing.chart(axis, drawn, y, chance, columns, shown.gaps(chosen))
    more = (
        " The effective rate is the client rate / (1 - momentum of the server). Areas are proportional to the "
        "client rate, down to a smallest size; a cross marks the best."
    )
    return replace(chart, caption=chart.caption + more)


def _rate_keys(shown: SeedGroups) -> list[str]:
    """The keys that make up the effective rate: markers differ in them, panels do not."""
    keys = sorted({key for group in shown.cells for key in group.keys})
    return [key for key in keys if key in ("effective_lr", "local.lr") or key.endswith(".momentum")]


def _present(shown: SeedGroups, key: str, groups: Sequence[Cell]) -> list[Any]:
    values = [group.keys[key] for group in groups]
    return [value for value in shown.all_values(key) if value in values]


def _markers(drawing: StudyPanels, line: LineRuns, largest: float) -> list[Series]:
    points = []
    for group in line.groups:
        rates, values = rates_of(group), drawing.finals(group)
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
