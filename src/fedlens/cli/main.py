"""`fedlens`: the commands; slow imports wait until a command needs them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedlens import __version__
from fedlens.cli.bench import bench
from fedlens.cli.compare import compare
from fedlens.cli.data import data
from fedlens.cli.list import list_names
from fedlens.cli.partition import partition
from fedlens.cli.report import report
from fedlens.cli.resume import resume
from fedlens.cli.run import RunCommand, run
from fedlens.cli.show import show

app = typer.Typer(
    name="fedlens",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=RunCommand)(run)
app.command("resume")(resume)
app.command("list")(list_names)
app.command("show")(show)
app.command("compare")(compare)
app.command("report")(report)
app.add_typer(data)
app.add_typer(bench)
app.add_typer(partition)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedlens {__version__}")
        raise typer.Exit


@app.callback(epilog="First steps: [bold]fedlens run digits[/bold], then open the page it names.")
def fedlens(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning for computer vision: train on partitioned data, and measure what the partition costs."""


def main() -> None:
    """The entry point of the `fedlens` command."""
    try:
        app(prog_name="fedlens")
    except KeyboardInterrupt:  # before a run has started
        sys.exit(130)
