"""Compares the runs that are found below folders: a table, and a page with their curves on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedlens.base.format import finite, heading, is_share, many
from fedlens.pages.render import write_page
from fedlens.results.bound import CENTRALIZED
from fedlens.results.comparison import (
    Comparison,
    Record,
    RunGroup,
    client_table,
    no_values,
    own_numbers,
    readable,
)
from fedlens.results.figures import chart as figures
from fedlens.results.figures.chart import TEN
from fedlens.results.figures.picture import draw_chart
from fedlens.results.figures.study_axes import spread
from fedlens.results.run import Run


def seed_curve(
    runs: Sequence[Run], key: str, name: str, color: str, dash: str = "solid", sums: Sequence[str] = ()
) -> list[figures.Series]:
    """The curve of `key` over rounds for runs that differ in the seed alone: a band of one deviation, and the mean.

    One run gives its own curve with the gaps that it has; of several, rounds without a finite value of each are left
    out. Empty without any value.

    Args:
        sums: what the places on the x axis are the sum of so far, in place of the rounds.
    """
    curves = []
    for run in runs:
        at = _reached(run, sums) if sums else {}
        points = zip(*run.series(key), strict=True)
        curves.append({k: (at.get(k, k), v) for k, v in points if len(runs) == 1 or v is not None})
    return figures.mean_curve(curves, lambda values: spread(values, "deviation", ""), name, color, dash)


def _reached(run: Run, keys: Sequence[str]) -> dict[int, float]:
    """The sum of `keys` up to each round."""
    steps = [sum(finite(line.get(key)) or 0 for key in keys) for line in run.metrics]
    return dict(zip((line["round"] for line in run.metrics), accumulate(steps), strict=True))


CLIENTS_SHOWN = 200  # rows of the table of clients on the page


def compare(paths: Sequence[Path | str], *, each: bool = False) -> list[Record]:
    """One row per run: its settings, its metrics and its cost. Runs that differ only in the seed are one row.

    `paths` are run directories, folders with runs below them, and patterns; runs that cannot be read are left out.

    Keys: run, runs (how many seeds), status, warnings (how many), algorithm, partition, dataset, model, seed (None for
    several), seeds, rounds (done), passes (over the training images), metric, measured_on ("test", or "validation"
    without a single global model), final and best (the value of `metric` in that round), best_round, chosen_on,
    accuracy and best_accuracy (the same if the metric is accuracy, else None), relative_accuracy, bound (run, value and
    passes of the centralized run), note (why there is no relative accuracy), clients_mean and clients_worst_decile (of
    `metric` over clients, with per-client evaluation), clients (client, examples, held_out, value, to_centralized,
    to_local_only), emd, seconds, bytes, directory, directories. Unknown values are None. A row of several seeds
    contains means, and in `std` the sample deviations.

    relative_accuracy is Acc_federated / Acc_centralized (Hsu et al. 2020, section 6) of the final values, for another
    main metric the same ratio of its values. The centralized run is a bound only with the same data, model and seed,
    and enough training: see `fedlens.results.bound.mismatch`.

    Raises `RunDirectoryError` if a path gives no run, or none can be read.
    """
    return Comparison.of(paths, each=each).rows


def write_comparison(paths: Sequence[Path | str], html_path: Path, *, each: bool = False) -> Path:
    """Writes one page with the curves of all runs on one axis, and the table; returns its path.

    Raises `RunDirectoryError` if a path gives no run, or none can be read.
    """
    return write_page_of(Comparison.of(paths, each=each), html_path)


def write_page_of(comparison: Comparison, html_path: Path) -> Path:
    """Writes the page of a comparison, and returns its path."""
    groups, rows = comparison.groups, comparison.rows
    metrics = dict.fromkeys([*(row["metric"] for row in rows), *own_numbers(groups)])
    client_head, clients = client_table(groups)
    more = len(clients) - CLIENTS_SHOWN
    hidden = [f"--json prints {many(more, 'more client')}."] if more > 0 else []
    context = {
        "title": "Runs compared · fedlens",
        "aside": "",
        "number": sum(len(group.runs) for group in groups),
        "algorithms": ", ".join(sorted({str(row["algorithm"]) for row in rows})),
        "datasets": ", ".join(sorted({str(row["dataset"]) for row in rows})),
        "charts": [chart for metric in metrics if (chart := _chart(groups, metric))],
        "losses": [chart for chart in [_chart(groups, "loss")] if chart],
        "notes": [f"{note.rstrip('.')}." for note in (*comparison.notes, *comparison.skipped)],
        "client_notes": [*_differences(client_head, rows), *hidden],
        "client_head": client_head,
        "clients": clients[:CLIENTS_SHOWN],
        "client_names": [str(row[0]) for row in clients],
        **_table(rows),
    }
    return write_page(Path(html_path), "compare.html.j2", context)


def _differences(head: Sequence[str], rows: Sequence[Record]) -> list[str]:
    """Sentences on the columns of differences in the table of clients; none without such a column."""
    if not any("vs " in name for name in head):
        return []
    points = (
        ["Differences are in points for a share."] if any(is_share(row["metric"]) for row in rows) else []
    )
    return [*points, "Differences need runs with the same clients and the same held-out images."]


def write_plot(comparison: Comparison, path: Path, metric: str | None = None) -> Path:
    """Draws the figure of `curve_figure` into a PNG, PDF or SVG file, and returns its path.

    Raises `ConfigError` if matplotlib is not installed, the file has another ending, or no run has values of `metric`,
    and `RunFailed` if the file cannot be written.
    """
    figure = curve_figure(comparison, metric)
    chart = figures.Chart(figure.title, figure.about, [replace(figure, title="", note=figure.heading)])
    return draw_chart(chart, path, "or choose another file")


def curve_figure(comparison: Comparison, metric: str | None = None) -> figures.Panel:
    """The curves of one metric over rounds, as on the page: the metric of the first run, another one, or the loss.

    Raises `ConfigError` if no run has values of `metric`.
    """
    metric = metric or comparison.rows[0]["metric"]
    figure = _figure(comparison.groups, metric)
    if figure is None:
        raise no_values(metric, comparison)
    return figure


def _chart(groups: Sequence[RunGroup], metric: str) -> figures.Panel | None:
    """The test values of one metric over rounds, time and bytes, for the runs that have it."""
    figure = _figure(groups, metric)
    if figure is None:
        return None
    ways: tuple[tuple[str, str, figures.Values, tuple[str, ...]], ...] = (
        ("time", "seconds of training", "number", ("seconds",)),
        ("data", "bytes sent", "bytes", ("bytes_up", "bytes_down", "bytes_peer")),
    )
    figure, others = replace(figure, shape="tall", view="rounds"), []
    for view, title, form, sums in ways:
        series = [line for _, line in _lines(groups, metric, sums)]
        if all(any(line.x) for line in series):
            axis = figures.Axis(title, form, limits=figures.x_limits(max(max(line.x) for line in series)))
            others.append(replace(figure, view=view, x=axis, series=series))
    return replace(figure, others=others)


def _lines(
    groups: Sequence[RunGroup], metric: str, sums: Sequence[str] = ()
) -> list[tuple[Record, figures.Series]]:
    """The lines and bands of one metric, each with the row of its runs, over rounds or as in `seed_curve`."""
    return [
        (group.row, line)
        for k, group in enumerate(groups)
        if metric in (group.row["metric"], "loss", *own_numbers([group]))
        for line in seed_curve(
            group.runs,
            metric if metric in own_numbers([group]) else f"{group.runs[0].split()}_{metric}",
            group.row["run"],
            *_style(k, group.row),
            sums,
        )
    ]


def _figure(groups: Sequence[RunGroup], metric: str) -> figures.Panel | None:
    """The curves of one metric over rounds; None if no run has it."""
    lines = _lines(groups, metric)
    if not lines:
        return None
    # A group with several seeds has a band and a line.
    shown = [row for row, line in lines if line.kind != "band"]
    where = "on test data" if all(row["measured_on"] == "test" for row in shown) else "as measured"
    title = heading(metric) if metric in own_numbers(groups) else f"{heading(metric)} {where}"
    banded = any(line.kind == "band" for _, line in lines)
    note = "lines are means over seeds, bands one deviation" if banded else ""
    number = sum(row["runs"] for row in shown)
    figure = figures.curves([line for _, line in lines], metric, title, f"{title} of {many(number, 'run')}.")
    return replace(figure, note=note)


def _table(rows: Sequence[Record]) -> dict[str, Any]:
    texts, winners, names = readable(rows), _winners(rows), []
    for k, row in enumerate(rows):
        about = [row[key] for key in ("algorithm", "dataset", "model")]
        about += [row["status"]] if row["status"] != "finished" else []
        style = dict(zip(("color", "dash"), _style(k, row), strict=True))
        more = {"about": [*filter(None, about)], "warnings": row["warnings"], "best": k in winners}
        names.append({**style, **more, "cells": _broken(texts[k])})
    first = ("run", "algorithm", "dataset", "partition", "rounds", "runs")
    last = [key for key in ("partition", "rounds", "runs") if key in texts[0]]
    return {"head": [*(key for key in texts[0] if key not in first), *last], "names": names}


def _broken(cells: Mapping[str, str]) -> dict[str, str]:
    """The cells with spaces that break no line, but for those in words and before a deviation."""
    words = ("run", "partition")
    return {
        key: cell if key in words else cell.replace(" ", "\u00a0").replace("\u00a0±", " ±")
        for key, cell in cells.items()
    }


def _winners(rows: Sequence[Record]) -> set[int]:
    """The best federated run of each task that several of them share."""
    tasks: dict[tuple[Any, ...], list[int]] = {}
    for k, row in enumerate(rows):
        if row["final"] is not None and row["algorithm"] != CENTRALIZED and is_share(row["metric"]):
            tasks.setdefault((row["dataset"], row["metric"], row["measured_on"]), []).append(k)
    return {max(members, key=lambda k: rows[k]["final"]) for members in tasks.values() if len(members) > 1}


def _style(position: int, row: Record) -> tuple[str, str]:
    """Colour and dash of a run in every chart; the centralized bound is dashed, as in hsu2019 figure 3."""
    repeats = position // len(TEN) + (row["algorithm"] == CENTRALIZED)
    return TEN[position % len(TEN)], figures.DASHES[repeats % len(figures.DASHES)]
