"""The figures of a study: those of its file, or the default ones."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.registry import checked_kind
from fedlens.results.cells import METHOD, Cell, is_number
from fedlens.results.figures.analysis_figures import analysis_figures, shown
from fedlens.results.figures.chart import Chart, Panel
from fedlens.results.figures.named_cells import NamedCells, selected
from fedlens.results.figures.picture import draw_chart
from fedlens.results.figures.study_charts import (
    curve_figure,
    effective_rate_figure,
    heat_figure,
    setting_figure,
)
from fedlens.results.figures.study_panels import Columns, no_values
from fedlens.results.figures.study_population_figures import distributions_figure, populations_figure
from fedlens.results.rows import Results, StudyInfo


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
    runs = NamedCells.of(study)
    chosen = selected(runs, where, methods)
    title = described.title if described else analysis
    panels: list[Panel] = []
    sentences: dict[str, list[str]] = {}
    for cell in chosen:
        rows = _rows(cell, analysis, matched if over == "mean" else ())
        figures = analysis_figures(analysis, rows)
        if len(figures) >= number:
            name = _name(runs, cell)
            panels += [_titled(panel, name) for panel in figures[number - 1].panels]
            sentences[name] = [figures[number - 1].caption, *figures[number - 1].notes]
    gaps = runs.gaps(chosen)
    if not panels:
        raise no_values(title, gaps)
    seeds = list(study.info.seeds)
    one = over == "first" or len(seeds) == 1
    at = f"at seed {seeds[0]}" if one else f"the mean over {len(seeds)} seeds"
    caption = f"{title} of each method and case, {at}."
    notes = [*_joined(sentences), *(described.reading if described else ())]
    return Chart(title, caption, _same_scale(panels), gaps, columns, notes=notes)


def _joined(sentences: Mapping[str, Sequence[str]]) -> list[str]:
    """The sentences on several figures: those that all share, and then those of each, after its name.

    >>> _joined({"a": ["Dots are models.", "It gains 1 %."], "b": ["Dots are models.", "It gains 2 %."]})
    ['Dots are models.', 'a: It gains 1 %.', 'b: It gains 2 %.']
    """
    every = list(sentences.values())
    shared = [one for one in every[0] if all(one in others for others in every)]
    own = [f"{name}: {one}" for name, listed in sentences.items() for one in listed if one not in shared]
    return [*shared, *own]


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


def _name(runs: NamedCells, cell: Cell) -> str:
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


# Each kind by name: a function of the results whose keyword-only parameters are the keys of [[figures]].
FIGURES: dict[str, Callable[..., Chart]] = {
    "setting": setting_figure,
    "curves": curve_figure,
    "heat": heat_figure,
    "effective-lr": effective_rate_figure,
    "populations": populations_figure,
    "distributions": distributions_figure,
    "analysis": analysis_figure,
}


def _common(*, kind: str, name: str = "", title: str = "", document: Any = True) -> None:
    """The settings of every kind, as types; `name` is of the file, and `document` is false for no marks of a paper."""


@dataclass(frozen=True)
class NamedFigure:
    """A figure and the name of its file; `figure` is None if it cannot be drawn yet, for the reason in `missing`."""

    name: str
    figure: Chart | None
    missing: str = ""
    kind: str = ""


def check_figures(info: StudyInfo) -> None:
    """Raises `ConfigError` for [[figures]] that the results of this study cannot have, before any run.

    Kinds, keys, their types, and the names of settings, methods and cases are checked.
    """
    planned = Results(info, {})
    for k, spec in enumerate(info.figures):
        with suppress(DataError):  # only the values of runs are missing
            study_figure(planned, spec, f"figures[{k}]")


def study_figure(results: Results, spec: Mapping[str, Any], where: str = "figures") -> Chart:
    """The figure that a [[figures]] table asks for; see `FIGURES` for the kinds.

    Raises `ConfigError` if the table is wrong, and `DataError` if no run has values for it yet.
    """
    common, settings = checked_kind("figure", FIGURES, _common, spec, where)
    if common.get("document") is False:
        results = replace(results, info=replace(results.info, document={}))
    try:
        figure = FIGURES[common["kind"]](results, **settings)
    except ConfigError as error:  # a kind of figure does not know its place in the file
        place = re.sub(r"^figures\b(?!\[)", lambda _: where, error.where or where)
        raise ConfigError(error.what, where=place, hint=error.hint) from None
    title, caveats = common.get("title") or figure.title, results.info.caveats
    return replace(figure, title=title, caveats=caveats)


def draw(results: Results, spec: Mapping[str, Any], path: Path) -> Path:
    """Draws the figure of a [[figures]] table into a .svg, .pdf or .png file, and returns its path.

    Raises `ConfigError` if the table is wrong, matplotlib is not installed or the name has another ending, `DataError`
    if no run has values for it yet, and `RunFailed` if the file cannot be written.
    """
    return draw_chart(study_figure(results, spec), path)


def study_figures(results: Results) -> list[NamedFigure]:
    """The figures that the study file asks for, or those of `default_figures`.

    A figure that no run has values for is named with the reason. Raises `ConfigError` if a table is wrong.
    """
    specs = list(results.info.figures) or default_figures(results)
    named: list[NamedFigure] = []
    for k, spec in enumerate(specs):
        name = _file_name(str(spec.get("name") or spec["kind"]))
        taken = {figure.name for figure in named}
        name = name if name not in taken else f"{name}-{k + 1}"
        try:
            named.append(NamedFigure(name, study_figure(results, spec, f"figures[{k}]"), kind=spec["kind"]))
        except DataError as error:
            named.append(NamedFigure(name, None, str(error)))
    return named


def default_figures(results: Results) -> list[dict[str, Any]]:
    """Learning curves of each case, and the metric against each dimension with several numbers."""
    runs = NamedCells.of(results)
    specs: list[dict[str, Any]] = [{"kind": "curves"}]
    for key in runs.varying():
        numbers = [value for value in runs.all_values(key) if is_number(value)]
        if key != METHOD and len(numbers) > 1:
            specs.append({"kind": "setting", "x": key, "name": f"setting-{key.rpartition('.')[2]}"})
    return specs


def write_study_figures(
    results: Results, folder: Path, formats: Sequence[str] = ("svg", "pdf")
) -> list[Path]:
    """Draws the figures of `study_figures` into a folder, and returns the files.

    Raises `ConfigError` if a table is wrong or matplotlib is not installed, and `RunFailed` if a file cannot be
    written.
    """
    return [
        draw_chart(named.figure, folder / f"{named.name}.{suffix}")
        for named in study_figures(results)
        if named.figure is not None
        for suffix in formats
    ]


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "figure"
