"""The partition of a run, or one alone, as pictures on a page: who has how much of what."""

from __future__ import annotations

import math

import numpy as np

from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.report import partition_figures as figures
from fedlens.report import templates as parts
from fedlens.report.downsample import Excerpt, excerpt, unit
from fedlens.report.format import count, number

CELLS = (300, 250)  # at most so many clients, and classes or groups of them, in a matrix
COLORS_AT_MOST = 100
NAMED_AT_MOST = 20  # clients in a matrix with their names, in their own order
_BARS, _BARS_OF_MANY = 100, 60
_LEGEND_AT_MOST = 24
UNITS = {
    "brightness": "factor",
    "contrast": "factor",
    "blur": "standard deviation, pixels",
    "rotation": "degrees, counter-clockwise",
    "noise": "standard deviation, 1 is black to white",
}
MARKS = "An example may be of several classes: it has one mark for each, and the pictures count marks."


def partition_section(partition: Partition | None) -> str:
    """The card "Who has what"; empty where it is not known."""
    if partition is None or not len(partition):
        return ""
    census = partition.census
    lead = "The classes were not counted, so there are sizes only." if census is None else ""
    if census is not None and unit(partition, census) != "examples":
        lead = MARKS
    return parts.card(facts(partition) + pictures(partition), "Who has what", lead)


def pictures(partition: Partition) -> str:
    """Class bars, the matrix of clients and classes, ranks, distances and features, as far as they are known."""
    census = partition.census
    if census is None:
        return _ranks(partition) + _features(partition)
    small = _ranks(partition) + _distances(census)
    pair = f'<div class="pair wide-left">{_heat(partition, census)}<div class="stack">{small}</div></div>'
    return _bars(partition, census) + pair + _features(partition)


def facts(partition: Partition) -> str:
    """The few numbers that say most."""
    sizes, census = partition.sizes(), partition.census
    said = [("Clients", count(len(sizes))), ("Examples", count(int(sizes.sum())))]
    if np.ptp(sizes) == 0:
        said.append(("Examples a client", count(int(sizes[0]))))
    else:
        low, middle, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
        said.append(("Smallest, median, largest", f"{low:,}, {middle:,.0f}, {high:,}"))
    if census is not None:
        held = census.classes_per_client()
        low, high = int(held.min()), int(held.max())
        said.append(("Classes a client", f"{low}" if low == high else f"{low} to {high}"))
        said.append(("Classes", count(len(census.classes))))
        if not math.isnan(emd := census.emd()):
            said.append(("Mean EMD (0 alike, 2 apart)", number(round(emd, 3))))
    return parts.facts(said)


def _bars(partition: Partition, census: Census) -> str:
    shown = bars_of(partition, census)
    title = "Classes of each client"
    if len(shown.ids) < len(partition):
        title = f"Classes of {shown.whose}"
    if shown.what:
        title += f"; {shown.what}"
    about = f"Stacked bars: the {shown.unit} of {len(shown.ids)} clients by class."
    views = [
        parts.View(shown.unit, layout=_axis("", "~s", "", shown.unit)),
        parts.View("shares", layout=_axis("percent", "", " %", "")),
    ]
    if shown.lopsided():
        views.reverse()
    few = len(shown.labels) <= _LEGEND_AT_MOST
    figure = figures.class_bars(shown)
    return parts.plot(figure, title, about, level=3, keys=few, views=() if shown.even() else views)


def bars_of(partition: Partition, census: Census) -> Excerpt:
    """What the class bars show: all of up to 100 clients, else 60 of them."""
    return excerpt(partition, census, _BARS if len(partition) <= _BARS else _BARS_OF_MANY, COLORS_AT_MOST)


def cells_of(partition: Partition, census: Census) -> Excerpt:
    """What the matrix of clients and classes shows: a few clients as they come, else by their main class."""
    shown = excerpt(partition, census, *CELLS)
    return shown if len(shown.ids) <= NAMED_AT_MOST else shown.by_main_class()


def _axis(norm: str, tickformat: str, suffix: str, title: str) -> dict[str, str]:
    return {
        "barnorm": norm,
        "yaxis.tickformat": tickformat,
        "yaxis.ticksuffix": suffix,
        "yaxis.title.text": title,
    }


def _heat(partition: Partition, census: Census) -> str:
    shown = cells_of(partition, census)
    named = len(shown.ids) <= NAMED_AT_MOST
    about = "A heat map: for each client the share of each class in what it holds."
    title = f"Share of each class, {shown.whose}"
    return parts.plot(figures.class_heat(shown, named), title, about, level=3, shape="tower")


def _ranks(partition: Partition) -> str:
    sizes, census = partition.sizes(), partition.census
    held = None if census is None else census.classes_per_client()
    title = "Examples of each client, by rank" if held is None else "Examples and classes, by rank"
    if nothing := int((sizes == 0).sum()):
        title += f"; {count(nothing)} without examples not shown"
    about = f"A line from the largest client to the smallest, {sizes.max():,} to {sizes.min():,} examples"
    about += "." if held is None else f", and one of classes, {held.max():,} to {held.min():,}."
    return parts.plot(figures.ranks(sizes, held), title, about, level=3, shape="low", keys=held is not None)


def _distances(census: Census) -> str:
    distances, mean = census.client_emds(), census.emd()
    title = "Distance of each client from the population"
    if nothing := int(np.isnan(distances).sum()):
        title += f"; {count(nothing)} without any class not shown"
    about = (
        f"A histogram of the clients' earth mover's distances, 0 to 2; their weighted mean is {number(mean)}."
    )
    return parts.plot(figures.emd_histogram(distances, mean), title, about, level=3, shape="low", keys=False)


def _features(partition: Partition) -> str:
    strips = [
        parts.plot(
            figures.feature_strip(values, partition.ids, UNITS.get(name, name)),
            name.capitalize(),
            f"One dot a client, from {values.min():.4g} to {values.max():.4g}.",
            level=3,
            shape="strip",
        )
        for name, values in partition.features.items()
    ]
    if not strips:
        return ""
    return f'<h2 class="next">How each client sees its images</h2><div class="pair">{"".join(strips)}</div>'
