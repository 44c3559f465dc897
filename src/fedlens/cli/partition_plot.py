"""`fedlens partition plot`: a partition as pictures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import Debug
from fedlens.cli.output import reported
from fedlens.cli.partition_show import PartitionFile


class Format(StrEnum):
    """A kind of picture file."""

    PNG = "png"
    PDF = "pdf"
    SVG = "svg"


def plot(
    file: PartitionFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The directory for the files.")],
    formats: Annotated[
        list[Format], typer.Option("--format", help="The kind of picture files; may be repeated.")
    ] = [Format.PNG, Format.PDF],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Draw a partition: figures for papers, their captions, and a page that opens offline."""
    with reported(debug):
        from fedlens.report.captions import write_captions
        from fedlens.report.partition_page import write_page
        from fedlens.report.pictures import draw
        from fedlens.report.read import read_partition

        partition = read_partition(file)
        written = draw(partition, out, [str(ending) for ending in dict.fromkeys(formats)])
        written.append(write_captions(partition, out / "captions.txt"))
        for path in [*written, write_page(partition, out / "partition.html")]:
            typer.echo(path)
