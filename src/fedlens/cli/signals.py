"""Lets Ctrl-C, SIGTERM and SIGHUP stop a command in the same way: once, and in order. No slow import."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if sys.platform != "win32":
    _SIGNALS.append(signal.SIGHUP)
_AGAIN = 10.0  # seconds after which a further signal interrupts once more, if the first one had no effect


class Stop:
    """A signal handler that raises `KeyboardInterrupt`, and ignores further signals while a command is stopping.

    A second interruption would break the first one's saving. If the first had no effect, because some code swallowed
    it, a later signal raises again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._raised: float | None = None

    def __call__(self, number: int, frame: object) -> None:
        """Raises `KeyboardInterrupt`, unless one is being handled."""
        now = self._clock()
        recent = self._raised is not None and now - self._raised < _AGAIN
        if recent or stopping():
            return
        self._raised = now
        raise KeyboardInterrupt


def stopping() -> bool:
    """Whether a `KeyboardInterrupt` is being handled by a function that called this one.

    >>> try:
    ...     raise KeyboardInterrupt
    ... except KeyboardInterrupt:
    ...     during = stopping()
    >>> during, stopping()
    (True, False)
    """
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block, the three signals raise `KeyboardInterrupt`; those that are ignored (nohup) stay ignored.

    Has no effect in a thread, or in a block inside of another.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop, before = Stop(), {}
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler in (None, signal.SIG_IGN) or isinstance(handler, Stop):
            continue
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:  # and not ignored since
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignores the three signals for the rest of the process, which is about to end."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
