"""The numbers of the document in the tables of a study, in columns with the head "Paper"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.base.format import MISSING
from fedlens.report.stated_values import StatedValue, stated_label, stated_values
from fedlens.report.table_view import TableView
from fedlens.results.table_format import TableCell

PAPER = "Paper"


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
    """The document's label of a method; empty where it is that of the study."""
    label = stated_label(view.info.document, method, view.label(method))
    return label if label != view.label(method) or method not in view.info.methods else ""


@dataclass(frozen=True)
class StatedRow:
    """A row of measured values, and what the document states of each; empty texts where it states nothing.

    Attributes:
        label: the document's label of the row, where it is another.
    """

    names: Sequence[TableCell]
    values: Sequence[TableCell]
    stated: Sequence[str]
    label: str = ""


def with_paper(head: Sequence[str], rows: Sequence[StatedRow]) -> tuple[list[str], list[list[TableCell]]]:
    """Head and rows, with a column "Paper" behind each column of which the document states a value.

    The first of a row has the document's label.

    >>> row = StatedRow([TableCell("small CNN")], [TableCell("41.0"), TableCell("2")], ["60.6", ""], "EfficientNet-B0")
    >>> with_paper(["Method", "Accuracy", "Rounds"], [row])[0]
    ['Method', 'Accuracy', 'Paper', 'Rounds']
    """
    width = len(head) - len(rows[0].values) if rows else len(head)
    columns = {k for row in rows for k, text in enumerate(row.stated) if text}
    names = [
        name for k, text in enumerate(head[width:]) for name in [text, *([PAPER] if k in columns else [])]
    ]
    lines = []
    for row in rows:
        line, label = list(row.names), f" ({row.label})" if row.label else ""
        for k, value in enumerate(row.values):
            line.append(value)
            if k in columns:
                line.append(TableCell(row.stated[k] + label if row.stated[k] else MISSING))
                label = "" if row.stated[k] else label
        lines.append(line)
    return [*head[:width], *names], lines


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


def document_notes(view: TableView, head: Sequence[str]) -> list[str]:
    """A note on the numbers of the document; empty without such numbers."""
    source = view.info.document.get("source", "the document's numbers")
    return [f'"Paper": {source}.'] if any(PAPER in name for name in head) else []
