"""What an algorithm declares for the page of its run: curves of its own numbers, and who sends to whom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlens.base.format import heading, metric_value
from fedlens.results.figures import chart as figures
from fedlens.results.figures.chart import class_colors
from fedlens.results.run import Run

_COLORS = ("var(--test)", "var(--validation)", "var(--local)", "var(--train)")
_NAMED = 32  # clients of a graph that are named beside their dots
_RADIUS, _THINNEST, _WIDEST = 120, 0.75, 4.5  # of the circle and of lines, in units of the drawing


def own_curves(run: Run) -> list[figures.Panel]:
    """The figures of the numbers that the algorithm declares (`AlgorithmBase.curves`)."""
    return [plot for curve in _shown(run, "curves") if (plot := _plot(run, curve))]


def tested_model(run: Run) -> str:
    """What was measured on the test data (`AlgorithmBase.tested_model`), at the beginning of a sentence."""
    found = run.shown.get("model")
    return found[:1].upper() + found[1:] if isinstance(found, str) else "The global model"


def _shown(run: Run, kind: str) -> list[Mapping[str, Any]]:
    found = run.shown.get(kind)
    return found if isinstance(found, list) else []


def _plot(run: Run, curve: Mapping[str, Any]) -> figures.Panel | None:
    metric, title, lines = curve["metric"], f"{heading(curve['metric'])}: {curve['about']}", []
    count = len(curve["lines"])
    colors = _COLORS[:count] if count <= len(_COLORS) else class_colors(count)
    for color, (key, name) in zip(colors, curve["lines"].items(), strict=True):
        rounds, values = run.series(key)
        if rounds:
            lines.append(figures.Series(rounds, values, name, color=color))
    ends = [f"{line.name} {metric_value(metric, line.y[-1])} after round {line.x[-1]}" for line in lines]
    about = f"{title} over rounds: {'; '.join(ends)}."
    return figures.curves(lines, metric, title, about) if lines else None


def graphs_of(run: Run) -> dict[str, Any] | None:
    """The drawings of who sends to whom (`AlgorithmBase.graphs`), the smallest and the largest weight; None without."""
    graphs = _shown(run, "graphs")
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
