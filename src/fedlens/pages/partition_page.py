"""A partition as a page that opens offline, as a section in the page of a run, and as captions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.base.format import count, many, number, setting
from fedlens.data.partition.partition import Partition
from fedlens.data.vertical.feature_partition import AnyPartition
from fedlens.pages import render
from fedlens.results.figures import partition_figures as data
from fedlens.results.figures.chart import Panel
from fedlens.results.figures.partition_figures import unit
from fedlens.results.partition_statistics import numbers, recipe_name

_MOST = 20  # items of a setting that is a list


def write_page(partition: Partition, path: Path, places: Panel | None = None) -> Path:
    """Writes the page of a partition, with the map `places` if it is given, and returns its path."""
    recipe, dataset = recipe_name(partition), partition.dataset or "a dataset"
    shown = [] if places is None else [places]
    context = {
        "title": f"{dataset} by {recipe} · fedlens",
        "aside": partition.digest[:16],
        "dataset": dataset,
        "clients": many(len(partition), "client"),
        "recipe": recipe,
        "partition": partition_section(partition),
        "places": shown,
        "numbers": numbers(partition),
        "settings": [(key, setting(value, _MOST)) for key, value in partition.spec.items()],
        "digest": partition.digest,
        "client_names": partition.ids,
    }
    return render.write_page(path, "partition.html.j2", context)


def write_captions(partition: Partition, path: Path, places: Panel | None = None) -> Path:
    """Writes a text file with a caption for each picture of `results.figures.pictures.draw`, and returns its path."""
    census, spec = partition.census, partition.spec.items()
    settings = [
        f"{key} {setting(v, _MOST)}" for key, v in spec if key not in ("name", "clients") and v is not None
    ]
    context = {
        "bars": census and data.bar_sample(partition, census),
        "matrix": census and data.matrix_sample(partition, census),
        "emd": census and data.emd_histogram(census),
        "ranks": data.joined_ranks(data.rank_curves(partition)),
        "features": partition.features,
        "places": places,
        "whole": f"{partition.dataset or 'A dataset'}, {count(len(partition.indices))} examples over "
        f"{many(len(partition), 'client')} ({', '.join([recipe_name(partition), *settings])}; "
        f"digest {partition.digest[:16]}).",
    }
    return render.write_page(path, "captions.txt.j2", context)


def partition_section(partition: AnyPartition | None) -> dict[str, Any] | None:
    """Facts and figures of the section "Data per client"; None for an unknown or empty partition, and for parties."""
    if not isinstance(partition, Partition) or not len(partition):
        return None
    census, curves = partition.census, data.rank_curves(partition)
    section = {
        "facts": _facts(partition),
        "unit": census and unit(partition, census),
        "ranks": replace(data.joined_ranks(curves), shape="low"),
        "strips": data.feature_strips(partition),
    }
    if census is not None:
        section |= {
            "bars": data.class_bars(data.bar_sample(partition, census), len(partition)),
            "matrix": data.class_matrix(data.matrix_sample(partition, census)),
            "distances": replace(data.emd_histogram(census), shape="low"),
        }
    return section


def _facts(partition: Partition) -> list[tuple[str, str]]:
    """The most important numbers."""
    sizes, census = partition.sizes(), partition.census
    facts = [("Clients", count(len(sizes))), ("Examples", count(int(sizes.sum())))]
    if np.ptp(sizes) == 0:
        facts.append(("Examples per client", count(int(sizes[0]))))
    else:
        levels = (sizes.min(), np.median(sizes), sizes.max())
        facts.append(("Smallest, median, largest", ", ".join(map(count, levels))))
    if census is not None:
        per_client = census.classes_per_client()
        facts.append(
            ("Classes per client", " to ".join(map(str, sorted({per_client.min(), per_client.max()}))))
        )
        facts.append(("Classes", count(len(census.classes))))
        if not math.isnan(emd := census.emd()):
            facts.append(("Mean EMD (0 alike, 2 apart)", number(round(emd, 3))))
    return facts
