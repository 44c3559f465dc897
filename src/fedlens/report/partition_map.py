"""The places of a partition's examples by class: longitude against latitude, with the cells of `s2`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.format import many
from fedlens.data.catalogue import data_directory
from fedlens.data.formats.csv_table import coordinates
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.s2 import cell_borders, read_places
from fedlens.data.table import Table
from fedlens.results.chart import TEN, Axis, Panel, Series
from fedlens.results.run import Run
from fedlens.settings.make_partition import read_dataset

_DOTS = 20_000
_GREY = "#c3c8d0"


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
