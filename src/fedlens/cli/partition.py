"""`fedlens partition`: make, show and plot partitions."""

from __future__ import annotations

import typer

from fedlens.cli.partition_make import make
from fedlens.cli.partition_plot import plot
from fedlens.cli.partition_show import show

partition = typer.Typer(
    name="partition",
    help="Make a partition of a dataset, show its statistics, plot it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
partition.command("make")(make)
partition.command("show")(show)
partition.command("plot")(plot)
