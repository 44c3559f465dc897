"""The data of a partition's figures, computed once for the page (plotly) and for picture files (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.format import many, number
from fedlens.data.catalogue import data_directory
from fedlens.data.formats.csv_table import coordinates
from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.s2 import cell_borders, read_places
from fedlens.data.table import Table
from fedlens.results.figures.chart import (
    NAMED,
    TEN,
    Align,
    Axis,
    Cells,
    Panel,
    Series,
    VerticalLine,
    named_axis,
    round_step,
    short,
    stacked_bars,
)
from fedlens.results.run import Run
from fedlens.settings.make_partition import read_dataset

_DOTS = 20_000
_GREY = "#c3c8d0"
_LOPSIDED = 4  # the largest bar over the median one, from where on bars are drawn as shares
_FINE = 2000
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


def read_places_map(partition: Partition, path: Path, changes: Sequence[str], data_dir: Path | None) -> Panel:
    """The map of a partition at `path`, a file or a run directory, whose dataset is read.

    Args:
        changes: `key=value`, a setting of the dataset, or its name.
        data_dir: the data folder; by default that of the run.

    Raises what `read_dataset` and `places_map` raise.
    """
    name, settings, seed = partition.dataset, dict[str, Any](), None
    if path.is_dir():
        run = Run.open(path)
        settings, seed = dict(run.config["data"]["dataset"]), run.config["seeds"]["data"]
        name = settings.pop("name")
        data_dir = data_dir or Path(run.environment.get("data_dir", data_directory(None)))
    data = read_dataset(name, changes, settings, data_seed=seed, root=data_directory(data_dir))
    return places_map(partition, data.table())


def places_map(partition: Partition, table: Table) -> Panel:
    """One dot for each class of an example, the nine largest classes in colours (hsu2020, figure 1).

    Args:
        table: of the training split that the partition was made from. Its columns of coordinates are those of the
            partition `s2`, or are recognized by name, as `data check` does.

    Raises `ConfigError` if the dataset has no coordinates, `DataError` if the table is another one's, or no example has
    valid coordinates.
    """
    if partition.data and partition.data != table.identity:
        raise DataError(
            "the training examples differ from those that the partition was made from",
            where=partition.dataset,
            hint="give the settings of the dataset with --set, and its folder with --data-dir",
        )
    stated = [str(partition.spec.get(key)) for key in ("lat", "lon")]
    columns = sorted(coordinates(table.columns)) if not set(stated) <= set(table.columns) else stated
    if not columns:
        raise ConfigError(
            f"'{partition.dataset}' has no coordinates, so its examples have no places on a map",
            where="--map",
            hint="remove --map; coordinates are columns such as lat and lon",
        )
    held = table.take(partition.indices)
    latitude, longitude, usable = read_places(held, columns[0], columns[1], skip=True)
    shown = held.take(usable)
    at = np.unique(np.linspace(0, len(shown.marks) - 1, min(len(shown.marks), _DOTS)).astype(np.int64))
    marks, rows = shown.marks[at], shown.rows[at]
    order = np.argsort(-np.bincount(shown.marks, minlength=len(table.classes)), kind="stable")
    named = order[: len(TEN) - 1].tolist()
    series = []
    if partition.spec.get("name") == "s2":
        x, y = cell_borders(partition.ids)
        series = [Series(x, y, kind="level", color="#9aa3b0", width=0.75)]
    rest = np.unique(marks[~np.isin(marks, named)])
    groups = [(many(len(rest), "other class", "other classes"), _GREY, rest)] if len(rest) else []
    groups += [(table.classes[label], TEN[k], np.array([label])) for k, label in enumerate(named)]
    for name, color, labels in groups:
        chosen = rows[np.isin(marks, labels)]
        x, y = longitude[chosen].round(4).tolist(), latitude[chosen].round(4).tolist()
        series.append(Series(x, y, name, "dots", color))
    missing = len(held) - len(usable)
    notes = [f"{many(missing, 'example')} without coordinates not shown"] if missing else []
    notes += (
        [f"{len(at):,} of {len(shown.marks):,} dots shown, evenly spread"]
        if len(at) < len(shown.marks)
        else []
    )
    return Panel(
        "Places of the examples by class",
        f"Map of {many(len(usable), 'example')}, longitude against latitude, coloured by class.",
        Axis("longitude, degrees"),
        Axis("latitude, degrees"),
        series,
        "; ".join(notes),
        shape="map",
    )


@dataclass(frozen=True)
class PartitionSample:
    """Some clients, and their marks by class or by group of neighbouring classes.

    Args:
        ids: the clients shown.
        counts: int64 [clients shown, groups], marks.
        sizes: int64 [clients shown], examples.
        labels: the name of each class or group.
        starts: the name of each class, or of the first of each group.
        clients_shown: "all 100 clients", or how many of them and how they were chosen.
        grouping: how the classes were grouped, or empty.
        unit: "examples", or "marks" where an example counts for any number of classes.
    """

    ids: tuple[str, ...]
    counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: tuple[str, ...]
    starts: tuple[str, ...]
    clients_shown: str
    grouping: str
    unit: str

    def shares(self) -> NDArray[np.float64]:
        """float64 [clients shown, groups]: the counts of each client as shares; 0 for an empty client."""
        shares: NDArray[np.float64] = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return shares

    def excerpt(self) -> str:
        """Which clients and classes are shown, line by line; empty if it is all of them."""
        whole = self.clients_shown.startswith(("all", "the one"))
        return "\n".join(filter(None, ["" if whole else self.clients_shown, self.grouping]))

    def even(self) -> bool:
        """Whether every client shown has the same number of marks."""
        return not len(self.counts) or np.ptp(self.counts.sum(axis=1)) == 0

    def lopsided(self) -> bool:
        """Whether the largest clients would dwarf the others."""
        marks = self.counts.sum(axis=1)
        return bool(len(marks)) and float(marks.max()) > _LOPSIDED * max(float(np.median(marks)), 1.0)

    def fine(self) -> bool:
        """Whether the cells of a matrix are so small that pale ones are hard to see."""
        return self.counts.size > _FINE

    def top_share(self) -> float:
        """The end of a matrix's colour scale: the largest share, or twice an even share where that is more."""
        even = 2 / max(len(self.labels), 2)
        return max(float(self.shares().max(initial=0)), even)

    def by_main_class(self) -> PartitionSample:
        """The same sample with the clients sorted by their most frequent class, the purest first."""
        shares = self.shares()
        order = np.lexsort((-shares.max(axis=1, initial=0), shares.argmax(axis=1)))
        ids = tuple(self.ids[k] for k in order)
        return replace(self, ids=ids, counts=self.counts[order], sizes=self.sizes[order])


def sample_partition(partition: Partition, census: Census, clients: int, classes: int) -> PartitionSample:
    """At most `clients` clients by at most `classes` classes.

    More clients are sampled at evenly spaced places in the order of size, the largest first (of position, if all
    sizes are equal). More classes are summed in groups of neighbours.

    >>> p = Partition.of_owners(np.repeat(np.arange(5), [1, 4, 2, 5, 3]), 5).counted(np.zeros(15, int))
    >>> some = sample_partition(p, p.census, 3, 10)
    >>> some.ids, some.sizes.tolist(), some.clients_shown
    (('3', '4', '0'), [5, 3, 1], '3 of 5 clients, evenly spread over the sizes')
    """
    sizes = partition.sizes()
    shown, clients_shown = _clients(sizes, clients)
    groups = min(classes, len(census.classes))
    edges = np.linspace(0, len(census.classes), groups + 1).round().astype(np.int64)
    counts, grouping = census.dense(shown), ""
    names = tuple(name.strip() or f"class {k}" for k, name in enumerate(census.classes))
    labels = starts = names
    if groups < len(names):
        counts = np.add.reduceat(counts, edges[:-1], axis=1)
        labels = tuple(_span(names[a:b]) for a, b in pairwise(edges))
        starts = tuple(names[a] for a in edges[:-1])
        low, high = int(np.diff(edges).min()), int(np.diff(edges).max())
        each = f"{low}" if low == high else f"{low} or {high}"
        grouping = f"{len(names):,} classes in {groups} groups of {each} neighbours"
    ids = tuple(partition.ids[k] for k in shown)
    return PartitionSample(
        ids, counts, sizes[shown], labels, starts, clients_shown, grouping, unit(partition, census)
    )


def unit(partition: Partition, census: Census) -> str:
    """The unit of a census: "examples" if each has one class, else "marks"."""
    single = len(census.counts) == 0 or int(census.counts.sum()) == len(partition.indices)
    return "examples" if single else "marks"


def _clients(sizes: NDArray[np.int64], at_most: int) -> tuple[NDArray[np.int64], str]:
    if len(sizes) <= at_most:
        return np.arange(len(sizes)), "the one client" if len(sizes) == 1 else f"all {len(sizes):,} clients"
    some = f"{at_most} of {len(sizes):,} clients, evenly spread"
    places = np.linspace(0, len(sizes) - 1, at_most).round().astype(np.int64)
    if np.ptp(sizes) == 0:
        return places, some
    return np.argsort(-sizes, kind="stable")[places], f"{some} over the sizes"


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def ranked(values: NDArray[Any], at_most: int = 400) -> tuple[list[int], list[float]]:
    """(ranks from 1 on, values from the largest down), thinned to places evenly spaced on a logarithmic axis.

    >>> ranked(np.array([3, 9, 1]))
    ([1, 2, 3], [9, 3, 1])
    """
    ordered = -np.sort(-values)
    if len(ordered) > at_most:
        places = np.unique(np.geomspace(1, len(ordered), at_most).round().astype(np.int64))
    else:
        places = np.arange(1, len(ordered) + 1)
    return places.tolist(), ordered[places - 1].tolist()


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
    places = range(len(sample.ids))
    step = round_step(len(places))
    names, limits = [short(name, _ID_WIDTH) for name in sample.ids[::step]], (-0.6, len(places) - 0.4)
    x = Axis("client", limits=limits, ticks=places[::step], names=names)
    whole = f"Classes of {sample.clients_shown if len(sample.ids) < clients else 'each client'}"
    about = f"Stacked bars of the {sample.unit} of {many(len(sample.ids), 'client')} by class."

    def seen(view: str, values: NDArray[Any], y: Axis) -> Panel:
        series = stacked_bars(values, sample.labels, sample.ids)
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


def client_name(name: str) -> str:
    """The name of a client outside a table of clients.

    >>> client_name("3"), client_name("client 3"), client_name("Hospital A")
    ('client 3', 'client 3', 'Hospital A')
    """
    return f"client {name}" if name.isdecimal() else name


def class_matrix(sample: PartitionSample) -> Panel:
    """Client by class, as in figures 3 and 11 of fedcv: the share of each class in a client's examples."""
    clients, classes = len(sample.ids), len(sample.labels)
    cells = Cells(
        sample.shares(),
        [
            f"{client_name(name)} ({size:,} examples)"
            for name, size in zip(sample.ids, sample.sizes, strict=True)
        ],
        sample.labels,
        f"share of the client's {sample.unit}",
        (0.0, sample.top_share()),
        "share",
        0.2 if sample.fine() else 0.5,
        counts=sample.counts if sample.counts.size <= _COUNTED and max(clients, classes) <= NAMED else None,
    )
    x = named_axis(Axis(), sample.labels, "class" if sample.grouping else f"{classes} classes")
    by_class = f"{clients} clients, by main class"
    y = named_axis(Axis("client", name_width=_ID_WIDTH), sample.ids, by_class, CLIENTS_IN_ORDER)
    title = "Share of each class" if cells.counts is None else "Examples of each class (colour: share)"
    return Panel(
        f"{title}, {sample.clients_shown}",
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
    heights = (np.arange(len(partition), dtype=np.float64) * _GOLDEN % 1).round(3).tolist()
    y, strips = Axis(values="hidden", limits=(-0.15, 1.15)), []
    for name, values in partition.features.items():
        about = f"One dot per client, from {values.min():.4g} to {values.max():.4g}."
        x = Axis(f"{name}, {_UNITS[name]}" if name in _UNITS else name)
        dots = Series(values.tolist(), heights, kind="dots", texts=partition.ids)
        strips.append(Panel(name.capitalize(), about, x, y, [dots], shape="strip"))
    return strips


def _left_out(clients: NDArray[np.bool_], name: str) -> str:
    return f"{many(missing, 'client')} without {name} not shown" if (missing := int(clients.sum())) else ""
