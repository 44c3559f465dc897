"""Tables of relative accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedlens.base.format import MISSING
from fedlens.report.study_budget_tables import needs_method
from fedlens.report.study_captions import (
    INTERVAL,
    failure_notes,
    final_value,
    joined,
    metric_name,
    own_populations,
    seeds_text,
    tuning_words,
    unit,
)
from fedlens.report.study_comparison_tables import oriented
from fedlens.report.study_document_rows import document_notes, stated, stated_text
from fedlens.report.study_statistics import t_interval
from fedlens.report.table_view import TableView
from fedlens.results.table_format import StudyTable, TableCell


def relative(
    view: TableView, *, to: str = "centralized", rows: Literal["methods", "cases"] = "methods"
) -> StudyTable:
    """Relative accuracy: each value divided by that of the method `to` in the same case and at the same seed.

    Source: hsu2020, section 6. The line of `to` itself has its values.

    Raises `ConfigError` if the study has no method `to`.
    """
    needs_method(view, to, f"{view.where}.to")
    grid = {
        (method, k): TableCell(_relative_text(view, method, to, case))
        for k, case in enumerate(view.info.cases)
        for method in view.info.methods
    }
    names = {to: f"{view.label(to)}: {metric_name(view.metric).lower()}{unit(view.metric)}"}
    head, lines, labels = oriented(
        view, grid, rows, lambda method, case: _stated_ratio(view, method, to, case), names
    )
    several = len(view.info.seeds) > 1
    spread = f", mean ± half the {INTERVAL} over" if several else " of"
    caption = joined(
        f"{metric_name(view.metric)} divided by that of {view.label(to)} in the same case and at the same seed, in %"
        f"{spread} {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        tuning_words(view.info),
    )
    notes = [*failure_notes(view.cells, view.results), *document_notes(view, head)]
    title = view.title or f"{metric_name(view.metric)} relative to {view.label(to)}"
    return StudyTable(view.name, title, caption, head, lines, notes, labels)


def ratios(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """`first` / `second` at each seed that both have, if `second` is not 0 there.

    >>> ratios({0: 0.4, 1: 0.5}, {0: 0.8, 2: 1.0})
    [0.5]
    """
    return [first[seed] / second[seed] for seed in sorted(first.keys() & second.keys()) if second[seed]]


def _relative_text(view: TableView, method: str, to: str, case: Mapping[str, Any]) -> str:
    cell, reference = view.cell(method, case), view.cell(to, case)
    if cell is None or not cell.complete:
        return view.status(cell)
    if method == to:
        return _mean(view, list(cell.values.values()), view.metric)
    if reference is None or not reference.complete:
        return f"{view.label(to)}: {view.status(reference)}"
    return _mean(view, ratios(cell.values, reference.values), "test_accuracy")


def _mean(view: TableView, values: Sequence[float], metric: str) -> str:
    """Mean and half the interval, in per cent where `metric` is a share."""
    if not values:
        return MISSING
    bounds = t_interval(values)
    text = view.value(bounds.mean, metric)
    return text if bounds.half is None else f"{text} ± {view.value(bounds.half, metric)}"


def _stated_ratio(view: TableView, method: str, to: str, case: Mapping[str, Any]) -> str:
    """The document's ratio, where it states both values; of `to`, its value."""
    value, reference = stated(view, method, case), stated(view, to, case)
    if method == to or value is None:
        return stated_text(view, value)
    if reference is None or reference.number == 0 or reference.value is None:
        return ""
    words = {"above": value.low, "below": value.high, "about": value.about}
    word = next((f"{word} " for word, given in words.items() if given is not None), "")
    return word + view.value(value.number / reference.number, "test_accuracy")
