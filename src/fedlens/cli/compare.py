"""`fedlens compare`: a table of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import Debug, Json
from fedlens.cli.output import print_columns, print_json, printable, reported


def compare(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with all curves on one axis.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare runs: accuracy, accuracy relative to a centralized run, EMD, time and bytes."""
    with reported(debug, as_json):
        from fedlens.report import compare as comparison

        rows = comparison.compare(directories)
        if as_json:
            print_json(rows)
        else:
            texts = comparison.readable(rows)
            words = ("run", "algorithm", "partition", "dataset")
            numeric = [k for k, column in enumerate(texts[0]) if column not in words]
            print_columns([list(row.values()) for row in texts], list(texts[0]), numeric)
        if html is not None:
            page = comparison.write_comparison(directories, html)
            typer.echo(printable(f"page: {page}"), err=as_json)
