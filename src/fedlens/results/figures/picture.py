"""Draws charts for papers: PNG with 200 dots per inch, PDF with its text as text, SVG.

Only this module imports matplotlib, which the extra `plot` installs.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedlens.base.errors import ConfigError
from fedlens.base.format import size
from fedlens.files.atomic_files import refused, write_atomically
from fedlens.results.figures.chart import DASHES, MARKERS_UP_TO, TEN, Axis, Cells, Chart, Panel, Series, short

Axes: TypeAlias = Any  # matplotlib's own types differ from release to release
Picture: TypeAlias = Any

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "pdf.fonttype": 42,  # whole fonts: many publishers refuse other kinds
    "svg.hashsalt": "fedlens",
    "text.parse_math": False,  # a class may be called "$5"
}
# The file formats, and what leaves the time of day out of them.
SUFFIXES: dict[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
_DASHES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))
_SYMBOLS = {"circle": "o", "up": "^", "down": "v"}
_MARK = "#d66a00"
_ROUND = [1, 2, 5, 10]  # steps of marks, times a power of ten
# In inches: of a row by the shape of its panels, of a line of a legend, and of a line of caveats.
_HEIGHTS = {"strip": 0.75, "tower": 4.0, "square": 4.2, "map": 3.6}
_LEGEND_LINE, _CAVEAT_LINE = 0.15, 0.12
_LETTERS, _TITLE_LETTERS, _CAVEAT_LETTERS = 11, 17, 21  # of labels, titles and caveats, for each inch
_LEGEND_AT_MOST, _LEGEND_NAME = 20, 40  # bars, of which more have a scale of colours, and characters
_TURNED_FROM = 12  # names on an axis that stand upright where they would run into each other


def draw_chart(chart: Chart, path: Path, hint: str | None = None) -> Path:
    """Draws a chart into a file whose name ends in .png, .pdf or .svg, and returns its path.

    The same chart gives the same bytes. Raises `ConfigError` if matplotlib is not installed or the name has another
    ending, and `RunFailed` if the file cannot be written.
    """
    with style():
        check_suffix(path)
        return save(chart_picture(chart), path, hint)


def check_suffix(path: Path) -> None:
    """Raises `ConfigError` if pictures cannot be written in the format that a file's name ends in."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"cannot draw '{path.name}': unknown file format '{path.suffix}'",
            hint=f"choose a name that ends in {', '.join(SUFFIXES)}",
        )


@contextmanager
def style() -> Iterator[None]:
    """The style of all pictures; raises `ConfigError` if matplotlib is not installed."""
    try:
        import matplotlib as mpl
        import matplotlib.figure
    except ImportError:
        raise ConfigError(
            "drawing pictures needs matplotlib, which is not installed",
            hint="install it with: pip install 'fedlens[plot]'",
        ) from None
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # such a character is drawn as a box
        yield


def save(picture: Picture, path: Path, hint: str | None = None) -> Path:
    """Writes a picture in the format that the ending of `path` names; raises `RunFailed` if the disk refuses.

    A link or another special file at `path` is replaced, not written to.
    """
    content = BytesIO()
    picture.savefig(content, format=path.suffix[1:], dpi=200, metadata=SUFFIXES[path.suffix])
    return write_picture(content.getvalue(), path, hint)


def write_picture(content: bytes, path: Path, hint: str | None = None) -> Path:
    """Writes a file, and its folder if it is missing; returns `path`. Raises `RunFailed` if the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(error, "the picture", path, hint) from error
    write_atomically(path, content, hint=hint)
    return path


def chart_picture(chart: Chart) -> Picture:
    """The panels row by row, with one legend below; needs `style`."""
    from matplotlib.figure import Figure

    panels = chart.panels
    wide = min(chart.columns or (2 if len(panels) in (2, 4) else 3), len(panels))
    tall = -(-len(panels) // wide)
    width = _width(panels, wide)
    names = [name for panel in panels for name in panel.x.names]
    tilted = sum(map(len, names)) / len(panels) > _LETTERS * width / wide
    row = (2.5 if wide > 1 else 2.7) + 0.035 * max(map(len, names), default=0) * tilted
    high = [_HEIGHTS.get(p.shape, 0.6 + 0.25 * len(p.y.names) if _named_bars(p) else row) for p in panels]
    heights = [max(high[k : k + wide]) for k in range(0, len(panels), wide)]
    picture = Figure((width, 0.4 + sum(heights)), layout="constrained")
    grid = np.ravel(picture.subplots(tall, wide, squeeze=False, height_ratios=heights))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    shared = len({panel.x.title for panel in panels}) == 1
    for k, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        _draw(axes, panel)
        # Panels share their scales, so the titles of the axes stand at the edge alone.
        if k % wide and panel.y.title == panels[k - 1].y.title:
            axes.set_ylabel("")
            axes.tick_params(labelleft=panel.y.names != panels[k - 1].y.names or not panel.y.names)
        if shared and k + wide < len(panels):
            axes.set_xlabel("")
        if tilted and panel.x.names:
            _tilt(axes, len(panel.x.names))
        letters = int(_TITLE_LETTERS * width / wide)
        title = "\n".join(textwrap.fill(line, letters) for line in panel.heading.split("\n"))
        axes.set_title(title, loc="left", fontsize=8)
    _add_scales(picture, grid, panels, wide)
    _add_legend(picture, grid[: len(panels)], panels, width)
    if chart.caveats:
        lines = textwrap.wrap(" ".join(chart.caveats), int(_CAVEAT_LETTERS * width))
        picture.set_figheight(picture.get_figheight() + _CAVEAT_LINE * len(lines))
        picture.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=6)
    return picture


def _width(panels: Sequence[Panel], wide: int) -> float:
    """Of a picture with so many columns."""
    if any(panel.stacked == "across" and not panel.y.names for panel in panels):
        return max(0.6 + 1.9 * wide, 4.0)
    if wide == 1 and any(panel.stacked or panel.shape in ("tower", "square", "map") for panel in panels):
        return 6.4
    return (4.4, 6.4, 8.4)[min(wide, 3) - 1] + 2.0 * max(wide - 3, 0)


def _named_bars(panel: Panel) -> bool:
    return panel.stacked == "across" and len(panel.y.names) > 0


def _tilt(axes: Axes, names: int) -> None:
    upright = names > _TURNED_FROM
    axes.tick_params(axis="x", rotation=90 if upright else 30)
    for label in axes.get_xticklabels():
        label.set(ha="center" if upright else "right", rotation_mode="default" if upright else "anchor")


def _add_legend(picture: Picture, grid: Any, panels: Sequence[Panel], width: float) -> None:
    """One legend of all panels, below them, in the order of the series; of many bars a scale of their colours."""
    from matplotlib.collections import PathCollection

    if any(panel.stacked and len(panel.series) > _LEGEND_AT_MOST for panel in panels):
        return _color_scale(picture, list(grid), max((panel.series for panel in panels), key=len))
    named: dict[str, Any] = {}
    for axes in grid:
        handles, names = axes.get_legend_handles_labels()
        named = dict(zip(names, handles, strict=True)) | named
    if len(named) <= 1:
        return None
    order = [f" {line.name}" for panel in panels for line in panel.series]
    names = [name for name in dict.fromkeys(order) if name in named]
    words = [f" {short(name, _LEGEND_NAME)}" for name in names]
    across = max(1, min(len(names), int(width * 15 / (max(map(len, words)) + 6))))
    lines = -(-len(names) // across)  # more than a few would squeeze the panels
    picture.set_figheight(picture.get_figheight() + _LEGEND_LINE * max(0, lines - 3))
    handles = [named[name] for name in names]
    legend = picture.legend(handles, words, loc="outside lower center", handlelength=2.4, ncols=across)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([22])  # where sizes say something, that of the first marker says nothing
    return None


def _color_scale(picture: Picture, grid: list[Axes], series: Sequence[Series]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    colors = ListedColormap([each.color for each in series])
    bar = picture.colorbar(ScalarMappable(Normalize(0, len(series)), colors), ax=grid, aspect=40, pad=0.01)
    named = np.unique(np.linspace(0, len(series) - 1, 6).round().astype(int))
    bar.set_ticks((named + 0.5).tolist(), labels=[short(series[k].name, 20) for k in named])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _draw(axes: Axes, panel: Panel) -> None:
    """The series or cells of a panel, its marks and its scales."""
    ends = np.zeros(len(panel.series[0].x) if panel.stacked else 0)
    for series in panel.series:
        color = series.color if series.color.startswith("#") else TEN[0]  # not a variable of the page's style
        if panel.stacked:
            ends = ends + _draw_stacked(axes, series, color, ends, panel.stacked == "across")
        else:
            _draw_series(axes, series, color)
    if panel.cells is not None:
        _draw_cells(axes, panel.cells)
    for band in panel.bands:
        axes.axvspan(band.first - 0.5, band.last + 0.5, color=_MARK, alpha=0.12, linewidth=0)
    if (mark := panel.mark) is not None:
        axes.axvline(mark.x, color=_MARK, linestyle="--", linewidth=1.2)
        above = axes.get_xaxis_transform()
        axes.text(mark.x, 1.01, mark.label, color=_MARK, ha=mark.align, va="bottom", transform=above)
    for scale, axis in ((axes.xaxis, panel.x), (axes.yaxis, panel.y)):
        _scale(scale, axis)
    if panel.shape == "map":
        axes.set_aspect("equal")
    if panel.y.values == "hidden" and not panel.y.title:
        axes.spines["left"].set_visible(False)


def _draw_series(axes: Axes, series: Series, color: str) -> None:
    x, y, points = series.x, [math.nan if value is None else value for value in series.y], len(series.x)
    # matplotlib leaves out a label that begins with an underscore.
    label = f" {series.name}" if series.name and not series.group else None
    if series.kind == "bar":
        axes.bar(x, y, series.bar or 0.92 * (x[1] - x[0] if points > 1 else 1), color=color, label=label)
        return _draw_error_bars(axes, series, "#3c4350")
    if series.kind == "band":
        half = points // 2
        axes.fill_between(x[:half], y[:half], y[half:][::-1], color=color, alpha=0.18, linewidth=0)
        return None
    if series.kind == "dots":
        look: dict[str, Any] = {"alpha": 0.6, "linewidths": 0, "rasterized": points > 5000}
        axes.scatter(x, y, 14 if points <= 300 else 4, color, label=label, **look)
        return None
    if series.kind == "cross":
        axes.scatter(x, y, 320, color, marker="+", linewidths=0.9, label=label)
    elif series.kind == "open":
        look = {"facecolors": "none", "edgecolors": color, "linewidths": 1.1, "zorder": 3}
        axes.scatter(x, y, 26, marker=_SYMBOLS[series.symbol], label=label, **look)
    elif series.kind == "points":
        areas: Any = [18 * area for area in series.sizes] or 18
        alpha = 0.75 if series.sizes else 1
        axes.scatter(x, y, areas, color, alpha=alpha, linewidths=0, label=label, zorder=3)
    else:
        thin = series.kind == "level"
        marker = "." if points <= MARKERS_UP_TO and not thin else ""
        line = {"color": color, "linestyle": _DASHES[series.dash], "linewidth": 0.9 if thin else 1.4}
        axes.plot(x, y, label=label, marker=marker, **line)
    axes.grid(visible=True)
    return _draw_error_bars(axes, series, color)


def _draw_stacked(axes: Axes, series: Series, color: str, ends: Any, across: bool) -> Any:
    """Bars that begin where the last ones end; returns their lengths."""
    places, lengths = (series.y, series.x) if across else (series.x, series.y)
    at, long = np.asarray(places, float), np.asarray(lengths, float)
    some = long > 0
    some[:1] |= not some.any()  # so that the legend has its colour
    if series.written:
        for place, end, words in zip(at, ends + long, series.texts, strict=True):
            axes.annotate(words, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    draw, thick = (axes.barh, 0.72 if series.written else 1.0) if across else (axes.bar, 0.85)
    draw(at[some], long[some], thick, ends[some], color=color, linewidth=0, label=f" {series.name}")
    return long


def _draw_error_bars(axes: Axes, series: Series, color: str) -> None:
    if not len(series.low):
        return
    ends = zip(series.x, series.y, series.low, series.high, strict=True)
    for x, y, low, high in ends:
        if y is not None and low is not None and high is not None:
            axes.errorbar(x, y, [[y - low], [high - y]], color=color, elinewidth=0.9, capsize=2)


def _draw_cells(axes: Axes, cells: Cells) -> None:
    from matplotlib.colors import Normalize, PowerNorm

    shown = np.ma.masked_invalid(cells.values)
    power = math.log(0.5) / math.log(cells.middle)
    norm = Normalize(*cells.limits) if power == 1 else PowerNorm(power, *cells.limits)
    origin = "lower" if cells.rising else "upper"
    axes.imshow(shown, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest", origin=origin)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("#f3f4f6")
    for row, texts in enumerate(cells.texts):
        for column, words in enumerate(texts):
            color = "white" if norm(cells.values[row, column]) > 0.55 else "black"
            axes.text(column, row, words, ha="center", va="center", color=color, fontsize=6)
    for mark in cells.marks:
        axes.plot(
            mark.column,
            mark.row,
            "o",
            color=_MARK,
            markersize=4,
            markeredgecolor="white",
            markeredgewidth=0.6,
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        look = {
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 6,
            "bbox": box,
            "annotation_clip": True,
        }
        axes.annotate(mark.name, (mark.column, mark.row), (0, 6), **look)


def _add_scales(picture: Picture, grid: Any, panels: Sequence[Panel], wide: int) -> None:
    """The scale of the colours of cells: one for all panels, or one for each stretch of a row with the same limits."""
    from matplotlib.ticker import MaxNLocator

    scales = [(panel.cells.limits, panel.cells.title) if panel.cells else None for panel in panels]
    alike = len(set(scales)) == 1
    for k, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        last = k + 1 == len(panels)
        if panel.cells is None or not (
            last if alike else last or (k + 1) % wide == 0 or scales[k + 1] != scales[k]
        ):
            continue
        form = percent_mark if panel.cells.form == "share" else None
        ticks = MaxNLocator(5, integer=panel.cells.form == "count", min_n_ticks=1, steps=_ROUND)
        beside = list(grid) if alike else axes
        bar = picture.colorbar(axes.images[0], ax=beside, aspect=30, pad=0.01, format=form, ticks=ticks)
        bar.set_label(panel.cells.title)
        bar.outline.set_visible(False)


def _scale(scale: Any, axis: Axis) -> None:
    from matplotlib.ticker import LogFormatter, MaxNLocator, NullFormatter, NullLocator

    which = scale.axis_name
    scale.axes.set(**{f"{which}label": axis.title, f"{which}scale": "log" if axis.log else "linear"})
    if axis.limits:
        scale.axes.set(**{f"{which}lim": axis.limits})
    if axis.values == "count":
        # Marks at whole numbers, written out; on a logarithmic axis at powers of ten.
        scale.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if axis.log:
            scale.set_minor_formatter(NullFormatter())
        else:
            scale.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=_ROUND))
    elif not axis.log:
        scale.set_major_locator(MaxNLocator(5 if axis.values == "bytes" else "auto", steps=_ROUND))
    if axis.values == "share":
        scale.set_major_formatter(percent_mark)
    if axis.log and axis.values == "number":
        # By itself a mark is "10^-2" between dollars, which text without formulas shows as it is.
        scale.set_major_formatter(lambda value, _: f"{value:g}")
        scale.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))
    if axis.values == "bytes":
        scale.set_major_formatter(lambda value, _: size(value).replace(".0 ", " "))
    if axis.gap is not None:
        mark = {"ha": "center", "va": "center", "fontsize": 8, "transform": scale.axes.get_xaxis_transform()}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        scale.axes.text(axis.gap, 0, "//", zorder=5, clip_on=False, bbox=box, **mark)
    if len(axis.ticks):
        scale.set_ticks(list(axis.ticks), [short(name, axis.name_width) for name in axis.names] or None)
        scale.set_minor_locator(NullLocator())
    if axis.values == "hidden":
        scale.set_ticks([])


def percent_mark(value: float, position: int) -> str:
    """A share as the mark of an axis."""
    return f"{100 * value:.3g} %"
