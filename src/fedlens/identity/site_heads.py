"""How far the server has seen the log of each site, over all runs: a site whose log goes back is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedlens.base.errors import IdentityError
from fedlens.base.parse_text import parse_json
from fedlens.identity.federation_folder import SiteRecord
from fedlens.identity.private_files import one_writer, read_private, write_private


class LogHead(NamedTuple):
    """A state of a log: how many lines it has, and the head of the last one in hexadecimal."""

    lines: int
    head: str


class SiteHeads:
    """The newest state of each site's log that the server has seen, in `heads.json` of the federation's folder.

    A state belongs to the time of the site's acceptance: after `federation accept` the next one is taken as it is.

    Args:
        folder: of the federation.

    Raises `IdentityError` if the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._saved = folder / "heads.json", True
        self._heads = self._read()

    def seen(self, record: SiteRecord) -> LogHead | None:
        """The newest state of a site's log; None before the first after its acceptance."""
        since, last = self._heads.get(record.name, (None, None))
        return last if since == record.since else None

    def fault(self, record: SiteRecord, asked: LogHead | None, count: Any, head: bytes) -> str | None:
        """Why a message does not follow from what was seen before, as a sentence; else notes its state.

        Args:
            record: of the site that sent it.
            asked: the state that was seen when the server sent what this message answers. An answer to an earlier ask
                may come after one to a later ask, so the newest state is no bound.
            count, head: those in the message.
        """
        if type(count) is not int or not 0 <= count < 2**53 or len(head) != 32:
            return "its message has no state of its log"
        now, last = LogHead(count, head.hex()), self.seen(record)
        if asked is not None and count < asked.lines:
            return f"its log has {count:,} lines, and had {asked.lines:,} before"
        if any(before is not None and before.lines == count and before != now for before in (asked, last)):
            return f"its log was changed up to line {count:,}"
        if last is None or count > last.lines:
            self._heads[record.name], self._saved = (record.since, now), False
        return None

    def save(self) -> None:
        """Writes what is new to the disk; a newer state that another process wrote stays. Raises `RunFailed`."""
        if self._saved:
            return
        with one_writer(self._path.parent):
            for name, (since, head) in self._read().items():
                if name not in self._heads or self._heads[name] < (since, head):
                    self._heads[name] = since, head
            write_private(self._path, json.dumps(self._heads, sort_keys=True).encode())
        self._saved = True

    def _read(self) -> dict[str, tuple[float, LogHead]]:
        if not self._path.exists():
            return {}
        try:
            heads: Mapping[str, Any] = parse_json(read_private(self._path))
            return {name: (float(since), LogHead(*head)) for name, (since, head) in heads.items()}
        except (TypeError, ValueError, AttributeError) as error:
            what = f"{self._path.name} is damaged: {error}"
            hint = "restore it, or remove it: then the next state of each site's log is taken as it is"
            raise IdentityError(what, where=str(self._path), hint=hint) from None
