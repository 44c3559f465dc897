"""The numbers of the document in the tables of a study, in rows labelled "document"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlens.report.stated_values import StatedValue, stated_label, stated_values
from fedlens.report.table_view import TableView


def stated(
    view: TableView, method: str, case: Mapping[str, Any], at: Mapping[str, float] | None = None
) -> StatedValue | None:
    """What the document states about a method in a case, at a budget or else at the end of training."""
    if not view.document:
        return None
    wanted = dict(at or {})
    for value in stated_values(view.info.document, view.metric):
        same = value.at.keys() == wanted.keys() and all(
            math.isclose(value.at[name], wanted[name]) for name in wanted
        )
        if value.method == method and same and value.holds_for(case):
            return value
    return None


def stated_methods(view: TableView) -> list[str]:
    """The methods of the document that the study does not run, such as "centralized"."""
    if not view.document:
        return []
    names = [value.method for value in stated_values(view.info.document, view.metric)]
    return [name for name in dict.fromkeys(names) if name not in view.info.methods]


def document_label(view: TableView, method: str) -> str:
    """The label of the document's row of a method."""
    return f"{stated_label(view.info.document, method, view.label(method))}, document"


def stated_budgets(view: TableView, name: str) -> list[float]:
    """The budgets of this kind that the document states values at, in rising order."""
    if not view.document:
        return []
    return sorted(
        {value.at[name] for value in stated_values(view.info.document, view.metric) if name in value.at}
    )


def stated_text(view: TableView, value: StatedValue | None, count: bool = False) -> str:
    """A stated value in the unit of the table: "above 75.0"; empty without one.

    Args:
        count: whether it is a number of rounds, not a value of the metric.
    """
    if value is None:
        return ""
    words = {"above": value.low, "below": value.high, "about": value.about}
    word = next((f"{word} " for word, number in words.items() if number is not None), "")
    return word + (f"{value.number:,.0f}" if count else view.value(value.number))


def document_notes(view: TableView, shown: bool) -> list[str]:
    """Notes on the rows of the document and the differences of scale; empty without such rows."""
    if not shown:
        return []
    source = view.info.document.get("source", "the document's numbers")
    notes = [f'"document": {source}.']
    if view.info.smaller:
        notes.append(f"At this scale: {'; '.join(sentence.rstrip('.') for sentence in view.info.smaller)}.")
    return notes
