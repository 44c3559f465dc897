"""The data of a figure: series, axes and texts. `plotly_figures` draws it on pages, `pictures` in files for papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import is_share

DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS_UP_TO = 40  # points of a line

Align: TypeAlias = Literal["left", "center", "right"]


@dataclass(frozen=True)
class Axis:
    """An axis of a figure.

    Args:
        values: how values are written; an axis of "hidden" values has only its title.
        limits: the first and the last value shown; None fits them to the data.
        ticks: where the marks are; empty chooses them.
        names: the labels of the marks; empty writes their values.
        name_width: of a label, in characters; a longer one is shortened.
        gap: where a mark says that the axis is broken, such as between 0 and the smallest value of a log axis.
    """

    title: str = ""
    values: Literal["number", "count", "share", "bytes", "hidden"] = "number"
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
        texts: a text for each point, for `hover`.
        hover: what the page shows at a point, a plotly template.
        low, high: the ends of an error bar at each point, None where it has none; empty without error bars.
        sizes: the area of each of some "points", relative to the usual one; empty for the usual one.
        symbol: of "open" markers; "up" and "down" point to where a bound leaves room.
        bar: the width of each "bar"; 0 fits it to the distance of the first two.
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
    hover: str = ""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    sizes: Sequence[float] = ()
    symbol: Literal["circle", "up", "down"] = "circle"
    bar: float = 0.0
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


@dataclass(frozen=True)
class Figure:
    """One or several series on two axes.

    Args:
        title: the heading on the page; pictures for papers have captions instead.
        about: a description for readers who cannot see the figure.
        note: what the figure leaves out, or empty.
        hover_title: the title of the box with the values of all series at one x; without it, each point has a box.
    """

    title: str
    about: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    mark: VerticalLine | None = None
    bands: Sequence[Band] = ()
    hover_title: str = ""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A matrix of shares, one colour a cell.

    Args:
        title: the heading on the page.
        about: a description for readers who cannot see the figure.
        shares: float64 [rows, columns], from 0 to 1.
        rows, columns: the name of each row and column, for the box at a cell.
        names: the labels of rows and columns on the axes; empty if they are too many.
        counts: int64 [rows, columns], written into the cells; None leaves the cells empty.
        row_title, column_title: of the axes.
        hover: what the page shows at a cell, a plotly template.
    """

    title: str
    about: str
    shares: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    names: Sequence[str]
    counts: NDArray[np.int64] | None
    row_title: str
    column_title: str
    hover: str


@dataclass(frozen=True, eq=False)
class ValueMap:
    """A matrix of values of a metric, one colour a cell, the first row at the bottom.

    Args:
        title: the heading on the page.
        about: a description for readers who cannot see the figure.
        values: float64 [rows, columns], NaN where a cell has no value.
        rows, columns: the name of each row and column.
        row_title, column_title: of the axes.
        value_title: what the colours show.
        limits: the values of the first and the last colour.
        share: whether the values are written in per cent.
    """

    title: str
    about: str
    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    row_title: str
    column_title: str
    value_title: str
    limits: tuple[float, float]
    share: bool


def curves(
    series: Sequence[Series], metric: str, title: str, about: str, bands: Sequence[Band] = ()
) -> Figure:
    """A figure of one metric over rounds, with all values of a round in one hover box."""
    values = [value for line in series for value in line.y if value is not None]
    last = int(max((max(line.x, default=0) for line in series), default=0))
    x = Axis("round", "count", limits=x_limits(last), ticks=range(last + 1) if 0 < last < 10 else ())
    if is_share(metric):
        y = Axis(values="share", limits=share_limits(values) if values else None)
    elif values and min(values) > 0 and max(values) / min(values) > 100:
        y = Axis("log scale", log=True)
    else:
        y = Axis()
    return Figure(title, about, x, y, series, bands=bands, hover_title="round %{x:,~r}")


def hover(metric: str) -> str:
    """What the page shows at a point of a metric's curve."""
    return "%{y:.2%}" if is_share(metric) else "%{y:.4~g}"


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
