"""The section "Clients" in the page of a run: the spread over clients, one dot a client, and a table by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlens.base.format import MISSING, count, heading, is_share, label, many, metric_gap, metric_value
from fedlens.pages.plotly_figures import DOTS
from fedlens.results.client_results import ClientHistories, ClientResult
from fedlens.results.figures.chart import Axis, Panel, Series, level, value_axis
from fedlens.results.run import Run

SCROLLS_FROM = 50  # rows from which the table has a height of its own
_ROWS = 5000
_CLASSES_NAMED = 3
_SPREAD_COLUMNS = {
    "mean": "mean",
    "mean_before": "mean before tuning",
    "std": "standard deviation",
    "worst_decile": "worst tenth of the clients",
}


@dataclass(frozen=True)
class ClientValue:
    """A cell of the table; `value` is what its column is sorted by, the text if it is None."""

    text: str
    value: float | None = None
    title: str = ""


def client_section(run: Run) -> dict[str, Any] | None:
    """The section of a run that measured clients; None of any other run."""
    spread, histories = run.spread(), ClientHistories.of(run)
    metric, rows = run.metric(), histories.results()
    if not spread and not rows:
        return None
    columns = client_columns(metric)
    if all(row.before is None for row in rows[:1]):
        del columns["before tuning"]
    more = many(len(rows) - _ROWS, "client")
    left_out = (
        [f"{more} more, all better than these, are in Result.clients in Python."] if len(rows) > _ROWS else []
    )
    return {
        "spread": _spread(histories, spread),
        "lead": [*_lead(histories), *left_out],
        "plot": _dots(rows, metric, histories.mean(metric)),
        "curve": _curve(rows, metric),
        "head": list(columns),
        "rows": [
            {
                "cells": [cell(row) for cell in columns.values()],
                "worst": row is rows[0] and row.last is not None,
            }
            for row in rows[:_ROWS]
        ],
        "scrolls": len(rows) > SCROLLS_FROM,
    }


def _spread(
    histories: ClientHistories, spread: dict[str, dict[str, float]]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table of means and deviations."""
    columns = {k: title for k, title in _SPREAD_COLUMNS.items() if any(k in row for row in spread.values())}
    worst = {metric: found for metric in spread if (found := histories.worst(metric))}
    if "worst_decile" in columns and any(found.client for found in worst.values()):
        columns["worst_decile"] = next(found.label for found in worst.values() if found.client)
    rows = []
    for metric, row in sorted(spread.items()):
        cells = {key: metric_value(metric, row.get(key)) for key in columns}
        if metric in worst:
            cells["worst_decile"] = worst[metric].text(metric)
        rows.append([label(metric), *cells.values()])
    return ["", *columns.values()], rows


def _lead(histories: ClientHistories) -> list[str]:
    text = "The model at each client, measured on the examples that the client holds out of its own data."
    if histories.rounds is None:
        return [text]
    first, last = histories.rounds
    start = "round 0 (untrained)" if first == 0 else f"round {first}"
    return [text, f"First, best and last value are over the evaluations from {start} to round {last}."]


def client_columns(metric: str) -> dict[str, Callable[[ClientResult], ClientValue]]:
    """The columns of a table of clients by title: what a narrow screen must show comes first."""

    def value(of: float | None) -> ClientValue:
        return ClientValue(metric_value(metric, of), of)

    return {
        "client": lambda row: ClientValue(row.client),
        "last": lambda row: value(row.last),
        "from the mean": lambda row: ClientValue(metric_gap(metric, row.gap), row.gap),
        "first": lambda row: value(row.first),
        "best": lambda row: value(row.best),
        "before tuning": lambda row: value(row.before),
        "examples": lambda row: ClientValue(count(row.examples), row.examples),
        "held out": lambda row: ClientValue(count(row.held_out), row.held_out),
        "classes": _classes,
    }


def _classes(row: ClientResult) -> ClientValue:
    """The number of a client's classes, and the most frequent ones: "5: cat, dog, bird, ..."."""
    if not row.classes:
        return ClientValue(MISSING, 0)
    named = ", ".join(row.classes[:_CLASSES_NAMED])
    more = ", ..." if len(row.classes) > _CLASSES_NAMED else ""
    return ClientValue(f"{len(row.classes)}: {named}{more}", len(row.classes), ", ".join(row.classes[:30]))


def _dots(rows: Sequence[ClientResult], metric: str, mean: float | None) -> Panel | None:
    """One dot a client: its training examples, and its last value."""
    measured = [row for row in rows if row.last is not None]
    if not measured or mean is None:
        return None
    sizes = [row.examples for row in measured]
    values = [row.last for row in measured if row.last is not None]
    texts = [row.client for row in measured]
    drawn = f"; {count(DOTS)} of {many(len(values), 'client')} drawn" if len(values) > DOTS + 1 else ""
    wide = min(sizes) > 0 and max(sizes) > 50 * min(sizes)
    pad = 0 if wide else max(0.04 * (max(sizes) - min(sizes)), 0.01 * max(sizes), 1)
    low, high = (min(sizes) * 0.8, max(sizes) * 1.25) if wide else (min(sizes) - pad, max(sizes) + pad)
    title = heading(metric)
    worst = metric_value(metric, values[0])
    mean_text = metric_value(metric, mean)
    series = [
        level(mean, (low, high), "", "dash", color="var(--local)", texts=["mean", "mean"]),
        Series(sizes[1:], values[1:], kind="dots", texts=texts[1:]),
        Series(sizes[:1], values[:1], kind="dots", color="var(--bad)", texts=texts[:1]),
    ]
    return Panel(
        title=f"{title} of each client by its training examples",
        about=f"One dot a client. The mean is {mean_text}; the worst client is {texts[0]} with {worst}.",
        x=Axis("training examples", "count", log=wide, limits=(low, high)),
        y=value_axis(metric, [*values, mean], "" if is_share(metric) else label(metric)),
        series=series,
        note=f"dashed: the mean, {mean_text}; red: {texts[0]}, {worst}{drawn}",
    )


def _curve(rows: Sequence[ClientResult], metric: str) -> Panel | None:
    """The last value of each client in rising order; a second line for the values before tuning."""
    measured = sorted((row for row in rows if row.last is not None), key=lambda row: row.last or 0.0)
    if len(measured) < 2:
        return None
    before = sorted((row for row in rows if row.before is not None), key=lambda row: row.before or 0.0)
    series = [_sorted_line(measured, [row.last for row in measured], "after tuning" if before else "")]
    if before:
        values = [row.before for row in before]
        series.append(_sorted_line(before, values, "before tuning", color="var(--local)", dash="dash"))
    title = heading(metric)
    lowest, highest = (metric_value(metric, row.last) for row in (measured[0], measured[-1]))
    shown = [value for line in series for value in line.y]
    return Panel(
        title=f"{title} of the clients, sorted",
        about=f"The {label(metric)} of {many(len(measured), 'client')} in rising order, from {lowest} to {highest}.",
        x=Axis("clients, from the lowest value up", "share", limits=(-0.015, 1.015)),
        y=value_axis(metric, shown, "" if is_share(metric) else label(metric)),
        series=series,
    )


def _sorted_line(
    rows: Sequence[ClientResult], values: Sequence[float | None], name: str, **style: Any
) -> Series:
    """A line over the share of clients; of very many, as many points are drawn as there are dots."""
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), DOTS)).round().astype(np.int64))
    x = (kept / (len(rows) - 1)).round(4).tolist() if len(rows) > 1 else [0.0]
    texts = [rows[k].client for k in kept]
    return Series(x, [values[k] for k in kept], name, texts=texts, **style)
