"""`fedlens partition`: make a scattered dataset, look at it, draw it."""

from __future__ import annotations

import typer

from fedlens.cli.partition_make import make
from fedlens.cli.partition_plot import plot
from fedlens.cli.partition_show import show

partition = typer.Typer(
    name="partition",
    help="Make a partition of a dataset, show what is in one, draw it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
partition.command("make")(make)
partition.command("show")(show)
partition.command("plot")(plot)
