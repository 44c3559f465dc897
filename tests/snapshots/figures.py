"""The data of a figure, without its pixels: titles, axes, series and colours, from each form that a figure has."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from fedlens.results.figures import chart
from fedlens.results.figures.chart import Chart, Panel

_OF_PAGES = ("shape", "unified")  # how a page lays a panel out
_TRACE = (
    "type",
    "mode",
    "name",
    "x",
    "y",
    "z",
    "text",
    "base",
    "offset",
    "width",
    "legendgroup",
    "showlegend",
)
_AXIS = ("type", "range", "visible", "autorange", "tickvals", "ticktext")


def described(figure: Any) -> Any:
    """A chart, a panel, an axis or a series as data; what has its default is left out."""
    if isinstance(figure, Sequence) and not isinstance(figure, str | range):
        return [described(item) for item in figure]
    if type(figure).__module__ != chart.__name__:
        return figure
    if isinstance(figure, Panel) and figure.cells is not None and figure.cells.rising:
        return _map(figure)
    shown = {field.name: (getattr(figure, field.name), field.default) for field in fields(figure)}
    return {
        name: described(value)
        for name, (value, usual) in shown.items()
        if name not in _OF_PAGES and repr(value) != repr(usual) and not (usual == () and not len(value))
    }


def _map(panel: Panel) -> dict[str, Any]:
    """A panel of cells: the matrix and the words around it."""
    cells = panel.cells
    return {
        "title": panel.title, "about": panel.about,
        "values": cells.values, "rows": cells.rows, "columns": cells.columns,
        "row_title": panel.y.title, "column_title": panel.x.title, "value_title": cells.title,
        "limits": cells.limits, "share": cells.form == "share",
    }  # fmt: skip


def of_study(figure: Chart) -> dict[str, Any]:
    """The figure of a study: its words and its panels."""
    words = {name: getattr(figure, name) for name in ("title", "caption", "gaps", "caveats")}
    return words | {"panels": described(figure.panels)}


def of_plotly(figure: Mapping[str, Any]) -> dict[str, Any]:
    """The traces and the axes of a figure of a page."""
    layout = figure["layout"]
    axes = {name: _axis(layout[name]) for name in ("xaxis", "yaxis") if name in layout}
    marks = {
        "annotations": [each["text"] for each in layout.get("annotations", ())],
        "shapes": [[each.get("x0"), each.get("x1")] for each in layout.get("shapes", ())],
    }
    traces = [_trace(trace) for trace in figure["data"]]
    return axes | {name: made for name, made in marks.items() if made} | {"traces": traces}


def _axis(axis: Mapping[str, Any]) -> dict[str, Any]:
    title = axis.get("title", {}).get("text", "")
    return {"title": title} | {key: axis[key] for key in _AXIS if axis.get(key) is not None}


def _trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    line, marker = trace.get("line", {}), trace.get("marker", {})
    look = {
        "color": line.get("color") or marker.get("color") or trace.get("fillcolor"),
        "dash": line.get("dash"),
    }
    bars = {key: trace["error_y"][key] for key in ("array", "arrayminus") if key in trace.get("error_y", {})}
    shown = {key: trace[key] for key in _TRACE if trace.get(key) is not None}
    return shown | {key: value for key, value in look.items() if value} | bars


def of_picture(picture: Any) -> dict[str, Any]:
    """What a picture for papers shows: of each of its axes the titles, the ends, and what is drawn."""
    legends = [text.get_text() for legend in picture.legends for text in legend.get_texts()]
    title = picture.get_suptitle()
    shown = {
        "title": title,
        "legend": legends,
        "axes": [_axes(axes) for axes in picture.axes if axes.get_visible()],
    }
    return {key: value for key, value in shown.items() if value}


@contextmanager
def instead_of_files() -> Iterator[dict[str, Any]]:
    """What the pictures show that are saved meanwhile, by the name of their file; no file is written."""
    from matplotlib.figure import Figure as PictureOfMatplotlib

    drawn: dict[str, Any] = {}

    def keep(picture: Any, path: Path, *more: Any, **how: Any) -> Path:
        drawn[path.name] = of_picture(picture)
        return path

    patch = mock.patch
    with (
        patch("fedlens.results.figures.picture.save", keep),
        patch.object(PictureOfMatplotlib, "savefig", keep),
    ):
        yield drawn


def _axes(axes: Any) -> dict[str, Any]:
    sides = {
        side: {
            "title": getattr(axes, f"get_{side}label")(),
            "scale": getattr(axes, f"get_{side}scale")(),
            "limits": getattr(axes, f"get_{side}lim")(),
            "ticks": _ticks(getattr(axes, f"{side}axis")),
        }
        for side in ("x", "y")
    }
    drawn = {
        "lines": [{"x": line.get_xdata(), "y": line.get_ydata()} for line in axes.lines],
        "points": [dots.get_offsets().tolist() for dots in axes.collections if len(dots.get_offsets())],
        "bars": [[bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()] for bar in axes.patches],
        "images": [image.get_array().tolist() for image in axes.images],
        "texts": [text.get_text() for text in axes.texts],
    }
    title = axes.get_title() or axes.get_title(loc="left")
    return {"title": title} | sides | {key: value for key, value in drawn.items() if value}


def _ticks(axis: Any) -> list[str]:
    """The names at the marks; those that matplotlib chooses itself differ from release to release."""
    from matplotlib.ticker import FixedLocator

    own = isinstance(axis.get_major_locator(), FixedLocator)
    return [text.get_text() for text in axis.get_ticklabels() if text.get_text()] if own else []


BUILT = (Panel, Chart)
"""The forms of a figure that a builder returns, beside a picture."""


@contextmanager
def watched() -> Iterator[set[tuple[str, str]]]:
    """(file, function) of all functions that take part in making a figure or a picture meanwhile."""
    from matplotlib.figure import Figure as PictureOfMatplotlib

    seen: set[tuple[str, str]] = set()

    def watching(make: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            frame: Any = sys._getframe(1)
            while frame is not None:
                seen.add((frame.f_code.co_filename, frame.f_code.co_name))
                frame = frame.f_back
            make(self, *args, **kwargs)

        return init

    with ExitStack() as stack:
        for kind in (*BUILT, PictureOfMatplotlib):
            stack.enter_context(mock.patch.object(kind, "__init__", watching(kind.__init__)))
        yield seen


def builders(source: Path) -> set[tuple[str, str]]:
    """(file, function) of all functions in the source that say that they return a figure or a picture."""
    names = {*(kind.__name__ for kind in BUILT), "Picture"}
    found = set()
    for path in source.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.parse(text).body if re.search("|".join(names), text) else ():
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                returned = {each for each in re.findall(r"\w+", ast.unparse(node.returns)) if each in names}
                found |= {(str(path), node.name)} if returned else set()
    return found
