"""Draws the rows of a benchmark: bars of images per second, with a panel for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.benchmark.comparison import ComparisonRow
from fedlens.benchmark.interleave import Kind

# Colour and legend of each kind of candidate.
_KINDS: dict[Kind, tuple[str, str]] = {
    "limit": ("#4a4a4a", "bare PyTorch"),
    "by hand": ("#8a8f98", "written by hand"),
    "fedlens": ("#4e79a7", "fedlens"),
    "peer": ("#f28e2b", "peers"),
}


def check(file: Path) -> None:
    """Raises `ConfigError` where matplotlib is not installed or does not know the file's ending."""
    figure = _figure(1.0, 1.0)
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in formats:
        raise ConfigError(
            f"'{file.suffix}' is not a picture format", where="--picture", hint="use .png, .svg or .pdf"
        )


def draw(rows: Sequence[ComparisonRow], file: Path) -> None:
    """Draws the rows into a file, in the format of its ending.

    Raises `ConfigError` as `check`, and `RunDirectoryError` where the file cannot be written.
    """
    check(file)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    counts = [sum(row.workload == name for row in rows) for name in workloads]
    figure = _figure(8.0, 0.6 + sum(0.27 * n + 0.62 for n in counts))
    axes = figure.subplots(len(workloads), 1, squeeze=False, height_ratios=[n + 1 for n in counts])[:, 0]
    for axis, name in zip(axes, workloads, strict=True):
        _panel(axis, name, [row for row in rows if row.workload == name])
    axes[-1].set_xlabel("images per second")
    colours, legends = zip(
        *(_KINDS[kind] for kind in _KINDS if any(row.kind == kind for row in rows)), strict=True
    )
    bars = [figure.axes[0].barh([0], [0], color=colour) for colour in colours]
    figure.legend(bars, legends, loc="outside lower right", ncols=4, frameon=False, fontsize=8)
    try:
        figure.savefig(file, dpi=160)
    except OSError as error:
        raise RunDirectoryError(f"the picture cannot be written: {error.strerror}", where=str(file)) from None


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib, which draws the picture, is not installed",
            where="--picture",
            hint="pip install 'fedlens[plot]'; the table and the JSON file do not need it",
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _panel(axis: Any, workload: str, rows: Sequence[ComparisonRow]) -> None:
    speeds = [row.images_per_s or 0.0 for row in rows]
    places = range(len(rows))
    axis.barh(places, speeds, color=[_KINDS[row.kind][0] for row in rows], height=0.72)
    axis.set_yticks(places, [named(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(workload, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(0, max([*speeds, 1.0]) * 1.4)  # room for the label of the longest bar
    for place, row, speed in zip(places, rows, speeds, strict=True):
        label = axis.annotate(
            _beside(row), (speed, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the limit's line
    for row in rows:
        if row.kind == "limit" and row.images_per_s:
            axis.axvline(
                row.images_per_s, color=_KINDS["limit"][0], linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5
            )


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
