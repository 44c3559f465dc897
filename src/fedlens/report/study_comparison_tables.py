"""Tables that compare methods: summary, differences to the baseline, and the settings that tuning chose."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedlens.base.errors import ConfigError
from fedlens.base.format import MISSING, number
from fedlens.report.study_captions import (
    INTERVAL,
    bold_words,
    edge_words,
    failure_notes,
    final_value,
    has_edge,
    joined,
    metric_name,
    own_populations,
    seeds_text,
    shown,
    tuning_words,
    unit,
    untested_words,
)
from fedlens.report.study_cells import CellComparison, StudyCell, better, comparisons
from fedlens.report.study_choices import choices as chosen
from fedlens.report.study_choices import chosen_values
from fedlens.report.study_document_rows import (
    PAPER,
    StatedRow,
    document_label,
    document_notes,
    stated,
    stated_methods,
    stated_text,
    with_paper,
)
from fedlens.report.table_view import TableView
from fedlens.results.rows import EFFECTIVE, Row, validation_metric
from fedlens.results.table_format import StudyTable, TableCell

Spread = Literal["interval", "deviation", "none"]


def summary(
    view: TableView,
    *,
    spread: Spread = "interval",
    rows: Literal["methods", "cases"] = "methods",
    compare: bool = True,
) -> StudyTable:
    """The final value of each method in each case: mean and interval or deviation over seeds.

    Bold is a value that is better than the baseline's, italic one that is worse, by the same rule as in `differences`.

    Args:
        compare: false for no test: of many points of a grid no one is a baseline.
    """
    compared = _compared(view) if compare and view.info.baseline in view.info.methods else []
    marks = {(each.cell.method, repr(each.cell.case)): each for each in compared}
    grid: dict[tuple[str, int], TableCell] = {}
    for k, case in enumerate(view.info.cases):
        for method in view.info.methods:
            cell = view.cell(method, case)
            text = _mean_text(view, cell, spread)
            comparison = marks.get((method, repr(case)))
            up = comparison is not None and comparison.bold and _better(view, comparison)
            down = comparison is not None and comparison.bold and not up
            grid[method, k] = TableCell(text, bold=up, italic=down)
    head, lines, labels = oriented(
        view, grid, rows, lambda method, case: stated_text(view, stated(view, method, case))
    )
    widths = {
        "interval": f"mean ± half the {INTERVAL} of the mean",
        "deviation": "mean ± standard deviation",
        "none": "mean",
    }
    several = len(view.info.seeds) > 1
    meaning = f"better than {view.label(view.info.baseline)} in the same case, italic: worse"
    caption = joined(
        f"{metric_name(view.metric)}{unit(view.metric)}: {widths[spread]} over {seeds_text(view.info.seeds)}."
        if several
        else f"{metric_name(view.metric)}{unit(view.metric)} of {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        tuning_words(view.info),
        bold_words(compared, view.info, meaning),
        edge_words(any(has_edge(view.results, cell) for cell in view.cells)),
        untested_words(compared, view.results) if several else "",
    )
    title = view.title or f"{metric_name(view.metric)} of each method"
    notes = [*failure_notes(view.cells, view.results), *document_notes(view, head)]
    return StudyTable(view.name, title, caption, head, lines, notes, labels)


def differences(
    view: TableView,
    *,
    baseline: str | None = None,
) -> StudyTable:
    """Differences to the baseline, paired by seed, with intervals and Holm-adjusted p values.

    Raises `ConfigError` if the baseline is not among the methods, or if no other method is.
    """
    base = baseline or view.info.baseline
    if base not in view.info.methods:
        raise ConfigError(
            f"the baseline '{base}' is not among the methods of the table",
            where=f"{view.where}.baseline",
            hint=f"methods: {', '.join(view.info.methods)}",
        )
    if len(view.info.methods) < 2:
        raise ConfigError(
            "a table of differences needs at least two methods, and the study has one",
            where=view.where,
            hint="remove the table, or add a method",
        )
    compared = _compared(view, base)
    head = [*view.dimension_head, "Method", "Difference", "Interval", "Seeds", "p", "Adjusted p"]
    rows = [[*view.dimension_cells(each.cell.case), *_difference_cells(view, each)] for each in compared]
    unit_words = " in percentage points" if unit(view.metric) else ""
    caption = joined(
        f"{metric_name(view.metric)}: difference to {view.label(base)}{unit_words}, "
        f"paired by seed over {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        f"Interval: {INTERVAL} of the mean difference, each for itself and not corrected for their number.",
        tuning_words(view.info),
        bold_words(compared, view.info, f"differs from {view.label(base)}"),
        edge_words(any(has_edge(view.results, cell) for cell in view.cells)),
        untested_words(compared, view.results),
    )
    title = view.title or f"Differences to {view.label(base)}"
    notes = failure_notes(view.cells, view.results)
    return StudyTable(view.name, title, caption, head, rows, notes, len(view.dimension_head) + 1)


def choices(view: TableView) -> StudyTable:
    """The settings that tuning chose in each cell, with a star at each value at the edge of what was tried.

    Raises `ConfigError` for a study without tuning.
    """
    if not view.info.tuning:
        raise ConfigError(
            "the study tunes no settings, so it has no table of choices",
            where=view.where,
            hint="remove the table, or add [tune]",
        )
    score = validation_metric(view.metric)
    chosen_by_cell = {
        (cell.method, repr(cell.case)): chosen(view.results, cell.method, cell.case) for cell in view.cells
    }
    settings = list(dict.fromkeys(choice.setting for each in chosen_by_cell.values() for choice in each))
    rows = []
    for cell in view.cells:
        values = {choice.setting: choice for choice in chosen_by_cell[cell.method, repr(cell.case)]}
        texts = [
            shown(values[key].value) + ("*" if values[key].edge else "") if key in values else MISSING
            for key in settings
        ]
        if not values:
            texts = ["not chosen yet"] + [MISSING] * (len(settings) - 1) if settings else []
        rates = effective_rates(view, cell)
        rows.append(
            [
                *view.dimension_cells(cell.case),
                TableCell(view.label(cell.method)),
                *map(TableCell, texts),
                TableCell(", ".join(number(rate) for rate in rates) or MISSING),
                TableCell(_tuning_score(view, cell, score)),
                TableCell(str(_tuning_runs(view, cell))),
            ]
        )
    stars = any(choice.edge for each in chosen_by_cell.values() for choice in each)
    searched = any(_tuning_runs(view, cell) for cell in view.cells)
    caption = joined(
        tuning_words(view.info),
        f"{metric_name(score)}{unit(score)}: the mean over the seeds of tuning, at the chosen settings."
        if searched
        else "",
        "Effective rate: local rate / (1 - server momentum).",
        _star_words(stars, all(chosen_by_cell.values())) if searched else "",
    )
    columns = [*settings, "Effective rate", f"{metric_name(score)}{unit(score)}", "Runs of tuning"]
    head = [*view.dimension_head, "Method", *columns]
    title = view.title or "Settings chosen by tuning"
    return StudyTable(view.name, title, caption, head, rows, view.info.notes, len(view.dimension_head) + 1)


def _star_words(stars: bool, complete: bool) -> str:
    if stars:
        return "* The value lies at the edge of those that were tried, so a better one may lie beyond."
    return "No chosen number lies at the edge of those that were tried." if complete else ""


def effective_rates(view: TableView, cell: StudyCell) -> list[float]:
    """The effective learning rates of the final runs of a cell, each once."""
    settings = {**cell.case, **chosen_values(view.results, cell.method, cell.case)}
    runs = view.results.runs(cell.method, cell.case).values()
    rates = {effective_rate_of(line, settings) for line in runs}
    return sorted(rate for rate in rates if rate is not None)


def effective_rate_of(line: Row, settings: Mapping[str, Any]) -> float | None:
    """The effective learning rate of a run: its fact, or the setting of that name; None if neither is known.

    >>> line = Row("", "", "finished", None, 1, "test_accuracy", {}, {})
    >>> effective_rate_of(line, {"effective_lr": 0.1}), effective_rate_of(line, {"local.lr": 0.1})
    (0.1, None)
    """
    rate = line.facts.get(EFFECTIVE)
    return rate if rate is not None else settings.get(EFFECTIVE)


def _compared(view: TableView, baseline: str | None = None) -> list[CellComparison]:
    return comparisons(view.cells, baseline or view.info.baseline, view.info.tuning)


def _mean_text(view: TableView, cell: StudyCell | None, spread: Spread) -> str:
    bounds = cell.interval if cell and spread == "interval" else None
    if cell is None or not cell.complete:
        return view.status(cell)
    star = "*" if has_edge(view.results, cell) else ""
    values = list(cell.values.values())
    text = view.value(statistics.fmean(values))
    if bounds is not None and bounds.low is not None and bounds.high is not None:
        return f"{text} ± {view.width((bounds.high - bounds.low) / 2)}{star}"
    if spread == "deviation" and len(values) > 1:
        return f"{text} ± {view.width(statistics.stdev(values))}{star}"
    return text + star


def _better(view: TableView, comparison: CellComparison) -> bool:
    assert comparison.test is not None
    return better(view.metric, comparison.test.difference.mean) > 0


def oriented(
    view: TableView,
    grid: Mapping[tuple[str, int], TableCell],
    rows: Literal["methods", "cases"],
    stated_of: Callable[[str, Mapping[str, Any]], str],
    names: Mapping[str, str] | None = None,
) -> tuple[list[str], list[list[TableCell]], int]:
    """Head, rows and the number of label columns of a table of methods by cases, with the document's numbers.

    Args:
        stated_of: what the document states about a method in a case; empty for nothing.
        names: labels instead of those of the study.
    """
    labels = {**view.info.methods, **(names or {})}
    cases, none = view.info.cases, TableCell(MISSING)
    others = dict.fromkeys(stated_methods(view), "not run")
    texts = {method: [stated_of(method, case) for case in cases] for method in [*labels, *others]}
    kept = {
        method: label for method, label in (labels | others).items() if method in labels or any(texts[method])
    }
    if rows == "methods":
        lines = [
            StatedRow(
                [TableCell(label)],
                [grid.get((method, k), none) for k in range(len(cases))],
                texts[method],
                document_label(view, method),
            )
            for method, label in kept.items()
        ]
        return *with_paper(["Method", *(view.case_label(case) for case in cases)], lines), 1
    head, columns = list(view.dimension_head), []
    for method, label in kept.items():
        if method in labels:
            head.append(label)
            columns.append([grid[method, k] for k in range(len(cases))])
        if any(texts[method]):
            own = document_label(view, method)
            head.append(f"{PAPER}: {own}" if own else PAPER)
            columns.append([TableCell(text or MISSING) for text in texts[method]])
    body = [[*view.dimension_cells(case), *(column[k] for column in columns)] for k, case in enumerate(cases)]
    return head, body, len(view.dimension_head)


def _difference_cells(view: TableView, each: CellComparison) -> Sequence[TableCell]:
    star = "*" if has_edge(view.results, each.cell) else ""
    name = TableCell(view.label(each.cell.method) + star)
    if each.test is None:
        return [name, TableCell(view.status(each.cell)), *[TableCell(MISSING)] * 4]
    shown = each.test.difference
    interval = MISSING
    if shown.low is not None and shown.high is not None:
        interval = f"[{view.signed(shown.low)}, {view.signed(shown.high)}]"
    return [
        name,
        TableCell(view.signed(shown.mean), bold=each.bold),
        TableCell(interval),
        TableCell(str(shown.n)),
        TableCell(p_text(each.test.p)),
        TableCell(p_text(each.test.adjusted), bold=each.bold),
    ]


def p_text(p: float | None) -> str:
    """A p value with three digits after the point.

    >>> p_text(0.01234), p_text(0.00001), p_text(None)
    ('0.012', '< 0.001', '–')
    """
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _tuning_rows(view: TableView, cell: StudyCell) -> list[Row]:
    return [
        row
        for row in view.results.rows
        if (row.role, row.method) == ("tune", cell.method) and row.case == cell.case
    ]


def _tuning_runs(view: TableView, cell: StudyCell) -> int:
    """Runs of tuning of a cell, each once though successive halving continues it."""
    return len({row.digest for row in _tuning_rows(view, cell)})


def _tuning_score(view: TableView, cell: StudyCell, metric: str) -> str:
    point = chosen_values(view.results, cell.method, cell.case)
    scores = [row.final(metric, view.info.last) for row in _tuning_rows(view, cell) if row.point == point]
    measured = [score for score in scores if score is not None]
    return (
        view.value(statistics.fmean(measured), metric)
        if measured and len(measured) == len(scores)
        else MISSING
    )
