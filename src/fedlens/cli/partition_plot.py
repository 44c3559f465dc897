"""`fedlens partition plot`: the figures of a partition."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import DataDir, DatasetChanges, Debug
from fedlens.cli.partition_show import PartitionFile


class PictureFormat(StrEnum):
    """A file format of pictures."""

    PNG = "png"
    PDF = "pdf"
    SVG = "svg"


def plot(
    file: PartitionFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory.")],
    formats: Annotated[
        list[PictureFormat], typer.Option("--format", help="File format; may be repeated.")
    ] = [PictureFormat.PNG, PictureFormat.PDF],  # noqa: B006
    places: Annotated[
        bool,
        typer.Option("--map", help="Add a map of the examples by class, if the dataset has coordinates."),
    ] = False,
    changes: DatasetChanges = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Draw a partition: figures for papers with captions, and a page that opens offline.

    --map reads the dataset: that of the run, or the one that the saved partition names, with its settings in --set.
    """
    with reported(debug):
        from fedlens.base.errors import DataError
        from fedlens.data.vertical.feature_partition import FeaturePartition
        from fedlens.report.partition_page import write_captions, write_page
        from fedlens.report.pictures import draw
        from fedlens.results.run import read_partition

        partition = read_partition(file)
        if isinstance(partition, FeaturePartition):
            raise DataError(
                "the file has the parties of vertical learning, and no clients to plot",
                where=str(file),
                hint="'fedlens partition show' prints them, and the page of a run shows their windows",
            )
        shown = None
        if places:
            from fedlens.report.partition_map import read_places_map

            shown = read_places_map(partition, file, changes or (), data_dir)
        written = draw(partition, out, [str(ending) for ending in dict.fromkeys(formats)], shown)
        written.append(write_captions(partition, out / "captions.txt", shown))
        for path in [*written, write_page(partition, out / "partition.html", shown)]:
            say(path)
