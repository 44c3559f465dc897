"""Trains for `run` and `resume`: shows the progress and prints the path of the result."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedlens.cli.output import Interrupted, print_json, stdout_kept_clean
from fedlens.cli.progress_display import ProgressDisplay, make_display

if TYPE_CHECKING:
    from fedlens.api import Result


def train(
    start: Callable[[ProgressDisplay], Result], *, quiet: bool, as_json: bool, strict: bool = False
) -> None:
    """Calls `start` with a progress display, and prints the outcome.

    Raises what `start` raises; `Interrupted` says how to continue. With `strict`, raises `typer.Exit` with code 1 if
    the run has warnings.
    """
    display = make_display(quiet=quiet, stderr=as_json)
    try:
        with stdout_kept_clean(as_json), terminated_like_interrupted():
            try:
                result = start(display)
            finally:
                display.close()
    except KeyboardInterrupt:
        if display.directory is None:
            raise Interrupted("nothing was started") from None
        if as_json:
            print_json(_ended(display.directory, "interrupted", None))
        raise Interrupted(f"continue with: fedlens resume {shlex.quote(str(display.directory))}") from None
    except Exception as error:
        if as_json and display.directory is not None:
            print_json(_ended(display.directory, "failed", str(error)))
        raise
    if as_json:
        print_json(result.summary)
    display.result(result.summary, Path(result.directory))
    if strict and result.warnings:
        print(f"error: --strict, and the run has warnings: {len(result.warnings)}", file=sys.stderr)
        raise typer.Exit(1)


def _ended(directory: Path, status: str, error: str | None) -> dict[str, Any]:
    """The summary of the run; status, error and directory alone if the run could not write one."""
    from fedlens.core.errors import FedlensError
    from fedlens.experiment.rundir import RunDir

    outcome: dict[str, Any] = {"status": status, "error": error, "directory": str(directory)}
    try:
        summary = RunDir(directory).read_summary()
    except FedlensError:
        return outcome
    # A resumed run that was killed leaves the summary of the run before.
    return summary if summary and summary.get("status") == status else {**(summary or {}), **outcome}


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C: workers are stopped in order, and a run saves its state and can be resumed."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
