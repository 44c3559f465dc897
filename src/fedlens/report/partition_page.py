"""A partition as a page that opens offline, and as a section in the page of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.report import partition_charts as charts
from fedlens.report import partition_figures as figures
from fedlens.report import render
from fedlens.report.downsample import unit
from fedlens.report.format import count, many, number
from fedlens.report.partition_statistics import numbers, recipe_name, said

_LEGEND_AT_MOST = 24
_MARKS = "An example may be of several classes: it has one mark for each, and the figures count marks."


def write_page(partition: Partition, path: Path) -> Path:
    """Writes the page of a partition, and returns its path."""
    recipe, dataset = recipe_name(partition), partition.dataset or "a dataset"
    context = {
        "title": f"{dataset} by {recipe} · fedlens",
        "aside": partition.digest[:16],
        "dataset": dataset,
        "clients": many(len(partition), "client"),
        "recipe": recipe,
        "partition": partition_section(partition),
        "numbers": numbers(partition),
        "settings": [(key, said(value)) for key, value in partition.spec.items()],
        "digest": partition.digest,
    }
    return render.write_page(path, "partition.html.j2", context)


def partition_section(partition: Partition | None) -> dict[str, Any] | None:
    """Facts and figures of the section "Data per client"; None for an unknown or empty partition."""
    if partition is None or not len(partition):
        return None
    census = partition.census
    shown = {
        "lead": "Only sizes are shown, because the classes were not counted.",
        "facts": _facts(partition),
        "matrix": None,
        "ranks": _ranks(partition),
        "strips": _strips(partition),
    }
    if census is not None:
        lead = "" if unit(partition, census) == "examples" else _MARKS
        shown |= {"lead": lead, "bars": _bars(partition, census)}
        shown |= {"matrix": _matrix(partition, census), "distances": _distances(census)}
    return shown


def _facts(partition: Partition) -> list[tuple[str, str]]:
    """The few numbers that say most."""
    sizes, census = partition.sizes(), partition.census
    facts = [("Clients", count(len(sizes))), ("Examples", count(int(sizes.sum())))]
    if np.ptp(sizes) == 0:
        facts.append(("Examples per client", count(int(sizes[0]))))
    else:
        low, middle, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
        facts.append(("Smallest, median, largest", f"{low:,}, {middle:,.0f}, {high:,}"))
    if census is not None:
        held = census.classes_per_client()
        low, high = int(held.min()), int(held.max())
        facts.append(("Classes per client", f"{low}" if low == high else f"{low} to {high}"))
        facts.append(("Classes", count(len(census.classes))))
        if not math.isnan(emd := census.emd()):
            facts.append(("Mean EMD (0 alike, 2 apart)", number(round(emd, 3))))
    return facts


def _bars(partition: Partition, census: Census) -> render.Plot:
    sample = charts.class_bars(partition, census)
    title = f"Classes of {sample.whose if len(sample.ids) < len(partition) else 'each client'}"
    views = [
        render.View(sample.unit, layout=_axis("", "~s", "", sample.unit)),
        render.View("shares", layout=_axis("percent", "", " %", "")),
    ]
    if sample.lopsided():
        views.reverse()
    return render.Plot(
        figures.class_bars(sample),
        f"{title}; {sample.what}" if sample.what else title,
        f"Stacked bars: the {sample.unit} of {len(sample.ids)} clients by class.",
        keys=len(sample.labels) <= _LEGEND_AT_MOST,
        views=() if sample.even() else views,
    )


def _axis(norm: str, tickformat: str, suffix: str, title: str) -> dict[str, str]:
    axis = {"tickformat": tickformat, "ticksuffix": suffix, "title.text": title}
    return {"barnorm": norm, **{f"yaxis.{key}": value for key, value in axis.items()}}


def _matrix(partition: Partition, census: Census) -> render.Plot:
    sample = charts.class_matrix(partition, census)
    about = "A heat map: for each client the share of each class in its data."
    return render.Plot(
        figures.class_matrix(sample), f"Share of each class, {sample.whose}", about, shape="tower"
    )


def _ranks(partition: Partition) -> render.Plot:
    curves, sizes = charts.rank_curves(partition), partition.sizes()
    title = "Examples and classes, by rank" if len(curves) > 1 else "Examples of each client, by rank"
    if empty := int((sizes == 0).sum()):
        title += f"; {count(empty)} without examples not shown"
    about = f"A line from the largest client to the smallest, {sizes.max():,} to {sizes.min():,} examples"
    if partition.census is not None:
        held = partition.census.classes_per_client()
        about += f", and one of classes, {held.max():,} to {held.min():,}"
    return render.Plot(figures.rank_curves(curves), title, f"{about}.", shape="low", keys=len(curves) > 1)


def _distances(census: Census) -> render.Plot:
    histogram = charts.emd_histogram(census)
    title = "Distance of each client from the population"
    if histogram.unknown:
        title += f"; {count(histogram.unknown)} without any class not shown"
    about = f"A histogram of the clients' earth mover's distances, 0 to 2; weighted mean {number(histogram.mean)}."
    return render.Plot(figures.emd_histogram(histogram), title, about, shape="low", keys=False)


def _strips(partition: Partition) -> list[render.Plot]:
    return [
        render.Plot(
            figures.feature_strip(strip),
            strip.name.capitalize(),
            f"One dot per client, from {strip.values.min():.4g} to {strip.values.max():.4g}.",
            shape="strip",
        )
        for strip in charts.feature_strips(partition)
    ]
