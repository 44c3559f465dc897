"""Figures of the analyses of a study's runs: those of each run's own page, one beside the other."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from fedlens.base.errors import ConfigError, nearest
from fedlens.report.analysis_figures import analysis_figures, shown
from fedlens.report.study_groups import SeedGroups
from fedlens.report.study_panels import Columns, no_values, selected
from fedlens.results.cells import METHOD, Cell
from fedlens.results.chart import Chart, Panel
from fedlens.results.rows import Results

_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z0-9])")


def analysis_figure(
    study: Results,
    *,
    analysis: str,
    number: Annotated[int, Field(ge=1)] = 1,
    over: Literal["first", "mean"] = "first",
    where: dict[str, Any] | None = None,
    methods: list[str] | None = None,
    columns: Columns | None = None,
) -> Chart:
    """The figure of an analysis for each method and case, with the same scales.

    Args:
        analysis: one of the study's `analyses`.
        number: which of its figures, counted from 1.
        over: the run of the first seed, or the mean over seeds of each number.
        where, methods: which cells.

    Raises `ConfigError` if a name is unknown, and `DataError` if no run has rows yet.
    """
    if analysis not in study.info.analyses:
        hint = (
            nearest(analysis, study.info.analyses)
            if study.info.analyses
            else f'set analyses = ["{analysis}"]'
        )
        raise ConfigError(
            f"the study does not make the analysis '{analysis}'", where="figures.analysis", hint=hint
        )
    described = shown(analysis)
    matched = described.matched if described else ("round",)
    if over == "mean" and not matched:
        raise ConfigError(
            f"the analysis '{analysis}' has no mean over seeds: its rows are of other clients in each",
            where="figures.over",
            hint='set over = "first"',
        )
    runs = SeedGroups.of(study)
    chosen = selected(runs, where, methods)
    title = described.title if described else analysis
    panels: list[Panel] = []
    captions: dict[str, str] = {}
    for cell in chosen:
        rows = _rows(cell, analysis, matched if over == "mean" else ())
        figures = analysis_figures(analysis, rows)
        if len(figures) >= number:
            name = _name(runs, cell)
            panels += [_titled(panel, name) for panel in figures[number - 1].panels]
            captions[name] = figures[number - 1].caption
    gaps = runs.gaps(chosen)
    if not panels:
        raise no_values(title, gaps)
    seeds = list(study.info.seeds)
    first = (
        f"Seed {seeds[0]}." if over == "first" or len(seeds) == 1 else f"The mean over {len(seeds)} seeds."
    )
    reading = described.reading if described else ""
    caption = " ".join(filter(None, [*_joined(captions), first, reading]))
    return Chart(title, caption, _same_scale(panels), gaps, columns)


def _joined(captions: Mapping[str, str]) -> list[str]:
    """The sentences of several captions: those that all share, and then those of each, after its name.

    >>> _joined({"a": "Dots are models. It gains 1 %.", "b": "Dots are models. It gains 2 %."})
    ['Dots are models.', 'a: It gains 1 %.', 'b: It gains 2 %.']
    """
    sentences = {name: _SENTENCE.split(text) for name, text in captions.items()}
    every = list(sentences.values())
    shared = [one for one in every[0] if all(one in others for others in every)] if every else []
    own = {name: [one for one in listed if one not in shared] for name, listed in sentences.items()}
    return [*shared, *(f"{name}: {' '.join(listed)}" for name, listed in own.items() if listed)]


def _rows(cell: Cell, analysis: str, matched: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """The rows of the first seed with some, or the mean over seeds of rows that have these keys in common."""
    made = [rows for line in cell.done.values() if (rows := line.analyses.get(analysis))]
    if not made or not matched or len(made) == 1:
        return made[0] if made else ()
    by_key = [{tuple(repr(row.get(key)) for key in matched): row for row in rows} for rows in made]
    return [_mean([rows[key] for rows in by_key]) for key in by_key[0] if all(key in rows for rows in by_key)]


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: _mean_value([row.get(key) for row in rows]) for key in rows[0]}


def _mean_value(values: Sequence[Any]) -> Any:
    """The mean of numbers, or of lists of as many numbers; otherwise the first value."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        mean = statistics.fmean(values)
        return values[0] if all(value == values[0] for value in values) else mean
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        return [_mean_value(items) for items in zip(*values, strict=True)]
    return values[0]


def _name(runs: SeedGroups, cell: Cell) -> str:
    """The settings that the cells of the study differ in, in words."""
    varying = runs.varying()
    case = runs.title(
        {key: value for key, value in cell.keys.items() if key in varying and key != METHOD}, cell.keys
    )
    method = runs.words(METHOD, cell.keys[METHOD]) if METHOD in varying else ""
    return ", ".join(filter(None, [method, case]))


def _titled(panel: Panel, name: str) -> Panel:
    return replace(panel, title=" · ".join(filter(None, [name, panel.title])))


def _same_scale(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with the same limits of the vertical axis, where all of them show the same values."""
    limits = [panel.y.limits for panel in panels if panel.y.limits is not None]
    if len({panel.y.title for panel in panels}) > 1 or len(limits) < len(panels):
        return list(panels)
    both = (min(low for low, _ in limits), max(high for _, high in limits))
    return [replace(panel, y=replace(panel.y, limits=both)) for panel in panels]
