"""Trains for `run` and `resume`: shows the progress and prints the path of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedlens.base.format import many
from fedlens.base.shell_command import shell_command
from fedlens.cli.display.output import (
    INTERRUPTED,
    CommandOutput,
    Interrupted,
    OutputLost,
    complain,
    console,
    error_object,
    error_parts,
    flush_output,
    stdout_kept_clean,
)
from fedlens.cli.display.run_display import RunDisplay

if TYPE_CHECKING:
    from fedlens.api import Result


def train(
    start: Callable[[Any], Result],
    *,
    quiet: bool,
    output: CommandOutput,
    strict: bool = False,
    again: str | None = None,
    files: Mapping[str, Path] | None = None,
    shown: type[RunDisplay] = RunDisplay,
) -> None:
    """Calls `start` with a progress display of the class `shown`, and prints the outcome.

    `again` is the command that resumes the run, by default `fedlens resume`. `files` are what the command
    wrote beside the run directory, by name, once `start` has returned; with --quiet the first is printed alone.

    Raises what `start` raises; `Interrupted` says how to resume, `OutputLost` that the result could not be printed.
    With `strict`, raises `typer.Exit` with code 1 if the run has warnings.
    """
    display = shown(console(stderr=output.as_json), quiet)
    try:
        with stdout_kept_clean(output.as_json):
            try:
                result = start(display)
            finally:
                display.close()
    except KeyboardInterrupt:
        if display.directory is None:
            raise Interrupted("nothing was started") from None
        how = f"resume with: {again or shell_command('resume', display.directory)}"
        if output.as_json:
            what = "the run was interrupted"
            output.json(_ended(display.directory, error_object("interrupted", INTERRUPTED, what, hint=how)))
        raise Interrupted(how) from None
    except Exception as error:
        if output.as_json and display.directory is not None:
            output.json(_ended(display.directory, error_object("failed", *error_parts(error, output.debug))))
        raise
    if output.as_json:
        output.json({**result.summary, **({"files": files} if files else {})})
    display.result(result.summary, Path(result.directory), files or {})
    _check_written(display, output)
    if strict and result.warnings:
        first = result.warnings[0]["sentence"]
        complain(
            "error", f"--strict is set, and the run has {many(len(result.warnings), 'warning')}: {first}"
        )
        raise typer.Exit(1)


def _check_written(display: RunDisplay, output: CommandOutput) -> None:
    """Raises `OutputLost` if what the command prints on standard output was lost for another reason than its reader."""
    flush_output()
    if display.lost is not None and not output.as_json:
        lost = OutputLost(display.lost, f"; the run is in {display.directory}")
        if not lost.broken_pipe:
            raise lost


def _ended(directory: Path, outcome: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run that ended badly, with the status, error and exit code of `outcome`.

    Only these and the directory if the run could not write a summary.
    """
    from fedlens.base.errors import FedlensError
    from fedlens.run.rundir import RunDir

    summary = None
    with suppress(FedlensError):
        summary = RunDir(directory).read_summary()
    return {**(summary or {}), **outcome, "directory": str(directory)}
