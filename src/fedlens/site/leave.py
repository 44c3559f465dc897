"""Leaving a federation: a file in the folder of the site ends `fedlens site start`, and refuses the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from fedlens.base.errors import ConfigError, FedlensError, IdentityError
from fedlens.base.shell_command import quoted_command
from fedlens.identity.authority import day
from fedlens.identity.private_files import one_writer, read_private, write_private
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.site.answers_log import AnswersLog
from fedlens.site.connection import ServerConnection, Timing

_FILE = "left"
_TICK = 0.5  # seconds between two tries
_TELLING = 20.0  # seconds for the server to hear of it: a socket of systemd starts it first
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


def tell_server(
    folder: Path, passphrase: Callable[[], bytes | None] | None, clock: Callable[[], float] = time
) -> str | None:
    """Tells the server that the site has left, and the log whether it knows. Returns why it does not; None if it does.

    `passphrase` returns that of the keys; an `IdentityError` is a reason too. None tells nobody.
    """

    async def leave(connection: ServerConnection) -> str | None:
        try:
            return await connection.leave()
        finally:
            await connection.close()

    why: str | None = "--offline"
    try:
        if passphrase is not None:
            keys = SiteKeys(folder / "keys", secret := passphrase())
            context = partial(client_context, keys.folder, secret)
            connection = ServerConnection(keys, context, 0, lambda _: None, Timing(quiet=_TELLING))
            why = asyncio.run(leave(connection))
    except FedlensError as error:
        why = error.what
    _note(folder, "told", clock, server_knows=why is None, **({"reason": why} if why else {}))
    return why


def come_back(folder: Path, clock: Callable[[], float] = time) -> None:
    """Takes the site back: `fedlens site start` runs again. Raises `ConfigError` if it has not left."""
    if left_on(folder) is None:
        raise ConfigError("this site has not left the federation", where=str(folder))
    _note(folder, "returned", clock)
    (folder / _FILE).unlink()


def _note(folder: Path, kind: str, clock: Callable[[], float], **values: Any) -> None:
    """A line in the chained log. Raises `IdentityError` while another process uses the folder."""
    with one_writer(folder, wait=False):
        log = AnswersLog(folder / "log", folder / "work", clock)
        try:
            log.event(kind, **values)
        finally:
            log.close()
