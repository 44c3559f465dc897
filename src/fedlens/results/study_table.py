"""A table of a study: the results it is made of, and its HTML, Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import html
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import MISSING, number
from fedlens.base.printable import csv_cell
from fedlens.results.cells import Cell, CellTest, cells, comparisons
from fedlens.results.rows import Results, StudyInfo
from fedlens.results.stated import StatedValue, stated_label, stated_values
from fedlens.results.statistics import Spread, half_width
from fedlens.results.words import case_name, failure_notes, shown, shown_in_percent

PAPER = "Paper"
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$", '"': "''",
    "`": r"\textasciigrave{}",
    # After `\\` a bracket is an option, and a star as well.
    "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--", "…": r"\ldots{}", "≥": r"$\geq$", "≤": r"$\leq$",
    "→": r"$\rightarrow$", "∞": r"$\infty$", "²": "$^2$", "χ": r"$\chi$", "α": r"$\alpha$", "β": r"$\beta$",
    "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\epsilon$", "η": r"$\eta$", "λ": r"$\lambda$", "μ": r"$\mu$",
    "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$", "Δ": r"$\Delta$", "\u00a0": "~",
}  # fmt: skip
_SPECIAL = re.compile("|".join(map(re.escape, _LATEX)) + r"|(?<![\w.])-(?=\d)|\s+")
_LONG = 60  # characters of a cell that LaTeX breaks into lines
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")


@dataclass(frozen=True)
class TableCell:
    """A text in a table, and how it is set."""

    text: str
    bold: bool = False
    italic: bool = False


@dataclass(frozen=True)
class StudyTable:
    """A table of results with its words.

    Attributes:
        name: of its files.
        caption: what the numbers are, in one sentence.
        rows: of as many cells as `head`.
        notes: sentences for the block of notes of a page: what its columns and marks mean.
        labels: the number of columns at the left that are names and not numbers.
        caveats: sentences for files, which have no page around them, on what the numbers do not show.
    """

    name: str
    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    notes: Sequence[str] = ()
    labels: int = 1
    caveats: Sequence[str] = ()

    def to_html(self) -> str:
        """A `table` element in a scrolling `div`; its page has the caption and the notes.

        >>> print(StudyTable("t", "T", "A & B.", ["method"], [[TableCell("x", bold=True)]]).to_html())
        <div class="scroll"><table><thead><tr><th>method</th></tr></thead><tbody>
        <tr><td><strong>x</strong></td></tr>
        </tbody></table></div>
        """
        head = "".join(f"<th{self._number(k)}>{html.escape(text)}</th>" for k, text in enumerate(self.head))
        rows = [
            "".join(f"<td{self._number(k)}>{_html(cell)}</td>" for k, cell in enumerate(row))
            for row in self.rows
        ]
        return "\n".join(
            [
                f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>',
                *(f"<tr>{row}</tr>" for row in rows),
                "</tbody></table></div>",
            ]
        )

    def to_markdown(self) -> str:
        """A table as GitHub reads it, with a paragraph of its title and caption before it, and one of notes below."""
        marks = ["---" if k < self.labels else "---:" for k in range(len(self.head))]
        lines = [
            [markdown(text) for text in self.head],
            marks,
            *([_marked(cell, markdown, "**", "**", "*", "*") for cell in row] for row in self.rows),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        caption = " ".join(filter(None, [f"**{markdown(self.title)}.**", markdown(self._sentences())]))
        return "\n\n".join(filter(None, [caption, table, markdown(" ".join(self.notes))])) + "\n"

    def to_latex(self) -> str:
        r"""A `table` environment for `\usepackage{booktabs}`."""
        texts = self.labels == len(self.head)  # without numbers, long texts are broken into lines
        long = [texts and any(len(row[k].text) > _LONG for row in self.rows) for k in range(self.labels)]
        names = "".join(r"p{0.22\linewidth}" if each else "l" for each in long)
        columns = names + "r" * (len(self.head) - self.labels)
        body = [
            " & ".join(_marked(cell, latex, r"\textbf{", "}", r"\textit{", "}") for cell in row)
            for row in self.rows
        ]
        title = self.title if self.title.endswith((".", "?", "!")) else f"{self.title}."
        caption = latex(" ".join(filter(None, [title, self._sentences()])))
        label = re.sub(r"[^A-Za-z0-9:-]+", "-", self.name)
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}",
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\label{{tab:{label}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                " & ".join(map(latex, self.head)) + r" \\",
                r"\midrule",
                *(rf"{line} \\" for line in body),
                r"\bottomrule",
                r"\end{tabular}",
                *([rf"\par\smallskip{{\footnotesize {latex(' '.join(self.notes))}}}"] if self.notes else []),
                r"\end{table}",
                "",
            ]
        )

    def to_csv(self) -> str:
        """The head and the rows as texts, without caption and notes. Caveats are a last column."""
        caveat = " ".join(self.caveats)
        lines = [[*self.head, "Caveat"], *([*(cell.text for cell in row), caveat] for row in self.rows)]
        return csv_text(lines if caveat else [line[:-1] for line in lines])

    def _sentences(self) -> str:
        return " ".join(filter(None, [*self.caveats, self.caption]))

    def _number(self, column: int) -> str:
        return "" if column < self.labels else ' class="num"'


@dataclass(frozen=True)
class Column:
    """A column of measured values.

    Attributes:
        head: None for a method that the study does not run: only the paper's numbers are shown.
        stated: what the paper states of each value, empty for nothing.
        label: the paper's label of the column, where it is another.
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
        document: whether rows of the paper's own numbers are shown.
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
        width = half_width(values, spread)
        percent = shown_in_percent(metric or self.metric)
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
        """The paper's values of the metric; none for a table without them."""
        return stated_values(self.info.document, self.metric) if self.document else []

    def stated(
        self, method: str, case: Mapping[str, Any], at: Mapping[str, float] | None = None
    ) -> StatedValue | None:
        """What the paper states about a method in a case, at a budget or else at the end of training."""
        wanted = dict(at or {})
        for value in self.all_stated:
            same = value.at.keys() == wanted.keys() and all(
                math.isclose(value.at[name], wanted[name]) for name in wanted
            )
            if value.method == method and same and value.holds_for(case):
                return value
        return None

    def stated_text(
        self, method: str, case: Mapping[str, Any], at: Mapping[str, float] | None = None, count: bool = False
    ) -> str:
        """What the paper states, in the unit of the table: "above 75.0"; empty for nothing.

        Args:
            count: whether it is a number of rounds, not a value of the metric.
        """
        value = self.stated(method, case, at)
        if value is None:
            return ""
        return value.word + (f"{value.number:,.0f}" if count else self.value(value.number))

    def document_label(self, method: str) -> str:
        """The paper's label of a method; empty where it is that of the study."""
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
        """A table with notes on failed runs, and with the paper's numbers behind those that it states.

        Args:
            words: the caption, and sentences for the notes.
            names: the heads and the cells of the columns that name the rows.
            labels: the paper's labels of the rows, empty where it has that of the study. The first number has it.
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
        source = self.info.document.get("source", "the paper's numbers")
        paper = [f'"Paper": {source}.'] if any(PAPER in name for name in head) else []
        caption, *more = words
        notes = [*filter(None, more), *notes, *failure_notes(self.cells, self.results), *paper]
        return StudyTable(self.name, self.title or title, caption, head, rows, notes, len(names[0]))

    def column(
        self, head: str, text: Callable[[Cell], str], stated: Callable[[Cell], str] = lambda _: ""
    ) -> Column:
        """A column of `table_of_cells`: the text of each cell, and what the paper states about it."""
        return Column(head, [TableCell(text(each)) for each in self.cells], [*map(stated, self.cells)])

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


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV with line feeds; None is an empty field, and texts are those of `csv_cell`.

    >>> csv_text([["a", None, 0.1], ["b, c", True, 2]])
    'a,,0.1\\n"b, c",True,2\\n'
    """
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(map(csv_cell, row) for row in rows)
    return file.getvalue()


def latex(text: str) -> str:
    r"""A text for LaTeX: special characters escaped, signs of mathematics in dollars, and no line breaks.

    >>> print(latex("FedAvg_2: 5 % ± 1 & -3"))
    FedAvg\_2: 5 \% $\pm$ 1 \& $-$3
    """
    return _SPECIAL.sub(_latex_character, text)


def _latex_character(found: re.Match[str]) -> str:
    text = found[0]
    return _LATEX.get(text) or ("$-$" if text == "-" else " ")


def markdown(text: str) -> str:
    r"""A text for Markdown: on one line, and without a character that is markup.

    >>> print(markdown("a_b | <c>"))
    a\_b \| &lt;c&gt;
    """
    # A backslash before < or ~ is CommonMark; Python-Markdown, which makes our pages, would show it.
    return _MARKDOWN.sub(_escaped, " ".join(text.split()))


def _escaped(character: re.Match[str]) -> str:
    return {"<": "&lt;", ">": "&gt;", "~": "&#126;"}.get(character[0], f"\\{character[0]}")


def _html(cell: TableCell) -> str:
    return _marked(cell, html.escape, "<strong>", "</strong>", "<em>", "</em>")


def _marked(cell: TableCell, escaped: Callable[[str], str], *marks: str) -> str:

    text = escaped(cell.text)
    if cell.italic and text:
        text = f"{marks[2]}{text}{marks[3]}"
    return f"{marks[0]}{text}{marks[1]}" if cell.bold and text else text
