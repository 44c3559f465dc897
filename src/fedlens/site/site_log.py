"""The log file of a site, with the texts of errors, which leave the site nowhere else; and what the site does now."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from fedlens.base.errors import RunFailed
from fedlens.base.parse_text import parse_json
from fedlens.base.printable import printable
from fedlens.base.systemd import show_status
from fedlens.files.atomic_files import create, open_unlinked, read_regular
from fedlens.identity.authority import day
from fedlens.identity.private_files import in_use, private_folder, read_private, write_private

CONTACT = "contact"
"""The file in the folder of a site whose time is that of the last contact with the server."""
WAITING = "waiting"
"""The file in the folder of a site that says what `fedlens site start` waits for; none while it waits for nothing."""
TROUBLE = "trouble"
"""The file in the folder of a site that says why the server cannot be reached; none while it can."""
OFF = "the server is off, as between two runs, or the port is wrong"
"""How a sentence in `TROUBLE` ends that says so."""
LARGEST = 2**23
"""Bytes of the file; then it is renamed to `site.1.jsonl`, in place of an earlier one."""

_HOUR = 3600.0


@dataclass(frozen=True)
class SiteState:
    """What the files of a site say of its `fedlens site start`.

    Attributes:
        runs: whether a process uses the folder.
        contact: when the server was last heard of, in seconds since 1970; 0 for never.
        waits: for what a person has to do, as a sentence; empty for nothing.
        trouble: why the server cannot be reached; empty while it can.
        ended: why the last process ended, if it could say so and none runs now.
    """

    runs: bool
    contact: float
    waits: str
    trouble: str
    ended: str

    @classmethod
    def read(cls, folder: Path) -> SiteState:
        """Reads it. What a killed process has left there does not count."""
        runs, contact = in_use(folder), folder / CONTACT
        paths = (folder / WAITING, folder / TROUBLE)
        waits, trouble = (
            printable(read_private(path).decode(), line_feeds=False) if runs and path.exists() else ""
            for path in paths
        )
        ended = "" if runs else _last_stop(folder / "log" / "site.jsonl")
        return cls(runs, contact.stat().st_mtime if contact.exists() else 0.0, waits, trouble, ended)

    def lost(self) -> str:
        """Since when there is no contact, and why."""
        since = f"since {day(self.contact)}" if self.contact else "yet"
        return f"no contact with the server {since}: {self.trouble or 'the process does not go on'}"

    def needs(self, now: float) -> str:
        """Why a person is needed, as a sentence; empty if nobody is, as while the server is off."""
        if not self.runs:
            return "'fedlens site start' does not run" + (f"; it ended: {self.ended}" if self.ended else "")
        lost = now - self.contact > _HOUR and not self.trouble.endswith(OFF)
        return self.waits or (self.lost() if lost else "")


def _last_stop(path: Path) -> str:
    """The reason in the last line of a `SiteLog`, if that says that the process stopped; else empty."""
    with suppress(OSError, ValueError, IndexError):
        match parse_json(read_regular(path).splitlines()[-1]):
            case {"kind": "stopped", "reason": str(reason)}:
                return printable(reason, line_feeds=False)
    return ""


def keep_sentence(path: Path, sentence: str) -> None:
    """Writes `WAITING` or `TROUBLE` in the folder of a site, or removes it, and shows the state of the site in systemd.

    What a person has to do is not shown there, since it may name people.
    """
    with suppress(OSError, RunFailed):
        if sentence:
            write_private(path, sentence.encode())
        else:
            path.unlink(missing_ok=True)
        state = SiteState.read(path.parent)
        known = state.lost() if state.trouble else "in touch with the server"
        show_status("waits for a person: see 'fedlens site status'" if state.waits else known)


class SiteLog:
    """Appends lines of JSON to `site.jsonl`, of mode 0600: a name of a file in it may be that of a patient.

    Args:
        folder: of mode 0700; it is made.
        clock: the seconds since 1970.

    >>> import tempfile
    >>> log = SiteLog(Path(tempfile.mkdtemp()), clock=lambda: 5)
    >>> log.note("stopped", reason="asked to")
    >>> log.path.read_text()
    '{"time":5,"kind":"stopped","reason":"asked to"}\\n'
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time) -> None:
        self.path, self._clock, self._lock = private_folder(folder) / "site.jsonl", clock, threading.Lock()
        self._waiting: str | None = None  # an earlier process may have left one

    def waits(self, sentence: str) -> None:
        """Keeps in the folder of the site what it waits for, where another command can show it; empty for nothing."""
        if sentence == self._waiting:
            return
        self._waiting = sentence
        keep_sentence(self.path.parents[1] / WAITING, sentence)

    def note(self, kind: str, **values: str | int | float | None) -> None:
        """Appends a line. A disk that refuses it does not end the site: its answers are in another file."""
        line = json.dumps({"time": int(self._clock()), "kind": kind, **values}, separators=(",", ":")) + "\n"
        with self._lock, suppress(OSError):
            if self.path.exists() and self.path.lstat().st_size > LARGEST:
                self.path.replace(self.path.with_suffix(".1.jsonl"))
            if not self.path.exists():
                os.close(create(self.path, 0o600))
            with os.fdopen(open_unlinked(self.path, os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(line.encode())
