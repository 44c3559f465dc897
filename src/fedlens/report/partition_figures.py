"""The data of a partition's figures, computed once for the page (plotly) and for picture files (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import many, number
from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.report.downsample import PartitionSample, ranked, sample_partition
from fedlens.report.figures import Align, Axis, Figure, Series, VerticalLine

EMD_BINS = 40  # over the whole range, 0 to 2, so that the histograms of two partitions can be compared
CLIENTS_IN_ORDER = 20  # in a matrix; more are sorted by their main class
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


def class_bars(partition: Partition, census: Census) -> PartitionSample:
    """The clients of the class bars: all of up to 100 clients, else 60 of them."""
    clients = _BARS if len(partition) <= _BARS else _BARS_OF_MANY
    return sample_partition(partition, census, clients, _COLORS)


def class_matrix(partition: Partition, census: Census) -> PartitionSample:
    """The cells of the matrix of clients and classes: few clients in their own order, more by their main class."""
    sample = sample_partition(partition, census, _MATRIX_CLIENTS, _MATRIX_CLASSES)
    return sample if len(sample.ids) <= CLIENTS_IN_ORDER else sample.by_main_class()


def rank_curves(partition: Partition) -> list[Figure]:
    """Examples of each client, from the largest down (hsu2020, figures 2b, 2c, 3), and classes if they were counted.

    Zeros are left out: logarithmic axes have no place for them.
    """
    sizes, census = partition.sizes(), partition.census
    values = {"examples": sizes} | ({} if census is None else {"classes": census.classes_per_client()})
    styles = (("var(--accent)", "solid"), ("var(--validation)", "dash"))
    clients, figures = len(partition), []
    few = range(1, clients + 1) if clients < 10 else ()
    x = Axis("client, by rank", "count", log=True, limits=(0.9, 1.12 * max(clients, 2)), ticks=few)
    for (name, counts), (color, dash) in zip(values.items(), styles, strict=False):
        hover = f"number %{{x:,}} of {clients:,}<br>%{{y:,}} {name}<extra></extra>"
        line = Series(*ranked(counts[counts > 0]), name=name, color=color, dash=dash, hover=hover)
        top = max(counts.max(initial=0), 10)
        y = Axis(f"{name} of the client", "count", log=True, limits=(0.8, 1.25 * top))
        about = (
            f"{name.capitalize()} of each client, from {counts.max(initial=0):,} down to {counts.min():,}."
        )
        title = f"{name.capitalize()} of each client, by rank"
        figures.append(Figure(title, about, x, y, [line], _left_out(counts == 0, name)))
    return figures


def joined_ranks(figures: Sequence[Figure]) -> Figure:
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


def emd_histogram(census: Census) -> Figure:
    """The clients by their distance from the population, and the weighted mean (hsu2020, figure 4, top row)."""
    distances = census.client_emds()
    counts, edges = emd_counts(census)
    bars = Series(
        ((edges[:-1] + edges[1:]) / 2).round(4).tolist(),
        counts.tolist(),
        kind="bar",
        texts=[f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)],
        hover="%{y:,} clients<br>EMD %{text}<extra></extra>",
    )
    mean, most = census.emd(), int(counts.max(initial=0))
    mark = None
    if not math.isnan(mean):
        align: Align = "left" if mean < 0.6 else "right" if mean > 1.4 else "center"
        mark = VerticalLine(mean, f"weighted mean {round(mean, 3):.3g}", align)
    return Figure(
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


def feature_strips(partition: Partition) -> list[Figure]:
    """One strip per image feature, with one dot per client; the heights keep neighbouring dots apart."""
    heights = np.arange(len(partition), dtype=np.float64) * _GOLDEN % 1
    hover = "client %{text}<br>%{x:.4~g}<extra></extra>"
    return [
        Figure(
            title=name.capitalize(),
            about=f"One dot per client, from {values.min():.4g} to {values.max():.4g}.",
            x=Axis(f"{name}, {_UNITS[name]}" if name in _UNITS else name),
            y=Axis(values="hidden", limits=(-0.15, 1.15)),
            series=[
                Series(
                    values.tolist(), heights.round(3).tolist(), kind="dots", texts=partition.ids, hover=hover
                )
            ],
        )
        for name, values in partition.features.items()
    ]


def _left_out(clients: NDArray[np.bool_], name: str) -> str:
    return f"{many(missing, 'client')} without {name} not shown" if (missing := int(clients.sum())) else ""
