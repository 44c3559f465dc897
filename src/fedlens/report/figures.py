"""The figures of a page, as plotly figures whose colours are the page's CSS variables.

A page fills the variables in when it draws, so one figure serves the light and the dark scheme.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedlens.report.format import is_share

# Tableau's ten: told apart by most colour-blind readers, and legible on both backgrounds.
TEN = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1"),
    *("#edc948", "#76b7b2", "#ff9da7", "#9c755f", "#a3a9b3"),
)
DASHES = ("solid", "dash", "dot", "dashdot")
SPLIT_LABELS = {"test": "test", "validation": "validation", "train": "training", "local": "seen by clients"}
BARS_AT_MOST = 60
ROWS_AT_MOST = 400
_MARKERS_UP_TO = 40
_LABELS_AT_MOST = 20


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
    figure = go.Figure(layout=_layout())
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


def class_colors(classes: int) -> list[str]:
    """One colour a class: ten well-known ones, and beyond that a walk around the colour wheel.

    Neighbours on the walk differ in lightness, so that classes next to each other in a bar can be told apart.
    """
    if classes <= len(TEN):
        return list(TEN[:classes])
    lightness = (0.42, 0.62, 0.52, 0.72)
    parts = [colorsys.hls_to_rgb(k / classes, lightness[k % 4], 0.5) for k in range(classes)]
    return ["#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in parts]


def evenly(total: int, at_most: int) -> np.ndarray:
    """At most `at_most` of `total` positions, evenly spread, first and last among them."""
    if total <= at_most:
        return np.arange(total)
    return np.unique(np.linspace(0, total - 1, at_most).round().astype(np.int64))


def class_bars(counts: np.ndarray, ids: Sequence[str], classes: Sequence[str]) -> go.Figure:
    """One stacked bar a client, one colour a class, as in figure 1 of hsu2019. counts: [clients, classes]."""
    figure = go.Figure(layout=_layout(bargap=0.12 if len(ids) <= 30 else 0.05))
    names = [escape(name, quote=False) for name in ids]
    sizes = np.maximum(counts.sum(axis=1), 1)
    for label, column, color in zip(classes, counts.T, class_colors(len(classes)), strict=True):
        figure.add_trace(
            go.Bar(
                name=escape(label, quote=False),
                x=names,
                y=column.tolist(),
                customdata=(column / sizes).tolist(),
                marker={"color": color, "line": {"width": 0}},
                hovertemplate="client %{x}<br><b>%{fullData.name}</b><br>%{customdata:.1%} of its examples"
                "<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", hovermode="closest")
    figure.update_xaxes(title_text="client", type="category", showgrid=False, autotickangles=[0, 90])
    figure.update_yaxes(title_text="examples", tickformat="~s")
    return figure


def class_heat(counts: np.ndarray, ids: Sequence[str], classes: Sequence[str]) -> go.Figure:
    """Client by class: the share of a client's examples in a class; clients sorted by their main class."""
    sizes = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shares = counts / sizes
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    names = np.array([escape(name, quote=False) for name in ids], dtype=object)
    figure = go.Figure(layout=_layout())
    figure.add_trace(
        go.Heatmap(
            z=shares[order].round(4).tolist(),
            x=[escape(name, quote=False) for name in classes],
            y=list(range(len(order))),
            customdata=[[name] * len(classes) for name in names[order]],
            zmin=0,
            zmax=max(float(shares.max(initial=0)), 1e-9),
            colorscale=[[0, "var(--heat-0)"], [0.5, "var(--heat-1)"], [1, "var(--heat-2)"]],
            colorbar={
                "tickformat": ".0%",
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1,
                "ypad": 0,
                "xpad": 6,
            },
            hovertemplate="client %{customdata}<br>%{x}<br>%{z:.1%} of its examples<extra></extra>",
        )
    )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(type="category", showgrid=False, showline=False, tickangle=-35)
    if len(classes) > _LABELS_AT_MOST:
        figure.update_xaxes(showticklabels=False, title_text=f"{len(classes)} classes")
    figure.update_yaxes(
        showticklabels=False, showgrid=False, title_text="clients, by main class", autorange="reversed"
    )
    return figure


def histogram(sizes: np.ndarray) -> go.Figure:
    """How many clients hold how many examples."""
    low, high = int(sizes.min()), int(sizes.max())
    edges = np.unique(np.linspace(low, high + 1, min(30, high - low + 1) + 1).round().astype(np.int64))
    number, edges = np.histogram(sizes, bins=edges)
    figure = go.Figure(layout=_layout(bargap=0.04))
    text = [f"{a:,}" if b - a == 1 else f"{a:,} to {b - 1:,}" for a, b in pairwise(edges)]
    figure.add_trace(
        go.Bar(
            x=((edges[:-1] + edges[1:] - 1) / 2).tolist(),
            width=np.diff(edges).tolist(),
            y=number.tolist(),
            text=text,
            textposition="none",
            marker={"color": "var(--accent)", "line": {"width": 1, "color": "var(--card)"}},
            hovertemplate="%{y:,} clients hold<br>%{text} examples<extra></extra>",
        )
    )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title_text="examples a client", tickformat="~s", showgrid=False)
    figure.update_yaxes(title_text="clients", tickformat="~s")
    return figure


def _layout(**more: Any) -> go.Layout:
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
