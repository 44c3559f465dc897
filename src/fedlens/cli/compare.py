"""`fedlens compare`: a table of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.base.printable import printable
from fedlens.cli.display.output import print_columns, print_json, reported
from fedlens.cli.options import Debug, Json

if TYPE_CHECKING:
    from fedlens.results.comparison import Comparison

ALL_UP_TO = 10  # clients of which the table has every one
CLIENTS_SHOWN = 5  # of more clients


def compare(
    directories: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR...",
            help="Run directories, folders with runs below them, or patterns: 'runs/*/2026*'.",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with all curves on one axis.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw the curves for a paper or slides; the name ends in .pdf, .png or .svg.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="One more column, and the curves of --plot: a metric, loss, or a number of your own.",
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Show runs that differ in the seed alone one by one.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare runs: the score, such as accuracy, and its ratio to a centralized run; EMD, time and bytes."""
    with reported(debug, as_json):
        from fedlens.pages.compare import write_page_of, write_plot
        from fedlens.results.comparison import Comparison

        comparison = Comparison.of(directories, each=each)
        if as_json:
            print_json(comparison.with_column(metric)[0] if metric else comparison.rows)
        else:
            show(comparison, metric)
        for sentence in comparison.skipped:
            typer.echo(printable(sentence), err=True)
        if html is not None:
            typer.echo(printable(f"page: {write_page_of(comparison, html)}"), err=as_json)
        if plot is not None:
            typer.echo(printable(f"picture: {write_plot(comparison, plot, metric)}"), err=as_json)


def show(comparison: Comparison, metric: str | None = None) -> None:
    """Prints the table of runs, with one more metric if one is named, its notes, and the worst clients."""
    from fedlens.results.comparison import client_table, readable

    texts = comparison.with_column(metric)[1] if metric else readable(comparison.rows)
    words = ("run", "algorithm", "partition", "dataset")
    numeric = [k for k, column in enumerate(texts[0]) if column not in words]
    print_columns([list(row.values()) for row in texts], list(texts[0]), numeric)
    for note in comparison.notes:
        typer.echo(printable(f"note: {note}"))
    head, rows = client_table(comparison.groups)
    if rows:
        typer.echo("")
        shown = rows if len(rows) <= ALL_UP_TO else rows[:CLIENTS_SHOWN]
        print_columns(shown, head, range(1, len(head)))
        if len(rows) > len(shown):
            typer.echo(f"and {len(rows) - len(shown)} more clients; --html or --json has them all")
