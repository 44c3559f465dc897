"""`fedlens purge`: remove what a run keeps besides its model, results and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import Debug


def purge(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A run directory: runs/<name>/<run-id>.")
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Purge all runs of this federation that are older than 'fedlens federation retention' says.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Remove checkpoints, client states, recordings and the journal of a run. It cannot be resumed then.

    The model, the results, the page and the logs stay. 'fedlens serve' purges what is due while it runs.
    """
    with reported(debug):
        from time import time

        from fedlens.base.errors import ConfigError
        from fedlens.identity.federation_folder import FederationFolder
        from fedlens.run.rundir import RunDir
        from fedlens.server.retention import ServedRuns
        from fedlens.server.retention import purge as purge_run

        if (directory is None) == (federation is None):
            raise ConfigError("purge needs a run directory or --federation, and not both")
        if directory is not None:
            runs = [RunDir.open(directory)]
        else:
            assert federation is not None
            runs = ServedRuns(FederationFolder(federation).folder).due(time())
        for run in runs:
            say(f"purged: {run.path}: {purge_run(run)}")
        if not runs:
            say("nothing is due")
