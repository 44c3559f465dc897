"""The charts of a run's page: `CHARTS` lists them in order. A new chart is a function here, and its name in the list.

Beside them are the drawings of who sends to whom, which an algorithm declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedlens.base.format import SPLITS, computed, heading, metric_value, split_of
from fedlens.results.bound import bound_line
from fedlens.results.figures.chart import Band, Panel, Series, class_colors, curves
from fedlens.results.run import Run

_COLORS = ("var(--test)", "var(--validation)", "var(--local)", "var(--train)")
_NAMED = 32  # clients of a graph that are named beside their dots
_RADIUS, _THINNEST, _WIDEST = 120, 0.75, 4.5  # of the circle and of lines, in units of the drawing


def metric_charts(run: Run, bound: Run | None) -> list[Panel]:
    """The main metric, the loss, and every other metric over rounds, by split.

    Args:
        bound: the centralized run, whose value is a line in the chart of the main metric.
    """
    metrics = {pair[1] for line in run.metrics for key in line if (pair := split_of(key))}
    ordered = sorted(metrics, key=lambda metric: (metric != run.metric(), metric != "loss", metric))
    return [chart for metric in ordered if (chart := _metric_chart(run, metric, bound))]


def declared_charts(run: Run, bound: Run | None) -> list[Panel]:
    """The numbers that the algorithm declares (`AlgorithmBase.curves`) over rounds, then others that its parts set."""
    charts = []
    declared = [
        (each["metric"], f"{heading(each['metric'])}: {each['about']}", each["lines"])
        for each in _declared(run, "curves")
    ]
    shown = {key for *_, keys in declared for key in keys}
    own = dict.fromkeys(name for line in run.metrics for name in line if not computed(name))
    for metric, title, keys in [*declared, *((n, heading(n), {n: n}) for n in own if n not in shown)]:
        colors = _COLORS[: len(keys)] if len(keys) <= len(_COLORS) else class_colors(len(keys))
        found = [
            Series(*run.series(key), name, color=color)
            for color, (key, name) in zip(colors, keys.items(), strict=True)
        ]
        if lines := [line for line in found if line.x]:
            about = f"{title} over rounds: {'; '.join(_ends(lines, metric))}."
            charts.append(curves(lines, metric, title, about))
    return charts


CHARTS: tuple[Callable[[Run, Run | None], list[Panel]], ...] = (metric_charts, declared_charts)


def run_charts(run: Run, bound: Run | None) -> list[Panel]:
    """The charts of a run, beside which `bound` is the centralized one."""
    return [panel for chart in CHARTS for panel in chart(run, bound)]


def _metric_chart(run: Run, metric: str, bound: Run | None) -> Panel | None:
    lines = []
    for split, name in SPLITS.items():
        rounds, values = run.series(f"{split}_{metric}")
        if any(value is not None for value in values):
            width = 1.5 if split == "local" else 2.25
            lines.append(Series(rounds, values, name, color=f"var(--{split})", width=width))
    if not lines:
        return None
    title, ends = heading(metric), _ends(lines, metric)
    if metric == run.metric() and bound is not None:
        lines.append(bound_line(run, bound, lines[0].x))
        ends.append(lines[-1].name)
    at, best, chosen_on = run.best(metric) if metric == run.metric() else (None, None, None)
    if at is not None and best is not None and len(run.metrics) > 1:
        lines.append(Series([at], [best], f"best, chosen on {chosen_on}", "ring"))
    bands = _bands(run, metric)
    shaded = [f" Shaded: {band.label}, rounds {band.first} to {band.last}." for band in bands]
    return curves(lines, metric, title, f"{title} over rounds: {'; '.join(ends)}.{''.join(shaded)}", bands)


def _ends(lines: Iterable[Series], metric: str) -> list[str]:
    return [f"{line.name} {metric_value(metric, line.y[-1])} after round {line.x[-1]}" for line in lines]


def _bands(run: Run, metric: str) -> list[Band]:
    """The rounds of each warning about this metric; of one about a loss on the main metric's figure, too."""
    about = {metric, "loss"} if metric == run.metric() else {metric}
    return [
        Band(w["since"], w["until"], str(w.get("kind")))
        for w in run.warnings
        if (pair := split_of(str(w.get("metric")))) and pair[1] in about
    ]


def tested_model(run: Run) -> str:
    """What was measured on the test data (`AlgorithmBase.tested_model`), at the beginning of a sentence."""
    found = run.shown.get("model")
    return found[:1].upper() + found[1:] if isinstance(found, str) else "The global model"


def _declared(run: Run, kind: str) -> list[Mapping[str, Any]]:
    found = run.shown.get(kind)
    return found if isinstance(found, list) else []


def graphs_of(run: Run) -> dict[str, Any] | None:
    """The drawings of who sends to whom (`AlgorithmBase.graphs`), the smallest and the largest weight; None without."""
    graphs = _declared(run, "graphs")
    weights = [weight for graph in graphs for *_, weight in graph["edges"]] or [0.0]
    drawings = [_drawing(run, graph, max(weights)) for graph in graphs]
    return {"drawings": drawings, "low": min(weights), "high": max(weights)} if drawings else None


def _drawing(run: Run, graph: Mapping[str, Any], largest: float) -> Mapping[str, Any]:
    """The graph with the names and places of its dots, from the top clockwise, and those of its lines with widths."""
    n = graph["clients"]
    names = list(map(str, range(n))) if run.partition is None else run.partition.ids
    turns = [2 * math.pi * k / n for k in range(n)]
    dots = [(round(_RADIUS * math.sin(turn), 1), round(-_RADIUS * math.cos(turn), 1)) for turn in turns]
    lines = [
        (*dots[i], *dots[j], max(_THINNEST, round(_WIDEST * weight / largest, 2)), names[i], names[j], weight)
        for i, j, weight in graph["edges"]
    ]
    return {**graph, "names": names, "dots": dots, "lines": lines, "named": n <= _NAMED}
