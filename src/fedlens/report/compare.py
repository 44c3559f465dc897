"""Several runs beside each other: a table, and a page with their curves on one axis."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
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
    metric_value,
    number,
    percent,
    size,
)
from fedlens.report.palette import TEN
from fedlens.report.read import Run, read_run
from fedlens.report.render import BORDERS, Plot, View, write_page

CENTRALIZED = "centralized"


def compare(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """One row a run: what it was, how well it did, and what it cost.

    Keys: run, status, algorithm, partition, dataset, model, seed, rounds (done), metric, measured_on ("test", or
    "validation" where there is no one model that could be tested), final and best (the value of `metric` there),
    best_round, chosen_on, accuracy and best_accuracy (the same where the metric is accuracy, and None elsewhere),
    relative_accuracy, clients_mean and clients_worst_decile (of `metric` over clients, where it was measured there),
    emd, seconds, bytes, directory. What is unknown is None.

    relative_accuracy is Acc_federated / Acc_centralized (hsu2020 section 6) of the final values, against the
    mean of the `centralized` runs of the same dataset and model among `run_dirs`; None where there is none.

    Raises `RunDirectoryError` where one of `run_dirs` is no run directory.
    """
    return _rows([read_run(directory) for directory in run_dirs])


def _rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows = [_row(run, label) for run, label in zip(runs, labels(runs), strict=True)]
    for row in rows:
        bound = [
            other["final"]
            for other in rows
            if other["algorithm"] == CENTRALIZED and other["final"] is not None and _task(other) == _task(row)
        ]
        if bound and row["final"] is not None and (upper := statistics.fmean(bound)) > 0:
            row["relative_accuracy"] = row["final"] / upper
    return rows


def _task(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["dataset"], row["model"], row["metric"], row["measured_on"]


def _row(run: Run, label: str) -> dict[str, Any]:
    metric = run.metric()
    _, final = run.final(metric)
    best_round, best, chosen_on = run.best(metric)
    up, down = run.total("bytes_up"), run.total("bytes_down")
    accuracy = metric == "accuracy"
    spread = run.spread().get(metric, {})
    return {
        "run": label,
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
    data = run.config.get("data")
    chosen = data.get("partition") if isinstance(data, dict) else None
    if not isinstance(chosen, dict):
        return None if chosen is None else str(chosen)
    settings = [f"{key}={value}" for key, value in chosen.items() if key not in ("name", "clients", "seed")]
    return " ".join([str(chosen.get("name", "")), *settings]).strip()


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, with its run id where two share the name, and a number where they share both."""
    names = Counter(run.name for run in runs)
    found = [run.name if names[run.name] == 1 else f"{run.name} ({run.run_id})" for run in runs]
    repeated = Counter(found)
    seen: Counter[str] = Counter()
    for k, label in enumerate(found):
        seen[label] += 1
        if repeated[label] > 1:
            found[k] = f"{label} #{seen[label]}"
    return found


def write_comparison(run_dirs: Sequence[Path], html_path: Path) -> Path:
    """Writes one page with the curves of all runs on one axis, and the table; returns its path.

    Raises `RunDirectoryError` where one of `run_dirs` is no run directory.
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


def _chart(runs: Sequence[Run], rows: Sequence[dict[str, Any]], metric: str) -> Plot | None:
    """The test values of one metric over rounds, time and bytes, of those runs that have it."""
    lines, seconds, sent = [], [], []
    for k, (run, row) in enumerate(zip(runs, rows, strict=True)):
        x, y = run.series(f"{run.split()}_{metric}")
        if metric not in (row["metric"], "loss") or not any(value is not None for value in y):
            continue
        color, dash = _mark(k, row)
        lines.append(figures.Curve(row["run"], x, y, color, dash))
        seconds.append(_along(run, x, ("seconds",)))
        sent.append(_along(run, x, ("bytes_up", "bytes_down")))
    if not lines:
        return None
    where = "on test data" if all(row["measured_on"] == "test" for row in rows) else "as measured"
    title = f"{metric.replace('_', ' ').capitalize()} {where}"
    rounds = [list(line.x) for line in lines]
    views = [_view("rounds", rounds, "round", "round %{x:,~r}")]
    if all(any(x) for x in seconds):
        views.append(_view("time", seconds, "seconds of training", "%{x:,.4~r} s"))
    if all(any(x) for x in sent):
        views.append(_view("data", sent, "bytes sent, both ways", "%{x:.3~s}B"))
    about = f"{title} of {len(lines)} runs."
    return Plot(figures.curves(lines, metric), title, about, shape="tall", views=views)


def _view(label: str, x: Sequence[Sequence[float]], title: str, hover: str) -> View:
    axis = {
        "xaxis.title.text": title,
        "xaxis.range": figures.x_range(max(max(along) for along in x)),
        "xaxis.tickformat": "~s" if label == "data" else ",",
        "xaxis.unifiedhovertitle.text": hover,
    }
    return View(label, {"x": x}, axis)


def _along(run: Run, rounds: Sequence[int], keys: Sequence[str]) -> list[float]:
    """The sum of `keys` over all rounds up to each of `rounds`."""
    steps = [sum(finite(line.get(key)) or 0 for key in keys) for line in run.metrics]
    reached = dict(zip((line["round"] for line in run.metrics), accumulate(steps), strict=True))
    return [reached[at] for at in rounds]


def readable(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The rows of `compare` as a person reads them: one text a column, the same columns in every row.

    The column `relative` is there where one run has a relative accuracy, those of clients where one run has measured
    at the clients, and `measured on` where one run has no model that could be tested, but only its clients' own.
    """
    relative = any(row["relative_accuracy"] is not None for row in rows)
    metrics = {row["metric"] for row in rows}
    name = "" if len(metrics) > 1 else " " + "".join(metrics).replace("_", " ")
    more = [
        key for key in ("clients_mean", "clients_worst_decile") if any(row[key] is not None for row in rows)
    ]
    told = [_readable(row, relative, name, more) for row in rows]
    if any(row["measured_on"] != "test" for row in rows):
        told = [{**texts, "measured on": row["measured_on"]} for texts, row in zip(told, rows, strict=True)]
    return told


def _readable(row: dict[str, Any], relative: bool, name: str, more: Sequence[str]) -> dict[str, str]:
    unit = "" if name else f" {row['metric']}"
    told = {
        "run": row["run"],
        "algorithm": row["algorithm"] or MISSING,
        "partition": row["partition"] or MISSING,
        "dataset": row["dataset"] or MISSING,
        "rounds": count(row["rounds"]),
        f"final{name}": metric_value(row["metric"], row["final"]) + unit,
        f"best{name}": metric_value(row["metric"], row["best"]) + unit,
    }
    if relative:
        told["relative"] = percent(row["relative_accuracy"])
    titles = {"clients_mean": "mean of clients", "clients_worst_decile": "worst tenth of clients"}
    told |= {titles[key]: metric_value(row["metric"], row[key]) for key in more}
    emd = None if row["emd"] is None else round(row["emd"], 3)
    return told | {"EMD": number(emd), "time": duration(row["seconds"]), "data": size(row["bytes"])}


def _table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    texts = readable(rows)
    winners = _winners(rows)
    head = [key for key in texts[0] if key not in ("run", "algorithm", "dataset", "partition", "rounds")]
    lead = (
        "Relative is the final accuracy divided by that of the centralized run on the same dataset and model."
    )
    names = []
    for k, (row, cells) in enumerate(zip(rows, texts, strict=True)):
        color, dash = _mark(k, row)
        about = [str(row[key]) for key in ("algorithm", "dataset", "model") if row[key]]
        about += [row["status"]] if row["status"] != "finished" else []
        style = f"border-top:3px {BORDERS[dash]} {color};vertical-align:middle"
        name = {"run": row["run"], "style": style, "about": " · ".join(about)}
        names.append(name | {"cells": cells, "best": k in winners})
    return {
        "head": [*head, "partition", "rounds"],
        "lead": lead if "relative" in head else "",
        "names": names,
    }


def _winners(rows: Sequence[dict[str, Any]]) -> set[int]:
    """The federated run that did best in each task that several of them share."""
    tasks: dict[tuple[Any, ...], list[int]] = {}
    for k, row in enumerate(rows):
        if row["final"] is not None and row["algorithm"] != CENTRALIZED and is_share(row["metric"]):
            tasks.setdefault((row["dataset"], row["metric"]), []).append(k)
    return {max(members, key=lambda k: rows[k]["final"]) for members in tasks.values() if len(members) > 1}


def _mark(position: int, row: dict[str, Any]) -> tuple[str, str]:
    """Colour and dash of a run in every chart; the centralized bound is dashed, as in hsu2019 figure 3."""
    again = position // len(TEN) + (row["algorithm"] == CENTRALIZED)
    return TEN[position % len(TEN)], figures.DASHES[again % len(figures.DASHES)]
