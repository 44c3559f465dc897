"""Leaving a federation: a file in the folder of the site ends `fedlens site start`, and refuses the next one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time

from fedlens.base.errors import ConfigError, IdentityError
from fedlens.base.shell_command import quoted_command
from fedlens.identity.authority import day
from fedlens.identity.private_files import one_writer, read_private, write_private
from fedlens.site.answers_log import AnswersLog

_FILE = "left"
_TICK = 0.5  # seconds between two tries
_PATIENCE = 60.0  # seconds for a process to end: longer than one step of PyTorch


def left_on(folder: Path) -> str | None:
    """When a person took the site out of the federation, None if the site takes part."""
    return read_private(folder / _FILE).decode() if (folder / _FILE).exists() else None


def refuse_left(folder: Path) -> None:
    """Raises `ConfigError` if the site has left."""
    if (since := left_on(folder)) is not None:
        hint = f"{quoted_command('site', 'leave', folder=folder, undo=True)} takes it back"
        raise ConfigError(f"this site left the federation on {since}", where=str(folder / _FILE), hint=hint)


def leave(folder: Path, clock: Callable[[], float] = time) -> None:
    """Takes the site out: a running `fedlens site start` ends, without its operation, and the next one is refused.

    Returns when no process computes any more. Raises `IdentityError` if one is still there after a minute.
    """
    if left_on(folder) is None:
        write_private(folder / _FILE, day(clock()).encode())
    until = monotonic() + _PATIENCE
    while monotonic() < until:
        with suppress(IdentityError):
            return _note(folder, "left", clock)
        sleep(_TICK)
    _note(folder, "left", clock)


def come_back(folder: Path, clock: Callable[[], float] = time) -> None:
    """Takes the site back: `fedlens site start` runs again. Raises `ConfigError` if it has not left."""
    if left_on(folder) is None:
        raise ConfigError("this site has not left the federation", where=str(folder))
    _note(folder, "returned", clock)
    (folder / _FILE).unlink()


def _note(folder: Path, kind: str, clock: Callable[[], float]) -> None:
    """A line in the chained log. Raises `IdentityError` while another process uses the folder."""
    with one_writer(folder, wait=False):
        log = AnswersLog(folder / "log", folder / "work", clock)
        try:
            log.event(kind)
        finally:
            log.close()
