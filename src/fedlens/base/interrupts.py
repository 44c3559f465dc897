"""Tells a user's Ctrl-C from a `KeyboardInterrupt` that the code of a client raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]  # Windows has two


class _Watch:
    """Signals belong to the whole process, and so does what is known of them."""

    active = False
    arrived = False


@contextmanager
def watched() -> Iterator[None]:
    """Notes the signals that arrive during the block; their handlers run as before.

    Signals can only be noted in the main thread: elsewhere, every `KeyboardInterrupt` is taken for the user's.
    """
    if threading.current_thread() is not threading.main_thread() or _Watch.active:
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    noting = {number: _noting(handler) for number, handler in before.items() if callable(handler)}
    for number, handler in noting.items():
        signal.signal(number, handler)
    _Watch.active, _Watch.arrived = True, False
    try:
        yield
    finally:
        _Watch.active = _Watch.arrived = False
        for number, handler in noting.items():
            if signal.getsignal(number) is handler:  # else somebody has taken it over
                signal.signal(number, before[number])


def _noting(handler: Callable[..., Any]) -> Callable[[int, Any], Any]:
    def note(number: int, frame: Any) -> Any:
        _Watch.arrived = True
        return handler(number, frame)

    return note


def no_user() -> None:
    """Declares that this process is a worker, which gets no Ctrl-C: its driver does."""
    _Watch.active = True


def from_code(error: BaseException) -> bool:
    """Whether an exception was raised by code, and not by a signal of the user.

    >>> from_code(SystemExit(3))
    True
    >>> with watched():
    ...     from_code(KeyboardInterrupt())
    True
    """
    return not isinstance(error, KeyboardInterrupt) or (_Watch.active and not _Watch.arrived)


@contextmanager
def postponed() -> Iterator[None]:
    """Postpones the signals of the user to the end of the block, which must be short: a message to another process.

    Signals can only be postponed in the main thread, which handles them; elsewhere nothing happens.

    >>> try:
    ...     with postponed():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("the block ends")
    ... except KeyboardInterrupt:
    ...     print("and then it is interrupted")
    the block ends
    and then it is interrupted
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        arrived.append((number, frame))

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {int(number): handler for number, handler in before.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived[:1]:
            handlers[number](number, frame)
