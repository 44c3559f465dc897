"""A partition as pictures for papers: PNG of 200 dots an inch, PDF with its text as text, SVG.

matplotlib is imported here and nowhere else; the extra `plot` installs it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedlens.core.errors import ConfigError, DataError, RunDirectoryError
from fedlens.data.partition.partition import Partition
from fedlens.report import partition_charts as charts
from fedlens.report.downsample import PartitionSample, short
from fedlens.report.format import many
from fedlens.report.palette import TEN, class_colors

Axes: TypeAlias = Any  # matplotlib's own types differ from release to release
Figure: TypeAlias = Any

FORMATS = ("png", "pdf", "svg")
_STYLE: dict[Any, Any] = {
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
    "pdf.fonttype": 42,  # whole fonts: many publishers refuse the other kind
    "svg.hashsalt": "fedlens",
    "text.parse_math": False,  # a class may be called "$5"
}
_WIDTH, _HEIGHT = 6.4, 2.9  # inches
_LEGEND_AT_MOST, _TICKS_AT_MOST, _BUBBLES_AT_MOST = 20, 25, 400
_MEAN = "#d66a00"


def draw(partition: Partition, out: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Draws every picture of a partition into the directory `out`, and returns the files.

    Where the classes were counted these are `class-bars` (hsu2019 figure 1), `matrix` (fedcv figures 3, 10 and
    11), `ranks` (hsu2020 figures 2b, 2c and 3) and `emd` (hsu2020 figure 4, top row), else `ranks` alone; and
    `features` where clients see their images differently. The same partition gives the same bytes.

    Raises `ConfigError` where matplotlib is not installed, `DataError` where there is no client, and
    `RunDirectoryError` where nothing can be written.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "pictures for papers are drawn by matplotlib, which is not installed",
            hint="install it with: pip install 'fedlens[plot]'",
        ) from None
    if not len(partition):
        raise DataError("there is no client in this partition, so there is nothing to draw")
    written = []
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing from"
        )  # a box stands for it, and the file is whole
        for name, picture in pictures(partition).items():
            figure = picture()
            written += [_save(figure, out / f"{name}.{ending}") for ending in formats]
    return written


def pictures(partition: Partition) -> dict[str, Callable[[], Figure]]:
    """What there is to draw of a partition, by name."""
    census = partition.census
    drawings: dict[str, Callable[[], Figure]] = {"ranks": lambda: _ranks(partition)}
    if census is not None:
        drawings |= {
            "class-bars": lambda: _bars(charts.class_bars(partition, census)),
            "matrix": lambda: _matrix(charts.class_matrix(partition, census)),
            "emd": lambda: _distances(charts.emd_histogram(census)),
        }
    if partition.features:
        drawings["features"] = lambda: _features(charts.feature_strips(partition))
    return dict(sorted(drawings.items()))


def _save(figure: Figure, path: Path) -> Path:
    # Without the time of day.
    metadata = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[path.suffix[1:]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata=metadata)
    except OSError as error:
        raise RunDirectoryError(
            f"the picture cannot be written: {error.strerror}",
            where=str(path),
            hint="name another directory with --out",
        ) from error
    return path


def _figure(width: float = _WIDTH, height: float = _HEIGHT) -> Figure:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _bars(shown: PartitionSample) -> Figure:
    """Stacked bars; where sizes differ too much for that, shares below, and above them the sizes."""
    from matplotlib.colors import ListedColormap

    uneven = shown.lopsided()
    figure = _figure(height=_HEIGHT + 0.9 * uneven)
    top, axes = (
        figure.subplots(2, 1, sharex=True, height_ratios=(1, 3)) if uneven else (None, figure.subplots())
    )
    places, colors = np.arange(len(shown.ids)), class_colors(len(shown.labels))
    heights = shown.shares() if uneven else shown.counts
    below = np.zeros(len(places))
    handles = []
    for column, color in zip(heights.T, colors, strict=True):
        some = column > 0
        handles.append(axes.bar(places[some], column[some], 0.85, below[some], color=color, linewidth=0))
        below += column
    axes.set(xlim=(-0.6, len(places) - 0.4), ylabel=f"share of its {shown.unit}" if uneven else shown.unit)
    if top is None:
        _count(axes.yaxis)
    else:
        axes.yaxis.set_major_formatter(_percent)
        axes.set_ylim(0, 1)
        marks = shown.counts.sum(axis=1)
        top.bar(places, marks, 0.85, color="#5d6b7a", linewidth=0)
        low, high = math.log10(marks[marks > 0].min()), math.log10(marks.max())
        top.set(yscale="log", ylabel=shown.unit, ylim=(10 ** (math.ceil(low) - 1), 10 ** math.ceil(high)))
        top.tick_params(bottom=False)
        _count(top.yaxis)
    _caption(figure, shown)
    _name_clients(axes, shown.ids)
    if len(shown.labels) <= _LEGEND_AT_MOST:
        # A label that begins with an underscore would be left out.
        names = [f" {short(label, 24)}" for label in shown.labels]
        figure.legend(handles[::-1], names[::-1], loc="outside right center", handlelength=1, handleheight=1)
    else:
        _class_scale(figure, [axes] if top is None else [top, axes], shown, ListedColormap(colors))
    return figure


def _number(value: float, place: int) -> str:
    return f"{value:,.0f}"


def _count(axis: Any) -> None:
    """Marks at whole numbers, written out; on a logarithmic axis at powers of ten."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axis.set_major_formatter(_number)
    if axis.get_scale() == "log":
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def _percent(value: float, place: int) -> str:
    return f"{100 * value:.3g} %"


def _caption(figure: Figure, shown: PartitionSample) -> None:
    """What of the whole is shown, where it is not all."""
    lines = [] if shown.whose.startswith(("all", "the one")) else [shown.whose]
    lines += [shown.what] if shown.what else []
    if lines:
        _headline(figure, "\n".join(lines))


def _headline(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=8)


def _name_clients(axes: Axes, ids: Sequence[str]) -> None:
    if len(ids) <= _TICKS_AT_MOST:
        names = [short(name, 16) for name in ids]
        axes.set_xticks(range(len(ids)), names)
        # Names that would run into each other are set on end.
        if sum(map(len, names)) > 60 or max(map(len, names)) * len(names) > 70:
            axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel("client")
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(ids)} clients")


def _class_scale(figure: Figure, axes: list[Axes], shown: PartitionSample, colors: Any) -> None:
    """Which colour is which class, where there are too many for a legend."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    groups = len(shown.labels)
    bar = figure.colorbar(ScalarMappable(Normalize(0, groups), colors), ax=axes, aspect=40, pad=0.01)
    places = np.unique(np.linspace(0, groups - 1, 6).round().astype(int))
    bar.set_ticks((places + 0.5).tolist(), labels=[short(shown.starts[k], 20) for k in places])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _matrix(shown: PartitionSample) -> Figure:
    """Bubbles of counts where there are few, else a heat map of shares."""
    few = shown.counts.size <= _BUBBLES_AT_MOST and max(shown.counts.shape) <= _TICKS_AT_MOST
    rows = len(shown.ids)
    height = min(max(1.3 + 0.22 * rows, 2.2), 5.2) if few else 4.2
    figure = _figure(height=height)
    axes = figure.subplots()
    (_bubbles if few else _heat)(figure, axes, shown)
    _caption(figure, shown)
    if len(shown.labels) <= _TICKS_AT_MOST:
        names = [short(label, 18) for label in shown.labels]
        axes.set_xticks(range(len(names)), names)
        if max(map(len, names)) > 3:
            axes.tick_params(axis="x", rotation=45)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(shown.labels)} classes" if not shown.what else "class")
    if rows <= _TICKS_AT_MOST:
        axes.set_yticks(range(rows), [short(name, 16) for name in shown.ids])
        axes.set_ylabel("client")
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{rows} clients, by main class")
    return figure


def _bubbles(figure: Figure, axes: Axes, shown: PartitionSample) -> None:
    rows, columns = shown.counts.nonzero()
    counts = shown.counts[rows, columns]
    largest = int(counts.max(initial=1))
    area = 150.0 * min(1.0, (14 / max(shown.counts.shape[0], 10)) ** 2)
    axes.scatter(columns, rows, s=area * counts / largest, color=TEN[0], linewidths=0)
    axes.set(xlim=(-0.6, len(shown.labels) - 0.4), ylim=(len(shown.ids) - 0.4, -0.6))
    axes.grid(visible=True)
    top = _round(largest)
    keys = sorted({top, top // 2, top // 10} - {0})
    handles = [axes.scatter([], [], s=area * key / largest, color=TEN[0], linewidths=0) for key in keys]
    names = [f"{key:,}" for key in keys]
    figure.legend(handles, names, title=shown.unit, loc="outside right upper", labelspacing=1.2)


def _round(number: float) -> int:
    """To one digit."""
    return int(float(f"{number:.1g}"))


def _heat(figure: Figure, axes: Axes, shown: PartitionSample) -> None:
    from matplotlib.colors import PowerNorm

    # Where cells are small, a small share must not be lost.
    norm = PowerNorm(0.5 if shown.fine() else 1.0, 0, shown.top_share())
    image = axes.imshow(shown.shares(), cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, aspect=40, pad=0.01, format=_percent)
    bar.set_label(f"share of the client's {shown.unit}")
    bar.outline.set_visible(False)


def _ranks(partition: Partition) -> Figure:
    curves = charts.rank_curves(partition)
    figure = _figure(width=_WIDTH if len(curves) > 1 else _WIDTH / 2, height=2.4)
    for axes, curve in zip(np.ravel(figure.subplots(1, len(curves))), curves, strict=True):
        marks = ".-" if len(curve.ranks) <= 30 else "-"
        axes.plot(curve.ranks, curve.values, marks, color=TEN[0], linewidth=1.4)
        top, clients = max([*curve.values, 10]), curve.clients
        axes.set(xscale="log", yscale="log", ylabel=f"{curve.name} of the client", xlabel="client, by rank")
        axes.set(ylim=(0.8, 1.25 * top), xlim=(0.9, 1.12 * max(clients, 2)))
        axes.grid(visible=True)
        if clients < 10:
            axes.set_xticks(range(1, clients + 1), map(str, range(1, clients + 1)), minor=False)
            axes.set_xticks([], minor=True)
        else:
            _count(axes.xaxis)
        _count(axes.yaxis)
    if empty := int((partition.sizes() == 0).sum()):
        _headline(figure, f"{many(empty, 'client')} without examples not shown")
    return figure


def _distances(histogram: charts.EmdHistogram) -> Figure:
    figure = _figure(width=_WIDTH / 2, height=2.2)
    axes = figure.subplots()
    axes.bar(histogram.centers, histogram.counts, 0.92 * 2 / charts.EMD_BINS, color=TEN[0])
    if not math.isnan(mean := histogram.mean):
        axes.axvline(mean, color=_MEAN, linestyle="--", linewidth=1.2)
        place, transform = histogram.mean_align, axes.get_xaxis_transform()
        axes.text(mean, 1.01, histogram.mean_label, color=_MEAN, ha=place, va="bottom", transform=transform)
    axes.set(xlim=(-0.02, 2.02), xlabel="EMD from the population", ylabel="clients")
    _count(axes.yaxis)
    if histogram.unknown:
        _headline(figure, f"{many(histogram.unknown, 'client')} without any class not shown")
    return figure


def _features(strips: Sequence[charts.FeatureStrip]) -> Figure:
    figure = _figure(width=_WIDTH / 2, height=0.35 + 0.75 * len(strips))
    for axes, strip in zip(np.ravel(figure.subplots(len(strips), 1)), strips, strict=True):
        dots, many_dots = 14 if len(strip.values) <= 300 else 4, len(strip.values) > 5000
        axes.scatter(strip.values, strip.heights, dots, TEN[0], alpha=0.6, linewidths=0, rasterized=many_dots)
        xlabel = f"{strip.name}, {strip.unit}" if strip.unit else strip.name
        axes.set(yticks=[], ylim=(-0.15, 1.15), xlabel=xlabel)
        axes.spines["left"].set_visible(False)
    return figure
