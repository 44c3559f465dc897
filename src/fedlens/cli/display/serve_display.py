"""Shows a run of sites: a table of the sites above the bar on a terminal, else a line when their states change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.format import count, duration, many
from fedlens.base.printable import printable
from fedlens.cli.display.run_display import RunDisplay
from fedlens.server.progress import ServeProgress, SiteRow

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_TABLE = 20  # sites in the table: those that need a look come first
_ORDER = ("refused", "late", "expected", "online")
_MEANING = {"late": "not heard of for a while", "expected": "not approved yet, or not started"}


class ServeDisplay(RunDisplay, ServeProgress):
    """The progress of a run of sites, and who is there."""

    def __init__(self, console: Console, quiet: bool = False, **how: Any) -> None:
        super().__init__(console, quiet, **how)
        self._rows: Sequence[SiteRow] = ()
        self._states = ""

    def waiting(self, directory: Path, address: str, run: str) -> None:
        """Called when the server listens, before the first census."""
        self.directory = directory
        if self._quiet:
            return
        self._print(f"listening at {address}, run {run}, run directory: {directory}", soft_wrap=True)
        self.begin("waiting for the sites", None)

    def sites(self, rows: Sequence[SiteRow]) -> None:
        """Receives all sites, once a second."""
        self._rows = rows
        states = states_line(rows)
        if states != self._states and not self._quiet and self._bar is None:
            self._print(states, soft_wrap=True)
        self._states = states

    def _update(self, now: float) -> None:
        if self._rounds is not None:
            super()._update(now)
        elif self._bar is not None:
            self._move("waiting for the sites", 0, None, [""])

    def _above(self) -> Iterable[RenderableType]:
        from rich.table import Table

        if not self._rows:
            return
        table = Table("site", "state", "last contact", "clients", "", box=None, pad_edge=False)
        for row in sorted(self._rows, key=lambda row: (_ORDER.index(row.state), row.name))[:_TABLE]:
            ago = "never" if row.ago is None else f"{duration(row.ago)} ago"
            note = row.note or _MEANING.get(row.state, "")
            table.add_row(*map(printable, (row.name, row.state, ago, count(row.clients or None), note)))
        yield table
        if len(self._rows) > _TABLE:
            yield states_line(self._rows)


def states_line(rows: Sequence[SiteRow]) -> str:
    """The sites in one line, by state, with up to five names each.

    >>> states_line([SiteRow("a", "online", 1.0, 1), SiteRow("b", "refused", None, 0, "contract")])
    '2 sites: 1 refused (b: contract), 1 online (a)'
    >>> states_line([SiteRow("c", "expected", None)])
    '1 site: 1 expected, which means not approved yet, or not started (c)'
    """
    parts = []
    for state in _ORDER:
        named = [f"{row.name}: {row.note}" if row.note else row.name for row in rows if row.state == state]
        if named:
            more = ", ..." if len(named) > 5 else ""
            means = f", which means {_MEANING[state]}" if state in _MEANING else ""
            parts.append(f"{len(named)} {state}{means} ({', '.join(named[:5])}{more})")
    return printable(f"{many(len(rows), 'site')}: {', '.join(parts) or 'none has joined yet'}")
