"""`fedlens partition plot`: the figures of a partition."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import Debug
from fedlens.cli.output import reported, say
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
    debug: Debug = False,
) -> None:
    """Draw a partition: figures for papers with captions, and a page that opens offline."""
    with reported(debug):
        from fedlens.report.partition_page import write_captions, write_page
        from fedlens.report.pictures import draw
        from fedlens.report.read import read_partition

        partition = read_partition(file)
        written = draw(partition, out, [str(ending) for ending in dict.fromkeys(formats)])
        written.append(write_captions(partition, out / "captions.txt"))
        for path in [*written, write_page(partition, out / "partition.html")]:
            say(path)
