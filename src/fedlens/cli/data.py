"""`fedlens data`: lists, describes and shows datasets, and checks your own data."""

from __future__ import annotations

import typer

from fedlens.cli.data_check import check
from fedlens.cli.data_info import info
from fedlens.cli.data_list import list_datasets
from fedlens.cli.data_show import show

data = typer.Typer(
    name="data",
    help="List the datasets, describe or show one, check your own.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
data.command("list")(list_datasets)
data.command("info")(info)
data.command("show")(show)
data.command("check")(check)
