"""`fedlens report`: the result page of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import Debug, RunDirectory


def report(
    directory: RunDirectory,
    pseudonyms: Annotated[
        bool,
        typer.Option(
            "--pseudonyms",
            help="Write report-pseudonyms.html, in which sites are 'site 1', 'site 2'; pseudonyms.json has the names.",
        ),
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    debug: Debug = False,
) -> None:
    """Write the result page of a run and print its path. Works during a run, too."""
    with reported(debug):
        from fedlens.pages.run_page import write_report

        page = write_report(directory, pseudonyms)
        say(page)
        if show:
            import webbrowser

            webbrowser.open(page.resolve().as_uri())
