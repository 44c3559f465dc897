"""Captions for the figures of a partition in a paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedlens.data.partition.partition import Partition
from fedlens.experiment.atomic_files import write_atomically
from fedlens.report.downsample import PartitionSample, unit
from fedlens.report.format import count, many
from fedlens.report.partition_charts import class_bars, class_matrix
from fedlens.report.partition_statistics import recipe_name, said


def write_captions(partition: Partition, path: Path) -> Path:
    """Writes the captions as a text file, one a paragraph, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(f"{name}: {caption}\n" for name, caption in captions(partition).items())
    write_atomically(path, text.encode())
    return path


def captions(partition: Partition) -> dict[str, str]:
    """A caption for each picture that `fedlens.report.pictures.draw` draws, by its name."""
    sizes, census = partition.sizes(), partition.census
    whole = _whole(partition)
    nothing = int((sizes == 0).sum())
    left_out = f" {many(nothing, 'client')} without examples {_are(nothing)} not shown." if nothing else ""
    of = "Examples" if census is None else "Examples and classes"
    texts = {"ranks": f"{of} of each client, each ranked from the largest down. {whole}{left_out}"}
    if census is not None:
        kind = unit(partition, census)
        bars, cells = class_bars(partition, census), class_matrix(partition, census)
        how = (
            "shares of the classes, below the size of each client" if bars.lopsided() else f"{kind} by class"
        )
        texts["class-bars"] = f"Data per client: {how}, one bar a client. {_sample(bars)}{whole}"
        texts["matrix"] = f"Clients by classes. {_sample(cells)}{whole}"
        unknown = int(np.isnan(census.client_emds()).sum())
        left_out = (
            f" {many(unknown, 'client')} without any class {_are(unknown)} not shown." if unknown else ""
        )
        mean = census.emd()
        line = "" if np.isnan(mean) else f"; the dashed line is the mean weighted by size, {mean:.3f}"
        texts["emd"] = (
            "Earth mover's distance (L1, 0 to 2) of each client's class distribution from the population's"
            f"{line}. {whole}{left_out}"
        )
        if kind == "marks":
            for name in ("class-bars", "matrix", "emd"):
                texts[name] += " An example may be of several classes, and has one mark for each."
    if partition.features:
        texts["features"] = f"How each client sees its images, one dot a client. {whole}"
    return dict(sorted(texts.items()))


def _whole(partition: Partition) -> str:
    left_out = ("name", "clients")
    settings = [
        f"{key} {said(value)}"
        for key, value in partition.spec.items()
        if key not in left_out and value is not None
    ]
    recipe = ", ".join([recipe_name(partition), *settings])
    return (
        f"{partition.dataset or 'A dataset'}, {count(len(partition.indices))} examples over "
        f"{many(len(partition), 'client')} ({recipe}; digest {partition.digest[:16]})."
    )


def _sample(sample: PartitionSample) -> str:
    what = f"; {sample.what}" if sample.what else ""
    return f"{sample.whose[0].upper()}{sample.whose[1:]}{what}. "


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
