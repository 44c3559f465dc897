"""The spread of a metric over the clients of one evaluation, for summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def client_summary(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any] | None:
    """The mean of a metric over the clients of one evaluation, and the client with the lowest value.

    None if `rows`, those of `clients.jsonl`, have no finite value of the metric. Of clients with the same value it
    names one with the most held-out examples.

    >>> values = {"a": 0.5, "b": 0.25}
    >>> rows = [{"round": 3, "client": client, "validation_examples": 4, "validation_accuracy": value}
    ...         for client, value in values.items()]
    >>> client_summary(rows, "accuracy")["worst"]
    {'client': 'b', 'value': 0.25, 'held_out': 4}
    """
    name = f"validation_{metric}"
    finite = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    if not finite:
        return None
    worst = min(finite, key=lambda row: (row[name], -row["validation_examples"]))
    return {
        "round": rows[0]["round"],
        "metric": metric,
        "measured": len(rows),
        "mean": float(np.sort([row[name] for row in finite]).mean()),  # as in `client_evaluation.spread`
        "worst": {
            "client": worst["client"],
            "value": worst[name],
            "held_out": worst["validation_examples"],
        },
    }
