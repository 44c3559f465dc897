"""The figures of a partition as plotly figures for a page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.report.downsample import PartitionSample, short
from fedlens.report.figures import Figure, layout, text
from fedlens.report.palette import class_colors
from fedlens.report.partition_charts import NAMED_AT_MOST, EmdHistogram, FeatureStrip, RankCurve

_LABELS_AT_MOST = 20
_ID_WIDTH, _CLASS_WIDTH = 14, 18  # of a label on an axis, in characters
_STRIP_AT_MOST = 2000


def class_bars(sample: PartitionSample) -> Figure:
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
    x: dict[str, Any] = {"title": "client", "type": "category", "showgrid": False, "autotickangles": [0, 90]}
    if max(map(len, sample.ids), default=0) > 4:
        step = math.ceil(len(names) / 30)
        x |= _ticks(names[::step], sample.ids[::step], _ID_WIDTH)
    y = {"title": sample.unit, "tickformat": "~s"}
    return {"data": bars, "layout": layout(x, y, bargap=0.15, barmode="stack", hovermode="closest")}


def class_matrix(sample: PartitionSample) -> Figure:
    """Client by class, as in figures 3 and 11 of fedcv: the share of each class in a client's examples."""
    # Names are the categories, which a hover box shows, so that they need not be repeated in every cell.
    names = [
        f"client {text(name)} ({size:,} examples)"
        for name, size in zip(sample.ids, sample.sizes, strict=True)
    ]
    # Where cells are small, a small share must stay visible.
    middle = 0.2 if sample.fine() else 0.5
    bar = {"tickformat": ".1~%", "thickness": 10, "outlinewidth": 0, "len": 1, "ypad": 0, "xpad": 6}
    heat = {
        "type": "heatmap",
        "z": [_compact(row, 3) for row in sample.shares()],
        "x": _distinct([short(label, 60) for label in sample.labels]),
        "y": names,
        "zmin": 0,
        "zmax": sample.top_share(),
        "colorscale": [[0, "var(--heat-0)"], [middle, "var(--heat-1)"], [1, "var(--heat-2)"]],
        "colorbar": bar,
        "hovertemplate": f"%{{y}}<br>%{{x}}<br>%{{z:.1%}} of its {sample.unit}<extra></extra>",
    }
    x: dict[str, Any] = {"type": "category", "showgrid": False, "showline": False}
    if len(sample.labels) <= _LABELS_AT_MOST:
        ticks = _ticks(range(len(sample.labels)), sample.labels, _CLASS_WIDTH)
        x |= ticks | {"tickangle": 0 if max(map(len, ticks["ticktext"]), default=0) <= 3 else -35}
    else:
        x |= {"showticklabels": False, "title": sample.what or f"{len(sample.labels)} classes"}
    y: dict[str, Any] = {"type": "category", "showgrid": False, "autorange": "reversed"}
    if len(sample.ids) <= NAMED_AT_MOST:
        y |= {"title": "client", **_ticks(range(len(names)), sample.ids, _ID_WIDTH)}
    else:
        y |= {"showticklabels": False, "title": "clients, by main class"}
    return {"data": [heat], "layout": layout(x, y, hovermode="closest")}


def rank_curves(curves: Sequence[RankCurve]) -> Figure:
    """Curves by rank on logarithmic axes; each curve has its own ranking."""
    styles = (("var(--accent)", "solid"), ("var(--validation)", "dash"))
    lines = [
        {
            "type": "scatter",
            "name": curve.name,
            "x": list(curve.ranks),
            "y": list(curve.values),
            "mode": "lines+markers" if len(curve.ranks) <= 30 else "lines",
            "line": {"color": color, "width": 2.25, "dash": dash},
            "marker": {"size": 5, "color": color},
            "hovertemplate": f"number %{{x:,}} of {curve.clients:,}<br>%{{y:,}} {curve.name}<extra></extra>",
        }
        for curve, (color, dash) in zip(curves, styles, strict=False)
    ]
    top = max((value for curve in curves for value in curve.values), default=1)
    x = {"title": "client, by rank", **_logarithmic(max(curves[0].clients, 2))}
    y = {"title": " or ".join(curve.name for curve in curves), **_logarithmic(max(top, 10))}
    return {"data": lines, "layout": layout(x, y, hovermode="closest")}


def _logarithmic(top: float) -> dict[str, Any]:
    """An axis from 1 to `top` with a mark at every power of ten; at every number where `top` is below ten."""
    decades = math.log10(top)
    return {
        "type": "log",
        "range": [-0.03 * decades, 1.04 * decades],
        **({"dtick": 1} if top >= 10 else {"tickvals": list(range(1, int(top) + 1))}),
        "tickformat": "~s",
    }


def emd_histogram(histogram: EmdHistogram) -> Figure:
    """Bars of clients by distance, and a line at the weighted mean."""
    bars = {
        "type": "bar",
        "x": histogram.centers.round(4).tolist(),
        "y": histogram.counts.tolist(),
        "text": [f"{a:.2f} to {b:.2f}" for a, b in itertools.pairwise(histogram.edges)],
        "textposition": "none",
        "marker": {"color": "var(--accent)", "line": {"width": 0}},
        "hovertemplate": "%{y:,} clients<br>EMD %{text}<extra></extra>",
    }
    more: dict[str, Any] = {
        "bargap": 0.06,
        "hovermode": "closest",
        "margin": {"l": 8, "r": 12, "t": 24, "b": 8},
    }
    if not math.isnan(mean := histogram.mean):
        line = {"color": "var(--validation)", "width": 2, "dash": "dash"}
        more["shapes"] = [
            {"type": "line", "x0": mean, "x1": mean, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        ]
        label = {"text": histogram.mean_label, "xanchor": histogram.mean_align, "yanchor": "bottom"}
        font = {"color": "var(--validation)"}
        more["annotations"] = [
            {"x": mean, "y": 1, "yref": "paper", "showarrow": False, "font": font, **label}
        ]
    x = {"title": "EMD from the population", "range": [-0.02, 2.02], "dtick": 0.5, "showgrid": False}
    y = {"title": "clients", "tickformat": "~s", "rangemode": "tozero"}
    few = {"dtick": 1} if histogram.counts.max(initial=0) < 5 else {}
    return {"data": [bars], "layout": layout(x, {**y, **few}, **more)}


def feature_strip(strip: FeatureStrip) -> Figure:
    """One dot per client along an axis, spread upwards so that dots lie beside each other."""
    clients = len(strip.values)
    shown = np.linspace(0, clients - 1, min(clients, _STRIP_AT_MOST)).round().astype(np.int64)
    dots = {
        "type": "scatter",
        "x": strip.values[shown].tolist(),
        "y": strip.heights[shown].round(3).tolist(),
        "text": [text(strip.ids[k]) for k in shown],
        "mode": "markers",
        "marker": {"size": 7 if len(shown) <= 300 else 4, "color": "var(--accent)", "opacity": 0.6},
        "hovertemplate": "client %{text}<br>%{x:.4~g}<extra></extra>",
    }
    x, y = {"title": text(strip.unit or strip.name)}, {"visible": False, "range": [-0.15, 1.15]}
    return {"data": [dots], "layout": layout(x, y, hovermode="closest")}


def _ticks(values: Sequence[Any], names: Sequence[str], width: int) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(values),
        "ticktext": [text(short(name, width)) for name in names],
    }


def _compact(shares: NDArray[np.float64], digits: int) -> list[float]:
    """Rounded shares, with 0 and 1 as whole numbers: most cells of a large matrix are 0, which shortens the page."""
    return [int(share) if share in (0.0, 1.0) else share for share in shares.round(digits).tolist()]


def _distinct(names: Sequence[str]) -> list[str]:
    """The escaped names, repeated ones with a number behind them: plotly draws a category once."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = again = seen.get(name, 0) + 1
        distinct.append(text(name) if again == 1 else f"{text(name)} ({again})")
    return distinct
