"""The figures of a page, as plotly's JSON in plain dictionaries; the colours are the page's CSS variables.

A page fills the variables in when it draws, so one figure serves the light and the dark scheme. The plotly package
takes longer to import than a page takes to write, so only the tests use it, to validate these dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from fedlens.report.format import is_share

Figure: TypeAlias = dict[str, Any]  # "data", a list of traces, and "layout"

DASHES = ("solid", "dash", "dot", "dashdot")
SPLIT_LABELS = {"test": "test", "validation": "validation", "train": "training", "local": "seen by clients"}
_MARKERS_UP_TO = 40


@dataclass(frozen=True)
class Curve:
    """One line of a chart: y over x, None where the value was not finite."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    dash: str = "solid"
    width: float = 2.25


def curves(lines: Sequence[Curve], metric: str) -> Figure:
    """Curves of one metric over rounds, with all of a round's values in one hover box."""
    values = [value for line in lines for value in line.y if value is not None]
    most = max((max(line.x, default=0) for line in lines), default=0)
    x = {
        "title": "round",
        "showspikes": False,
        "unifiedhovertitle": {"text": "round %{x:,~r}"},
        "range": x_range(most),
        **({"dtick": 1} if most < 10 else {}),
    }
    if is_share(metric):
        y: dict[str, Any] = {"tickformat": ".1~%", **({"range": _share_range(values)} if values else {})}
    elif values and min(values) > 0 and max(values) / min(values) > 100:
        y = {"type": "log", "tickformat": "~g", "dtick": 1, "title": "log scale"}
    else:
        y = {"tickformat": "~g"}
    hover = "%{y:.2%}" if is_share(metric) else "%{y:.4~g}"
    return {"data": [_line(line, hover) for line in lines], "layout": layout(x, y, hovermode="x unified")}


def _line(line: Curve, hover: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": text(line.label),
        "x": list(line.x),
        "y": list(line.y),
        "mode": "lines+markers" if len(line.x) <= _MARKERS_UP_TO else "lines",
        "line": {"color": line.color, "width": line.width, "dash": line.dash},
        "marker": {"size": 5 if len(line.x) > 1 else 9, "color": line.color},
        "hovertemplate": hover,
    }


def x_range(most: float) -> list[float]:
    """From 0 to `most`, with room for the marks at both ends."""
    most = most or 1
    return [-0.015 * most, 1.02 * most]


def _share_range(shares: Sequence[float]) -> list[float]:
    """A range for shares that fills the axis and does not leave [0, 1] by more than a mark's width."""
    low, high = min(shares), max(shares)
    pad = max(0.06 * (high - low), 0.02)
    return [max(low - pad, -0.01), min(high + pad, 1.01)]


def star(x: float, y: float, label: str) -> dict[str, Any]:
    """A trace that marks one point, the best round."""
    ring = {"width": 3, "color": "var(--accent)"}
    return {
        "type": "scatter",
        "x": [x],
        "y": [y],
        "name": text(label),
        "mode": "markers",
        "showlegend": False,
        "hoverinfo": "skip",
        "marker": {"symbol": "circle", "size": 11, "color": "var(--card)", "line": ring},
    }


def layout(x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The layout that all figures share, with the settings of both axes; `title` of an axis is text."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "var(--font)", "size": 12, "color": "var(--muted)"},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)"},
        },
        "margin": {"l": 8, "r": 12, "t": 10, "b": 8},
        "showlegend": False,
        "xaxis": _axis({"showline": True, **x}),
        "yaxis": _axis(y),
        **more,
    }


def _axis(settings: Mapping[str, Any]) -> dict[str, Any]:
    # An empty title would take up room.
    text = {"text": settings["title"]} if "title" in settings else {}
    return {
        "color": "var(--muted)",
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "ticks": "",
        **settings,
        "title": {"standoff": 8, "font": {"size": 12}, **text},
    }


def text(name: str) -> str:
    """A name that a user gave, escaped: plotly reads markup in names."""
    return escape(name, quote=False)
