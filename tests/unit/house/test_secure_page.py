"""docs/who-may-know-what.md: its tables and drawing of secure sums are those of their measurements, and fit."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tools.secure_page import COLOURS, FIGURE, HEIGHT, PAGE, PANELS, PLOT, WIDTH, drawing, rendered, rows

SVG = "{http://www.w3.org/2000/svg}"
AGAIN = "run: python -m tools.secure_page"


def test_the_page_and_the_drawing_are_those_of_the_measurements() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page, rows()), AGAIN
    assert FIGURE.read_text(encoding="utf-8") == drawing(rows()), AGAIN
    assert page.count(f'--8<-- "figures/{FIGURE.name}"') == page.count("<!-- table: secure bytes -->") == 1
    table = page.partition("<!-- table: secure bytes -->")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, flags=re.M) == list(COLOURS)


def test_drawings_in_pages_stand_in_a_figure() -> None:
    """Else Markdown takes the words of a drawing for paragraphs, and no check of the build says so."""
    pages = {path: path.read_text(encoding="utf-8") for path in PAGE.parent.rglob("*.md")}
    drawn = {path: re.findall(r'(.*)\n--8<-- ".*\.svg"', text) for path, text in pages.items()}
    assert drawn[PAGE]
    assert [
        path for path, before in drawn.items() if not all(line.startswith("<figure") for line in before)
    ] == []


def test_the_drawing_has_a_line_of_each_aggregate_inside_its_plot() -> None:
    svg = ElementTree.fromstring(drawing(rows()))
    assert len({line.attrib["stroke"] for line in svg.iter(f"{SVG}polyline")}) == len(COLOURS)
    for k in range(len(PANELS)):
        left, top = 60 + 380 * (k % 2), 62 + 240 * (k // 2)
        assert left + PLOT[0] <= WIDTH
        assert top + PLOT[1] + 18 <= HEIGHT
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in svg.iter(f"{SVG}circle")]
    for a, b in points:
        assert any(
            left <= a <= left + PLOT[0] and top <= b <= top + PLOT[1]
            for left in (60, 440)
            for top in (62, 302)
        )


def test_the_colours_of_words_and_lines_follow_the_scheme_of_the_page() -> None:
    svg = ElementTree.fromstring(drawing(rows()))
    assert not [text for text in svg.iter(f"{SVG}text") if "fill" in text.attrib or "style" in text.attrib]
    assert drawing(rows()).count("var(--md-default-fg-color") == 3
