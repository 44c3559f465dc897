"""What a person, and a browser, finds in a page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "input", "img", "hr"}


@dataclass
class Page(HTMLParser):
    """A page taken apart: its text outside of scripts and styles, its figures, and all that it would load."""

    text: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    styles: str = ""
    scripts: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)
    _kind: str | None = None

    def __post_init__(self) -> None:
        HTMLParser.__init__(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "poster")
        ]
        if tag not in VOID:
            self._open.append(tag)
        self._kind = dict(attrs).get("type")

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script" and self._kind == "application/json":
            self.figures.append(json.loads(data))
        elif inside == "script":
            self.scripts.append(data)
        elif inside == "style":
            self.styles += data
        else:
            self.text += data + "\n"

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)

    def traces(self) -> list[dict[str, Any]]:
        return [trace for figure in self.figures for trace in figure["data"]]

    def trace(self, name: str, figure: int = 0) -> dict[str, Any]:
        return next(trace for trace in self.figures[figure]["data"] if trace.get("name") == name)


def read_page(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page._open, f"left open: {page._open}"
    return page


def assert_self_contained(html: str) -> None:
    """Nothing in the page is loaded from anywhere, and the browser is told to load nothing."""
    page = read_page(html)
    assert [link for link in page.loads if not link.startswith(("data:", "#"))] == []
    assert "@import" not in page.styles
    assert "url(" not in page.styles
    assert "http:" not in page.styles + page.text
    assert "https:" not in page.styles + page.text
    policy = next(
        value for name, value in page.attributes if name == "content" and "default-src" in (value or "")
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "*" not in policy
