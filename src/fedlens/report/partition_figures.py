"""The figures of a partition, as plotly figures: who has what, how much, and how far from the population."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fedlens.report.downsample import Excerpt, ranked, short
from fedlens.report.figures import layout
from fedlens.report.palette import class_colors

EMD_BINS = 40  # of the whole range, 0 to 2, so that the histograms of two partitions can be laid side by side
_LABELS_AT_MOST = 20
_ID_WIDTH, _CLASS_WIDTH = 14, 18  # of a label on an axis, in characters
_STRIP_AT_MOST = 2000
_GOLDEN = (math.sqrt(5) - 1) / 2


def class_bars(shown: Excerpt) -> go.Figure:
    """One stacked bar a client, one colour a class, as in figure 1 of hsu2019."""
    figure = go.Figure(layout=layout(bargap=0.15))
    colors, shares = class_colors(len(shown.labels)), shown.shares()
    names = [_text(name) for name in shown.ids]
    for k, label in enumerate(shown.labels):
        figure.add_trace(
            go.Bar(
                name=_text(short(label, 60)),
                x=names,
                y=shown.counts[:, k].tolist(),
                customdata=shares[:, k].round(4).tolist(),
                marker={"color": colors[k], "line": {"width": 0}},
                hovertemplate="client %{x}<br><b>%{fullData.name}</b><br>%{customdata:.1%} of its "
                f"{shown.unit}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", hovermode="closest")
    figure.update_xaxes(title_text="client", type="category", showgrid=False, autotickangles=[0, 90])
    if max(map(len, shown.ids), default=0) > 4:
        step = math.ceil(len(names) / 30)
        ticks = [_text(short(name, _ID_WIDTH)) for name in shown.ids[::step]]
        figure.update_xaxes(tickmode="array", tickvals=names[::step], ticktext=ticks)
    figure.update_yaxes(title_text=shown.unit, tickformat="~s")
    return figure


def class_heat(shown: Excerpt, named: bool) -> go.Figure:
    """Client by class, as in figures 3 and 11 of fedcv: the share of a client's examples that are of a class.

    `named` puts the clients' names beside their rows.
    """
    shares = shown.shares()
    # Names are the categories, which a hover box shows, so that they need not be repeated in every cell.
    names = [
        f"client {_text(name)} ({size:,} examples)" for name, size in zip(shown.ids, shown.sizes, strict=True)
    ]
    figure = go.Figure(layout=layout(hovermode="closest"))
    figure.add_trace(
        go.Heatmap(
            z=shares.round(3).tolist(),
            x=_distinct([short(label, 60) for label in shown.labels]),
            y=names,
            zmin=0,
            zmax=top_share(shown),
            # Where cells are small, a small share must not be lost.
            colorscale=[
                [0, "var(--heat-0)"],
                [0.2 if shown.fine() else 0.5, "var(--heat-1)"],
                [1, "var(--heat-2)"],
            ],
            colorbar={
                "tickformat": ".1~%",
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1,
                "ypad": 0,
                "xpad": 6,
            },
            hovertemplate=f"%{{y}}<br>%{{x}}<br>%{{z:.1%}} of its {shown.unit}<extra></extra>",
        )
    )
    figure.update_xaxes(type="category", showgrid=False, showline=False, showticklabels=False)
    if len(shown.labels) <= _LABELS_AT_MOST:
        ticks = [_text(short(label, _CLASS_WIDTH)) for label in shown.labels]
        figure.update_xaxes(
            showticklabels=True,
            tickangle=0 if max(map(len, ticks), default=0) <= 3 else -35,
            tickmode="array",
            tickvals=list(range(len(ticks))),
            ticktext=ticks,
        )
    else:
        figure.update_xaxes(title_text=shown.what or f"{len(shown.labels)} classes")
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", showticklabels=named)
    if named:
        ticks = [_text(short(name, _ID_WIDTH)) for name in shown.ids]
        figure.update_yaxes(title_text="client", tickvals=list(range(len(ticks))), ticktext=ticks)
    else:
        figure.update_yaxes(title_text="clients, by main class")
    return figure


def top_share(shown: Excerpt) -> float:
    """Where the colours of a matrix end: the largest share, or twice that of an even spread, which is no extreme."""
    even = 2 / max(len(shown.labels), 2)
    return max(float(shown.shares().max(initial=0)), even)


def ranks(sizes: NDArray[np.int64], classes: NDArray[np.int64] | None) -> go.Figure:
    """Examples of each client, and classes of each client, from the largest down (hsu2020, figures 2b, 2c, 3).

    Both axes are logarithmic. Each line has its own ranking. Zeros, for which such an axis has no place, are
    left out.
    """
    figure = go.Figure(layout=layout(hovermode="closest"))
    lines = [("examples", sizes, "var(--accent)", "solid")]
    if classes is not None:
        lines.append(("classes", classes, "var(--validation)", "dash"))
    top = 1.0
    for name, values, color, dash in lines:
        rank, value = ranked(values[values > 0])
        top = max([top, *value])
        figure.add_trace(
            go.Scatter(
                name=name,
                x=rank,
                y=value,
                mode="lines+markers" if len(rank) <= 30 else "lines",
                line={"color": color, "width": 2.25, "dash": dash},
                marker={"size": 5, "color": color},
                hovertemplate=f"number %{{x:,}} of {len(sizes):,}<br>%{{y:,}} {name}<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="client, by rank", **_logarithmic(max(len(sizes), 2)))
    figure.update_yaxes(title_text=" or ".join(line[0] for line in lines), **_logarithmic(max(top, 10)))
    return figure


def _logarithmic(top: float) -> dict[str, object]:
    """An axis from 1 to `top` with a mark at every power of ten; at every number where there are no such powers."""
    decades = math.log10(top)
    return {
        "type": "log",
        "range": [-0.03 * decades, 1.04 * decades],
        **({"dtick": 1} if top >= 10 else {"tickvals": list(range(1, int(top) + 1))}),
        "tickformat": "~s",
    }


def emd_histogram(distances: NDArray[np.float64], mean: float) -> go.Figure:
    """How many clients are how far from the population, with the weighted mean (hsu2020, figure 4, top row)."""
    number, edges = np.histogram(distances[~np.isnan(distances)], bins=EMD_BINS, range=(0.0, 2.0))
    figure = go.Figure(layout=layout(bargap=0.06, hovermode="closest"))
    figure.add_trace(
        go.Bar(
            x=((edges[:-1] + edges[1:]) / 2).round(4).tolist(),
            y=number.tolist(),
            text=[f"{a:.2f} to {b:.2f}" for a, b in itertools.pairwise(edges)],
            textposition="none",
            marker={"color": "var(--accent)", "line": {"width": 0}},
            hovertemplate="%{y:,} clients<br>EMD %{text}<extra></extra>",
        )
    )
    if not math.isnan(mean):
        line = {"color": "var(--validation)", "width": 2, "dash": "dash"}
        figure.add_shape(type="line", x0=mean, x1=mean, y0=0, y1=1, yref="paper", line=line)
        figure.add_annotation(
            x=mean,
            y=1,
            yref="paper",
            yanchor="bottom",
            xanchor="left" if mean < 0.6 else "right" if mean > 1.4 else "center",
            text=f"weighted mean {round(mean, 3):.3g}",
            showarrow=False,
            font={"color": "var(--validation)"},
        )
    figure.update_layout(margin={"l": 8, "r": 12, "t": 24, "b": 8})
    figure.update_xaxes(title_text="EMD from the population", range=[-0.02, 2.02], dtick=0.5, showgrid=False)
    figure.update_yaxes(title_text="clients", tickformat="~s", rangemode="tozero")
    if number.max(initial=0) < 5:
        figure.update_yaxes(dtick=1)
    return figure


def feature_strip(values: NDArray[np.float64], ids: Sequence[str], title: str) -> go.Figure:
    """One dot a client along an axis, spread upwards so that dots lie beside each other."""
    shown = np.linspace(0, len(values) - 1, min(len(values), _STRIP_AT_MOST)).round().astype(np.int64)
    figure = go.Figure(layout=layout(hovermode="closest"))
    figure.add_trace(
        go.Scatter(
            x=values[shown].tolist(),
            y=(shown * _GOLDEN % 1).round(3).tolist(),
            text=[_text(ids[k]) for k in shown],
            mode="markers",
            marker={"size": 7 if len(shown) <= 300 else 4, "color": "var(--accent)", "opacity": 0.6},
            hovertemplate="client %{text}<br>%{x:.4~g}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text=_text(title))
    figure.update_yaxes(visible=False, range=[-0.15, 1.15])
    return figure


def _text(name: str) -> str:
    """Plotly reads markup in names."""
    return escape(name, quote=False)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names as text, with a number behind those that are there already: a category is drawn once."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = again = seen.get(name, 0) + 1
        found.append(_text(name) if again == 1 else f"{_text(name)} ({again})")
    return found
