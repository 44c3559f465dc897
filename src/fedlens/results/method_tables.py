"""The kinds of tables of what methods reach: final values, differences, choices, budgets, targets, ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedlens.base.errors import ConfigError
from fedlens.base.format import MISSING, number
from fedlens.results.cells import Cell, CellTest, chosen_values, edges
from fedlens.results.rows import validation_metric
from fedlens.results.table_format import StudyTable, TableCell
from fedlens.results.table_view import Column, Spread, TableView
from fedlens.results.values import better, effective_rate
from fedlens.results.words import (
    INTERVAL,
    bold_words,
    case_name,
    edge_words,
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

Lines = Literal["methods", "cases"]


def summary(
    view: TableView, *, spread: Spread = "interval", rows: Lines = "methods", compare: bool = True
) -> StudyTable:
    """The final value of each method in each case: mean and interval or deviation over seeds.

    Bold is a value that is better than the baseline's, italic one that is worse, by the same rule as in `differences`.

    Args:
        compare: false for no test: of many points of a grid no one is a baseline.
    """
    info, metric = view.info, f"{metric_name(view.metric)}{unit(view.metric)}"
    compared = view.compared() if compare and info.baseline in info.methods else []
    bold = {id(each.cell): each.test for each in compared if each.bold}

    def cell_of(method: str, case: Mapping[str, Any]) -> TableCell:
        cell = view.cell(method, case)
        if cell is None or not cell.complete:
            return TableCell(view.status(cell))
        text = view.mean([*cell.values.values()], spread) + _star(view, cell)
        test = bold.get(id(cell))
        up = test is not None and better(view.metric, test.difference.mean) > 0
        return TableCell(text, bold=up, italic=test is not None and not up)

    widths = {
        "interval": f"mean ± half the {INTERVAL} of the mean",
        "deviation": "mean ± standard deviation",
        "none": "mean",
    }
    several = len(info.seeds) > 1
    words = (
        f"{metric}: {widths[spread]} over {seeds_text(info.seeds)}."
        if several
        else f"{metric} of {seeds_text(info.seeds)}.",
        own_populations(info),
        final_value(info),
        _tests(
            view,
            compared,
            f"better than {view.label(info.baseline)} in the same case, italic: worse",
            several,
        ),
    )

    def stated_of(method: str, case: Mapping[str, Any]) -> str:
        return view.stated_text(view.stated(method, case))

    return _grid(view, f"{metric_name(view.metric)} of each method", words, rows, cell_of, stated_of)


def differences(view: TableView, *, baseline: str | None = None) -> StudyTable:
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
    compared = view.compared(base)
    rows = [_difference(view, each) for each in compared]
    heads = ("Difference", "Interval", "Seeds", "p", "Adjusted p")
    columns = [Column(head, [row[k] for row in rows]) for k, head in enumerate(heads)]
    names = [view.names(each.cell, _star(view, each.cell)) for each in compared]
    unit_words = " in percentage points" if unit(view.metric) else ""
    words = (
        f"{metric_name(view.metric)}: difference to {view.label(base)}{unit_words}, "
        f"paired by seed over {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        f"Interval: {INTERVAL} of the mean difference, each for itself and not corrected for their number.",
        _tests(view, compared, f"differs from {view.label(base)}"),
    )
    title = f"Differences to {view.label(base)}"
    return view.table(title, words, ([*view.dimension_head, "Method"], names), columns)


def _difference(view: TableView, each: CellTest) -> list[TableCell]:
    if each.test is None:
        return [TableCell(view.status(each.cell)), *[TableCell(MISSING)] * 4]
    mean = each.test.difference
    interval = MISSING
    if mean.low is not None and mean.high is not None:
        interval = f"[{view.signed(mean.low)}, {view.signed(mean.high)}]"
    texts = (
        view.signed(mean.mean),
        interval,
        str(mean.seeds),
        p_text(each.test.p),
        p_text(each.test.adjusted),
    )
    return [TableCell(text, bold=each.bold and k in (0, 4)) for k, text in enumerate(texts)]


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
    metric = validation_metric(view.metric)
    score = f"{metric_name(metric)}{unit(metric)}"
    found = [(cell, chosen_values(view.results, cell.method, cell.case)) for cell in view.cells]
    settings = list(dict.fromkeys(key for _, point in found for key in point))
    rows, searched, starred = [], False, False
    for cell, point in found:
        at_edge = edges(view.results, cell.method, cell.case)
        values = {key: f"{shown(value)}{'*' if key in at_edge else ''}" for key, value in point.items()}
        texts = [values.get(key, MISSING) for key in settings]
        if settings and not values:
            texts[0] = "not chosen yet"
        tuned = [
            row
            for row in view.results.rows
            if (row.role, row.method) == ("tune", cell.method) and row.case == cell.case
        ]
        at_choice = [row for row in tuned if row.point == point]
        scores = [row.final(metric, view.info.last) for row in at_choice]
        measured = [value for value in scores if value is not None]
        known = measured and len(measured) == len(scores)
        rates = {effective_rate(row) for row in view.results.runs(cell.method, cell.case).values()}
        texts += [
            ", ".join(map(number, sorted(rate for rate in rates if rate is not None))) or MISSING,
            view.value(statistics.fmean(measured), metric) if known else MISSING,
            str(len({row.digest for row in tuned})),  # once each, though successive halving continues it
        ]
        searched, starred = searched or bool(tuned), starred or bool(at_edge)
        rows.append([*view.names(cell), *map(TableCell, texts)])
    stars = ""
    if starred:
        stars = "* The value lies at the edge of those that were tried, so a better one may lie beyond."
    elif all(point for _, point in found):
        stars = "No chosen number lies at the edge of those that were tried."
    caption = joined(
        tuning_words(view.info),
        f"{score}: the mean over the seeds of tuning, at the chosen settings." if searched else "",
        "Effective rate: local rate / (1 - server momentum).",
        stars if searched else "",
    )
    head = [*view.dimension_head, "Method", *settings, "Effective rate", score, "Runs of tuning"]
    labels = len(view.dimension_head) + 1
    return StudyTable(
        view.name, view.title or "Settings chosen by tuning", caption, head, rows, view.info.notes, labels
    )


def relative(view: TableView, *, to: str = "centralized", rows: Lines = "methods") -> StudyTable:
    """Relative accuracy: each value divided by that of the method `to` in the same case and at the same seed.

    Source: hsu2020, section 6. The line of `to` itself has its values.

    Raises `ConfigError` if the study has no method `to`.
    """
    view.refuse_absent(to)
    metric, share = metric_name(view.metric), "test_accuracy"  # ratios are shown as shares

    def text(method: str, case: Mapping[str, Any]) -> str:
        cell, reference = view.cell(method, case), view.cell(to, case)
        if cell is None or not cell.complete:
            return view.status(cell)
        if method == to:
            return view.mean([*cell.values.values()], metric=view.metric)
        if reference is None or not reference.complete:
            return f"{view.label(to)}: {view.status(reference)}"
        found = ratios(cell.values, reference.values)
        return view.mean(found, metric=share) if found else MISSING

    def stated_of(method: str, case: Mapping[str, Any]) -> str:
        """The document's ratio, where it states both values; of `to`, its value."""
        value, reference = view.stated(method, case), view.stated(to, case)
        if method == to or value is None:
            return view.stated_text(value)
        if reference is None or reference.number == 0 or reference.value is None:
            return ""
        return value.word + view.value(value.number / reference.number, share)

    names = {to: f"{view.label(to)}: {metric.lower()}{unit(view.metric)}"}
    spread = f", mean ± half the {INTERVAL} over" if len(view.info.seeds) > 1 else " of"
    words = (
        f"{metric} divided by that of {view.label(to)} in the same case and at the same seed, in %"
        f"{spread} {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        tuning_words(view.info),
    )
    title = f"{metric} relative to {view.label(to)}"
    return _grid(view, title, words, rows, lambda *place: TableCell(text(*place)), stated_of, names)


def ratios(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """`first` / `second` at each seed that both have, if `second` is not 0 there.

    >>> ratios({0: 0.4, 1: 0.5}, {0: 0.8, 2: 1.0})
    [0.5]
    """
    return [first[seed] / second[seed] for seed in sorted(first.keys() & second.keys()) if second[seed]]


def p_text(p: float | None) -> str:
    """A p value with three digits after the point.

    >>> p_text(0.01234), p_text(0.00001), p_text(None)
    ('0.012', '< 0.001', '–')
    """
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _grid(
    view: TableView,
    title: str,
    words: Sequence[str],
    rows: Lines,
    cell_of: Callable[[str, Mapping[str, Any]], TableCell],
    stated_of: Callable[[str, Mapping[str, Any]], str],
    labels: Mapping[str, str] | None = None,
) -> StudyTable:
    """A table of methods by cases, with the methods of the document that the study does not run.

    Args:
        stated_of: what the document states about a method in a case; empty for nothing.
        labels: instead of those of the study.
    """
    cases, own = view.info.cases, {**view.info.methods, **(labels or {})}
    stated = {
        method: [stated_of(method, case) for case in cases]
        for method in dict.fromkeys([*own, *(value.method for value in view.all_stated)])
    }
    methods = [method for method in stated if method in own or any(stated[method])]
    none = [TableCell(MISSING)] * len(cases)
    cells = {m: [cell_of(m, case) for case in cases] if m in own else none for m in methods}
    if rows == "cases":
        names = view.dimension_head, [view.dimension_cells(case) for case in cases]
        columns = [Column(own.get(m), cells[m], stated[m], view.document_label(m)) for m in methods]
        return view.table(title, words, names, columns)
    columns = [
        Column(name, [cells[m][k] for m in methods], [stated[m][k] for m in methods])
        for k, name in enumerate(case_name(view.info, case) or "value" for case in cases)
    ]
    lines = [[TableCell(own.get(method, "not run"))] for method in methods]
    return view.table(title, words, (["Method"], lines), columns, [*map(view.document_label, methods)])


def _tests(view: TableView, compared: Sequence[CellTest], meaning: str, untested: bool = True) -> str:
    """How settings were chosen, what bold and stars mean, and what has no test."""
    return joined(
        tuning_words(view.info),
        bold_words(compared, view.info, meaning),
        edge_words(any(has_edge(view.results, cell) for cell in view.cells)),
        untested_words(compared, view.results) if untested else "",
    )


def _star(view: TableView, cell: Cell) -> str:
    return "*" if has_edge(view.results, cell) else ""
