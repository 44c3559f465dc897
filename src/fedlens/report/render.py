"""Renders the templates of the pages. Jinja2 escapes every value that is put into them.

A page loads nothing: style, script and figures are in it, and its content security policy forbids the rest.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedlens.experiment.atomic_files import write_atomically
from fedlens.report.figures import Figure

# The border style that looks like a dash of plotly.
BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dashed"}


@dataclass(frozen=True)
class View:
    """One way to look at a figure: a button, and what it changes in the traces and in the layout."""

    label: str
    data: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LegendKey:
    """A legend's entry; a click on it hides its trace."""

    trace: int
    name: str
    box: bool
    style: str


@dataclass(frozen=True)
class Plot:
    """A figure with its title, its legend and its views.

    Args:
        about: a description for readers who cannot see the figure.
        shape: the height, a class of style.css: "tall", "low", "tower", "strip", or the usual one.
        keys: whether the legend is shown.
        views: the first one is shown at the start.
    """

    figure: Figure
    title: str
    about: str
    shape: str = ""
    keys: bool = True
    views: Sequence[View] = ()

    @property
    def legend(self) -> list[LegendKey]:
        traces = enumerate(self.figure["data"] if self.keys else [])
        return [_key(k, trace) for k, trace in traces if trace.get("name") and trace.get("showlegend", True)]


def _key(position: int, trace: Mapping[str, Any]) -> LegendKey:
    if trace["type"] == "bar":
        return LegendKey(position, trace["name"], True, f"background:{trace['marker']['color']}")
    line = trace["line"]
    style = f"border-top-color:{line['color']};border-top-style:{BORDERS[line['dash']]}"
    return LegendKey(position, trace["name"], False, style)


def write_page(path: Path, template: str, context: Mapping[str, Any]) -> Path:
    """Renders a template into a file, and returns the file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _environment().get_template(template).render(context).encode())
    return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedlens.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals.update(asset=_asset, plotly=_plotly)
    return environment


@cache
def _asset(name: str) -> Markup:
    return Markup(files("fedlens.report").joinpath("templates", name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    """The `cartesian` build of plotly.js, gzipped, in base64; page.js unpacks it in the browser."""
    packed = files("fedlens.report").joinpath("plotly", "plotly-cartesian.min.js.gz").read_bytes()
    return Markup(base64.b64encode(packed).decode())
