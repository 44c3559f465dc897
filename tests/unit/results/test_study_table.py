"""Tables as HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

import pytest

from fedlens.results.study_table import StudyTable, TableCell, latex

NASTY = r"""50 % & <b>$x_1$</b> {a} #1 ~ ^ \ | `q` "w" [z] * α ± – × -3 μ²"""


def table(text: str = NASTY) -> StudyTable:
    rows = [[TableCell(text), TableCell("1.5", bold=True)], [TableCell("[b]"), TableCell("-2", italic=True)]]
    return StudyTable(
        "a table/1", "T & T", f"About {text}.", ["Method", "Value (%)"], rows, [f"Note {text}."]
    )


def faults(text: str) -> list[str]:
    """What LaTeX would stop at: loose braces, special characters that are not escaped, environments left open."""
    found, depth, math, open_ = [], 0, False, []
    body = re.sub(r"^%.*$", "", text, flags=re.MULTILINE)
    for name, place in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        open_.append(place) if name == "begin" else open_.remove(place)
    found += [f"{place} is open" for place in open_]
    body = re.sub(r"\\(begin|end)\{\w+\}(\{[lr]+\})?", "", body)
    for line in body.splitlines():
        cells = len(re.findall(r"(?<!\\)&", line))
        ends = line.endswith(r" \\")
        found += [f"& outside of a row: {line}"] if cells and not ends else []
        found += [f"{cells} &: {line}"] if ends and cells != 1 else []
    k = 0
    while k < len(body):
        character = body[k]
        if character == "\\":
            k += 2
            continue
        if character == "$":
            math = not math
        depth += {"{": 1, "}": -1}.get(character, 0)
        special = character in "#%~" or (character in "_^" and not math)
        # `~` is a space, and is written for a no-break space alone.
        found += [f"{character} at {k}"] if special or depth < 0 else []
        if not math and character in '<>|"':
            found.append(f"{character} at {k}")
        if ord(character) > 127:
            found.append(f"{character!r} at {k}")
        k += 1
    return found + (["loose brace"] if depth else []) + (["open $"] if math else [])


def test_latex_of_any_text_is_escaped_and_closed() -> None:
    text = table().to_latex()
    assert faults(text) == []
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
    assert r"\begin{tabular}{lr}" in text
    assert r"\label{tab:a-table-1}" in text


@pytest.mark.parametrize("bad", ["50 %", "a_b", "a&b", "#", "^", "{", "}", "$", "<", "α", "±"])
def test_the_check_of_latex_sees_each_character_that_is_not_escaped(bad: str) -> None:
    assert faults(rf"\textbf{{{bad}}} & 1 \\") != []
    assert faults(rf"\textbf{{{latex(bad)}}} & 1 \\") == []


def test_a_row_that_begins_with_a_bracket_is_no_option_of_the_line_before() -> None:
    rows = [line for line in table().to_latex().splitlines() if line.endswith(r" \\")]
    assert not any(row.lstrip().startswith(("[", "*")) for row in rows)
    assert rows[-1].startswith("{[}b{]}")


def test_a_minus_is_one_in_latex_and_a_hyphen_stays() -> None:
    assert latex("fed-avg-2 -3, top-5, [-1.5]") == "fed-avg-2 $-$3, top-5, {[}$-$1.5{]}"


class Cells(HTMLParser):
    """The texts of the cells, and the elements that are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.cells[-1] += data


def test_html_has_the_texts_and_no_elements_of_theirs() -> None:
    text = table().to_html()
    read = Cells(text)
    assert read.open == []
    assert read.cells == ["Method", "Value (%)", NASTY, "1.5", "[b]", "-2"]
    assert "<strong>1.5</strong>" in text
    assert "<em>-2</em>" in text
    assert "<b>" not in text


def test_markdown_has_as_many_cells_in_each_row_and_escapes_bars() -> None:
    lines = [line for line in table().to_markdown().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}
    assert "**1.5**" in lines[2]
    assert r"\*" in lines[2]
    assert lines[1] == "| --- | ---: |"


def test_markdown_is_read_as_the_texts_by_the_reader_of_our_pages() -> None:
    markdown = pytest.importorskip("markdown")
    texts = ["< 0.001", "a ~ b", "x > y", "local_lr*", "[-1, +2]"]
    made = StudyTable("t", "T", "", ["p"], [[TableCell(text)] for text in texts]).to_markdown()
    page = Cells(markdown.markdown(made, extensions=["tables"]))
    assert page.cells == ["p", *texts]


def test_csv_gives_the_texts_back() -> None:
    rows = list(csv.reader(io.StringIO(table().to_csv())))
    assert rows == [["Method", "Value (%)"], [NASTY, "1.5"], ["[b]", "-2"]]
