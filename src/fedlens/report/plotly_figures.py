"""Draws figures for a page: plotly's JSON in plain dictionaries, with the page's CSS variables as colours.

The page resolves the variables when it draws, so one figure serves the light and the dark colour scheme. Importing the
plotly package takes longer than writing a page, so only the tests use it, to validate these dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlens.report.downsample import PartitionSample, short
from fedlens.report.figures import MARKERS_UP_TO, Axis, Band, Figure, HeatMap, Series, ValueMap, VerticalLine
from fedlens.report.palette import class_colors
from fedlens.report.partition_figures import CLIENTS_IN_ORDER

PlotlyFigure: TypeAlias = dict[str, Any]  # "data", a list of traces, and "layout"

_CLASSES_NAMED = 20  # on the axis of a matrix
_ID_WIDTH, _CLASS_WIDTH = 14, 18  # of a label on an axis, in characters
_DECADES = 7  # of a logarithmic axis, each with a label
DOTS = 2000  # of a series; of more, as many are drawn
_TICK_FORMATS = {"number": "~g", "count": "~s", "share": ".1~%", "bytes": "~s"}
_SYMBOLS = {"circle": "circle-open", "up": "triangle-up-open", "down": "triangle-down-open"}
_NAMED_CELLS = 120  # of a map of values, each with its value written in it


def draw(figure: Figure) -> PlotlyFigure:
    """The figure as traces and a layout."""
    axes = {"xaxis": _axis(figure.x), "yaxis": _axis(figure.y, figure.series)}
    layout: dict[str, Any] = axes | _mark(figure.mark) | _gap(figure.x)
    if figure.bands:
        layout |= _bands(figure.bands)
    if figure.hover_title:
        layout["hovermode"] = "x unified"
        layout["xaxis"] |= {"showspikes": False, "unifiedhovertitle": {"text": figure.hover_title}}
    return {"data": [_trace(series) for series in figure.series], "layout": layout}


def _trace(series: Series) -> dict[str, Any]:
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
    if series.hover:
        trace["hovertemplate"] = series.hover
    if len(series.texts):
        trace["text"] = [text(line) for line in np.array(series.texts, object)[points]]
    marker: dict[str, Any] = {"color": series.color}
    if series.kind == "band":
        # The same group as its line, so that both are hidden together.
        area = {"mode": "lines", "fill": "toself", "fillcolor": f"{series.color}2e", "line": {"width": 0}}
        return trace | area | {"legendgroup": trace["name"], "showlegend": False, "hoverinfo": "skip"}
    if series.kind == "bar":
        place = {"width": series.bar, "offset": -series.bar / 2} if series.bar else {}
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


def _gap(axis: Axis) -> dict[str, Any]:
    """A mark on the x axis where it is broken."""
    if axis.gap is None:
        return {}
    place = {
        "x": math.log10(axis.gap) if axis.log else axis.gap,
        "y": 0,
        "yref": "paper",
        "yanchor": "middle",
    }
    look = {"text": "//", "showarrow": False, "bgcolor": "var(--card)", "borderpad": 0}
    return {"annotations": [place | look]}


def _axis(axis: Axis, series: Sequence[Series] = ()) -> dict[str, Any]:
    if axis.values == "hidden":
        return {"visible": False, "range": axis.limits}
    settings: dict[str, Any] = {**_title(axis.title), "tickformat": _TICK_FORMATS[axis.values]}
    if axis.limits:
        settings["range"] = [math.log10(limit) for limit in axis.limits] if axis.log else list(axis.limits)
    if axis.log:
        # A label at each power of ten; the values of a run that diverges span too many of them.
        marks = {"nticks": _DECADES} if _decades(series) > _DECADES else {"dtick": 1}
        settings |= {"type": "log"} | marks
    if axis.ticks:
        settings |= {"tickmode": "array", "tickvals": list(axis.ticks)}
    if axis.names:
        settings |= {
            "ticktext": [text(short(name, axis.name_width)) for name in axis.names],
            "showgrid": False,
        }
    return settings


def _decades(series: Iterable[Series]) -> float:
    """How many powers of ten the positive values of some series span."""
    values = [value for line in series for value in line.y if value is not None and value > 0]
    return math.log10(max(values)) - math.log10(min(values)) if values else 0.0


def _mark(mark: VerticalLine | None) -> dict[str, Any]:
    if mark is None:
        return {}
    color = "var(--validation)"
    line = {"color": color, "width": 2, "dash": "dash"}
    label = {"text": mark.label, "xanchor": mark.align, "yanchor": "bottom", "font": {"color": color}}
    return {
        "margin": {"l": 8, "r": 12, "t": 24, "b": 8},
        "shapes": [
            {"type": "line", "x0": mark.x, "x1": mark.x, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        ],
        "annotations": [{"x": mark.x, "y": 1, "yref": "paper", "showarrow": False, **label}],
    }


def _bands(bands: Sequence[Band]) -> dict[str, Any]:
    """Stretches of the x axis, half a round wider on both sides, so that a single round can be seen."""
    color = "var(--bad)"
    place = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shapes = [
        {"type": "rect", "x0": band.first - 0.5, "x1": band.last + 0.5, **place}
        | {"fillcolor": color, "opacity": 0.12, "line": {"width": 0}}
        for band in bands
    ]
    return {"shapes": shapes}


def class_bars(sample: PartitionSample) -> PlotlyFigure:
    """One stacked bar per client, one colour per class, as in figure 1 of hsu2019."""
    colors, shares = class_colors(len(sample.labels)), sample.shares()
    names = [text(name) for name in sample.ids]
    hover = "client %{x}<br><b>%{fullData.name}</b><br>%{customdata:.1%} of its "
    bars = [
        {
            "type": "bar",
            "name": text(short(label, 60)),
            "x": names,
            "y": sample.counts[:, k].tolist(),
            "customdata": _compact(shares[:, k], 4),
            "marker": {"color": colors[k], "line": {"width": 0}},
            "hovertemplate": f"{hover}{sample.unit}<extra></extra>",
        }
        for k, label in enumerate(sample.labels)
    ]
    x: dict[str, Any] = {**_title("client"), "type": "category", "showgrid": False, "autotickangles": [0, 90]}
    if max(map(len, sample.ids), default=0) > 4:
        step = math.ceil(len(names) / 30)
        x |= _ticks(names[::step], sample.ids[::step], _ID_WIDTH)
    y = {**_title(sample.unit), "tickformat": "~s"}
    return {"data": bars, "layout": {"xaxis": x, "yaxis": y, "bargap": 0.15, "barmode": "stack"}}


def class_matrix(sample: PartitionSample) -> PlotlyFigure:
    """Client by class, as in figures 3 and 11 of fedcv: the share of each class in a client's examples."""
    # The names are the categories: the hover box shows them, and they are not repeated in every cell.
    names = [
        f"client {text(name)} ({size:,} examples)"
        for name, size in zip(sample.ids, sample.sizes, strict=True)
    ]
    # Small cells need more contrast for small shares.
    middle = 0.2 if sample.fine() else 0.5
    heat = {
        "type": "heatmap",
        "z": [_compact(row, 3) for row in sample.shares()],
        "x": _distinct(short(label, 60) for label in sample.labels),
        "y": names,
        **_heat_scale(sample.top_share(), middle),
        "hovertemplate": f"%{{y}}<br>%{{x}}<br>%{{z:.1%}} of its {sample.unit}<extra></extra>",
    }
    x: dict[str, Any] = {"type": "category", "showgrid": False, "showline": False}
    if len(sample.labels) <= _CLASSES_NAMED:
        ticks = _ticks(range(len(sample.labels)), sample.labels, _CLASS_WIDTH)
        x |= ticks | {"tickangle": 0 if max(map(len, ticks["ticktext"]), default=0) <= 3 else -35}
    else:
        x |= {"showticklabels": False, **_title(sample.grouping or f"{len(sample.labels)} classes")}
    y: dict[str, Any] = {"type": "category", "showgrid": False, "autorange": "reversed"}
    if len(sample.ids) <= CLIENTS_IN_ORDER:
        y |= {**_title("client"), **_ticks(range(len(names)), sample.ids, _ID_WIDTH)}
    else:
        y |= {"showticklabels": False, **_title("clients, by main class")}
    return {"data": [heat], "layout": {"xaxis": x, "yaxis": y}}


def heat_map(figure: HeatMap) -> PlotlyFigure:
    """A matrix of shares, the first row on top; small shares get more contrast."""
    heat: dict[str, Any] = {
        "type": "heatmap",
        "z": [_compact(row, 3) for row in figure.shares],
        "x": _distinct(short(name, 60) for name in figure.columns),
        "y": _distinct(short(name, 60) for name in figure.rows),
        **_heat_scale(1.0, 0.2 if figure.names else 0.06),
        "hovertemplate": figure.hover,
    }
    if figure.counts is not None:
        heat |= {"text": figure.counts.tolist(), "texttemplate": "%{text}"}
    axis: dict[str, Any] = {"type": "category", "showgrid": False, "showline": False}
    ticks = _ticks(range(len(figure.names)), figure.names, _CLASS_WIDTH) if figure.names else {}
    hidden = {} if figure.names else {"showticklabels": False}
    turned = {"tickangle": -90 if len(figure.names) > 5 and max(map(len, figure.names)) > 3 else 0}
    x = axis | _title(figure.column_title) | ticks | hidden | turned
    y = axis | _title(figure.row_title) | ticks | hidden | {"autorange": "reversed"}
    return {"data": [heat], "layout": {"xaxis": x, "yaxis": y}}


def value_map(figure: ValueMap) -> PlotlyFigure:
    """A matrix of values, the first row at the bottom, each with its value where they are few."""
    low, high = figure.limits
    bar = {"tickformat": ".1~%" if figure.share else "~g", "thickness": 10, "outlinewidth": 0, "len": 1}
    values = [[None if math.isnan(value) else value for value in row] for row in figure.values.tolist()]
    heat: dict[str, Any] = {
        "type": "heatmap",
        "z": values,
        "x": _distinct(figure.columns),
        "y": _distinct(figure.rows),
        "zmin": low,
        "zmax": high,
        "colorscale": [[0, "var(--heat-0)"], [0.5, "var(--heat-1)"], [1, "var(--heat-2)"]],
        "colorbar": bar | {"ypad": 0, "xpad": 6},
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": f"{text(figure.row_title)} %{{y}}<br>{text(figure.column_title)} %{{x}}<br>"
        f"<b>%{{z:{'.2%' if figure.share else '.4~g'}}}</b><extra></extra>",
    }
    if figure.values.size <= _NAMED_CELLS:
        heat["texttemplate"] = "%{z:.1%}" if figure.share else "%{z:.3~g}"
    axis = {"type": "category", "showgrid": False, "showline": False}
    return {
        "data": [heat],
        "layout": {"xaxis": axis | _title(figure.column_title), "yaxis": axis | _title(figure.row_title)},
    }


def _heat_scale(largest: float, middle: float) -> dict[str, Any]:
    """The colours of shares from 0 to `largest`, and their bar; `middle` is where the middle colour is."""
    bar = {"tickformat": ".1~%", "thickness": 10, "outlinewidth": 0, "len": 1, "ypad": 0, "xpad": 6}
    colors = [[0, "var(--heat-0)"], [middle, "var(--heat-1)"], [1, "var(--heat-2)"]]
    return {"zmin": 0, "zmax": largest, "colorscale": colors, "colorbar": bar}


def _title(title: str) -> dict[str, Any]:
    # An empty title would take up room.
    return {"title": {"text": text(title)}} if title else {}


def _ticks(values: Sequence[Any], names: Sequence[str], width: int) -> dict[str, Any]:
    labels = [text(short(name, width)) for name in names]
    return {"tickmode": "array", "tickvals": list(values), "ticktext": labels}


def _compact(shares: NDArray[np.float64], digits: int) -> list[float]:
    """Rounded shares, 0 and 1 as whole numbers: most cells of a large matrix are 0, which shortens the page."""
    return [int(share) if share in (0.0, 1.0) else share for share in shares.round(digits).tolist()]


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
