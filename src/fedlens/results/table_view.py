"""What a table of a study is about: the results, narrowed by the options that all kinds of tables share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import MISSING, number
from fedlens.results.cells import Cell, CellTest, cells, comparisons
from fedlens.results.rows import Results, StudyInfo
from fedlens.results.stated import StatedValue, stated_label, stated_values
from fedlens.results.statistics import t_interval
from fedlens.results.table_format import StudyTable, TableCell
from fedlens.results.words import case_name, failure_notes, joined, shown, shown_in_percent

Spread = Literal["interval", "deviation", "none"]
PAPER = "Paper"


@dataclass(frozen=True)
class Column:
    """A column of measured values.

    Attributes:
        head: None for a method that the study does not run: only the document's numbers are shown.
        stated: what the document states of each value, empty for nothing.
        label: the document's label of the column, where it is another.
    """

    head: str | None
    cells: Sequence[TableCell]
    stated: Sequence[str] = ()
    label: str = ""


@dataclass(frozen=True)
class TableView:
    """The results that a table is made of.

    Attributes:
        results: with the metric, the methods and the cases of the table alone.
        name: of its files.
        title: empty for the usual title of the kind.
        digits: after the point, of shares in per cent and of differences; None for the usual number.
        document: whether rows of the document's own numbers are shown.
        where: the table in the study file, for messages.
    """

    results: Results
    name: str
    title: str = ""
    digits: int | None = None
    document: bool = True
    where: str = "tables"

    @property
    def info(self) -> StudyInfo:
        """The plan."""
        return self.results.info

    @property
    def metric(self) -> str:
        """The column that the table shows."""
        return self.results.metric

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells of the table."""
        return cells(self.results)

    def cell(self, method: str, case: Mapping[str, Any]) -> Cell | None:
        """The cell of a method in a case; None if the study does not plan it."""
        return next((each for each in self.cells if each.method == method and each.case == case), None)

    def compared(self, baseline: str | None = None) -> list[CellTest]:
        """The comparisons of the table with a method, that of the study by default."""
        return comparisons(self.cells, baseline or self.info.baseline, self.info.tuning)

    def refuse_absent(self, method: str) -> None:
        """Raises `ConfigError` if the table does not have the method that its option `to` names."""
        if method not in self.info.methods:
            raise ConfigError(
                f"the table has no method '{method}' that values are relative to",
                where=f"{self.where}.to",
                hint=nearest(method, self.info.methods),
            )

    def label(self, method: str) -> str:
        """The label of a method."""
        return self.info.methods.get(method, method)

    @property
    def dimension_head(self) -> list[str]:
        """Headings of the columns that name a case."""
        return [self.info.dimensions[dimension] or dimension for dimension in self.info.dimensions]

    def dimension_cells(self, case: Mapping[str, Any]) -> list[TableCell]:
        """The values of a case, one for each heading."""
        return [TableCell(shown(case[d]) if d in case else MISSING) for d in self.info.dimensions]

    def names(self, cell: Cell, star: str = "") -> list[TableCell]:
        """The values of a case and the label of a method."""
        return [*self.dimension_cells(cell.case), TableCell(self.label(cell.method) + star)]

    def value(self, value: float | None, metric: str | None = None) -> str:
        """A value of the metric: per cent without the sign for shares, else four significant digits."""
        if value is None or not shown_in_percent(metric or self.metric):
            return number(value)
        return f"{100 * value:.{1 if self.digits is None else self.digits}f}"

    def mean(self, values: Sequence[float], spread: Spread = "interval", metric: str | None = None) -> str:
        """Mean and half the interval, or the deviation, of values over seeds, in the unit of `value`."""
        text = self.value(statistics.fmean(values), metric)
        if len(values) < 2 or spread == "none":
            return text
        width = (t_interval(values).half or 0.0) if spread == "interval" else statistics.stdev(values)
        percent = metric is not None or shown_in_percent(self.metric)
        return f"{text} ± {self.value(width, metric) if percent else f'{width:.2g}'}"

    def signed(self, value: float) -> str:
        """A difference in the unit of `value`, in points for shares."""
        if not shown_in_percent(self.metric):
            return f"{value:+.{3 if self.digits is None else self.digits}g}"
        text = f"{100 * value:+.{2 if self.digits is None else self.digits}f}"
        return text.lstrip("+-") if not any(digit in text for digit in "123456789") else text

    def status(self, cell: Cell | None) -> str:
        """What stands in place of a value: "failed (1 of 3)", or how many runs are finished."""
        if cell is None:
            return MISSING
        if cell.failed:
            return f"{'failed' if cell.measured else 'no value'} ({len(cell.failed)} of {cell.planned})"
        return f"unfinished ({len(cell.values)} of {cell.planned})"

    @cached_property
    def all_stated(self) -> list[StatedValue]:
        """The document's values of the metric; none for a table without them."""
        return stated_values(self.info.document, self.metric) if self.document else []

    def stated(
        self, method: str, case: Mapping[str, Any], at: Mapping[str, float] | None = None
    ) -> StatedValue | None:
        """What the document states about a method in a case, at a budget or else at the end of training."""
        wanted = dict(at or {})
        for value in self.all_stated:
            same = value.at.keys() == wanted.keys() and all(
                math.isclose(value.at[name], wanted[name]) for name in wanted
            )
            if value.method == method and same and value.holds_for(case):
                return value
        return None

    def stated_text(self, value: StatedValue | None, count: bool = False) -> str:
        """A stated value in the unit of the table: "above 75.0"; empty without one.

        Args:
            count: whether it is a number of rounds, not a value of the metric.
        """
        if value is None:
            return ""
        return value.word + (f"{value.number:,.0f}" if count else self.value(value.number))

    def document_label(self, method: str) -> str:
        """The document's label of a method; empty where it is that of the study."""
        label = stated_label(self.info.document, method, self.label(method))
        return label if label != self.label(method) or method not in self.info.methods else ""

    def table(
        self,
        title: str,
        words: Sequence[str],
        names: tuple[Sequence[str], Sequence[Sequence[TableCell]]],
        columns: Sequence[Column],
        labels: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> StudyTable:
        """A table with notes on failed runs, and with the document's numbers behind those that it states.

        Args:
            words: the sentences of the caption.
            names: the heads and the cells of the columns that name the rows.
            labels: the document's labels of the rows, empty where it has that of the study. The first number has it.
        """
        head, rows = list(names[0]), [list(row) for row in names[1]]
        left = [f" ({label})" if label else "" for label in labels] or [""] * len(rows)
        for column in columns:
            if column.head is not None:
                head.append(column.head)
                rows = [[*row, cell] for row, cell in zip(rows, column.cells, strict=True)]
            if any(column.stated):
                head.append(f"{PAPER}: {column.label}" if column.label else PAPER)
                for k, text in enumerate(column.stated):
                    rows[k].append(TableCell(text + left[k] if text else MISSING))
                    left[k] = "" if text else left[k]
        source = self.info.document.get("source", "the document's numbers")
        paper = [f'"Paper": {source}.'] if any(PAPER in name for name in head) else []
        notes = [*notes, *failure_notes(self.cells, self.results), *paper]
        return StudyTable(self.name, self.title or title, joined(*words), head, rows, notes, len(names[0]))

    def table_of_cells(
        self, title: str, words: Sequence[str], columns: Sequence[Column], notes: Sequence[str] = ()
    ) -> StudyTable:
        """A table with a row a cell."""
        names = ([*self.dimension_head, "Method"], [self.names(cell) for cell in self.cells])
        labels = [self.document_label(cell.method) for cell in self.cells]
        return self.table(title, words, names, columns, labels, notes)


def narrowed(
    results: Results,
    where: str,
    metric: str | None,
    methods: Sequence[str] | None,
    cases: Mapping[str, Any] | None,
) -> Results:
    """The results with another metric, some of the methods, or some of the cases.

    Args:
        where: the table in the study file, for messages.
        cases: by dimension, the value or the list of values to keep.

    Raises `ConfigError` for a method or a dimension that the study does not have, and if no case is left.
    """
    info = results.info
    for method in methods or ():
        if method not in info.methods:
            raise ConfigError(
                f"the study has no method '{method}'",
                where=f"{where}.methods",
                hint=nearest(method, info.methods),
            )
    for dimension in cases or ():
        if dimension not in info.dimensions:
            raise ConfigError(
                f"the cases have no dimension '{dimension}'",
                where=f"{where}.where",
                hint=nearest(dimension, info.dimensions) if info.dimensions else "remove it",
            )
    kept = [case for case in info.cases if all(_among(case, *item) for item in (cases or {}).items())]
    if not kept:
        some = "; ".join(case_name(info, case) for case in info.cases[:6])
        raise ConfigError("no case has these values", where=f"{where}.where", hint=f"cases: {some}")
    names = {name: info.methods[name] for name in methods} if methods else info.methods
    left_out = info.methods.keys() - names.keys()
    stated = [value for value in info.document.get("values", ()) if value["method"] not in left_out]
    document = {**info.document, "values": stated} if info.document else info.document
    shown = replace(info, metric=metric or info.metric, methods=names, cases=kept, document=document)
    return replace(results, info=shown)


def _among(case: Mapping[str, Any], dimension: str, wanted: Any) -> bool:
    values = wanted if isinstance(wanted, list | tuple) else [wanted]
    return dimension in case and (case[dimension] in values or case[dimension] == wanted)
