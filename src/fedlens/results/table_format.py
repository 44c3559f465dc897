"""Tables of results as HTML, Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedlens.base.printable import csv_cell

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
        caption: what the numbers are, in sentences.
        rows: of as many cells as `head`.
        notes: sentences below it.
        labels: the number of columns at the left that are names and not numbers.
        caveats: sentences before the caption on what the numbers do not show.
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
        """A `table` element in a scrolling `div`, with the caption and the notes as paragraphs.

        >>> print(StudyTable("t", "T", "A & B.", ["method"], [[TableCell("x", bold=True)]]).to_html())
        <p class="lead">A &amp; B.</p>
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
                f'<p class="lead">{html.escape(self._sentences())}</p>',
                f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>',
                *(f"<tr>{row}</tr>" for row in rows),
                "</tbody></table></div>",
                *(f'<p class="lead next">{html.escape(note)}</p>' for note in self.notes),
            ]
        )

    def to_markdown(self) -> str:
        """A table as GitHub reads it, with the title, the caption and the notes as paragraphs."""
        marks = ["---" if k < self.labels else "---:" for k in range(len(self.head))]
        lines = [
            [_markdown(text) for text in self.head],
            marks,
            *([_marked(cell, _markdown, "**", "**", "*", "*") for cell in row] for row in self.rows),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        caption = " ".join(filter(None, [f"**{_markdown(self.title)}.**", _markdown(self._sentences())]))
        return "\n\n".join([caption, table, *map(_markdown, self.notes)]) + "\n"

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
                *(rf"\par\smallskip{{\footnotesize {latex(note)}}}" for note in self.notes),
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


def _markdown(text: str) -> str:
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
