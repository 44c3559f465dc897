"""One description of a figure: panels of series or cells, axes and words. `pages.plotly_figures` draws it on pages,
`picture` in files for papers."""

from __future__ import annotations

import colorsys
import itertools
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import is_share

DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS_UP_TO = 40  # points of a line
# Tableau's ten: told apart by most colour-blind readers, and legible on light and dark.
TEN = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1"),
    *("#edc948", "#76b7b2", "#ff9da7", "#9c755f", "#a3a9b3"),
)
GREY = "#77828f"
NAMED = 25  # names on an axis
_WRITTEN_CELLS = 120  # of a matrix, each with its value in it

Align: TypeAlias = Literal["left", "center", "right"]
Values: TypeAlias = Literal["number", "count", "share", "bytes", "hidden"]
Shape: TypeAlias = Literal["", "tall", "low", "tower", "strip", "square", "map"]


@dataclass(frozen=True)
class Axis:
    """An axis of a figure.

    Args:
        values: how values are written; an axis of "hidden" values has its title alone.
        limits: the first and the last value shown; None fits them to the data.
        ticks: where the marks are; empty chooses them.
        names: the labels of the marks; empty writes their values.
        name_width: of a label, in characters; a longer one is shortened.
        gap: where a mark says that the axis is broken, such as between 0 and the smallest value of a log axis.
    """

    title: str = ""
    values: Values = "number"
    log: bool = False
    limits: tuple[float, float] | None = None
    ticks: Sequence[float] = ()
    names: Sequence[str] = ()
    name_width: int = 18
    gap: float | None = None


@dataclass(frozen=True)
class Series:
    """Values y over x, None where a value was not finite.

    A "band" is the outline of an area around the line of the same name: along its upper edge, and back on its lower.
    Its colour is written as #rrggbb. "points" are filled markers, "open" ones outlines, a "cross" has four arms, and
    a "level" is a line without markers.

    Args:
        color: a colour of CSS, or a variable of the page's style.
        dash: one of `DASHES`.
        texts: a text for each point, which the page shows at it, before the value.
        low, high: the ends of an error bar at each point, None where it has none; empty without error bars.
        sizes: the area of each of some "points", relative to the usual one; empty for the usual one.
        symbol: of "open" markers; "up" and "down" point to where a bound leaves room.
        bar: the width of each "bar"; 0 fits it to the distance of the first two.
        written: whether files have the texts beside stacked bars.
        group: the name of the series that it is shown and hidden with; it has no entry in the legend then.
    """

    x: Sequence[float]
    y: Sequence[float | None]
    name: str = ""
    kind: Literal["line", "bar", "dots", "ring", "band", "points", "open", "cross", "level"] = "line"
    color: str = "var(--accent)"
    dash: str = "solid"
    width: float = 2.25
    texts: Sequence[str] = ()
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    sizes: Sequence[float] = ()
    symbol: Literal["circle", "up", "down"] = "circle"
    bar: float = 0.0
    written: bool = False
    group: str = ""


@dataclass(frozen=True)
class VerticalLine:
    """A dashed vertical line at `x` with its label; `align` is the side of the label that touches the line."""

    x: float
    label: str
    align: Align


@dataclass(frozen=True)
class Band:
    """A shaded stretch of the x axis, from `first` to `last`, with its label."""

    first: float
    last: float
    label: str


class CellMark(NamedTuple):
    """A place in a matrix, from the middle of the first column and row on in columns and rows, and its name."""

    column: float
    row: float
    name: str


@dataclass(frozen=True, eq=False)
class Cells:
    """A matrix of values, one colour a cell.

    Args:
        values: float64 [rows, columns], NaN where a cell has no value.
        rows, columns: the name of each row and column.
        title: what the colours show.
        limits: the values of the first and the last colour.
        form: how values are written.
        middle: where between the limits the middle colour is; less tells small values apart.
        rising: whether the first row is at the bottom.
        counts: int64 [rows, columns], written into the cells; None leaves them empty, but for values that are rising
            and few.
        marks: places with a name that are drawn over the cells.
    """

    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str
    limits: tuple[float, float]
    form: Values = "number"
    middle: float = 0.5
    rising: bool = False
    counts: NDArray[np.int64] | None = None
    marks: Sequence[CellMark] = ()

    @property
    def texts(self) -> list[list[str]]:
        """What is written into the cells, row by row; empty for nothing."""
        if self.counts is not None:
            return [[f"{count:,}" for count in row] for row in self.counts.tolist()]
        if not self.rising or self.values.size > _WRITTEN_CELLS:
            return []
        share = self.form == "share"
        words = [[f"{100 * v:.1f}" if share else f"{v:.3g}" for v in row] for row in self.values.tolist()]
        return [["" if text == "nan" else text for text in row] for row in words]


@dataclass(frozen=True)
class Panel:
    """Series or cells on two axes.

    Args:
        title: the heading.
        about: a description for readers who cannot see the figure.
        note: what the panel leaves out, or empty.
        unified: whether the page shows the values of all series at one x in one box.
        stacked: bars that stand on each other "up", or lie one after the other "across".
        shape: how high it is: "tall", "low", "tower", "strip" or "square", or empty for the usual height; a "map" has
            the same scale on both axes in files.
        view, others: the name of this view, and the same series seen in another way, of which the page shows one.
    """

    title: str
    about: str
    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    note: str = ""
    mark: VerticalLine | None = None
    bands: Sequence[Band] = ()
    unified: bool = False
    cells: Cells | None = None
    stacked: Literal["", "up", "across"] = ""
    shape: Shape = ""
    view: str = ""
    others: Sequence[Panel] = ()

    @property
    def heading(self) -> str:
        """The title and the note."""
        return "; ".join(filter(None, [self.title, self.note]))


@dataclass(frozen=True)
class Chart:
    """A figure: its panels, which share their scales, and its words.

    Args:
        caption: what the panels show, in one sentence.
        panels: a single one needs no title.
        gaps: what is missing: failed runs, and runs that are not done.
        columns: panels beside each other; None fits them to their number.
        caveats: sentences that stand above the picture: what the figure does not show.
        notes: sentences for the block of notes of a page: what the marks mean.
    """

    title: str
    caption: str
    panels: Sequence[Panel]
    gaps: Sequence[str] = ()
    columns: int | None = None
    caveats: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        single = len(self.panels) == 1
        shape: Shape = "tall" if single or self.columns == 1 else "low"
        shown = [replace(panel, shape=panel.shape or shape) for panel in self.panels]
        object.__setattr__(self, "panels", [replace(shown[0], title="")] if single else shown)


def matrix(title: str, about: str, cells: Cells, x: Axis, y: Axis, **more: Any) -> Panel:
    """A panel of cells whose axes name all rows and columns."""
    return Panel(title, about, named_axis(x, cells.columns), named_axis(y, cells.rows), cells=cells, **more)


def named_axis(axis: Axis, names: Sequence[str], many: str = "", most: int = NAMED) -> Axis:
    """An axis with a mark for each name, the first at 0; of more than `most`, for names at equal steps, or with the
    title `many` for none."""
    if many and len(names) > most:
        return Axis(many, "hidden")
    step = round_step(len(names), most)
    return replace(axis, ticks=range(0, len(names), step), names=names[::step])


def round_step(number: int, most: int = NAMED) -> int:
    """The steps 1, 2, 5, 10, 20, ... of marks, of which `number` places have at most `most`.

    >>> round_step(20), round_step(160), round_step(500)
    (1, 10, 20)
    """
    steps = (step * int(10**power) for power in itertools.count() for step in (1, 2, 5))
    return next(step for step in steps if number <= most * step)


def curves(
    series: Sequence[Series], metric: str, title: str, about: str, bands: Sequence[Band] = ()
) -> Panel:
    """A panel of one metric over rounds, with all values of a round in one hover box."""
    values = drawn_values(series)
    last = int(max((max(line.x, default=0) for line in series), default=0))
    y = value_axis(metric, values)
    if not is_share(metric) and values and min(values) > 0 and max(values) / min(values) > 100:
        y = Axis("log scale", log=True)
    return Panel(title, about, round_axis(last), y, series, bands=bands, unified=True)


def drawn_values(series: Iterable[Series]) -> list[float]:
    """All values along the y axis: those of lines and markers, and the ends of bands and error bars."""
    return [value for each in series for value in (*each.y, *each.low, *each.high) if value is not None]


def round_axis(last: float) -> Axis:
    """The axis of the rounds from 0 to the last one."""
    ticks = range(int(last) + 1) if 0 < last < 10 else ()
    return Axis("round", "count", limits=x_limits(last), ticks=ticks)


def value_axis(metric: str, values: Iterable[float | None], title: str = "") -> Axis:
    """The axis of a metric that shows these values."""
    finite = [value for value in values if value is not None]
    if is_share(metric):
        return Axis(title, "share", limits=share_limits(finite) if finite else None)
    return Axis(title)


def x_limits(last: float) -> tuple[float, float]:
    """From 0 to `last`, with room for the markers at both ends."""
    last = last or 1
    return -0.015 * last, 1.02 * last


def share_limits(shares: Sequence[float]) -> tuple[float, float]:
    """Limits that fit the shares and exceed [0, 1] by at most the width of a marker, so that no tick lies outside."""
    low, high = min(shares), max(shares)
    pad = max(0.06 * (high - low), 0.02)
    top = min(high + pad, 1.01)
    return max(low - pad, -0.01 * top), top


def band(x: Sequence[float], low: Sequence[float], high: Sequence[float], name: str, color: str) -> Series:
    """The area around the line of a name, from `low` to `high` at each x."""
    return Series([*x, *x[::-1]], [*high, *low[::-1]], name, "band", color)


def banded(
    x: Sequence[float],
    y: Sequence[float | None],
    ends: Sequence[tuple[float, float] | None],
    name: str,
    color: str,
    dash: str = "solid",
    texts: Sequence[str] = (),
) -> list[Series]:
    """A line with its bands; a point whose neighbours have no band has an error bar."""
    series: list[Series] = []
    stretches: list[list[int]] = [[]]
    for k, end in enumerate(ends):
        if end is None or y[k] is None:
            stretches.append([])
        else:
            stretches[-1].append(k)
    alone: set[int] = set()
    for stretch in filter(None, stretches):
        if len(stretch) == 1:
            alone.add(stretch[0])
            continue
        lows, highs = zip(*(ends[k] or (0.0, 0.0) for k in stretch), strict=True)
        series.append(band([x[k] for k in stretch], lows, highs, name, color))
    bars = [ends[k] if k in alone else None for k in range(len(x))] if alone else []
    main = Series(
        list(x),
        list(y),
        name,
        color=color,
        dash=dash,
        texts=texts,
        low=[bar[0] if bar else None for bar in bars],
        high=[bar[1] if bar else None for bar in bars],
    )
    return [*series, main]


def mean_curve(
    runs: Sequence[Mapping[int, tuple[float, float | None]]],
    spread: Callable[[Sequence[float]], tuple[float, float] | None],
    name: str,
    color: str,
    dash: str = "solid",
) -> list[Series]:
    """The mean over runs with its bands, at the rounds that all of them have; empty without a value.

    Args:
        runs: of each, (place on the x axis, value) by round. A value that is None is a gap.
        spread: the ends of the band around the mean of values.
    """
    shared = sorted(set.intersection(*map(set, runs))) if runs else []
    places = [[run[at][0] for run in runs] for at in shared]
    x = [each[0] if len(set(each)) == 1 else fmean(each) for each in places]
    values = [[v for run in runs if (v := run[at][1]) is not None] for at in shared]
    y = [fmean(each) if len(each) == len(runs) else None for each in values]
    return banded(x, y, [*map(spread, values)], name, color, dash) if any(v is not None for v in y) else []


def stacked_bars(
    values: NDArray[Any], names: Sequence[str], texts: Sequence[str], across: bool = False
) -> list[Series]:
    """A bar for each row of `values`, with a part for each column in a colour of its own.

    Args:
        names: of the columns.
        texts: of the rows.
        across: whether bars lie.
    """
    places, series = list(range(len(values))), list[Series]()
    for parts, name, color in zip(values.T.tolist(), names, class_colors(len(names)), strict=True):
        x, y = (parts, places) if across else (places, parts)
        series.append(Series(x, y, short(name, 60), "bar", color, texts=texts))
    return series


def level(value: float, limits: tuple[float, float], name: str, dash: str = "dot", **more: Any) -> Series:
    """A horizontal line across a panel."""
    return Series(
        list(limits), [value, value], name, "level", dash=dash, width=1.25, **({"color": GREY} | more)
    )


def short(name: str, width: int) -> str:
    """A name in one line of at most `width` characters; longer names lose their middle.

    >>> short("a class with a very long name", 16)
    'a class …ng name'
    """
    line = " ".join("".join(c if unicodedata.category(c)[0] != "C" else " " for c in name).split())
    if len(line) <= width:
        return line
    head = math.ceil((width - 1) / 2)
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


def class_colors(classes: int) -> list[str]:
    """One colour a class: ten well-known ones, and beyond that a walk around the colour wheel.

    Neighbours on the walk differ in lightness, so that classes next to each other in a bar can be told apart.

    >>> class_colors(3)
    ['#4e79a7', '#f28e2b', '#59a14f']
    """
    if classes <= len(TEN):
        return list(TEN[:classes])
    lightness = (0.42, 0.62, 0.52, 0.72)
    parts = [colorsys.hls_to_rgb(k / classes, lightness[k % 4], 0.5) for k in range(classes)]
    return ["#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in parts]


def shade(number: int, of: int) -> str:
    """Colour `number` of `of` in an order, from a light to a dark blue.

    >>> shade(0, 2), shade(1, 2)
    ('#99bfe6', '#143352')
    """
    lightness = 0.75 - 0.55 * number / max(of - 1, 1)
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(0.583, lightness, 0.6))
