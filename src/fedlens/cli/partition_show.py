"""`fedlens partition show`: the statistics of a saved partition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import print_columns, print_json, reported
from fedlens.cli.options import Debug, Json

PartitionFile = Annotated[Path, typer.Argument(metavar="FILE", help="A saved partition or a run directory.")]


def show(
    file: PartitionFile,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print clients, examples, sizes, classes per client, EMD, imbalance and digest of a partition."""
    with reported(debug, as_json):
        from fedlens.report.partition_statistics import describe, readable
        from fedlens.results.run import read_partition

        partition = read_partition(file)
        if as_json:
            print_json(describe(partition))
            return
        print_columns(readable(partition))
