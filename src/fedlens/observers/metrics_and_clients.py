"""The lines that each round adds to metrics.jsonl and clients.jsonl, and the clients' spread in summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedlens.core.driver import Tally
from fedlens.core.protocol import Payload, State
from fedlens.core.types import client_name
from fedlens.run.build import Built
from fedlens.run.observer import Observer, Place


class MetricsFile(Observer):
    """Writes metrics.jsonl: a line a round."""

    place = Place.WRITE
    file = "metrics.jsonl"
    ends_run = True

    def rows(self, state: State, tally: Tally, metrics: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The line of the round."""
        return [metrics]


class ClientsFile(Observer):
    """Writes clients.jsonl: what each client reported in training, if it is recorded, and in evaluations.

    Its part of the checkpoint is the summary of the last per-client evaluation (`client_summary`).
    """

    place = Place.WRITE
    file = "clients.jsonl"
    part_name = "clients"
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._built, self._name = built, partial(client_name, ids=built.partition.ids)
        self._latest: Mapping[str, Any] | None = None
        self._evaluated: list[dict[str, Any]] = []  # rows of the current round

    def restore(self, part: Payload) -> None:
        """Continues with the summary at a checkpoint."""
        self._latest = part

    def part(self) -> Payload:
        """The summary; empty without a per-client evaluation."""
        return self._latest or {}

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Takes the values of each client that the evaluation measured."""
        for row in tally.per_client:
            values = {name: value for name, value in row.items() if name.startswith("validation_")}
            if values:
                client = self._name(row["client"])
                self._evaluated.append({"round": round, "client": client, **values})
        return {}

    def rows(self, state: State, tally: Tally, metrics: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The rows of the round: of training, of failures, and of the evaluation."""
        evaluated, self._evaluated = self._evaluated, []
        score = self._built.task.score
        self._latest = (client_summary(evaluated, score) if score else None) or self._latest
        trained = self._trained(metrics["round"], tally) if self._built.config.record.clients else []
        return [*trained, *evaluated]

    def _trained(self, round: int, tally: Tally) -> list[dict[str, Any]]:
        rows = []
        for row in tally.per_client:
            examples = row.get("examples", 0)
            loss = {"loss": row["loss"] / examples} if examples and "loss" in row else {}
            rows.append({"round": round, **row, **loss, "client": self._name(row["client"])})
        for client, reasons in tally.failures.items():
            rows += [
                {"round": round, "client": self._name(client), "failure": reason, "times": times}
                for reason, times in reasons.items()
            ]
        return rows

    def summary(self) -> Mapping[str, Any]:
        """The summary of the last per-client evaluation."""
        return {"clients": self._latest or None}


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
