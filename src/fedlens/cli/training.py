"""What `run` and `resume` have in common: they train, show how it goes, and say where the result is."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.cli.output import Interrupted, print_json, stdout_kept_clean
from fedlens.cli.progress_display import Watch, watch

if TYPE_CHECKING:
    from fedlens.api import Result


def train(start: Callable[[Watch], Result], *, quiet: bool, as_json: bool) -> None:
    """Calls `start` with something that shows its progress, and prints how it ended.

    Raises what `start` raises; `Interrupted` says how to go on.
    """
    seen = watch(quiet=quiet, stderr=as_json)
    try:
        with stdout_kept_clean(as_json), terminated_like_interrupted():
            try:
                result = start(seen)
            finally:
                seen.close()
    except KeyboardInterrupt:
        if seen.directory is None:
            raise Interrupted("nothing was started") from None
        if as_json:
            print_json(_ended(seen.directory, "interrupted", None))
        raise Interrupted(f"continue with: fedlens resume {shlex.quote(str(seen.directory))}") from None
    except Exception as error:
        if as_json and seen.directory is not None:
            print_json(_ended(seen.directory, "failed", str(error)))
        raise
    if as_json:
        print_json(result.summary)
    seen.result(result.summary, Path(result.directory))


def _ended(directory: Path, status: str, error: str | None) -> dict[str, Any]:
    """The summary that the run left; where it had no time to, what is known without it."""
    from fedlens.core.errors import FedlensError
    from fedlens.experiment.rundir import RunDir

    known: dict[str, Any] = {"status": status, "error": error, "directory": str(directory)}
    try:
        found = RunDir(directory).read_summary()
    except FedlensError:
        return known
    # A resumed run may have died beside the summary of its first life.
    return found if found and found.get("status") == status else {**(found or {}), **known}


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: what was started is ended in order; a run saves its state and can be resumed."""
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
