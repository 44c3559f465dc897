"""The results of each client of a run, by name: which client does badly, and what it gains by taking part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedlens.base.format import finite, metric_value, smaller_is_better
from fedlens.results.run import Run, subtable

FEW = 20  # with fewer measured clients, the worst tenth is the worst client
_PREFIX = "validation_"
_BEFORE = "_before"


@dataclass(frozen=True)
class ClientResult:
    """One client of a run, and the values of one metric on the examples that it holds out.

    Args:
        client: its name.
        examples: its training examples; 0 if the partition is unknown.
        held_out: the examples that it was measured on; 0 if it was never measured.
        classes: the classes of its training examples, the most frequent first.
        first, best, last: the values at its first, best and last evaluation; None if it was never measured.
        gap: `last` less the mean over the clients that were measured in the same round.
        round: the round of `last`.
        before: the value before tuning, where clients tune.
        to_centralized, to_local_only: `last` less its value in these runs; see `with_references`.
    """

    client: str
    examples: int
    held_out: int
    classes: tuple[str, ...]
    first: float | None = None
    best: float | None = None
    last: float | None = None
    gap: float | None = None
    round: int | None = None
    before: float | None = None
    to_centralized: float | None = None
    to_local_only: float | None = None


@dataclass(frozen=True)
class WorstClients:
    """The worst client of an evaluation, or the mean over the worst tenth where there are `FEW` clients or more.

    Args:
        value: of the metric.
        client: the name of the worst client; None for the worst tenth.
        held_out: the number of examples that the worst client was measured on; 0 if it is unknown.
    """

    value: float
    client: str | None = None
    held_out: int = 0

    @property
    def label(self) -> str:
        """What `value` is of: "worst client" or "worst tenth of the clients"."""
        return "worst tenth of the clients" if self.client is None else "worst client"

    def text(self, metric: str) -> str:
        """The value with the client's name: "61.0 % (mercy, of 9 held-out images)"."""
        value = metric_value(metric, self.value)
        images = f", of {self.held_out:,} held-out images" if self.held_out else ""
        return value if self.client is None else f"{value} ({self.client}{images})"


@dataclass
class _Course:
    """The values of one metric at one client, over the evaluations so far."""

    first: float
    best: float
    last: float
    round: int
    before: float | None = None


@dataclass
class ClientHistories:
    """The measured rows of `clients.jsonl` of a run, read in one pass that keeps no rows."""

    run: Run
    held_out: dict[str, int] = field(default_factory=dict)
    courses: dict[str, dict[str, _Course]] = field(default_factory=dict)  # by metric and client
    sums: dict[str, dict[int, list[float]]] = field(default_factory=dict)  # by metric and round: sum, number
    rounds: tuple[int, int] | None = None  # the first and the last round in which clients were measured

    @classmethod
    def of(cls, run: Run) -> ClientHistories:
        """Reads the rows of a run. Raises `RunDirectoryError` if a line of clients.jsonl cannot be read."""
        histories = cls(run)
        for row in run.stream_clients():
            if f"{_PREFIX}examples" in row:
                histories._add(row)
        return histories

    def _add(self, row: Mapping[str, Any]) -> None:
        client, round = str(row["client"]), int(row["round"])
        self.rounds = (self.rounds[0] if self.rounds else round, round)
        self.held_out[client] = int(row[f"{_PREFIX}examples"])
        for name, given in row.items():
            if not name.startswith(_PREFIX) or name == f"{_PREFIX}examples" or name.endswith(_BEFORE):
                continue
            value, metric = finite(given), name.removeprefix(_PREFIX)
            if value is None:
                continue
            courses = self.courses.setdefault(metric, {})
            course = courses.get(client)
            if course is None:
                course = courses[client] = _Course(value, value, value, round)
            pick = min if smaller_is_better(metric) else max
            course.best, course.last, course.round = pick(course.best, value), value, round
            course.before = finite(row.get(name + _BEFORE))
            total = self.sums.setdefault(metric, {}).setdefault(round, [0.0, 0])
            total[0], total[1] = total[0] + value, total[1] + 1

    def mean(self, metric: str, round: int | None = None) -> float | None:
        """The mean of a metric over the clients measured in a round, by default the last one."""
        if round is None:
            round = self.rounds[1] if self.rounds else -1
        total = self.sums.get(metric, {}).get(round)
        return total[0] / total[1] if total else None

    def results(self, metric: str | None = None) -> list[ClientResult]:
        """One row a client, the worst first; clients that were never measured come last.

        Empty if no client was measured. `metric` is the main metric of the run by default; of a loss, the largest is
        the worst.
        """
        metric = metric or self.run.metric()
        courses = self.courses.get(metric, {})
        if not courses:
            return []
        facts = _facts(self.run)
        facts |= {client: (0, ()) for client in courses if client not in facts}
        rows = [self._result(metric, client, *known) for client, known in facts.items()]
        sign = -1 if smaller_is_better(metric) else 1
        # Of equal values the one with the most held-out examples is the surest.
        return sorted(
            rows, key=lambda row: (math.inf if row.last is None else sign * row.last, -row.held_out)
        )

    def _result(self, metric: str, client: str, examples: int, classes: tuple[str, ...]) -> ClientResult:
        row = ClientResult(client, examples, self.held_out.get(client, 0), classes)
        course = self.courses[metric].get(client)
        if course is None:
            return row
        return replace(row, **vars(course), gap=course.last - (self.mean(metric, course.round) or 0.0))

    def worst(self, metric: str | None = None) -> WorstClients | None:
        """The worst client of the last evaluation, or the worst tenth of many; None if it is unknown."""
        metric = metric or self.run.metric()
        last = self.rounds[1] if self.rounds else None
        measured = [(name, c.last) for name, c in self.courses.get(metric, {}).items() if c.round == last]
        if 0 < len(measured) < FEW:
            sign = -1 if smaller_is_better(metric) else 1
            client, value = min(measured, key=lambda pair: (sign * pair[1], -self.held_out[pair[0]]))
            return WorstClients(value, client, self.held_out[client])
        return _worst_tenth(self.run, metric)


def client_results(run: Run) -> list[ClientResult]:
    """One row a client of a run: its data and the run's main metric on its held-out examples, the worst first.

    Empty if the run measured no clients: that needs `evaluation.clients`, or personal models.
    Raises `RunDirectoryError` if a line of clients.jsonl cannot be read.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from fedlens import Experiment
    >>> from fedlens.results.run import read_run
    >>> partition = {"name": "shards", "clients": 4, "classes_per_client": 3}
    >>> data = {"dataset": "digits", "partition": partition, "validation": 0.2, "validation_from": "client"}
    >>> experiment = Experiment(
    ...     rounds=1, model="linear", local={"lr": 0.1}, data=data, evaluation={"clients": "all"})
    >>> result = experiment.run(Path(tempfile.mkdtemp()) / "run", report=False)
    >>> rows = client_results(read_run(result.directory))
    >>> sorted(row.client for row in rows), len(rows[0].classes), rows[0].last <= rows[-1].last
    (['0', '1', '2', '3'], 3, True)
    """
    return ClientHistories.of(run).results()


def worst_clients(run: Run) -> WorstClients | None:
    """The worst client of the last evaluation in the main metric, or the worst tenth of `FEW` clients or more.

    Reads clients.jsonl only if the run has no summary. None if the run measured no clients.
    """
    if not run.summary:
        return ClientHistories.of(run).worst()
    clients = subtable(run.summary, "clients")
    worst, measured = subtable(clients, "worst"), finite(clients.get("measured"))
    value = finite(worst.get("value"))
    if clients.get("metric") != run.metric() or value is None or measured is None or measured >= FEW:
        return _worst_tenth(run, run.metric())
    return WorstClients(value, str(worst.get("client")), int(finite(worst.get("held_out")) or 0))


def same_clients(run: Run, other: Run) -> bool:
    """Whether two runs have the same training and held-out examples at each client, so that clients can be compared.

    That is: the same dataset, and in `partition` of both summaries the same `digest` and the same `held_out_digest`
    (a SHA-256 of the positions that each client holds out, absent from older runs).
    """
    keys = [
        (
            run.part("data", "dataset"),
            *(run.recorded("partition", key) for key in ("digest", "held_out_digest")),
        )
        for run in (run, other)
    ]
    return keys[0] == keys[1] and None not in keys[0]


def references(run: Run, others: Sequence[Run], algorithm: str) -> list[Run]:
    """The finished runs of `algorithm` among `others` that `run` can be compared with, client by client.

    They have the same clients (see `same_clients`), the same model with the same settings, and the same main metric.
    """
    return [
        other
        for other in others
        if other.part("algorithm") == algorithm
        and other.status == "finished"
        and same_clients(run, other)
        and other.config.get("model") == run.config.get("model")
        and other.metric() == run.metric()
    ]


def with_references(run: Run, others: Sequence[Run]) -> list[ClientResult]:
    """`client_results(run)`, with each client's distance to the centralized and the local-only runs among `others`.

    `to_centralized` is `last` less the value of the centralized model on the client's same held-out examples, at that
    run's last evaluation; `to_local_only` is `last` less the value of a model trained at that client alone. Of several
    such runs it is the mean. Both are None where `references` finds no run, or it did not measure the client.
    Runs are compared only with the same clients, so `others` may hold any runs, `run` too.

    Raises `RunDirectoryError` if a line of clients.jsonl cannot be read.
    """
    values = {
        algorithm: _last_values(references(run, others, algorithm))
        for algorithm in ("centralized", "local-only")
    }
    results = []
    for row in client_results(run):
        gaps = {
            algorithm: row.last - known[row.client] if row.last is not None and row.client in known else None
            for algorithm, known in values.items()
        }
        results.append(replace(row, to_centralized=gaps["centralized"], to_local_only=gaps["local-only"]))
    return results


def _last_values(runs: Sequence[Run]) -> dict[str, float]:
    """The mean over runs of each client's last value."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for row in client_results(run):
            if row.last is not None:
                values.setdefault(row.client, []).append(row.last)
    return {client: math.fsum(each) / len(each) for client, each in values.items()}


def _worst_tenth(run: Run, metric: str) -> WorstClients | None:
    value = run.spread().get(metric, {}).get("worst_decile")
    return None if value is None else WorstClients(value)


def _facts(run: Run) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The examples and the classes of each client in the order of the partition; empty if it is unknown."""
    partition = run.partition
    if partition is None:
        return {}
    sizes, census = partition.sizes().tolist(), partition.census
    if census is None:
        return {client: (size, ()) for client, size in zip(partition.ids, sizes, strict=True)}
    # By client, then by falling count; equal counts stay in the order of the classes.
    order = np.lexsort((-census.counts, census.owners()))
    names = [census.classes[column] for column in census.columns[order].tolist()]
    starts = census.offsets.tolist()
    return {
        client: (sizes[k], tuple(names[starts[k] : starts[k + 1]])) for k, client in enumerate(partition.ids)
    }
