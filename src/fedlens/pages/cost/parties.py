"""What each party's features add in vertical learning, computed from the runs below one directory, and its page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.format import MISSING, heading, many, metric_value, signed
from fedlens.pages.cost.answer import compared, cost_runs
from fedlens.pages.cost.measures import SIGNS, interval_text
from fedlens.pages.render import write_page
from fedlens.results.statistics import deviation, mean

HEAD = ("features of", "test images", "std", "more than alone", "95 % interval", "")


def party_answer(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs say. `about` is what `fedlens.cost` planned, with `alone`, the role of the label party.

    Keys besides those of `about`: `metric`; `runs`, with `status`; `parties`, by role: `words`, `values` by seed, and
    `added`, the difference from the label party alone over the seeds (mean, low, high, sign), or None; `sentences`.
    """
    runs, rows = cost_runs(directory, about)
    metric = next((run.metric() for run in runs.values()), "accuracy")
    values: dict[str, dict[int, float]] = {role: {} for role in about["roles"]}
    for row in rows:
        if row["status"] == "finished":
            values[row["role"]][row["seed"]] = runs[row["name"]].metrics[-1][f"test_{metric}"]
    parties = {}
    for role, words in about["roles"].items():
        found = compared(values[role], values[about["alone"]]) if role != about["alone"] else None
        added = found and {key: found[key] for key in ("mean", "low", "high", "sign", "seeds")}
        parties[role] = {"words": words, "values": values[role], "added": added}
    answer = {**about, "metric": metric, "runs": rows, "parties": parties}
    best, said = parties[about["all"]]["added"], []
    if best is not None:
        name, interval = heading(metric).lower(), interval_text(metric, best)
        by = signed(metric, best["mean"]) + (f" (95 % interval {interval})" if interval else "")
        said.append(f"The features of the other parties change the {name} on the test images by {by}.")
    return {**answer, "sentences": said}


def party_rows(answer: Mapping[str, Any]) -> list[list[str]]:
    """The table under `HEAD`: a row for each set of parties."""
    metric, rows = answer["metric"], []
    for found in answer["parties"].values():
        values, added = list(found["values"].values()), found["added"]
        spread = [metric_value(metric, of(values)) for of in (mean, deviation)]
        change = signed(metric, added["mean"]) if added else MISSING
        says = SIGNS.get(added["sign"], "") if added else ""
        rows.append([found["words"], *spread, change, interval_text(metric, added) or MISSING, says])
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
