"""Successive halving in synchronous rungs: chooses the runs that continue by their values at each rung.

All points of a cell run to the first rung; the best 1/eta of them continue to the next rung, which is eta times as
long (Jamieson and Talwalkar 2016, algorithm 1). A decision reads each curve up to the round of the rung and no
further, so it is the same however far the runs have come since.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedlens.base.errors import ConfigError
from fedlens.base.format import many, smaller_is_better
from fedlens.results.rows import Row, validation_metric

DIVERGED = "diverged in round"  # first words of the reason of a run whose loss diverged
# The number of failed seeds, and the mean value of the others; the smaller the better.
Score = tuple[int, float]


def rungs(rounds: int, first: int | None = None, eta: int | None = None) -> list[int]:
    """The rounds at which points are compared, the last of them after all `rounds`.

    >>> rungs(500, first=50, eta=3), rungs(500)
    ([50, 150, 450, 500], [500])
    """
    rung_rounds: list[int] = []
    if first is not None and eta is not None:
        at = first
        while at < rounds:
            rung_rounds.append(at)
            at *= eta
    return [*rung_rounds, rounds]


def kept(points: int, eta: int) -> int:
    """Returns how many of `points` continue after a rung: 1/eta of them, rounded down, and at least one.

    >>> [kept(points, 3) for points in (12, 4, 2, 1)]
    [4, 1, 1, 1]
    """
    return max(1, points // eta)


def has_reached(line: Row | None, rung: int | None) -> bool:
    """Whether a run needs no more rounds for a comparison at `rung`; None for the end of the run.

    A failed run needs no more rounds.
    """
    if line is None:
        return False
    return line.status in ("finished", "failed") or (rung is not None and line.rounds >= rung)


def failed_before(line: Row, rung: int | None) -> bool:
    """Whether a run had failed or diverged when round `rung` was over; None for the end of the run.

    A run that failed later was compared at the rung while it still ran, and that comparison stands. A diverged run was
    stopped by its last complete round; other failures happen in the round after it.
    """
    if line.status != "failed":
        return False
    diverged = (line.reason or "").startswith(DIVERGED)
    return rung is None or line.rounds < rung or (line.rounds == rung and diverged)


def value_at(line: Row, metric: str, rung: int | None = None, last: int = 1) -> float | None:
    """The mean of the last `last` values of `metric` up to round `rung`, None for the whole run.

    None if the run failed until then, or its value or loss is not finite in the last evaluation.

    >>> curve = {"round": [0, 1, 2, 3], "validation_accuracy": [0.1, 0.5, 0.6, 0.9]}
    >>> line = Row("d", "r", "finished", None, 3, "test_accuracy", curve)
    >>> value_at(line, "validation_accuracy", rung=2), value_at(line, "validation_accuracy", rung=2, last=2)
    (0.6, 0.55)
    """
    if failed_before(line, rung) or line.not_finite(metric, rung):
        return None
    rounds = line.curve.get("round", ())
    values = [
        value
        for index, value in line.series(metric)
        if rung is None or (at := rounds[index]) is None or at <= rung
    ][-last:]
    return statistics.fmean(values) if values else None


def score(lines: Sequence[Row], metric: str | None, rung: int | None = None, last: int = 1) -> Score:
    """Returns the score of a point, from its runs with every tuning seed; smaller is better.

    A point with fewer failed runs is better than one with more. A run that diverged has failed.

    Args:
        metric: of the study, None for the main metric of each run; the score uses its validation counterpart, see
            `fedlens.results.rows.validation_metric`.

    Raises `ConfigError` if a run that did not fail lacks the metric.
    """
    values: list[float] = []
    failed = 0
    for line in lines:
        column = validation_metric(metric or line.main)
        if not failed_before(line, rung):
            _check_has(line, column)
        value = value_at(line, column, rung, last)
        if value is None:
            failed += 1
        else:
            values.append(value if smaller_is_better(column) else -value)
    return failed, statistics.fmean(values) if values else 0.0


def best(scores: Sequence[Score], number: int) -> list[int]:
    """The indices of the `number` best scores, in their order; of equal ones the first are taken.

    >>> best([(0, -0.5), (1, -0.9), (0, -0.7), (0, -0.7)], 2), best([(0, -0.7), (0, -0.7)], 1)
    ([2, 3], [0])
    """
    ranked = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    return sorted(ranked[:number])


def _check_has(line: Row, metric: str) -> None:
    """Raises `ConfigError` if a run has no column for the metric that points are compared by."""
    if line.curve and metric not in line.curve:
        columns = [name for name in line.curve if name.startswith("validation_")]
        raise ConfigError(
            f"tuning needs the metric '{metric}', which the run {line.run} lacks",
            where="metric",
            hint=f"choose one of {', '.join(columns)}" if columns else "set data.validation, or tune.share",
        )


def reaching(points: int, rounds: int, first: int | None = None, eta: int | None = None) -> dict[int, int]:
    """Returns how many of `points` run to each rung, by its round. The last remaining point is chosen and stops.

    >>> reaching(9, 500, first=50, eta=3), reaching(4, 500)
    ({50: 9, 150: 3}, {500: 4})
    """
    points_by_rung: dict[int, int] = {}
    for rung in rungs(rounds, first, eta):
        if points > 1:
            points_by_rung[rung] = points
            points = kept(points, eta or points)
    return points_by_rung


def check_rungs(first: int, every: int, rounds: int, where: str = "stop.first") -> None:
    """Raises `ConfigError` if the first rung precedes the first evaluation of a trained model, or stops no run.

    Args:
        every: rounds between evaluations, see `evaluation.every`.
        rounds: of a run.
    """
    if first >= rounds:
        raise ConfigError(
            f"the first rung is round {first}, but a run has {many(rounds, 'round')}, so halving would stop no run",
            where=where,
            hint=f"set stop.first to at most {rounds - 1}, or remove halving and first"
            if rounds > 1
            else "remove halving and first",
        )
    if first < every:
        raise ConfigError(
            f"the first rung is round {first}, but runs are first evaluated after round {every}",
            where=where,
            hint=f"set stop.first to {every} or more, or evaluation.every to {first} or less",
        )
