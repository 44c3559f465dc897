"""The axes of a study's figures: where values stand on them, what they are called, and where they end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fedlens.base.errors import ConfigError
from fedlens.base.format import is_share, label
from fedlens.results.cells import Cell, is_number
from fedlens.results.figures.chart import Axis, Series, share_limits
from fedlens.results.figures.named_cells import NamedCells, bare
from fedlens.results.statistics import Band, half_width

Scale: TypeAlias = Literal["auto", "log", "linear", "category"]
Limits: TypeAlias = tuple[float, float]

_LOG_FROM = 8.0  # the largest value over the smallest, from where on an axis is logarithmic by itself
_LONG = 32  # characters of the name of a case
_MARKED = 12  # values at most that are all marked
_NEAR = 0.085  # of an axis: labels closer than that would run into each other


@dataclass(frozen=True)
class XScale:
    """Where values stand on an axis."""

    axis: Axis
    kind: Literal["log", "linear", "category"]
    places: Mapping[str, float]

    def at(self, value: Any) -> float:
        """The place of a value."""
        return self.places[repr(value)]

    def beside(self, value: Any, number: int, lines: int) -> float:
        """The place of a value on line `number` of `lines`: of categories, lines stand beside each other."""
        shift = 0.5 * (number - (lines - 1) / 2) / max(lines, 3) if self.kind == "category" else 0.0
        return self.at(value) + shift


def x_scale(
    runs: NamedCells,
    key: str,
    values: Sequence[Any],
    scale: Scale = "auto",
    reverse: bool = False,
    marks: bool = True,
) -> XScale:
    """The axis of a setting. On a logarithmic one, 0 stands a step below the smallest value, after a break.

    With `marks` each value is marked, as far as there is room, if all are round; else round numbers are.

    Raises `ConfigError` if an axis of numbers is wanted for other values, or a logarithmic one for negative numbers.
    """
    distinct = list({repr(value): value for value in values}.values())
    numeric = all(map(is_number, distinct))
    if scale in ("log", "linear") and not (numeric and (scale == "linear" or min(distinct) >= 0)):
        bad = next(v for v in distinct if not is_number(v) or v < 0)
        raise ConfigError(
            f"{runs.label(key)} has the value {runs.words(key, bad)}, which no {scale} axis shows",
            where="figures.scale",
            hint="write scale = 'category'",
        )
    if scale == "category" or not numeric:
        distinct = sorted(distinct) if numeric else distinct
        places = {repr(value): float(k) for k, value in enumerate(distinct)}
        limits = (-0.5, len(distinct) - 0.5)
        names = [runs.words(key, value) for value in distinct]
        axis = Axis(
            runs.label(key),
            limits=limits[::-1] if reverse else limits,
            ticks=range(len(names)),
            names=names,
            name_width=_LONG,
        )
        return XScale(axis, "category", places)
    ordered = sorted(distinct)
    positive = [value for value in ordered if value > 0]
    wide = len(positive) > 1 and ordered[0] >= 0 and positive[-1] / positive[0] >= _LOG_FROM
    log = bool(positive) and (scale == "log" or (scale == "auto" and wide))
    places = {repr(value): float(value) for value in ordered}
    gap = None
    if log and ordered[0] == 0:
        span = max(math.log10(positive[-1] / positive[0]), 1.0)
        zero = positive[0] / 10 ** max(0.14 * span, 0.3)
        gap = math.sqrt(zero * positive[0])
        places[repr(ordered[0])] = zero
    at = [places[repr(value)] for value in ordered]
    limits, named = _padded(at, log), [runs.words(key, value) for value in ordered]
    if marks and not all(map(_is_round, ordered)):
        zeros = 0 if gap is None else 1
        others = decades(*_padded(at[zeros:], log)) if log else []
        at, named = [*at[:zeros], *others], [*named[:zeros], *(f"{mark:g}" for mark in others)]
    marked = 0 < len(at) <= _MARKED and (marks or gap is not None)
    axis = Axis(
        runs.label(key),
        log=log,
        limits=limits[::-1] if reverse else limits,
        ticks=at if marked else (),
        names=_thinned(at, named, log) if marked else (),
        gap=gap,
    )
    return XScale(axis, "log" if log else "linear", places)


def _is_round(value: float) -> bool:
    """Whether a number has at most three digits that are not zeros at its end."""
    return float(f"{value:.3g}") == value


def decades(low: float, high: float) -> list[float]:
    """The marks of a logarithmic axis: powers of ten, with their doubles and fives if there are few.

    >>> decades(0.003, 2.0), decades(0.02, 0.3)
    ([0.01, 0.1, 1.0], [0.02, 0.05, 0.1, 0.2])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    marks = [float(f"{step}e{power}") for power in powers for step in steps]
    return [mark for mark in marks if low <= mark <= high]


def _padded(at: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = (math.log10(at[0]), math.log10(at[-1])) if log else (at[0], at[-1])
    pad = 0.05 * (high - low) or (0.3 if log else 0.5)
    return (10 ** (low - pad), 10 ** (high + pad)) if log else (low - pad, high + pad)


def _thinned(at: Sequence[float], names: Sequence[str], log: bool) -> list[str]:
    """The names of marks, empty where they would run into their neighbour; both ends keep theirs."""
    places = [math.log10(value) for value in at] if log else list(at)
    near = _NEAR * (places[-1] - places[0])
    kept, last = [], -math.inf
    for k, place in enumerate(places):
        end = k in (0, len(places) - 1)
        fits = place - last >= near and (end or places[-1] - place >= near)
        kept.append(names[k] if end or fits else "")
        last = place if kept[-1] else last
    return kept


def spread(values: Sequence[float], band: Band, metric: str) -> tuple[float, float] | None:
    """The ends of the band around the mean of values over seeds; None for a single one.

    A band of a share stays in [0, 1], and one of losses above 0 does not go below it. `metric` is "" for ratios.
    """
    if len(values) < 2 or band == "none":
        return None
    low, high = min(values), max(values)
    if band != "range":
        mean, half = statistics.fmean(values), half_width(values, band)
        low, high = mean - half, mean + half
    if is_share(bare(metric)):
        return max(low, 0.0), min(high, 1.0)
    return (max(low, 0.0) if metric.endswith("loss") and min(values) >= 0 else low), high


BANDS = {
    "interval": "95 % t intervals over seeds",
    "range": "the range over seeds",
    "deviation": "one standard deviation over seeds",
}


def means_and_edges(panels: Sequence[Sequence[Series]]) -> tuple[list[float], list[float]]:
    """The values of lines and markers, and the ends of bands and error bars."""
    means: list[float] = []
    edges: list[float] = []
    for series in (each for panel in panels for each in panel):
        (edges if series.kind == "band" else means).extend(value for value in series.y if value is not None)
        edges += [value for value in (*series.low, *series.high) if value is not None]
    return means, edges


def y_axis(
    metric: str,
    title: str,
    panels: Sequence[Sequence[Series]],
    relative: bool = False,
    wanted: tuple[float, float] | None = None,
) -> Axis:
    """The axis that all panels share: it shows every mean. Of a share it begins where the values and their bands begin;
    other bands are shown as far as they do not squeeze the means.

    `wanted` are its ends, if the study file names them.
    """
    means, edges = means_and_edges(panels)
    share = is_share(bare(metric)) or relative
    if wanted is not None:
        return Axis(title, values="share" if share else "number", limits=wanted)
    if not means:
        return Axis(title, values="share" if share else "number")
    if share and not relative:
        return Axis(title, values="share", limits=share_limits([*means, *edges]))
    low, high = min(means), max(means)
    reach = max(high - low, 0.02 if share else 0.1 * abs(high))
    ends = (max(min([*edges, low]), low - reach), min(max([*edges, high]), high + reach))
    if not relative and low > 0 and high / low > 100:
        return Axis(f"{title} (log scale)", log=True)
    pad = 0.05 * (ends[1] - ends[0]) or 0.05
    return Axis(title, values="share" if share else "number", limits=(ends[0] - pad, ends[1] + pad))


def metric_title(metric: str, relative: bool = False) -> str:
    """A metric on an axis.

    >>> metric_title("test_accuracy"), metric_title("test_accuracy", relative=True)
    ('test accuracy', 'accuracy relative to centralized')
    """
    if relative:
        return f"{label(bare(metric))} relative to centralized"
    split, _, name = metric.partition("_")
    return f"{split} {label(name)}" if name == bare(metric) else label(metric)


def chance_level(
    cells: Sequence[Cell],
    metric: str,
    chance: float | None,
    panels: Sequence[Sequence[Series]],
    y: Limits | None,
) -> float | None:
    """The accuracy of guessing: as given, or the fact "chance" of the runs if it is the same in all of them.

    None if it lies so far below the lines of the panels that it would squeeze them, or beyond the ends `y` of the
    axis, unless it is given.
    """
    if chance is not None or "accuracy" not in metric:
        return chance
    levels = {line.facts.get("chance") for cell in cells for line in cell.done.values()}
    level = levels.pop() if len(levels) == 1 else None
    if level is not None and y is not None and not y[0] <= level <= y[1]:
        return None
    means, _ = means_and_edges(panels)
    if level is None or not means or level < min(means) - max(max(means) - min(means), 0.02):
        return None
    return level
