"""Draws charts on pages: plotly's JSON in plain dictionaries, with the page's CSS variables as colours.

The page resolves the variables when it draws, so one figure serves the light and the dark colour scheme. Importing the
plotly package takes longer than writing a page, so only the tests use it, to validate these dictionaries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

import numpy as np

from fedlens.results.figures.chart import MARKERS_UP_TO, Axis, Cells, Panel, Series, short

PlotlyFigure: TypeAlias = dict[str, Any]  # "data", a list of traces, and "layout"

_NAME = 60  # characters of a row or a column
_WHOLE = 5  # the longest axis of counts with a mark at each whole number
_DECADES = 7  # of a logarithmic axis, each with a label
DOTS = 2000  # of a series; of more, as many are drawn
_LEGEND_AT_MOST = 24
_TICK_FORMATS = {"number": "~g", "count": "~s", "share": ".1~%", "bytes": "~s"}
_HOVER_FORMATS = {"number": "%s:.4~g}", "count": "%s:,d}", "share": "%s:.2%%}", "bytes": "%s:.3~s}B"}
_SYMBOLS = {"circle": "circle-open", "up": "triangle-up-open", "down": "triangle-down-open"}


def draw(panel: Panel) -> PlotlyFigure:
    """The panel as traces and a layout."""
    axes = {"xaxis": _axis(panel.x), "yaxis": _axis(panel.y, panel.series)}
    for name, axis in (("xaxis", panel.x), ("yaxis", panel.y)):
        if axis.values == "count" and not (axis.log or len(axis.ticks)) and _span(panel, axis) <= _WHOLE:
            axes[name]["dtick"] = 1  # plotly would choose halves, and write 500m
    layout: dict[str, Any] = axes | _marks(panel)
    if panel.stacked:
        layout |= {"barmode": "stack", "bargap": 0.15 if panel.stacked == "up" else 0}
    if panel.unified:
        layout["hovermode"] = "x unified"
        title = " ".join(filter(None, [text(panel.x.title), _shown("x", panel.x)]))
        layout["xaxis"] |= {"showspikes": False, "unifiedhovertitle": {"text": title}}
    if panel.cells is None:
        return {"data": [_trace(series, panel) for series in panel.series], "layout": layout}
    heat = _heat(panel.cells, panel)
    for name, drawn in axes.items():
        drawn |= {"type": "category", "showgrid": False, "showline": False}
        if (
            "tickvals" in drawn
        ):  # by name: plotly takes a number for the category of this name if there is one
            drawn["tickvals"] = [heat[name[0]][place] for place in drawn["tickvals"]]
    if not panel.cells.rising:
        layout["yaxis"]["autorange"] = "reversed"
    if panel.cells.marks:
        layout["annotations"] = [_cell_mark(*mark) for mark in panel.cells.marks]
    return {"data": [heat], "layout": layout}


def views(panel: Panel) -> list[dict[str, Any]]:
    """The views of a panel with several: the label of each, and what it changes in the traces and in the layout."""
    shown = [panel, *panel.others] if panel.others else []
    drawn = [draw(each) for each in shown]
    keys = [
        key
        for key in ("x", "y", "hovertemplate")
        if any(
            [trace.get(key) for trace in each["data"]] != [t.get(key) for t in drawn[0]["data"]]
            for each in drawn
        )
    ]
    return [
        {
            "label": each.view,
            "data": {key: [trace.get(key) for trace in figure["data"]] for key in keys},
            "layout": {axis: figure["layout"][axis] for axis in ("xaxis", "yaxis")},
        }
        for each, figure in zip(shown, drawn, strict=True)
    ]


@dataclass(frozen=True)
class LegendKey:
    """An entry of a legend, its name escaped; `shape` is "line", "dot", "ring" or "box"."""

    name: str
    shape: str
    color: str
    dash: str = "solid"


def legend(panels: Sequence[Panel]) -> list[LegendKey]:
    """The legend of panels: each name once, in the order of the series; empty for more names than one tells apart."""
    shapes = {"bar": "box", "dots": "dot", "points": "dot", "open": "ring", "cross": "ring"}
    keys: dict[str, LegendKey] = {}
    for each in (series for panel in panels for series in panel.series):
        if each.name and not each.group and each.kind not in ("band", "ring"):
            shape = shapes.get(each.kind, "line")
            keys.setdefault(each.name, LegendKey(text(each.name), shape, each.color, each.dash))
    return list(keys.values()) if len(keys) <= _LEGEND_AT_MOST else []


def _shown(side: str, axis: Axis) -> str:
    """A value of an axis, as a part of a template; "" where the axis hides it."""
    return "" if axis.values == "hidden" else f"%{{{_HOVER_FORMATS[axis.values] % side}"


def _hover(series: Series, panel: Panel) -> str:
    """What the page shows at a point: its text, else its place; its value; and beside them the name of the series."""
    if panel.unified:
        return "%{text}<extra></extra>" if len(series.texts) else _shown("y", panel.y)
    place, value = [("x", panel.x), ("y", panel.y)][:: -1 if panel.stacked == "across" else 1]
    placed = not len(series.texts) or series.kind == "dots" or len(series.sizes) > 0
    of = f"{text(place[1].title)} " if panel.stacked else ""
    lines = [f"{of}<b>%{{text}}</b>"] if len(series.texts) else []
    for side, axis in [place, value] if placed else [value]:
        if shown := _shown(side, axis):
            lines.append(f"{text(axis.title)} {shown}".strip())
    return "<br>".join(lines) + ("" if series.name else "<extra></extra>")


def _trace(series: Series, panel: Panel) -> dict[str, Any]:
    points: Any = slice(None)
    if series.kind == "dots":
        points = np.linspace(0, len(series.x) - 1, min(len(series.x), DOTS)).round().astype(np.int64)
    x, y = (np.array(values, object)[points].tolist() for values in (series.x, series.y))
    trace: dict[str, Any] = {"type": "bar" if series.kind == "bar" else "scatter", "x": x, "y": y}
    if series.name:
        trace["name"] = text(series.name)
    if series.group:
        trace |= {"legendgroup": text(series.group), "showlegend": False}
    if len(series.low):
        trace["error_y"] = _error_bars(series)
    if series.kind not in ("band", "ring"):
        trace["hovertemplate"] = _hover(series, panel)
    if len(series.texts):
        trace["text"] = [text(line) for line in np.array(series.texts, object)[points]]
    marker: dict[str, Any] = {"color": series.color}
    if series.kind == "band":
        # The same group as its line, so that both are hidden together.
        area = {"mode": "lines", "fill": "toself", "fillcolor": f"{series.color}2e", "line": {"width": 0}}
        return trace | area | {"legendgroup": trace["name"], "showlegend": False, "hoverinfo": "skip"}
    if series.kind == "bar":
        place: dict[str, Any] = {"orientation": "h"} if panel.stacked == "across" else {}
        if series.bar and not panel.stacked:
            place = {"width": series.bar, "offset": -series.bar / 2}
        return trace | place | {"marker": marker | {"line": {"width": 0}}, "textposition": "none"}
    if series.kind == "dots":
        return trace | {
            "mode": "markers",
            "marker": marker | {"size": 7 if len(x) <= 300 else 4, "opacity": 0.6},
        }
    if series.kind == "ring":
        marker = {"size": 11, "color": "var(--card)", "line": {"width": 3, "color": series.color}}
        return trace | {"mode": "markers", "marker": marker, "showlegend": False, "hoverinfo": "skip"}
    if series.kind in ("points", "open", "cross"):
        return trace | {"mode": "markers", "marker": marker | _marker(series)}
    marked = len(x) <= MARKERS_UP_TO and series.kind != "level"
    return trace | {
        "mode": "lines+markers" if marked else "lines",
        "line": {"color": series.color, "width": series.width, "dash": series.dash},
        "marker": marker | {"size": 5 if len(x) > 1 else 9},
    }


def _marker(series: Series) -> dict[str, Any]:
    if series.kind == "open":
        return {"symbol": _SYMBOLS[series.symbol], "size": 9, "line": {"width": 2}}
    if series.kind == "cross":
        return {"symbol": "cross-thin-open", "size": 26, "line": {"width": 1.75}}
    sizes = [7 * math.sqrt(size) for size in series.sizes]
    return {"size": sizes or 7, "opacity": 0.75 if sizes else 1, "line": {"width": 0}}


def _error_bars(series: Series) -> dict[str, Any]:
    ends = zip(series.y, series.low, series.high, strict=True)
    known = [(0.0, 0.0) if None in each else (each[0] - each[1], each[2] - each[0]) for each in ends]  # type: ignore[operator]
    below, above = (list(side) for side in zip(*known, strict=True))
    return {"array": above, "arrayminus": below, "thickness": 1.25, "width": 3, "color": series.color}


def _marks(panel: Panel) -> dict[str, Any]:
    """The vertical line and its label, shaded stretches of the x axis, and a mark on it where it is broken."""
    on_paper = {"yref": "paper", "showarrow": False}
    layout: dict[str, Any] = {}
    if (axis := panel.x).gap is not None:
        at = math.log10(axis.gap) if axis.log else axis.gap
        look = {"text": "//", "bgcolor": "var(--card)", "borderpad": 0}
        layout["annotations"] = [{"x": at, "y": 0, "yanchor": "middle"} | on_paper | look]
    if (mark := panel.mark) is not None:
        color = "var(--validation)"
        line = {"type": "line", "x0": mark.x, "x1": mark.x, "y0": 0, "y1": 1, "yref": "paper"}
        label = {"text": mark.label, "xanchor": mark.align, "yanchor": "bottom", "font": {"color": color}}
        layout["margin"] = {"l": 8, "r": 12, "t": 24, "b": 8}
        layout["shapes"] = [line | {"line": {"color": color, "width": 2, "dash": "dash"}}]
        layout["annotations"] = [{"x": mark.x, "y": 1} | on_paper | label]
    if panel.bands:
        # Half a round wider on both sides, so that a single round can be seen.
        look = {"fillcolor": "var(--bad)", "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
        place = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [
            place | look | {"x0": each.first - 0.5, "x1": each.last + 0.5} for each in panel.bands
        ]
    return layout


def _axis(axis: Axis, series: Sequence[Series] = ()) -> dict[str, Any]:
    settings: dict[str, Any] = _title(axis.title)
    if axis.values == "hidden":
        settings |= {"showticklabels": False, "showgrid": False, "showline": False}
    else:
        settings["tickformat"] = _TICK_FORMATS[axis.values]
    if axis.limits:
        settings["range"] = [math.log10(limit) for limit in axis.limits] if axis.log else list(axis.limits)
    if axis.log:
        # A label at each power of ten; the values of a run that diverges span too many of them.
        marks = {"nticks": _DECADES} if _decades(series) > _DECADES else {"dtick": 1}
        settings |= {"type": "log"} | marks
    if len(axis.ticks):
        settings |= {"tickmode": "array", "tickvals": list(axis.ticks), "autotickangles": [0, 30, 90]}
    if axis.names:
        settings |= {
            "ticktext": [text(short(name, axis.name_width)) for name in axis.names],
            "showgrid": False,
        }
    return settings


def _span(panel: Panel, axis: Axis) -> float:
    """The length of an axis, from 0 if its limits are not given; bars that are stacked along it are added up."""
    if axis.limits:
        return axis.limits[1] - axis.limits[0]
    stacked, values = panel.stacked == ("across" if axis is panel.x else "up"), [0.0]
    heights: Counter[float | None] = Counter()
    for line in panel.series:
        for place, value in zip(*((line.y, line.x) if axis is panel.x else (line.x, line.y)), strict=True):
            heights[place] += value or 0
            values.append(heights[place] if stacked else value or 0)
    return max(values)


def _decades(series: Iterable[Series]) -> float:
    """How many powers of ten the positive values of some series span."""
    values = [value for line in series for value in line.y if value is not None and value > 0]
    return math.log10(max(values)) - math.log10(min(values)) if values else 0.0


def _heat(cells: Cells, panel: Panel) -> dict[str, Any]:
    """A matrix as a trace. Its values are rounded: most cells of a large one are 0, which shortens the page."""
    bar = {
        "tickformat": _TICK_FORMATS[cells.form],
        "thickness": 10,
        "outlinewidth": 0,
        "len": 1,
        "ypad": 0,
        "xpad": 6,
    }
    low, high = cells.limits
    if cells.form == "count" and high - low <= _WHOLE:
        bar["dtick"] = 1
    digits = 3 if cells.form == "share" and not cells.rising else 12
    values = [
        [None if math.isnan(v) else int(v) if v in (0, 1) else v for v in row]
        for row in cells.values.round(digits).tolist()
    ]
    names = [
        f"{text(axis.title)} %{{{side}}}<br>".lstrip() for side, axis in (("y", panel.y), ("x", panel.x))
    ]
    value = Axis(values=cells.form)
    heat: dict[str, Any] = {
        "type": "heatmap",
        "z": values,
        "x": _distinct(short(name, _NAME) for name in cells.columns),
        "y": _distinct(short(name, _NAME) for name in cells.rows),
        "zmin": low,
        "zmax": high,
        "colorscale": [[0, "var(--heat-0)"], [cells.middle, "var(--heat-1)"], [1, "var(--heat-2)"]],
        "colorbar": bar,
        "hoverongaps": False,
        "hovertemplate": f"{''.join(names)}{text(cells.title)} <b>{_shown('z', value)}</b><extra></extra>",
    }
    if texts := cells.texts:
        heat |= {"text": texts, "texttemplate": "%{text}"}
    return heat | ({"xgap": 1, "ygap": 1} if cells.rising else {})


def _cell_mark(column: float, row: float, name: str) -> dict[str, Any]:
    """A dot and a label over cells. A whole number could be the name of a category, so that it is moved a little."""
    dot = {
        "showarrow": True,
        "arrowhead": 6,
        "arrowsize": 1.2,
        "arrowcolor": "var(--validation)",
        "ax": 0,
        "ay": -18,
    }
    label = {"text": text(name), "bgcolor": "var(--card)", "borderpad": 1, "opacity": 0.9}
    return {"x": column + 1e-6, "y": row + 1e-6, "xref": "x", "yref": "y"} | dot | label


def _title(title: str) -> dict[str, Any]:
    # An empty title would take up room.
    return {"title": {"text": text(title)}} if title else {}


def _distinct(names: Iterable[str]) -> list[str]:
    """The escaped names; repeated ones get a number, because plotly draws a category once."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = repeats = seen.get(name, 0) + 1
        distinct.append(text(name) if repeats == 1 else f"{text(name)} ({repeats})")
    return distinct


def text(name: str) -> str:
    """A user's name, escaped: plotly reads markup in names."""
    return escape(name, quote=False)
