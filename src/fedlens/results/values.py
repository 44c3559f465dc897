"""The numbers of a run that tables compare: each is a function from a row to a number, or None."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from fedlens.base.format import smaller_is_better, split_of
from fedlens.results.rows import EFFECTIVE, Row

Value: TypeAlias = Callable[[Row], float | None]

COLUMNS = {"rounds": "round", "batches": "batches", "bytes": "bytes"}
"""What budgets and targets count, and the columns of a curve that count it."""


def final(metric: str, last: int) -> Value:
    """The mean of the last evaluations of a metric."""
    return lambda row: row.final(metric, last)


def mean_change(metric: str, last: int) -> Value:
    """The mean size of the last changes of a metric from one evaluation to the next; None without a change."""

    def value(row: Row) -> float | None:
        values = [value for _, value in row.series(metric)][-last - 1 :]
        return statistics.fmean(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else None

    return value


def at_budget(metric: str, kind: str, budget: float) -> Value:
    """The last value of a metric within a budget; None if a run ends before, or was not evaluated by then.

    Args:
        kind: of `COLUMNS`.

    >>> curve = {"round": [1, 2], "batches": [10, 20], "test_accuracy": [0.5, 0.6]}
    >>> row = Row("", "", "finished", None, 2, "test_accuracy", curve)
    >>> [at_budget("test_accuracy", "batches", budget)(row) for budget in (5, 15, 20, 30)]
    [None, 0.5, 0.6, None]
    """

    def value(row: Row) -> float | None:
        spent = row.curve.get(COLUMNS[kind], ())
        if not any(each is not None and each >= budget for each in spent):
            return None
        within = [value for k, value in row.series(metric) if (at := spent[k]) is not None and at <= budget]
        return within[-1] if within else None

    return value


def to_target(metric: str, kind: str, target: float) -> Value:
    """The rounds, batches or bytes to the first evaluation that reaches a target; None if none does.

    A target is reached by a value of at least it, or at most for losses.

    >>> curve = {"round": [1, 2, 3], "test_loss": [2.0, 1.0, 0.5]}
    >>> row = Row("", "", "finished", None, 3, "test_loss", curve)
    >>> to_target("test_loss", "rounds", 1.0)(row), to_target("test_loss", "rounds", 0.1)(row)
    (2, None)
    """

    def value(row: Row) -> float | None:
        reached = (k for k, v in row.series(metric) if better(metric, v) >= better(metric, target))
        k = next(reached, None)
        return row.curve[COLUMNS[kind]][k] if k is not None and is_counted(row, kind) else None

    return value


def is_counted(row: Row, kind: str) -> bool:
    """Whether a run counted its rounds, batches or bytes."""
    return any(amount is not None for amount in row.curve.get(COLUMNS[kind], ()))


def effective_rate(row: Row) -> float | None:
    """The effective learning rate of a run: its fact, or the setting of that name; None if neither is known.

    >>> row = Row.planned("", "", "fedavg", {"effective_lr": 0.1}, {}, "final", 0)
    >>> effective_rate(row), effective_rate(Row.planned("", "", "fedavg", {"local.lr": 0.1}, {}, "final", 0))
    (0.1, None)
    """
    rate = row.facts.get(EFFECTIVE)
    return rate if rate is not None else {**row.case, **row.point}.get(EFFECTIVE)


def better(metric: str, value: float) -> float:
    """A value with the sign that makes larger better: the negative of a loss.

    >>> better("test_accuracy", 0.5), better("test_loss", 0.5)
    (0.5, -0.5)
    """
    split = split_of(metric)
    return -value if smaller_is_better(split[1] if split else metric) else value
