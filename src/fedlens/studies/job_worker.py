"""A worker process of a study: carries out runs one after the other, with a shared session."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Imported here, in the process that all workers are forked from.
from fedlens.base.registry import load_file
from fedlens.base.threads import share_cores
from fedlens.engines.devices import show_only
from fedlens.run.session import Session
from fedlens.studies.carry_out import RunOptions, StudyStopped, carry_out
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import working

_EVERY = 0.3  # seconds between two messages on the rounds of a run
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of Linux


def main(driver: Connection, settings: dict[str, Any]) -> None:
    """Serves the main process of the study until it closes the connection or ends."""
    _end_with_parent()
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    show_only(settings["device"])
    torch.set_num_threads(settings["threads"])
    share_cores(settings["cores"])
    sys.path[:] = settings["path"]
    with contextlib.suppress(EOFError, ConnectionError):
        for file in settings["files"]:
            load_file(Path(file))
        options: RunOptions = driver.recv()
        with working(options.study):
            _serve(driver, options, interrupt)


def _serve(driver: Connection, options: RunOptions, interrupt: _Interrupt) -> None:
    session, rounds = Session(), _Rounds(driver)
    while True:
        due: DueRun = driver.recv()
        answer: tuple[Any, ...] = ("interrupted",)
        try:
            with interrupt.raised():
                answer = ("line", carry_out(due, options, session, rounds))
        except KeyboardInterrupt:
            pass  # the run is saved; the answer says that it was interrupted
        except StudyStopped as error:
            answer = ("stopped", error)
        driver.send(answer)


class _Interrupt:
    """Handles Ctrl-C, which the main process forwards: raises once, and only within a run."""

    def __init__(self) -> None:
        self._within, self._arrived = False, False

    def __call__(self, number: int, frame: object) -> None:
        """Raises `KeyboardInterrupt` in a run; a second signal would break the saving of the first."""
        raised, self._arrived = self._arrived, True
        if self._within and not raised:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Any:
        """Within the block the signal raises; at once if it has arrived before."""
        self._within = True
        try:
            if self._arrived:
                raise KeyboardInterrupt
            yield
        finally:
            self._within = False


class _Rounds(StudyProgress):
    """Sends the number of the round from time to time."""

    def __init__(self, driver: Connection) -> None:
        self._driver, self._sent = driver, 0.0

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        now = time.monotonic()
        if now - self._sent >= _EVERY:
            self._sent = now
            self._driver.send(("round", round, rounds))  # small: one write, which a signal cannot cut


def _end_with_parent() -> None:
    """Makes Linux kill this process when its parent is killed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
