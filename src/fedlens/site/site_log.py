"""The log file of a site: what happened, with the texts of errors, which leave the site nowhere else."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time

from fedlens.base.errors import RunFailed
from fedlens.files.atomic_files import create, open_unlinked
from fedlens.identity.private_files import private_folder, write_private

CONTACT = "contact"
"""The file in the folder of a site whose time is that of the last contact with the server."""
WAITING = "waiting"
"""The file in the folder of a site that says what `fedlens site start` waits for; none while it waits for nothing."""
LARGEST = 2**23
"""Bytes of the file; then it is renamed to `site.1.jsonl`, in place of an earlier one."""


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
        self._waiting, path = sentence, self.path.parents[1] / WAITING
        with suppress(OSError, RunFailed):
            if sentence:
                write_private(path, sentence.encode())
            else:
                path.unlink(missing_ok=True)

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
