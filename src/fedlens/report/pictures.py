"""Draws partitions and curves for papers: PNG with 200 dots per inch, PDF with its text as text, SVG.

Only this module imports matplotlib, which the extra `plot` installs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedlens.base.errors import ConfigError, DataError, RunDirectoryError
from fedlens.base.format import size
from fedlens.data.partition.partition import Partition
from fedlens.files.atomic_files import refused, write_atomically
from fedlens.report import classification_figures as classification
from fedlens.report import figures
from fedlens.report import partition_figures as data
from fedlens.report.downsample import PartitionSample, short
from fedlens.report.palette import TEN, class_colors

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
_WIDTH, _HEIGHT = 6.4, 2.9  # inches
_LEGEND_AT_MOST, _TICKS_AT_MOST, _BUBBLES_AT_MOST = 20, 25, 400
_DASHES = dict(zip(figures.DASHES, ("-", "--", ":", "-."), strict=True))
_SYMBOLS = {"circle": "o", "up": "^", "down": "v"}
_MEAN = "#d66a00"

_ANOTHER = "or choose another directory with --out"


def draw(
    partition: Partition,
    out: Path,
    formats: Sequence[str] = ("png", "pdf"),
    places: figures.Figure | None = None,
) -> list[Path]:
    """Draws every picture of a partition into the directory `out`, and returns the files.

    The pictures are `ranks` (Hsu et al. 2020, figures 2b, 2c and 3); if the classes were counted, also `class-bars`
    (Hsu et al. 2019, figure 1), `matrix` (FedCV, figures 3, 10 and 11) and `emd` (Hsu et al. 2020, figure 4, top
    row); `features` if clients have feature shifts; and `map` with the `places` of `partition_map.places_map` (Hsu et
    al. 2020, figure 1). The same partition gives the same bytes.

    Raises `ConfigError` if matplotlib is not installed, `DataError` if there are no clients, and
    `RunFailed` if a file cannot be written.
    """
    with style():
        if not len(partition):
            raise DataError("the partition has no clients to draw")
        written = []
        for name, make_picture in pictures(partition, places).items():
            picture = make_picture()
            written += [save(picture, out / f"{name}.{suffix}", _ANOTHER) for suffix in formats]
    return written


def draw_evaluation(run_dir: Path, out: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Draws how a run's classifier did on the test data into the directory `out`, and returns the files.

    The pictures are `class-accuracy`, `reliability` (the reliability diagram) and, up to 1,000 classes, `confusion`.

    Raises `ConfigError` if matplotlib is not installed, and `RunDirectoryError` if `run_dir` is not a run directory,
    the run has not recorded its last evaluation, it is not of a classifier, or a file cannot be written.
    """
    from fedlens.results.run import Run

    evaluation = Run.open(run_dir).evaluation
    if evaluation is None or evaluation.kind != classification.KIND:
        what = "has not recorded its last evaluation" if evaluation is None else f"is for {evaluation.kind}"
        raise RunDirectoryError(f"the run {what}, so there is no classifier to draw", where=str(run_dir))
    results = classification.ClassResults.of(evaluation.classes, evaluation.sums)
    heat = classification.confusion_map(results)
    shown: dict[str, figures.Figure | figures.HeatMap] = {
        "class-accuracy": classification.class_accuracies(results),
        "reliability": classification.reliability(classification.Calibration.of(evaluation.sums)),
    } | ({"confusion": heat} if heat else {})
    with style():
        drawn = {
            name: heat_picture(f) if isinstance(f, figures.HeatMap) else _row([f])
            for name, f in shown.items()
        }
        return [
            save(picture, out / f"{name}.{suffix}", _ANOTHER)
            for name, picture in drawn.items()
            for suffix in formats
        ]


def heat_picture(figure: figures.HeatMap) -> Picture:
    """The picture of a matrix of shares, with names and counts if there are few."""
    from matplotlib.colors import PowerNorm

    picture = new_picture(height=4.6)
    axes = picture.subplots()
    norm = PowerNorm(1.0 if figure.names else 0.4, 0, 1)
    image = axes.imshow(figure.shares, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    bar = picture.colorbar(image, ax=axes, aspect=40, pad=0.01, format=percent_mark)
    bar.set_label("share of the class")
    bar.outline.set_visible(False)
    names = [short(name, 18) for name in figure.names]
    for scale, title in ((axes.xaxis, figure.column_title), (axes.yaxis, figure.row_title)):
        scale.set_ticks(range(len(names)), names)
        scale.set_label_text(title)
    if names and max(map(len, names)) > 3:
        axes.tick_params(axis="x", rotation=90)
    if figure.counts is not None:
        for (row, column), number in np.ndenumerate(figure.counts):
            color = "white" if figure.shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{number:,}", ha="center", va="center", color=color, fontsize=6)
    return picture


def draw_curves(figure: figures.Figure, path: Path) -> Path:
    """Draws curves over rounds, with a legend, into a file whose name ends in .png, .pdf or .svg; returns its path.

    The same figure gives the same bytes.

    Raises `ConfigError` if matplotlib is not installed or the name has another ending, and `RunFailed` if the
    file cannot be written.
    """
    with style():
        check_suffix(path)
        return save(curve_picture(figure), path, hint="or choose another file")


def check_suffix(path: Path) -> None:
    """Raises `ConfigError` if pictures cannot be written in the format that a file's name ends in."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"cannot draw '{path.name}': unknown file format '{path.suffix}'",
            hint=f"choose a name that ends in {', '.join(SUFFIXES)}",
        )


def curve_picture(figure: figures.Figure) -> Picture:
    """The picture of curves: what the axes show as their title, and a legend without the bands."""
    picture = new_picture(_WIDTH * 0.8, _HEIGHT)
    axes = picture.subplots()
    draw_figure(axes, figure)
    axes.set_title("; ".join(filter(None, [figure.title, figure.note])), loc="left", fontsize=8)
    names = [line.name for line in figure.series if line.kind != "band"]
    if len(names) <= 4 and max(map(len, names)) <= 30:  # else it covers the curves
        axes.legend(loc="best", handlelength=2.4)
    else:
        picture.legend(loc="outside lower left", handlelength=2.4, ncols=2)
    return picture


@contextmanager
def style() -> Iterator[None]:
    """The style of all pictures; raises `ConfigError` if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "drawing pictures needs matplotlib, which is not installed",
            hint="install it with: pip install 'fedlens[plot]'",
        ) from None
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # such a character is drawn as a box
        yield


def pictures(partition: Partition, places: figures.Figure | None = None) -> dict[str, Callable[[], Picture]]:
    """The pictures of a partition by name, as functions that draw them."""
    census = partition.census
    functions: dict[str, Callable[[], Picture]] = {"ranks": lambda: _row(data.rank_curves(partition))}
    if census is not None:
        functions |= {
            "class-bars": lambda: _bars(data.class_bars(partition, census)),
            "matrix": lambda: _matrix(data.class_matrix(partition, census)),
            "emd": lambda: _row([data.emd_histogram(census)]),
        }
    if partition.features:
        functions["features"] = lambda: _column(data.feature_strips(partition))
    if places is not None:
        functions["map"] = lambda: _map(places)
    return dict(sorted(functions.items()))


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


def new_picture(width: float = _WIDTH, height: float = _HEIGHT) -> Picture:
    """An empty picture of this size in inches; needs `style`."""
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _map(figure: figures.Figure) -> Picture:
    picture = new_picture(_WIDTH, 3.2)
    axes = picture.subplots()
    draw_figure(axes, figure)
    axes.set_aspect("equal")
    axes.set_title(figure.note, fontsize=6, loc="left")
    picture.legend(loc="outside right upper", markerscale=2)
    return picture


def _row(shown: Sequence[figures.Figure]) -> Picture:
    picture = new_picture(_WIDTH / 2 * len(shown), 2.4)
    _headline(picture, shown[0].note)
    return _fill(picture, picture.subplots(1, len(shown)), shown)


def _column(shown: Sequence[figures.Figure]) -> Picture:
    picture = new_picture(_WIDTH / 2, 0.35 + 0.75 * len(shown))
    return _fill(picture, picture.subplots(len(shown), 1), shown)


def _fill(picture: Picture, panels: Any, shown: Sequence[figures.Figure]) -> Picture:
    for axes, figure in zip(np.ravel(panels), shown, strict=True):
        draw_figure(axes, figure)
    return picture


def draw_figure(axes: Axes, figure: figures.Figure) -> None:
    """Draws the series of a figure, its marks and its scales."""
    for series in figure.series:
        x, y, points = series.x, series.y, len(series.x)
        color = series.color if series.color.startswith("#") else TEN[0]  # not a variable of the page's style
        if series.kind == "bar":
            heights = [math.nan if value is None else value for value in y]
            axes.bar(x, heights, series.bar or 0.92 * (x[1] - x[0]), color=color, label=f" {series.name}")
            _draw_error_bars(axes, series, "#3c4350")
        elif series.kind == "dots":
            look = {"alpha": 0.6, "linewidths": 0, "rasterized": points > 5000}
            axes.scatter(x, y, 14 if points <= 300 else 4, color, label=f" {series.name}", **look)
        elif series.kind in ("points", "open", "cross"):
            _draw_markers(axes, series, color)
        elif series.kind == "band":
            half = points // 2
            axes.fill_between(x[:half], y[:half], y[half:][::-1], color=color, alpha=0.18, linewidth=0)
        else:
            # A gap where a value was not finite; matplotlib leaves out a label that begins with an underscore.
            values = [math.nan if value is None else value for value in y]
            marker = "." if points <= figures.MARKERS_UP_TO and series.kind != "level" else ""
            label = f" {series.name}" if series.name else None
            line = {
                "color": color,
                "linestyle": _DASHES[series.dash],
                "linewidth": 0.9 if series.kind == "level" else 1.4,
                "marker": marker,
            }
            axes.plot(x, values, label=None if series.group else label, **line)
            axes.grid(visible=True)
            _draw_error_bars(axes, series, color)
    for band in figure.bands:
        axes.axvspan(band.first - 0.5, band.last + 0.5, color=_MEAN, alpha=0.12, linewidth=0)
    if (mark := figure.mark) is not None:
        axes.axvline(mark.x, color=_MEAN, linestyle="--", linewidth=1.2)
        above = axes.get_xaxis_transform()
        axes.text(mark.x, 1.01, mark.label, color=_MEAN, ha=mark.align, va="bottom", transform=above)
    for scale, axis in ((axes.xaxis, figure.x), (axes.yaxis, figure.y)):
        _scale(scale, axis)
    if figure.y.values == "hidden":
        axes.spines["left"].set_visible(False)


def _draw_markers(axes: Axes, series: figures.Series, color: str) -> None:
    label = f" {series.name}" if series.name and not series.group else None
    values = [math.nan if value is None else value for value in series.y]
    if series.kind == "cross":
        axes.scatter(series.x, values, 320, color, marker="+", linewidths=0.9, label=label)
    elif series.kind == "open":
        look = {"facecolors": "none", "edgecolors": color, "linewidths": 1.1, "zorder": 3}
        axes.scatter(series.x, values, 26, marker=_SYMBOLS[series.symbol], label=label, **look)
    else:
        areas: Any = [18 * size for size in series.sizes] or 18
        alpha = 0.75 if series.sizes else 1
        axes.scatter(series.x, values, areas, color, alpha=alpha, linewidths=0, label=label, zorder=3)
    axes.grid(visible=True)
    _draw_error_bars(axes, series, color)


def _draw_error_bars(axes: Axes, series: figures.Series, color: str) -> None:
    if not len(series.low):
        return
    ends = zip(series.x, series.y, series.low, series.high, strict=True)
    for x, y, low, high in ends:
        if y is not None and low is not None and high is not None:
            axes.errorbar(x, y, [[y - low], [high - y]], color=color, elinewidth=0.9, capsize=2)


def _scale(scale: Any, axis: figures.Axis) -> None:
    from matplotlib.ticker import LogFormatter, MaxNLocator, NullLocator

    which = scale.axis_name
    scale.axes.set(**{f"{which}label": axis.title, f"{which}scale": "log" if axis.log else "linear"})
    if axis.limits:
        scale.axes.set(**{f"{which}lim": axis.limits})
    if axis.values == "count":
        _count(scale)
    if axis.values == "share":
        scale.set_major_formatter(percent_mark)
    if axis.log and axis.values == "number":
        # By itself a mark is "10^-2" between dollars, which text without formulas shows as it is.
        scale.set_major_formatter(lambda value, _: f"{value:g}")
        scale.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))
    if axis.values == "bytes":
        scale.set_major_formatter(lambda value, _: size(value).replace(".0 ", " "))
        scale.set_major_locator(MaxNLocator(nbins=5))
    if axis.gap is not None:
        mark = {"ha": "center", "va": "center", "fontsize": 8, "transform": scale.axes.get_xaxis_transform()}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        scale.axes.text(axis.gap, 0, "//", zorder=5, clip_on=False, bbox=box, **mark)
    if axis.ticks:
        scale.set_ticks(list(axis.ticks), [short(name, axis.name_width) for name in axis.names] or None)
        scale.set_minor_locator(NullLocator())
    if axis.values == "hidden":
        scale.set_ticks([])


def _count(scale: Any) -> None:
    """Marks at whole numbers, written out; on a logarithmic axis at powers of ten."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    scale.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if scale.get_scale() == "log":
        scale.set_minor_formatter(NullFormatter())
    else:
        scale.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def percent_mark(value: float, position: int) -> str:
    """A share as the mark of an axis."""
    return f"{100 * value:.3g} %"


def _headline(picture: Picture, text: str) -> None:
    if text:
        picture.suptitle(text, x=0.01, ha="left", fontsize=8)


def _bars(sample: PartitionSample) -> Picture:
    """Stacked bars; if sizes differ too much for that, bars of shares, and the sizes above them."""
    from matplotlib.colors import ListedColormap

    uneven = sample.lopsided()
    picture = new_picture(height=_HEIGHT + 0.9 * uneven)
    panels = picture.subplots(1 + uneven, 1, squeeze=False, sharex=True, height_ratios=(1, 3)[1 - uneven :])[
        :, 0
    ]
    axes, clients = panels[-1], np.arange(len(sample.ids))
    colors, unit = class_colors(len(sample.labels)), sample.unit
    bottoms, handles = np.zeros(len(clients)), []
    for heights, color in zip((sample.shares() if uneven else sample.counts).T, colors, strict=True):
        some = heights > 0
        handles.append(axes.bar(clients[some], heights[some], 0.85, bottoms[some], color=color, linewidth=0))
        bottoms += heights
    axes.set(xlim=(-0.6, len(clients) - 0.4), ylabel=f"share of its {unit}" if uneven else unit)
    if uneven:
        axes.yaxis.set_major_formatter(percent_mark)
        axes.set_ylim(0, 1)
        marks = sample.counts.sum(axis=1)
        panels[0].bar(clients, marks, 0.85, color="#5d6b7a", linewidth=0)
        low, high = math.log10(marks[marks > 0].min()), math.log10(marks.max())
        panels[0].set(yscale="log", ylabel=unit, ylim=(10 ** (math.ceil(low) - 1), 10 ** math.ceil(high)))
        panels[0].tick_params(bottom=False)
    _count(panels[0].yaxis)
    _headline(picture, sample.excerpt())
    names = [short(name, 16) for name in sample.ids]
    _name_ticks(axes.xaxis, names, "client", f"{len(names)} clients")
    # Names that would run into each other are turned.
    if (
        len(names) <= _TICKS_AT_MOST
        and max(sum(map(len, names)) / 60, max(map(len, names)) * len(names) / 70) > 1
    ):
        axes.tick_params(axis="x", rotation=90)
    if len(sample.labels) <= _LEGEND_AT_MOST:
        # matplotlib leaves out a label that begins with an underscore.
        names = [f" {short(label, 24)}" for label in sample.labels]
        picture.legend(handles[::-1], names[::-1], loc="outside right center", handlelength=1, handleheight=1)
    else:
        _class_scale(picture, list(panels), sample, ListedColormap(colors))
    return picture


def _name_ticks(scale: Any, names: Sequence[str], title: str, many: str) -> None:
    """A tick with its name for each of a few; for more, only the title of the axis says what they are."""
    few = len(names) <= _TICKS_AT_MOST
    scale.set_ticks(range(len(names)) if few else [], names if few else [])
    scale.set_label_text(title if few else many)


def _class_scale(picture: Picture, panels: list[Axes], sample: PartitionSample, colors: Any) -> None:
    """A colour scale of the classes, for more classes than a legend holds."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    groups = len(sample.labels)
    bar = picture.colorbar(ScalarMappable(Normalize(0, groups), colors), ax=panels, aspect=40, pad=0.01)
    named = np.unique(np.linspace(0, groups - 1, 6).round().astype(int))
    bar.set_ticks((named + 0.5).tolist(), labels=[short(sample.starts[k], 20) for k in named])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _matrix(sample: PartitionSample) -> Picture:
    """Bubbles of counts for few cells, else a heat map of shares."""
    few = sample.counts.size <= _BUBBLES_AT_MOST and max(sample.counts.shape) <= _TICKS_AT_MOST
    clients = len(sample.ids)
    picture = new_picture(height=min(max(1.3 + 0.22 * clients, 2.2), 5.2) if few else 4.2)
    axes = picture.subplots()
    (_bubbles if few else _heat)(picture, axes, sample)
    _headline(picture, sample.excerpt())
    names = [short(label, 18) for label in sample.labels]
    _name_ticks(axes.xaxis, names, "", "class" if sample.grouping else f"{len(names)} classes")
    if len(names) <= _TICKS_AT_MOST and max(map(len, names)) > 3:
        for label in axes.get_xticklabels():
            label.set(rotation=45, ha="right", rotation_mode="anchor")
    _name_ticks(
        axes.yaxis, [short(name, 16) for name in sample.ids], "client", f"{clients} clients, by main class"
    )
    return picture


def _bubbles(picture: Picture, axes: Axes, sample: PartitionSample) -> None:
    rows, columns = sample.counts.nonzero()
    counts = sample.counts[rows, columns]
    largest = int(counts.max(initial=1))
    area = 150.0 * min(1.0, (14 / max(sample.counts.shape[0], 10)) ** 2)
    axes.scatter(columns, rows, s=area * counts / largest, color=TEN[0], linewidths=0)
    axes.set(xlim=(-0.6, len(sample.labels) - 0.4), ylim=(len(sample.ids) - 0.4, -0.6))
    axes.grid(visible=True)
    top = int(float(f"{largest:.1g}"))  # to one digit
    keys = sorted({top, top // 2, top // 10} - {0})
    handles = [axes.scatter([], [], s=area * key / largest, color=TEN[0], linewidths=0) for key in keys]
    names = [f"{key:,}" for key in keys]
    picture.legend(handles, names, title=sample.unit, loc="outside right upper", labelspacing=1.2)


def _heat(picture: Picture, axes: Axes, sample: PartitionSample) -> None:
    from matplotlib.colors import PowerNorm

    # Small cells need more contrast for small shares.
    norm = PowerNorm(0.5 if sample.fine() else 1.0, 0, sample.top_share())
    image = axes.imshow(sample.shares(), cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    bar = picture.colorbar(image, ax=axes, aspect=40, pad=0.01, format=percent_mark)
    bar.set_label(f"share of the client's {sample.unit}")
    bar.outline.set_visible(False)
