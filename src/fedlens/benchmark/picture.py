"""Draws the rows of a benchmark: bars of images per second, with a panel for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlens.base.errors import ConfigError
from fedlens.benchmark.comparison import ComparisonRow
from fedlens.benchmark.interleave import Kind
from fedlens.results.figures.chart import Axis, Chart, Panel, Series, VerticalLine, named_axis
from fedlens.results.figures.picture import check_suffix, draw_chart, style

# Colour and legend of each kind of candidate.
_KINDS: dict[Kind, tuple[str, str]] = {
    "limit": ("#4a4a4a", "bare PyTorch"),
    "by hand": ("#8a8f98", "written by hand"),
    "fedlens": ("#4e79a7", "fedlens"),
    "peer": ("#f28e2b", "peers"),
}


def check(file: Path) -> None:
    """Raises `ConfigError` where matplotlib is not installed or the file's ending is not that of a picture."""
    try:
        with style():
            check_suffix(file)
    except ConfigError as error:
        raise ConfigError(error.what, where="--picture", hint=error.hint) from None


def draw(rows: Sequence[ComparisonRow], file: Path) -> None:
    """Draws the rows into a file, in the format of its ending.

    Raises `ConfigError` as `check`, and `RunFailed` where the file cannot be written.
    """
    check(file)
    workloads = dict.fromkeys(row.workload for row in rows)
    panels = [_panel(name, [row for row in rows if row.workload == name]) for name in workloads]
    draw_chart(Chart("Speed", "", panels, columns=1), file)


def _panel(workload: str, rows: Sequence[ComparisonRow]) -> Panel:
    speeds, places = [row.images_per_s or 0.0 for row in rows], list(range(len(rows)))
    series = []
    for kind, (color, name) in _KINDS.items():
        here = [row.kind == kind for row in rows]
        if any(here):
            bars = [speed * own for speed, own in zip(speeds, here, strict=True)]
            words = [_beside(row) if own else "" for row, own in zip(rows, here, strict=True)]
            series.append(Series(bars, places, name, "bar", color, texts=words, written=True))
    # Room for the words beside the longest bar.
    x = Axis("images per second", "count", limits=(0, max([*speeds, 1.0]) * 1.4))
    y = named_axis(Axis(limits=(len(rows) - 0.5, -0.5), name_width=40), [named(row) for row in rows])
    limit = next((row.images_per_s for row in rows if row.kind == "limit" and row.images_per_s), None)
    mark = None if limit is None else VerticalLine(limit, "", "left")
    about = "Images per second of each candidate."
    return Panel(workload, about, x, y, series, mark=mark, stacked="across")


def named(row: ComparisonRow) -> str:
    """The name of a candidate and its arrangement."""
    if "processes" not in row.about:
        return row.name
    return f"{row.name}, {row.about['processes']} x {row.about['threads']}"


def _beside(row: ComparisonRow) -> str:
    if row.images_per_s is None:
        return "did not run"
    if row.to_limit is None:
        return f"{row.images_per_s:,.0f}"
    digits = 2 if row.to_limit.median < 10 else 1
    return f"{row.images_per_s:,.0f}   {row.to_limit.median:.{digits}f} x the limit"
