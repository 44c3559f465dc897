"""What a table of a study is about: the results, narrowed by the options that all kinds of tables share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import MISSING, number
from fedlens.report.study_captions import case_name, shown, shown_in_percent
from fedlens.report.study_cells import StudyCell, study_cells
from fedlens.results.rows import Results, StudyInfo
from fedlens.results.table_format import TableCell


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
    def cells(self) -> list[StudyCell]:
        """The cells of the table."""
        return study_cells(self.results)

    def cell(self, method: str, case: Mapping[str, Any]) -> StudyCell | None:
        """The cell of a method in a case; None if the study does not plan it."""
        return next((each for each in self.cells if each.method == method and each.case == case), None)

    def label(self, method: str) -> str:
        """The label of a method."""
        return self.info.methods.get(method, method)

    @property
    def dimension_head(self) -> list[str]:
        """Headings of the columns that name a case."""
        return [label_of(self.info, dimension) for dimension in self.info.dimensions]

    def dimension_cells(self, case: Mapping[str, Any]) -> list[TableCell]:
        """The values of a case, one for each heading."""
        return [TableCell(shown(case[d]) if d in case else MISSING) for d in self.info.dimensions]

    def case_label(self, case: Mapping[str, Any]) -> str:
        """A case as the heading of a column."""
        return case_name(self.info, case) or "value"

    def value(self, value: float | None, metric: str | None = None) -> str:
        """A value of the metric: per cent without the sign for shares, else four significant digits."""
        if value is None or not shown_in_percent(metric or self.metric):
            return number(value)
        return f"{100 * value:.{1 if self.digits is None else self.digits}f}"

    def width(self, half: float) -> str:
        """Half the width of an interval, or a deviation, in the unit of `value`."""
        return self.value(half) if shown_in_percent(self.metric) else f"{half:.2g}"

    def signed(self, value: float) -> str:
        """A difference in the unit of `value`, in points for shares."""
        if not shown_in_percent(self.metric):
            return f"{value:+.{3 if self.digits is None else self.digits}g}"
        text = f"{100 * value:+.{2 if self.digits is None else self.digits}f}"
        return text.lstrip("+-") if not any(digit in text for digit in "123456789") else text

    def status(self, cell: StudyCell | None) -> str:
        """What stands in place of a value: "failed (1 of 3)", or how many runs are finished."""
        if cell is None:
            return MISSING
        if cell.failed and not cell.measured:
            return f"no value ({len(cell.failed)} of {cell.planned})"
        if cell.failed:
            return f"failed ({len(cell.failed)} of {cell.planned})"
        return f"unfinished ({len(cell.values)} of {cell.planned})"


def label_of(info: StudyInfo, dimension: str) -> str:
    """The heading of a dimension."""
    return info.dimensions.get(dimension) or dimension


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
