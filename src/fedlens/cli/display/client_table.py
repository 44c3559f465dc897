"""The results of a run's clients as lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.base.format import finite, label, metric_value

ALL_UP_TO = 20  # clients of which the table has every one
_WORST = 5  # of more clients
_NAME = 32  # characters of a name
_SHOWN = ("client", "last", "from the mean", "best", "examples", "held out", "classes")


def worst_text(summary: Mapping[str, Any], metric: str, tenth: float | None) -> str:
    """The worst client of a summary by name, after a comma; empty without a per-client evaluation.

    With 20 clients or more it begins with `tenth`, the value at the worst tenth of them.

    >>> clients = {"metric": "accuracy", "measured": 8, "worst": {"client": "mercy", "value": 0.61}}
    >>> worst_text({"clients": clients}, "accuracy", 0.61)
    ', 61.0 % at the worst client (mercy)'
    >>> few = {"client": "mercy", "value": 0.4, "held_out": 9}
    >>> worst_text({"clients": clients | {"worst": few}}, "accuracy", 0.4)
    ', 40.0 % at the worst client (mercy, of 9 held-out images)'
    >>> worst_text({"clients": clients | {"measured": 40}}, "accuracy", 0.66)
    ', 66.0 % at the worst tenth of the clients, 61.0 % at the worst client (mercy)'
    """
    from fedlens.results.client_results import FEW
    from fedlens.results.run import subtable

    clients = subtable(summary, "clients")
    worst, measured = subtable(clients, "worst"), finite(clients.get("measured"))
    # A resumed run prints a summary that somebody else may have written.
    value = finite(worst.get("value")) if clients.get("metric") == metric else None
    parts = []
    if tenth is not None and (value is None or measured is None or measured >= FEW):
        parts.append(f"{metric_value(metric, tenth)} at the worst tenth of the clients")
    if value is not None:
        held_out = finite(worst.get("held_out"))
        images = f", of {held_out:,.0f} held-out images" if held_out else ""
        parts.append(f"{metric_value(metric, value)} at the worst client ({worst.get('client')}{images})")
    return "".join(f", {part}" for part in parts)


def client_lines(directory: Path) -> list[str]:
    """A table of the clients of a run, the worst first: all of up to 20, else the five worst and where the rest is.

    Empty if the run measured no clients. Raises `RunDirectoryError` if the run cannot be read.
    """
    from fedlens.pages.client_section import client_columns
    from fedlens.results.client_results import client_results
    from fedlens.results.run import read_run

    run = read_run(directory)
    results = client_results(run)
    shown = results if len(results) <= ALL_UP_TO else results[:_WORST]
    if not shown:
        return []
    columns = client_columns(run.metric())
    rows = [[columns[title](row).text for title in _SHOWN] for row in shown]
    rows = [[name if len(name) <= _NAME else f"{name[: _NAME - 3]}...", *cells] for name, *cells in rows]
    head = [label(run.metric()) if title == "last" else title for title in _SHOWN]
    lines = _columns([head, *rows], left=(0, len(head) - 1))
    if len(shown) < len(results):
        lines.append(
            f"These are the {len(shown)} worst of {len(results):,} clients; the result page lists all of them."
        )
    return lines


def _columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows with their cells under each other, two spaces apart; columns that are not in `left` end alike."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pads = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [c + pad if k in left else pad + c for k, (c, pad) in enumerate(zip(row, pads, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
