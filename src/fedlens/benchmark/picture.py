"""The rows of a benchmark as one picture: bars of images per second, a panel for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.benchmark.comparison import ComparisonRow
from fedlens.benchmark.interleave import Kind
from fedlens.core.errors import ConfigError, RunDirectoryError

_COLOURS: dict[Kind, str] = {
    "limit": "#4a4a4a",
    "by hand": "#8a8f98",
    "fedlens": "#4e79a7",
    "peer": "#f28e2b",
}
_LEGEND: dict[Kind, str] = {
    "limit": "bare PyTorch",
    "by hand": "written by hand",
    "fedlens": "fedlens",
    "peer": "peers",
}


def check(file: Path) -> None:
    """Raises `ConfigError` where matplotlib is not installed or the file's ending is no format."""
    figure = _figure(1.0, 1.0)
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in formats:
        raise ConfigError(
            f"'{file.suffix}' is no format of a picture",
            where="--picture",
            hint="end the file's name in .png, .svg or .pdf",
        )


def draw(rows: Sequence[ComparisonRow], file: Path) -> None:
    """Draws the rows into a file, in the format that its ending says.

    Raises `ConfigError` where matplotlib is not installed or the ending is no format, and `RunDirectoryError` where
    the file cannot be written.
    """
    workloads = list(dict.fromkeys(row.workload for row in rows))
    counts = [sum(row.workload == name for row in rows) for name in workloads]
    figure = _figure(8.0, 0.6 + sum(0.27 * n + 0.62 for n in counts))
    axes = figure.subplots(len(workloads), 1, squeeze=False, height_ratios=[n + 1 for n in counts])[:, 0]
    for axis, name in zip(axes, workloads, strict=True):
        _panel(axis, name, [row for row in rows if row.workload == name])
    axes[-1].set_xlabel("images per second")
    kinds = [kind for kind in _COLOURS if any(row.kind == kind for row in rows)]
    bars = [figure.axes[0].barh([0], [0], color=_COLOURS[kind]) for kind in kinds]
    figure.legend(
        bars, [_LEGEND[k] for k in kinds], loc="outside lower right", ncols=4, frameon=False, fontsize=8
    )
    try:
        figure.savefig(file, dpi=160)
    except ValueError as error:
        raise ConfigError(
            str(error), where="--picture", hint="end the file's name in .png, .svg or .pdf"
        ) from None
    except OSError as error:
        raise RunDirectoryError(f"the picture cannot be written: {error.strerror}", where=str(file)) from None


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "the picture is drawn by matplotlib, which is not installed",
            where="--picture",
            hint="pip install 'fedlens[plot]'; the table and the JSON file are there without it",
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _panel(axis: Any, workload: str, rows: Sequence[ComparisonRow]) -> None:
    speeds = [row.images_per_s or 0.0 for row in rows]
    places = range(len(rows))
    axis.barh(places, speeds, color=[_COLOURS[row.kind] for row in rows], height=0.72)
    axis.set_yticks(places, [named(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(workload, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(0, max([*speeds, 1.0]) * 1.4)  # room for the words behind the longest bar
    for place, row, speed in zip(places, rows, speeds, strict=True):
        words = axis.annotate(
            _beside(row), (speed, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
        words.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the limit's line
    for row in rows:
        if row.kind == "limit" and row.images_per_s:
            axis.axvline(
                row.images_per_s, color=_COLOURS["limit"], linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5
            )


def named(row: ComparisonRow) -> str:
    """Who it is, and in which arrangement."""
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
