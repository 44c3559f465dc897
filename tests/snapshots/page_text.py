"""A page as text: headings, captions, cells and commands in their order, and a mark where a figure stands."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.snapshots.figures import of_plotly
from tests.snapshots.kit import as_text
from tests.unit.pages.reading import VOID

_LINES = {"p", "li", "tr", "dt", "dd", "pre", "figcaption", "summary", "footer", "header", "section", "figure",
          "div", "thead", "tbody", "table"}  # fmt: skip
_BEFORE = {"h1": "# ", "h2": "## ", "h3": "### ", "li": "- ", "summary": "> ", "dd": "    ", "pre": "$ "}
_AFTER_CELL = " | "


class PageText(HTMLParser):
    """Reads a page into `lines`, and the data of its figures into `figures`.

    The picture of an `img` is left out; its description stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.figures: list[dict[str, Any]] = []
        self._views: list[dict[str, Any]] = []  # of the figure that comes next
        self._open: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a line at a block, and marks figures, pictures and badges."""
        given = dict(attrs)
        if tag not in VOID:
            self._open.append((tag, given))
        if tag in _BEFORE or (tag in _LINES and not self._in_cell()):
            self._new_line(_BEFORE.get(tag, ""))
        if tag in ("td", "th") and self.lines[-1]:
            self.lines[-1] += _AFTER_CELL
        if tag in ("strong", "em"):
            self.lines[-1] += {"strong": "**", "em": "_"}[tag]
        if tag in ("line", "circle", "rect", "path", "text"):
            self._new_line(f"[{tag} {' '.join(str(value) for _, value in attrs)}] ")
        if tag == "svg":
            self._new_line(f"[drawing: {given.get('aria-label')}]")
        if tag == "img":
            self._new_line(f"[picture: {given.get('alt')}]")
        if tag == "div" and given.get("role") == "img":
            self._new_line(f"[figure {len(self.figures) + 1}: {given.get('aria-label')}]")
        if tag in ("span", "small") and self.lines[-1].strip():
            self.lines[-1] += " "
        if tag == "button" and "data-layout" in given:
            read = {key: json.loads(given[f"data-{key}"] or "null") for key in ("data", "layout")}
            title = read["layout"]["xaxis"].get("title", {}).get("text", "")
            titles = {"xaxis.title.text": title} if "x" in read["data"] else {}
            data = {key: values for key, values in read["data"].items() if key != "hovertemplate"}
            self._views.append({"data": data, "titles": titles})
            self._new_line("[view] ")
        elif tag == "button" and given.get("class") == "key":
            self._new_line("[key] ")

    def handle_endtag(self, tag: str) -> None:
        """Ends what was marked."""
        self._open.pop()
        if tag in ("strong", "em"):
            self.lines[-1] += {"strong": "**", "em": "_"}[tag]
        if tag in _BEFORE or (tag in _LINES and not self._in_cell()):
            self._new_line()

    def handle_data(self, data: str) -> None:
        """Keeps a text; a figure's data are read."""
        inside, given = self._open[-1] if self._open else ("", {})
        if inside == "script":
            if given.get("type") == "application/json":
                views = {"views": self._views} if self._views else {}
                self.figures.append(of_plotly(json.loads(data)) | views)
                self._views = []
        elif inside != "style" and not (inside == "title" and self._open[-2][0] == "head"):
            words = re.sub(r"\s+", " ", data) if inside != "pre" else data.replace("\n", "\n  ")
            self.lines[-1] += words if self.lines[-1].strip() or inside == "pre" else words.lstrip()

    def text(self) -> str:
        """The lines that are not empty."""
        return "\n".join(line.rstrip() for line in self.lines if line.strip(" $->#")) + "\n"

    def _in_cell(self) -> bool:
        return any(tag in ("td", "th") for tag, _ in self._open)

    def _new_line(self, begin: str = "") -> None:
        if self.lines[-1].strip():
            self.lines.append("")
        self.lines[-1] = begin


def page_text(html: str) -> PageText:
    """A page that was read."""
    page = PageText()
    page.feed(html)
    page.close()
    return page


def page_snapshot(path: Path) -> str:
    """The words of a page, and below them the data of its figures."""
    page = page_text(path.read_text("utf-8"))
    return page.text() + "".join(f"figure {k}: {as_text(figure)}" for k, figure in enumerate(page.figures, 1))
