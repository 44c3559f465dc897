"""The data of a partition's figures, computed once for the page (plotly) and for picture files (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import many, number
from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.report.downsample import PartitionSample, ranked, sample_partition
from fedlens.results.chart import (
    NAMED,
    Align,
    Axis,
    Cells,
    Panel,
    Series,
    VerticalLine,
    class_colors,
    named_axis,
    short,
)

EMD_BINS = 40  # over the whole range, 0 to 2, so that the histograms of two partitions can be compared
CLIENTS_IN_ORDER = 20  # in a matrix; more are sorted by their main class
_ID_WIDTH = 16  # characters of a client's name on an axis
_COUNTED = 400  # cells with their count in them
_BARS, _BARS_OF_MANY, _COLORS = 100, 60, 100
_MATRIX_CLIENTS, _MATRIX_CLASSES = 300, 250
_GOLDEN = (math.sqrt(5) - 1) / 2
_UNITS = {
    "brightness": "factor",
    "contrast": "factor",
    "blur": "standard deviation, pixels",
    "rotation": "degrees, counter-clockwise",
    "noise": "standard deviation, 1 is black to white",
}


def bar_sample(partition: Partition, census: Census) -> PartitionSample:
    """The clients of the class bars: all of up to 100 clients, else 60 of them."""
    clients = _BARS if len(partition) <= _BARS else _BARS_OF_MANY
    return sample_partition(partition, census, clients, _COLORS)


def class_bars(sample: PartitionSample, clients: int) -> Panel:
    """One stacked bar per client, one colour per class (hsu2019, figure 1): counts, and shares as another view.

    If sizes differ too much for that, shares come first.

    Args:
        clients: of the partition, of which the sample shows some.
    """
    colors, places = class_colors(len(sample.labels)), list(range(len(sample.ids)))
    step = max(1, math.ceil(len(places) / NAMED))
    names, limits = [short(name, _ID_WIDTH) for name in sample.ids[::step]], (-0.6, len(places) - 0.4)
    x = Axis("client", limits=limits, ticks=places[::step], names=names)
    whole = f"Classes of {sample.clients_shown if len(sample.ids) < clients else 'each client'}"
    about = f"Stacked bars of the {sample.unit} of {many(len(sample.ids), 'client')} by class."

    def seen(view: str, values: NDArray[Any], y: Axis) -> Panel:
        series = [
            Series(places, column.tolist(), short(label, 60), "bar", color, texts=sample.ids)
            for column, label, color in zip(values.T, sample.labels, colors, strict=True)
        ]
        return Panel(whole, about, x, y, series, sample.grouping, stacked="up", view=view)

    views = [
        seen(sample.unit, sample.counts, Axis(sample.unit, "count")),
        seen("shares", sample.shares().round(4), Axis(f"share of its {sample.unit}", "share", limits=(0, 1))),
    ]
    first, other = views[::-1] if sample.lopsided() else views
    return first if sample.even() else replace(first, others=[other])


def size_bars(sample: PartitionSample) -> Panel:
    """The size of each client, for above shares that do not show it."""
    marks = sample.counts.sum(axis=1)
    ends = (
        10.0 ** (math.ceil(math.log10(marks[marks > 0].min())) - 1),
        10.0 ** math.ceil(math.log10(marks.max())),
    )
    bars = Series(list(range(len(marks))), marks.tolist(), "", "bar", "#5d6b7a", bar=0.85)
    x = Axis("client", "hidden", limits=(-0.6, len(marks) - 0.4))
    return Panel(
        "",
        f"The {sample.unit} of each client.",
        x,
        Axis(sample.unit, "count", True, ends),
        [bars],
        shape="strip",
    )


def matrix_sample(partition: Partition, census: Census) -> PartitionSample:
    """The cells of the matrix of clients and classes: few clients in their own order, more by their main class."""
    sample = sample_partition(partition, census, _MATRIX_CLIENTS, _MATRIX_CLASSES)
    return sample if len(sample.ids) <= CLIENTS_IN_ORDER else sample.by_main_class()


def class_matrix(sample: PartitionSample) -> Panel:
    """Client by class, as in figures 3 and 11 of fedcv: the share of each class in a client's examples."""
    clients, classes = len(sample.ids), len(sample.labels)
    cells = Cells(
        sample.shares(),
        [f"client {name} ({size:,} examples)" for name, size in zip(sample.ids, sample.sizes, strict=True)],
        sample.labels,
        f"share of the client's {sample.unit}",
        (0.0, sample.top_share()),
        "share",
        0.2 if sample.fine() else 0.5,
        counts=sample.counts if sample.counts.size <= _COUNTED and max(clients, classes) <= NAMED else None,
    )
    x = named_axis(Axis(), sample.labels, "class" if sample.grouping else f"{classes} classes")
    title = f"{clients} clients, by main class"
    y = named_axis(Axis("client", name_width=_ID_WIDTH), sample.ids, title, CLIENTS_IN_ORDER)
    return Panel(
        f"Share of each class, {sample.clients_shown}",
        "Heat map of the share of each class in the data of each client.",
        x,
        y,
        note=sample.grouping,
        cells=cells,
        shape="tower",
    )


def rank_curves(partition: Partition) -> list[Panel]:
    """Examples of each client, from the largest down (hsu2020, figures 2b, 2c, 3), and classes if they were counted.

    Zeros are left out: logarithmic axes have no place for them.
    """
    sizes, census = partition.sizes(), partition.census
    values = {"examples": sizes} | ({} if census is None else {"classes": census.classes_per_client()})
    styles = (("var(--accent)", "solid"), ("var(--validation)", "dash"))
    clients, figures = len(partition), []
    for (name, counts), (color, dash) in zip(values.items(), styles, strict=False):
        line = Series(*ranked(counts[counts > 0]), name=name if census else "", color=color, dash=dash)
        x, y = rank_axes("client", f"{name} of the client", clients, counts.max(initial=0))
        about = (
            f"{name.capitalize()} of each client, from {counts.max(initial=0):,} down to {counts.min():,}."
        )
        title = f"{name.capitalize()} of each client, by rank"
        figures.append(Panel(title, about, x, y, [line], _left_out(counts == 0, name)))
    return figures


def rank_axes(thing: str, what: str, longest: int, highest: float, log: str = "both") -> tuple[Axis, Axis]:
    """The axes of counts by rank; `log` is "both", "x", "y" or "none"."""
    log_x, log_y = log in ("both", "x"), log in ("both", "y")
    x = (0.9, 1.12 * max(longest, 2)) if log_x else (0.0, 1.02 * longest)
    y = (0.8, 1.25 * max(highest, 10)) if log_y else (0.0, 1.05 * highest)
    few = range(1, longest + 1) if log_x and longest < 10 else ()
    return Axis(f"{thing}, by rank", "count", log_x, x, few), Axis(what, "count", log_y, y)


def joined_ranks(figures: Sequence[Panel]) -> Panel:
    """The curves of `rank_curves` on the same axes."""
    if len(figures) == 1:
        return figures[0]
    series = [line for figure in figures for line in figure.series]
    highest = max((figure.y for figure in figures), key=lambda y: y.limits or (0, 0))
    return replace(
        figures[0],
        title="Examples and classes, by rank",
        about=" ".join(figure.about for figure in figures),
        y=replace(highest, title=" or ".join(line.name for line in series)),
        series=series,
    )


def emd_histogram(census: Census) -> Panel:
    """The clients by their distance from the population, and the weighted mean (hsu2020, figure 4, top row)."""
    distances = census.client_emds()
    counts, edges = emd_counts(census)
    bars = Series(
        ((edges[:-1] + edges[1:]) / 2).round(4).tolist(),
        counts.tolist(),
        kind="bar",
        texts=[f"EMD {low:.2f} to {high:.2f}" for low, high in pairwise(edges)],
    )
    mean, most = census.emd(), int(counts.max(initial=0))
    mark = None
    if not math.isnan(mean):
        align: Align = "left" if mean < 0.6 else "right" if mean > 1.4 else "center"
        mark = VerticalLine(mean, f"weighted mean {round(mean, 3):.3g}", align)
    return Panel(
        title="Distance of each client from the population",
        about=f"Histogram of the clients' earth mover's distances, 0 to 2; weighted mean {number(mean)}.",
        x=Axis("EMD from the population", limits=(-0.02, 2.02), ticks=(0, 0.5, 1, 1.5, 2)),
        y=Axis("clients", "count", ticks=range(most + 1) if most < 5 else ()),
        series=[bars],
        note=_left_out(np.isnan(distances), "classes"),
        mark=mark,
    )


def emd_counts(census: Census) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(counts [40], edges [41]): the clients in each bin of the distance from the population, 0 to 2."""
    distances = census.client_emds()
    return np.histogram(distances[~np.isnan(distances)], bins=EMD_BINS, range=(0.0, 2.0))


def feature_strips(partition: Partition) -> list[Panel]:
    """One strip per image feature, with one dot per client; the heights keep neighbouring dots apart."""
    heights = np.arange(len(partition), dtype=np.float64) * _GOLDEN % 1
    return [
        Panel(
            title=name.capitalize(),
            about=f"One dot per client, from {values.min():.4g} to {values.max():.4g}.",
            x=Axis(f"{name}, {_UNITS[name]}" if name in _UNITS else name),
            y=Axis(values="hidden", limits=(-0.15, 1.15)),
            shape="strip",
            series=[Series(values.tolist(), heights.round(3).tolist(), kind="dots", texts=partition.ids)],
        )
        for name, values in partition.features.items()
    ]


def _left_out(clients: NDArray[np.bool_], name: str) -> str:
    return f"{many(missing, 'client')} without {name} not shown" if (missing := int(clients.sum())) else ""
