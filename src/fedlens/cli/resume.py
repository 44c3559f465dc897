"""`fedlens resume`: resumes a stopped run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.display.output import reported
from fedlens.cli.options import Debug, Json, Quiet, Report, RunDataDir, RunDirectory, Strict
from fedlens.cli.run_with_progress import train

if TYPE_CHECKING:
    from fedlens.api import Result
    from fedlens.cli.display.run_display import RunDisplay


def resume(
    directory: RunDirectory,
    data_dir: RunDataDir = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Continue with edited settings, such as more rounds, edited Python files, or edited lines.",
        ),
    ] = False,
    report: Report = True,
    quiet: Quiet = False,
    as_json: Json = False,
    strict: Strict = False,
    debug: Debug = False,
) -> None:
    """Resume an interrupted or killed run from its last checkpoint."""

    def start(progress: RunDisplay) -> Result:
        from fedlens import api

        return api.resume(
            directory, data_dir=data_dir, progress=progress, report=report, accept_changes=accept_changes
        )

    with reported(debug, as_json) as output:
        train(start, quiet=quiet, output=output, strict=strict)
