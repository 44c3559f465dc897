"""The figures of analyses, drawn from their rows, and how to read them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from fedlens.base.format import heading, label, metric_gap, points
from fedlens.results.figures.chart import (
    GREY,
    TEN,
    Axis,
    CellMark,
    Cells,
    Chart,
    Panel,
    Series,
    band,
    drawn_values,
    matrix,
    round_axis,
    share_limits,
    value_axis,
)

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]

_LINES = 6  # pairs of models in one panel

BLUE, ORANGE, GREEN, RED = TEN[:4]


@dataclass(frozen=True)
class Shown:
    """How an analysis is shown.

    Attributes:
        title: its heading.
        reading: sentences on how to read the figures.
        figures: makes them from the rows.
        matched: the keys by which rows of several seeds are the same; empty if seeds have no rows in common, because
            their rows are of other clients.
    """

    title: str
    reading: tuple[str, ...]
    figures: Callable[[Rows], list[Chart]]
    matched: tuple[str, ...] = ("round",)


def shown(analysis: str) -> Shown | None:
    """How an analysis is shown; None for one of a user's own."""
    return _SHOWN.get(analysis)


def analysis_figures(analysis: str, rows: Rows) -> list[Chart]:
    """The figures of an analysis; none for one of a user's own, or without rows."""
    found = shown(analysis)
    return found.figures(rows) if found is not None and rows else []


def _over_rounds(title: str, about: str, rows: Rows, y: Axis, *lines: tuple[str, str, str]) -> list[Panel]:
    """A panel of lines over rounds, each a key of the rows, a name and a colour; none without any value."""
    series = []
    for key, name, color in lines:
        points = [(row["round"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            at, values = zip(*points, strict=True)
            series.append(Series(list(at), list(values), name, "line", color))
    last = max((row["round"] for row in rows), default=1)
    return [Panel(title, about, round_axis(last), y, series)] if series else []


def dynamics_figures(rows: Rows) -> list[Chart]:
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
        Series(places, [points[at] for at in places], "global model", "points", BLUE),
        Series(rounds, local, "local models, mean", "open", RED),
    ]
    values = [*points.values(), *local]
    gained = sum(row["local_gain"] for row in rows) / len(rows)
    back = sum(row["aggregation_gain"] for row in rows) / len(rows)
    gains = [metric_gap(metric, gain) for gain in (gained, back)]
    about = f"On average a round gains {gains[0]} by local training and {gains[1]} by aggregation."
    y = value_axis(metric, values, label(metric))
    figure = Panel("", about, round_axis(places[-1]), y, series)
    caption = f"{heading(metric)} of the global model (dots) and of the local models (rings)."
    return [Chart("Training dynamics", caption, [figure], notes=[about])]


def optimal_figures(rows: Rows) -> list[Chart]:
    """Figure 3 of chen2022: averaging, and the best convex combination of the same local models."""
    metric = str(rows[0]["metric"])
    gap = max(rows, key=lambda row: row["gap"])
    caption = (
        f"{heading(metric)} of the average of the local models, and of the combination with the weights that score "
        "best."
    )
    largest = f"The largest gap is {points(metric, gap['gap'])}, in round {gap['round']}."
    y = value_axis(metric, [row[key] for row in rows for key in ("average", "optimal")], label(metric))
    best = ("optimal", "best convex combination", ORANGE)
    [panel] = _over_rounds("", caption, rows, y, best, ("average", "average", BLUE))
    dashed = replace(panel.series[0], dash="dash")
    lines = [dashed, panel.series[1]]
    return [Chart("Optimal aggregation", caption, [replace(panel, series=lines)], notes=[largest])]


def surface_figures(rows: Rows) -> list[Chart]:
    """Figures 4 and 11 of chen2022: the loss of the average, the interval of the combinations, and histograms."""
    rounds = [row["round"] for row in rows]
    low, high = [row["low"] for row in rows], [row["high"] for row in rows]
    over = [
        *([band(rounds, low, high, "random combinations", BLUE)] if len(rows) > 1 else []),
        Series(
            rounds,
            [row["mean"] for row in rows],
            "random combinations",
            color=BLUE,
            low=[] if len(rows) > 1 else low,
            high=[] if len(rows) > 1 else high,
        ),
        Series(rounds, [row["average"] for row in rows], "average", color=ORANGE),
    ]
    chosen = [
        rows[0],
        *([rows[len(rows) // 2]] if len(rows) > 2 else []),
        *([rows[-1]] if len(rows) > 1 else []),
    ]
    caption = (
        f"Loss of {len(rows[0]['losses']):,} uniformly drawn convex combinations of the local models "
        "(mean and 95 % interval), and of their weighted average."
    )
    panels = [Panel("all rounds", caption, round_axis(max(rounds)), Axis("loss"), over)]
    panels += [_histogram(row) for row in chosen]
    return [Chart("Loss surface", caption, panels, columns=2)]


def _histogram(row: Row, bins: int = 24) -> Panel:
    losses = [loss for loss in row["losses"] if loss is not None]
    low, high = min(losses), max(losses)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for loss in losses:
        counts[min(bins - 1, int((loss - low) / width))] += 1
    places = [low + (k + 0.5) * width for k in range(bins)]
    series = [Series(places, [float(count) for count in counts], "random combinations", "bar", BLUE)]
    about = f"Histogram of the losses of random combinations in round {row['round']}."
    return Panel(f"round {row['round']}", about, Axis("loss"), Axis("combinations", "count"), series)


def plane_figures(rows: Rows) -> list[Chart]:
    """The losses on the plane through three models, as a map (Garipov et al. 2018, figure 1)."""
    grid = [row for row in rows if not _model_name(row)]
    models = [row for row in rows if _model_name(row)]
    x, y = sorted({row["x"] for row in grid}), sorted({row["y"] for row in grid})
    losses = {(row["x"], row["y"]): row["loss"] for row in grid}
    values = np.array([[_number(losses[at, up]) for at in x] for up in y])
    finite = np.sort(values[np.isfinite(values)])
    if not len(finite):
        return []
    # Losses far outside of the triangle would leave one colour for what lies inside.
    limits = (float(finite[0]), float(finite[int(0.9 * (len(finite) - 1))]))
    listed = "; ".join(
        f"{_model_name(row)} at ({row['x']:.3g}, {row['y']:.3g}), loss {_number(row['loss']):.4g}"
        for row in models
    )
    caption = f"Loss on the plane through three local models of round {rows[0]['round']}: {listed}."
    limits = limits if limits[1] > limits[0] else (limits[0], limits[0] + 1.0)
    marks = [CellMark(_in_cells(row["x"], x), _in_cells(row["y"], y), _model_name(row)) for row in models]
    cells = Cells(values, _places(y), _places(x), "loss", limits, rising=True, marks=marks)
    ways = ("distance along the first two models", "distance from the first two models")
    return [Chart("Loss on a plane", caption, [matrix("", caption, cells, *map(Axis, ways))])]


def _model_name(row: Row) -> str:
    """What a row of a plane is about: a model, or "" for a point of the grid."""
    return f"client {row['client']}" if "client" in row else str(row.get("model", ""))


def _in_cells(value: float, places: Sequence[float]) -> float:
    """A coordinate in columns or rows of a grid with equal steps."""
    return (value - places[0]) / (places[1] - places[0])


def line_figures(rows: Rows) -> list[Chart]:
    """The loss along the lines between two models, one line per pair, and the barriers."""
    pairs: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        pairs.setdefault((row["round"], row["from"], row["to"]), []).append(row)
    shown_pairs = list(pairs.items())[:: max(1, -(-len(pairs) // _LINES))]
    series = [
        Series(
            [row["t"] for row in points],
            [row["loss"] for row in points],
            f"round {round}: {first} to {second}",
            color=TEN[k % len(TEN)],
        )
        for k, ((round, first, second), points) in enumerate(shown_pairs)
    ]
    barriers = [{"round": round, **points[0]} for (round, _, _), points in pairs.items()]
    highest = max(barriers, key=lambda row: row["barrier"])
    caption = "Loss between two models, t from the first to the second."
    barrier = f"The highest barrier is {highest['barrier']:.3g}, in round {highest['round']}."
    panels = [Panel("loss along the line", caption, Axis("t", limits=(-0.02, 1.02)), Axis("loss"), series)]
    if len(pairs) > 1:
        y, line = Axis("barrier"), ("barrier", "barrier", GREY)
        panels += _over_rounds("barrier", "Barrier by round.", barriers, y, line)
    return [Chart("Lines between models", caption, panels, columns=2, notes=[barrier])]


def drift_figures(rows: Rows) -> list[Chart]:
    """The agreement of the clients' updates by round, and by layer."""
    total = [row for row in rows if row["layer"] == "all"]
    lines = (
        [("cosine", "cosine to the mean update", BLUE), ("orthogonal", "of orthogonal updates", GREY)],
        [("agreeing", "effective number of agreeing clients", GREEN)],
        [("diversity", "gradient diversity", ORANGE)],
    )
    panels = [
        panel
        for shown in lines
        for panel in _over_rounds(shown[0][1], f"{shown[0][1]} by round.", total, Axis(shown[0][1]), *shown)
    ]
    last = total[-1]
    caption = (
        f"In round {last['round']}, {last['clients']} clients took part; their updates agree as "
        f"{_number(last['agreeing']):.2f} equal ones would, and have a mean cosine of "
        f"{_number(last['cosine']):.2f} to their average."
    )
    about = "Mean cosine of the clients' updates to their average, by layer and round."
    layered = [row for row in rows if row["layer"] != "all"]
    by_layer = _layer_map("Client drift by layer", about, layered, "cosine", "cosine")
    orthogonal = (
        "Grey: the cosine of orthogonal updates, 1 / sqrt(M) for M of equal norm and weight, and sqrt(sum p_k^2) for "
        "weights p_k, since each is a part of the mean."
    )
    notes = [orthogonal] if any(row.get("orthogonal") is not None for row in total) else []
    return [Chart("Client drift", caption, panels, columns=3, notes=notes), *by_layer]


def _layer_map(
    title: str, about: str, rows: Rows, key: str, name: str, notes: Sequence[str] = ()
) -> list[Chart]:
    """A number by layer and round, from 0 or the lowest on up to 1; none without a finite one."""
    kinds = {row["layer"]: row.get("kind", "") for row in rows}
    layers = list(kinds)[::-1]
    rounds = list(dict.fromkeys(row["round"] for row in rows))
    by = {(row["layer"], row["round"]): _number(row[key]) for row in rows}
    values = np.array([[by.get((layer, round), math.nan) for round in rounds] for layer in layers])
    finite = values[np.isfinite(values)]
    if not len(finite):
        return []
    limits = (min(0.0, float(finite.min())), 1.0)
    names = [f"{layer} {kinds[layer]}".strip() for layer in layers]
    cells = Cells(values, names, list(map(str, rounds)), name, limits, rising=True)
    panel = matrix("", about, cells, Axis("round"), Axis("layer", name_width=32))
    return [Chart(title, about, [panel], notes=notes)]


def representation_figures(rows: Rows) -> list[Chart]:
    """The similarity of the clients' features by layer and round, and how the classes separate by round."""
    layered = [row for row in rows if "between_clients" in row]
    about = "Linear CKA between the local models of a round, the mean over pairs, by layer and round."
    reading = (
        "Linear CKA is 1 for features that differ by a rotation and a scale only, and near 0 for unrelated ones.",
        "Clients with skewed data usually agree in early layers and differ in late ones.",
    )
    figures = _layer_map("Similarity of representations", about, layered, "between_clients", "CKA", reading)
    separated = [row for row in rows if "between_clients" not in row]
    lines = (
        ("knn_accuracy", "k-NN accuracy", GREEN, ""),
        ("within", "variability within classes (NC1)", ORANGE,
         "NC1 falls towards 0 as the features of a class shrink to their mean (Papyan et al. 2020)."),
        ("simplex", "distance from the simplex (NC2)", BLUE,
         "NC2 falls towards 0 as the class means spread evenly (Papyan et al. 2020)."),
    )  # fmt: skip
    panels, notes = [], []
    for key, name, color, meaning in lines:
        y = value_axis(key, [row.get(key) for row in separated], label(key))
        if drawn := _over_rounds(name, f"{name} by round.", separated, y, (key, name, color)):
            panels += drawn
            notes.append(meaning)
    if panels:
        caption = "The features of the global model after each round, before its last layer."
        figures.append(
            Chart("Separation of classes", caption, panels, columns=3, notes=[*filter(None, notes)])
        )
    return figures


def calibration_figures(rows: Rows) -> list[Chart]:
    """The calibration error by round, and the reliability diagram of the last round."""
    rounds = list(dict.fromkeys(row["round"] for row in rows))
    styles = (
        ("before", "before the round", GREY),
        ("local", "local models, mean", RED),
        ("after", "after", BLUE),
    )
    means = [
        {"round": round}
        | {
            model: statistics.fmean(
                row["error"] for row in rows if row["round"] == round and row["model"] == model
            )
            for model, *_ in styles
        }
        for round in rounds
    ]
    last = [row for row in rows if row["round"] == rounds[-1]]
    diagrams = list[Series]()
    for model, title, color in styles:
        points = _pooled_bins([row["bins"] for row in last if row["model"] == model])
        diagrams.append(Series([x for x, _ in points], [y for _, y in points], title, color=color))
    caption = (
        f"Expected calibration error by round, and accuracy by confidence in round {rounds[-1]}: of "
        "the global model before and after the round, and of the local models together."
    )
    ends = share_limits([*(x for line in diagrams for x in line.x), *drawn_values(diagrams)])
    x, y = (Axis(title, "share", limits=ends) for title in ("confidence", "accuracy"))
    diagonal = [max(ends[0], 0.0), min(ends[1], 1.0)]
    diagrams.insert(0, Series(diagonal, diagonal, "calibrated", "level", GREY, dash="dot", width=1.25))
    error, errors = "calibration error", [row[model] for row in means for model, *_ in styles]
    panels = _over_rounds(error, caption, means, Axis(error, "share", limits=share_limits(errors)), *styles)
    panels.append(Panel(f"round {rounds[-1]}", caption, x, y, diagrams))
    return [Chart("Calibration", caption, panels, columns=2)]


def _pooled_bins(models: Sequence[Sequence[Row]]) -> list[tuple[float, float]]:
    """(confidence, accuracy) of each bin over several models, without empty bins."""
    points = []
    for bins in zip(*models, strict=True):
        filled = [each for each in bins if each["count"]]
        if total := sum(each["count"] for each in filled):
            confidence = sum(each["count"] * each["confidence"] for each in filled) / total
            points.append((confidence, sum(each["count"] * each["accuracy"] for each in filled) / total))
    return points


def _places(values: Sequence[float]) -> list[str]:
    """The coordinates of a grid as labels; what is 0 up to rounding is 0."""
    tiny = 1e-6 * (max(values) - min(values))
    return [f"{0.0 if abs(value) < tiny else value:.3g}" for value in values]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


_SHOWN: dict[str, Shown] = {
    "dynamics": Shown(
        "Training dynamics",
        (
            "Each round starts at a dot, the global model.",
            "The slanted line leads to the mean of the local models after local training: if it falls, local training "
            "forgets what other clients know (drift).",
            "The vertical line leads to the average of the local models: how much aggregation wins back.",
            "The two gains add up to the change of the global model (chen2022, Eq. 4).",
        ),
        dynamics_figures,
    ),
    "optimal-aggregation": Shown(
        "Optimal aggregation",
        (
            "The run's average weighs clients as its aggregate does.",
            "The dashed line shows the best weights for the same local models, chosen on the evaluated data.",
            "A small gap means that aggregation is robust to its weights; chen2022 (Eq. 5) finds smaller gaps "
            "after pre-training.",
        ),
        optimal_figures,
    ),
    "loss-surface": Shown(
        "Loss surface",
        (
            "Each random combination of the local models is a model that other weights would have produced.",
            "A narrow interval means a flat surface between the local models: the weights hardly matter.",
            "Where the average lies below the interval, the weights of the run are better than most others (chen2022, "
            "section 4.4).",
        ),
        surface_figures,
    ),
    "loss-plane": Shown(
        "Loss on a plane",
        (
            "The plane goes through three local models; distances are Euclidean distances of the weights.",
            "If the loss inside of the triangle is lower than at its corners, averaging finds a better model than any "
            "client.",
        ),
        plane_figures,
        matched=(),
    ),
    "drift": Shown(
        "Client drift",
        (
            "The cosine compares each client's update with the weighted mean: 1 if all point the same way.",
            "The effective number of agreeing clients is their number for equal updates, 1 for orthogonal ones, and "
            "below 1 where they cancel.",
            "The gradient diversity is 1 for equal updates and grows as they differ.",
        ),
        drift_figures,
        matched=("round", "layer"),
    ),
    "line": Shown(
        "Lines between models",
        (
            "If the loss rises between two models, they lie in different basins, and their average is worse than both.",
            "The barrier is the largest height above the straight line between the losses of the two ends.",
        ),
        line_figures,
        matched=(),
    ),
    "representation": Shown("Representations", (), representation_figures, matched=("round", "layer")),
    "calibration": Shown(
        "Calibration",
        (
            "The diagram compares confidence and accuracy: below the diagonal a model is overconfident.",
            "Local models of skewed clients are overconfident on global data, and averaging them often corrects it.",
        ),
        calibration_figures,
        matched=(),
    ),
}
