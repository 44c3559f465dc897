"""The figures of analyses, drawn from their rows, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedlens.report.figures import Axis, Figure, Series, hover, share_limits, x_limits
from fedlens.report.format import is_share, label
from fedlens.report.palette import TEN
from fedlens.report.study_figure import StudyFigure

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]

BLUE, ORANGE, GREEN, RED, GREY = TEN[0], TEN[1], TEN[2], TEN[3], "#77828f"


@dataclass(frozen=True)
class Shown:
    """How an analysis is shown.

    Attributes:
        title: its heading.
        reading: a paragraph on how to read the figures.
        figures: makes them from the rows.
    """

    title: str
    reading: str
    figures: Callable[[Rows], list[StudyFigure]]


def shown(analysis: str) -> Shown | None:
    """How an analysis is shown; None for one of a user's own."""
    return _SHOWN.get(analysis)


def analysis_figures(analysis: str, rows: Rows) -> list[StudyFigure]:
    """The figures of an analysis; none for one of a user's own, or without rows."""
    found = shown(analysis)
    return found.figures(rows) if found is not None and rows else []


def round_axis(rounds: Sequence[float]) -> Axis:
    """The axis of rounds."""
    last = max(rounds, default=1)
    return Axis("round", "count", limits=x_limits(last), ticks=range(int(last) + 1) if last < 10 else ())


def value_axis(metric: str, values: Sequence[float | None], title: str = "") -> Axis:
    """The axis of a metric that shows these values."""
    finite = [value for value in values if value is not None]
    if is_share(metric):
        return Axis(title or label(metric), values="share", limits=share_limits(finite) if finite else None)
    return Axis(title or label(metric))


def dynamics_figures(rows: Rows) -> list[StudyFigure]:
    """Figure 2 of chen2022: the global model, slanted lines to the local models, and vertical ones back."""
    metric = str(rows[0]["metric"])
    slanted_x: list[float] = []
    slanted_y: list[float | None] = []
    vertical_x: list[float] = []
    vertical_y: list[float | None] = []
    for row in rows:
        slanted_x += [row["round"] - 1, row["round"], row["round"]]
        slanted_y += [row["before"], row["local"], None]
        vertical_x += [row["round"]] * 3
        vertical_y += [row["local"], row["after"], None]
    points: dict[float, float] = {row["round"] - 1: row["before"] for row in rows}
    points |= {row["round"]: row["after"] for row in rows}
    places = sorted(points)
    rounds = [row["round"] for row in rows]
    local = [row["local"] for row in rows]
    series = [
        Series(slanted_x, slanted_y, "gain by local training", "level", RED, width=1.5),
        Series(vertical_x, vertical_y, "gain by aggregation", "level", GREEN, width=1.5),
        Series(places, [points[at] for at in places], "global model", "points", BLUE, hover=hover(metric)),
        Series(rounds, local, "local models, mean", "open", RED, hover=hover(metric)),
    ]
    values = [*points.values(), *local]
    gained = sum(row["local_gain"] for row in rows) / len(rows)
    back = sum(row["aggregation_gain"] for row in rows) / len(rows)
    form = "{:+.1%}" if is_share(metric) else "{:+.4g}"
    about = f"On average a round gains {form.format(gained)} by local training and {form.format(back)} by aggregation."
    figure = Figure("", about, round_axis(places), value_axis(metric, values), series)
    caption = (
        f"{label(metric)[:1].upper()}{label(metric)[1:]} of the global model (dots) and of the local models (rings). "
        f"{about}"
    )
    return [StudyFigure.of_panels("Training dynamics", caption, [figure])]


_SHOWN: dict[str, Shown] = {
    "dynamics": Shown(
        "Training dynamics",
        "Each round starts at a dot, the global model. The slanted line leads to the mean of the local models after "
        "local training: if it falls, local training forgets what other clients know (drift). The vertical line "
        "leads to the average of the local models: how much aggregation wins back. The two gains add up to the "
        "change of the global model (chen2022, Eq. 4).",
        dynamics_figures,
    ),
}
