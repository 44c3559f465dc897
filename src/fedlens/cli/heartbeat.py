"""Calls a function again and again in the background, so that a display moves while nothing arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


class Heartbeat:
    """A daemon thread that calls `beat` every `seconds` until it is stopped.

    Workers are forked by a process of their own (`fedlens.engines.forkserver`), so no fork copies the thread's locks.
    """

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._beat, self._seconds = beat, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedlens-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for a call in progress; may be called twice."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            with suppress(
                Exception
            ):  # a display that fails once is no reason to stand still for the rest of the run
                self._beat()
