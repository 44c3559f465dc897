"""The log of a server: one JSON object a line, for whoever collects logs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import FedlensError
from fedlens.files import jsonl

DAY = 86400.0


class EventLog:
    """Appends events to a file that its owner alone can read, or to standard error. All threads may write.

    A log that cannot be written ends no run: the line goes to standard error then.

    Args:
        path: the file; None for standard error.
        clock: seconds since 1970.

    >>> import tempfile
    >>> log = EventLog(Path(tempfile.mkdtemp()) / "serve.log.jsonl", clock=lambda: 0.0)
    >>> log.write("suspended", "ward-a", reason="two addresses")
    >>> jsonl.read(log.path)
    [{'time': '1970-01-01T00:00:00Z', 'event': 'suspended', 'site': 'ward-a', 'reason': 'two addresses'}]
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time) -> None:
        self.path, self._clock = path, clock
        self._busy = threading.Lock()
        self._warned: dict[tuple[str, str], float] = {}

    def write(self, event: str, site: str = "", **facts: Any) -> None:
        """Appends one event; `facts` are plain values."""
        now = datetime.fromtimestamp(self._clock(), UTC)
        row = {
            "time": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "event": event,
            **({"site": site} if site else {}),
            **facts,
        }
        with self._busy:
            if self.path is not None:
                with suppress(FedlensError, OSError):
                    jsonl.append(self.path, [row], private=True)
                    return
            with suppress(OSError, ValueError):
                sys.stderr.write(json.dumps(row, allow_nan=False) + "\n")

    def notice(self, kind: str, site: str, what: str) -> None:
        """Appends what a link tells the operator."""
        self.write(kind, site, what=what)

    def warn(self, event: str, site: str = "", **facts: Any) -> bool:
        """Appends a warning, at most once a day for each event and site; returns whether it did."""
        now = self._clock()
        if now - self._warned.get((event, site), -DAY) < DAY:
            return False
        self._warned[event, site] = now
        self.write(event, site, **facts)
        return True
