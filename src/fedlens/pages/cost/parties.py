"""What each party's features add in vertical learning, computed from the runs below one directory, and its page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.format import MISSING, heading, many, metric_value, signed
from fedlens.pages.cost.answer import read_or_none, run_row
from fedlens.pages.cost.sentences import interval_text
from fedlens.pages.render import write_page
from fedlens.results.statistics import LEAST_SEEDS, UNSURE, difference

HEAD = ("features of", "test images", "std", "more than alone", "95 % interval", "")


def party_answer(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs say. `about` is what `fedlens.cost` planned, with `alone`, the role of the label party.

    Keys besides those of `about`: `metric`; `runs`, with `status`; `parties`, by role: `words`, `values` by seed, and
    `added`, the difference from the label party alone over the seeds (mean, low, high, sign), or None; `sentences`.
    """
    runs = {row["name"]: read_or_none(directory / row["name"]) for row in about["runs"]}
    rows = [run_row(row, runs[row["name"]]) for row in about["runs"]]
    metric = next((run.metric() for run in runs.values() if run is not None), "accuracy")
    values: dict[str, dict[int, float]] = {role: {} for role in about["roles"]}
    for row in rows:
        run = runs[row["name"]]
        if run is not None and row["status"] == "finished":
            values[row["role"]][row["seed"]] = run.metrics[-1][f"test_{metric}"]
    parties = {}
    for role, words in about["roles"].items():
        found = difference(values[role], values[about["alone"]]) if role != about["alone"] else None
        few = found is None or found.seeds < LEAST_SEEDS
        added = found and {
            "mean": found.mean,
            "low": None if few else found.low,
            "high": None if few else found.high,
            "sign": None if few else found.sign,
            "seeds": found.seeds,
        }
        parties[role] = {"words": words, "values": values[role], "added": added}
    answer = {**about, "metric": metric, "runs": rows, "parties": parties}
    best = parties[about["all"]]["added"]
    sentence = ""
    if best is not None:
        change, interval = signed(metric, best["mean"]), interval_text(metric, best)
        sentence = (
            f"The features of the other parties change the {heading(metric).lower()} on the test images by {change}"
            + (f" (95 % interval {interval})." if interval else ".")
        )
    return {**answer, "sentences": [sentence] if sentence else []}


def party_rows(answer: Mapping[str, Any]) -> list[list[str]]:
    """The table under `HEAD`: a row for each set of parties."""
    metric, rows = answer["metric"], []
    for found in answer["parties"].values():
        values, added = list(found["values"].values()), found["added"]
        says = {None: "", 0: UNSURE, 1: "higher", -1: "lower"}[added["sign"]] if added else ""
        rows.append([
            found["words"],
            metric_value(metric, statistics.fmean(values)) if values else MISSING,
            metric_value(metric, statistics.stdev(values)) if len(values) > 1 else MISSING,
            signed(metric, added["mean"]) if added else MISSING,
            interval_text(metric, added) or MISSING,
            says,
        ])  # fmt: skip
    return rows


def write_party_page(directory: Path, answer: Mapping[str, Any]) -> Path:
    """Writes cost.html into a cost directory from `party_answer`, and returns its path."""
    context = {
        "title": f"What the parties' features add: {answer['name']} · fedlens",
        "aside": str(directory),
        "answer": answer,
        "head": HEAD,
        "rows": party_rows(answer),
        "metric_name": heading(answer["metric"]),
        "failed": [row for row in answer["runs"] if row["status"] != "finished"],
        "seeds": many(len(answer["seeds"]), "seed"),
        "client_names": [],
    }
    return write_page(directory / "cost.html", "party_cost.html.j2", context)
