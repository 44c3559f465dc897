"""Compares runs: a table, and a page with their curves on one axis."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedlens.report import figures
from fedlens.report.format import (
    MISSING,
    count,
    duration,
    finite,
    is_share,
    label,
    metric_value,
    number,
    percent,
    size,
)
from fedlens.report.palette import TEN
from fedlens.report.read import Row, Run, read_run, subtable
from fedlens.report.render import Plot, View, write_page

CENTRALIZED = "centralized"
_FORMATS: dict[str, Callable[[Any], str]] = {
    "rounds": count,
    "relative_accuracy": percent,
    "emd": lambda emd: number(None if emd is None else round(emd, 3)),
    "seconds": duration,
    "bytes": size,
}


def compare(run_dirs: Sequence[Path]) -> list[Row]:
    """One row per run: its settings, its metrics and its cost.

    Keys: run, status, algorithm, partition, dataset, model, seed, rounds (done), metric, measured_on ("test", or
    "validation" without a single global model), final and best (the value of `metric` in that round),
    best_round, chosen_on, accuracy and best_accuracy (the same if the metric is accuracy, else None),
    relative_accuracy, clients_mean and clients_worst_decile (of `metric` over clients, with per-client evaluation),
    emd, seconds, bytes, directory. What is unknown is None.

    relative_accuracy is Acc_federated / Acc_centralized (hsu2020 section 6) of the final values, against the
    mean of the `centralized` runs of the same dataset and model among `run_dirs`; None without one.

    Raises `RunDirectoryError` if one of `run_dirs` is no run directory.
    """
    return _rows([read_run(directory) for directory in run_dirs])


def _rows(runs: Sequence[Run]) -> list[Row]:
    rows = [_row(run, name) for run, name in zip(runs, labels(runs), strict=True)]
    bounds: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["algorithm"] == CENTRALIZED and row["final"] is not None:
            bounds.setdefault(_task(row), []).append(row["final"])
    for row in rows:
        bound = statistics.fmean(bounds.get(_task(row), [0.0]))
        if row["final"] is not None and bound > 0:
            row["relative_accuracy"] = row["final"] / bound
    return rows


def _task(row: Row) -> tuple[Any, ...]:
    return row["dataset"], row["model"], row["metric"], row["measured_on"]


def _row(run: Run, name: str) -> Row:
    metric = run.metric()
    _, final = run.final(metric)
    best_round, best, chosen_on = run.best(metric)
    up, down = run.total("bytes_up"), run.total("bytes_down")
    accuracy = metric == "accuracy"
    spread = run.spread().get(metric, {})
    return {
        "run": name,
        "status": run.status,
        "algorithm": run.part("algorithm"),
        "partition": _partition(run),
        "dataset": run.part("data", "dataset"),
        "model": run.part("model"),
        "seed": run.summary.get("seed", run.config.get("seed")),
        "rounds": run.rounds_done,
        "metric": metric,
        "measured_on": run.split(),
        "final": final,
        "best": best,
        "best_round": best_round,
        "chosen_on": chosen_on,
        "accuracy": final if accuracy else None,
        "best_accuracy": best if accuracy else None,
        "relative_accuracy": None,
        "clients_mean": spread.get("mean"),
        "clients_worst_decile": spread.get("worst_decile"),
        "emd": run.emd(),
        "seconds": run.seconds(),
        "bytes": None if up is None and down is None else (up or 0) + (down or 0),
        "directory": str(run.directory),
    }


def _partition(run: Run) -> str | None:
    """The partition with its settings other than the number of clients: `dirichlet alpha=0.1`."""
    table = subtable(subtable(run.config, "data"), "partition").items()
    settings = [f"{key}={value}" for key, value in table if key not in ("name", "clients", "seed")]
    name = run.part("data", "partition")
    return name and " ".join([name, *settings])


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, with its run id if two share the name, and a number if they share both."""
    names = Counter(run.name for run in runs)
    with_ids = [run.name if names[run.name] == 1 else f"{run.name} ({run.run_id})" for run in runs]
    repeats = Counter(with_ids)
    return [
        name if repeats[name] == 1 else f"{name} #{with_ids[: k + 1].count(name)}"
        for k, name in enumerate(with_ids)
    ]


def write_comparison(run_dirs: Sequence[Path], html_path: Path) -> Path:
    """Writes one page with the curves of all runs on one axis, and the table; returns its path.

    Raises `RunDirectoryError` if one of `run_dirs` is no run directory.
    """
    runs = [read_run(directory) for directory in run_dirs]
    rows = _rows(runs)
    metrics = dict.fromkeys(row["metric"] for row in rows)
    context = {
        "title": "Runs compared · fedlens",
        "aside": "",
        "algorithms": ", ".join(sorted({str(row["algorithm"]) for row in rows})),
        "datasets": ", ".join(sorted({str(row["dataset"]) for row in rows})),
        "charts": [chart for metric in metrics if (chart := _chart(runs, rows, metric))],
        "losses": [chart for chart in [_chart(runs, rows, "loss")] if chart],
        **_table(rows),
    }
    return write_page(Path(html_path), "compare.html.j2", context)


def _chart(runs: Sequence[Run], rows: Sequence[Row], metric: str) -> Plot | None:
    """The test values of one metric over rounds, time and bytes, for the runs that have it."""
    lines, seconds, sent = [], [], []
    for k, (run, row) in enumerate(zip(runs, rows, strict=True)):
        rounds, values = run.series(f"{run.split()}_{metric}")
        if metric not in (row["metric"], "loss") or not any(value is not None for value in values):
            continue
        color, dash = _style(k, row)
        hover = figures.hover(metric)
        lines.append(figures.Series(rounds, values, row["run"], color=color, dash=dash, hover=hover))
        seconds.append(_cumulative(run, rounds, ("seconds",)))
        sent.append(_cumulative(run, rounds, ("bytes_up", "bytes_down")))
    if not lines:
        return None
    where = "on test data" if all(row["measured_on"] == "test" for row in rows) else "as measured"
    title = f"{label(metric).capitalize()} {where}"
    figure = figures.curves(lines, metric, title, f"{title} of {len(lines)} runs.")
    ticks = "array" if figure.x.ticks else "auto"
    views = [_view("rounds", [line.x for line in lines], "round", figure.hover_title, ",", ticks)]
    if all(map(any, seconds)):
        views.append(_view("time", seconds, "seconds of training", "%{x:,.4~r} s"))
    if all(map(any, sent)):
        views.append(_view("data", sent, "bytes sent, both ways", "%{x:.3~s}B", "~s"))
    return Plot.of(figure, shape="tall", views=views)


def _view(
    label: str, x: Sequence[Sequence[float]], title: str, hover: str, form: str = ",", ticks: str = "auto"
) -> View:
    axis = {
        "title.text": title,
        "range": figures.x_limits(max(map(max, x))),
        "tickformat": form,
        "tickmode": ticks,
        "unifiedhovertitle.text": hover,
    }
    return View(label, {"x": x}, {f"xaxis.{key}": value for key, value in axis.items()})


def _cumulative(run: Run, rounds: Sequence[int], keys: Sequence[str]) -> list[float]:
    """The sum of `keys` over all rounds up to each of `rounds`."""
    steps = [sum(finite(line.get(key)) or 0 for key in keys) for line in run.metrics]
    reached = dict(zip((line["round"] for line in run.metrics), accumulate(steps), strict=True))
    return [reached[at] for at in rounds]


def readable(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows of `compare` as text for a table, with the same columns in every row.

    The column `relative` needs a run with a relative accuracy, the columns of clients a run with per-client
    evaluation, and `measured on` a run without a single global model.
    """
    metrics = {row["metric"] for row in rows}
    suffix = "" if len(metrics) > 1 else " " + label("".join(metrics))

    def text(row: Row, key: str) -> str:
        if key in ("final", "best"):
            return metric_value(row["metric"], row[key]) + ("" if suffix else f" {row['metric']}")
        if key.startswith("clients_"):
            return metric_value(row["metric"], row[key])
        write = _FORMATS.get(key)
        return write(row[key]) if write else str(row[key] or MISSING)

    titles = {key: key for key in ("run", "algorithm", "partition", "dataset", "rounds")}
    titles |= {"final": f"final{suffix}", "best": f"best{suffix}"}
    optional = {
        "relative_accuracy": "relative",
        "clients_mean": "mean of clients",
        "clients_worst_decile": "worst tenth of clients",
    }
    titles |= {key: title for key, title in optional.items() if any(row[key] is not None for row in rows)}
    titles |= {"emd": "EMD", "seconds": "time", "bytes": "data"}
    if any(row["measured_on"] != "test" for row in rows):
        titles["measured_on"] = "measured on"
    return [{title: text(row, key) for key, title in titles.items()} for row in rows]


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    texts = readable(rows)
    winners = _winners(rows)
    names = []
    for k, row in enumerate(rows):
        about = [row[key] for key in ("algorithm", "dataset", "model")]
        about += [row["status"]] if row["status"] != "finished" else []
        style = dict(zip(("color", "dash"), _style(k, row), strict=True))
        names.append(style | {"about": list(filter(None, about)), "cells": texts[k], "best": k in winners})
    first = ("run", "algorithm", "dataset", "partition", "rounds")
    return {"head": [*(key for key in texts[0] if key not in first), "partition", "rounds"], "names": names}


def _winners(rows: Sequence[Row]) -> set[int]:
    """The best federated run of each task that several of them share."""
    tasks: dict[tuple[Any, ...], list[int]] = {}
    for k, row in enumerate(rows):
        if row["final"] is not None and row["algorithm"] != CENTRALIZED and is_share(row["metric"]):
            tasks.setdefault((row["dataset"], row["metric"]), []).append(k)
    return {max(members, key=lambda k: rows[k]["final"]) for members in tasks.values() if len(members) > 1}


def _style(position: int, row: Row) -> tuple[str, str]:
    """Colour and dash of a run in every chart; the centralized bound is dashed, as in hsu2019 figure 3."""
    repeats = position // len(TEN) + (row["algorithm"] == CENTRALIZED)
    return TEN[position % len(TEN)], figures.DASHES[repeats % len(figures.DASHES)]
