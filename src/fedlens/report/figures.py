"""The figures of a page, as plotly figures whose colours are the page's CSS variables.

A page fills the variables in when it draws, so one figure serves the light and the dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go

from fedlens.report.format import is_share

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


def curves(lines: Sequence[Curve], metric: str) -> go.Figure:
    """Curves of one metric over rounds, with all of a round's values in one hover box."""
    figure = go.Figure(layout=layout())
    value = "%{y:.2%}" if is_share(metric) else "%{y:.4~g}"
    for line in lines:
        few = len(line.x) <= _MARKERS_UP_TO
        figure.add_trace(
            go.Scatter(
                name=escape(line.label, quote=False),
                x=list(line.x),
                y=list(line.y),
                mode="lines+markers" if few else "lines",
                line={"color": line.color, "width": line.width, "dash": line.dash},
                marker={"size": 5 if len(line.x) > 1 else 9, "color": line.color},
                hovertemplate=value,
            )
        )
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title_text="round", showspikes=False)
    figure.update_xaxes(unifiedhovertitle_text="round %{x:,~r}")
    known = [value for line in lines for value in line.y if value is not None]
    if is_share(metric):
        figure.update_yaxes(tickformat=".1~%", range=_room(known))
    elif known and min(known) > 0 and max(known) / min(known) > 100:
        figure.update_yaxes(type="log", tickformat="~g", dtick=1, title_text="log scale")
    else:
        figure.update_yaxes(tickformat="~g")
    most = max((max(line.x, default=0) for line in lines), default=0)
    figure.update_xaxes(range=x_range(most), dtick=1 if most < 10 else None)
    return figure


def x_range(most: float) -> list[float]:
    """From 0 to `most`, with room for the marks at both ends."""
    most = most or 1
    return [-0.015 * most, 1.02 * most]


def _room(shares: Sequence[float]) -> list[float] | None:
    """A range for shares that fills the axis and does not leave [0, 1] by more than a mark's width."""
    if not shares:
        return None
    low, high = min(shares), max(shares)
    pad = max(0.06 * (high - low), 0.02)
    return [max(low - pad, -0.01), min(high + pad, 1.01)]


def star(figure: go.Figure, x: float, y: float, label: str) -> go.Figure:
    """Marks one point, the best round, in `figure`."""
    trace = go.Scatter(
        x=[x],
        y=[y],
        name=escape(label, quote=False),
        mode="markers",
        showlegend=False,
        hoverinfo="skip",
        marker={
            "symbol": "circle",
            "size": 11,
            "color": "var(--card)",
            "line": {"width": 3, "color": "var(--accent)"},
        },
    )
    figure.add_trace(trace)
    return figure


def layout(**more: Any) -> go.Layout:
    """What all figures look like."""
    axis = {
        "color": "var(--muted)",
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "ticks": "",
        "title": {"standoff": 8, "font": {"size": 12}},
    }
    return go.Layout(
        template=go.layout.Template(),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "var(--font)", "size": 12, "color": "var(--muted)"},
        hoverlabel={
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)"},
        },
        margin={"l": 8, "r": 12, "t": 10, "b": 8},
        showlegend=False,
        xaxis={**axis, "showline": True},
        yaxis=axis,
        **more,
    )
