"""Renders the templates of the pages. Jinja2 escapes every value that is put into a page.

A page loads nothing: style, script and figures are in it, and its content security policy forbids the rest.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedlens.base import format
from fedlens.files.atomic_files import write_atomically
from fedlens.pages import plotly_figures
from fedlens.pages.page_contents import page_contents
from fedlens.results.study_table import markdown

# The CSS border style that looks like a dash of plotly.
BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dashed"}

_COMMON: Mapping[str, Any] = {"client_names": (), "images_command": ""}


class Told(NamedTuple):
    """The sentence that stands at a figure or a table, and how many more are in the notes of the page."""

    caption: str
    notes: int


class PageNotes:
    """The notes of a page. A figure or a table has one sentence; all others stand in one block, each once.

    >>> notes = PageNotes()
    >>> notes.kept("Accuracy", ["Test accuracy over rounds.", "One seed, so no interval.", "Dotted: guessing."])
    Told(caption='Test accuracy over rounds.', notes=2)
    >>> notes.kept("Loss", ["Test loss over rounds.", "One seed, so no interval."]).notes
    1
    >>> notes.by_title()
    {'Accuracy · Loss': ['One seed, so no interval.'], 'Accuracy': ['Dotted: guessing.']}
    """

    def __init__(self) -> None:
        self._titles: dict[str, list[str]] = {}

    def kept(self, title: str, sentences: Iterable[str]) -> Told | None:
        """The first of the sentences on what has this title, after keeping the others; None without any."""
        told = [*filter(None, sentences)]
        self.add(title, told[1:])
        return Told(told[0], len(told) - 1) if told else None

    def add(self, title: str, sentences: Iterable[str]) -> str:
        """Keeps sentences on what has this title, or on the whole page; returns "", which a template may write."""
        for sentence in filter(None, sentences):
            titles = self._titles.setdefault(sentence, [])
            titles += [title] if title not in titles else []
        return ""

    def by_title(self) -> dict[str, list[str]]:
        """The notes by the titles of what they are about, those on the whole page first, without a title."""
        groups: dict[str, list[str]] = {"": []}
        for sentence, titles in self._titles.items():
            groups.setdefault("" if "" in titles else " · ".join(titles), []).append(sentence)
        return {title: notes for title, notes in groups.items() if notes}


def write_page(path: Path, template: str, context: Mapping[str, Any]) -> Path:
    """Renders a template into a file, and returns the file's path.

    `client_names` of the context are looked for in a page, and `images_command` repeats a run with test images.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page = page_text(template, context)
    # A file name that is not UTF-8 has lone surrogates in Python; the page shows them as escapes.
    write_atomically(path, page.encode(errors="backslashreplace"))
    return path


def page_text(template: str, context: Mapping[str, Any]) -> str:
    """Renders a template; see `write_page`."""
    return _environment().get_template(template).render({**_COMMON, "page_notes": PageNotes(), **context})


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedlens.pages"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals.update(asset=_asset, plotly=_plotly, borders=BORDERS, page_contents=page_contents)
    environment.globals.update(
        traces=plotly_figures.draw, views=plotly_figures.views, legend=plotly_figures.legend
    )
    filters = (format.count, format.duration, format.heading, format.label, format.many, format.size)
    environment.filters.update({function.__name__: function for function in filters})
    environment.filters.update(markdown=markdown)
    environment.filters.update(metric=lambda value, name: format.metric_value(name, value))
    return environment


@cache
def _asset(name: str) -> Markup:
    return Markup(files("fedlens.pages").joinpath("templates", name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    """The `cartesian` build of plotly.js, gzipped, in base64; page.js unpacks it in the browser."""
    packed = files("fedlens.pages").joinpath("plotly", "plotly-cartesian.min.js.gz").read_bytes()
    return Markup(base64.b64encode(packed).decode())
