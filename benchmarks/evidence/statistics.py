"""What is read off the curves. A curve is a list of (round, batches so far, accuracy)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.evidence.cells import Point

LAST = 5  # evaluations that the final accuracy is the mean of


class Spread(NamedTuple):
    """Mean, least and largest of a few seeds."""

    mean: float
    least: float
    largest: float


def final(curve: Sequence[Point]) -> float:
    """The mean accuracy of the last five evaluations: with few clients a round, one alone says little.

    >>> final([(0, 0, 0.1), (1, 5, 0.5), (2, 10, 0.6), (3, 15, 0.7), (4, 20, 0.6), (5, 25, 0.6)])
    0.6
    """
    last = [value for _, _, value in curve[-LAST:]]
    return round(sum(last) / len(last), 6)


def rounds_to(curve: Sequence[Point], target: float) -> int | None:
    """The first round, among those measured, with an accuracy of at least `target`; None where there is none.

    >>> rounds_to([(0, 0, 0.1), (5, 25, 0.7), (10, 50, 0.6)], 0.65)
    5
    """
    return next((number for number, _, value in curve if value >= target), None)


def at_round(curve: Sequence[Point], budget: int) -> float | None:
    """Acc@round (hsu2020): the last accuracy measured by round `budget`; None where the run ended before it."""
    return _by([(number, value) for number, _, value in curve], budget)


def at_batches(curve: Sequence[Point], budget: int) -> float | None:
    """Acc@batch (hsu2020): the last accuracy measured within `budget` batches; None where there were never so many.

    >>> at_batches([(0, 0, 0.1), (1, 9, 0.5), (2, 30, 0.6)], 20)
    0.5
    """
    return _by([(batches, value) for _, batches, value in curve], budget)


def _by(points: Sequence[tuple[int, float]], budget: int) -> float | None:
    if points[-1][0] < budget:
        return None
    return [value for spent, value in points if spent <= budget][-1]


def spread(values: Sequence[float]) -> Spread:
    """Mean, least and largest."""
    return Spread(sum(values) / len(values), min(values), max(values))


def sign(differences: Sequence[float]) -> int:
    """1 where every seed's difference is above 0, -1 where every one is below, else 0: it cannot be told.

    >>> sign([0.01, 0.02, 0.03]), sign([-0.01, -0.02, -0.03]), sign([0.01, -0.02, 0.03])
    (1, -1, 0)
    """
    if all(d > 0 for d in differences):
        return 1
    return -1 if all(d < 0 for d in differences) else 0


def at_edge(value: float, values: Sequence[float]) -> bool:
    """Whether the choice is the least or the largest of three or more: the best may lie beyond."""
    return len(values) > 2 and value in (min(values), max(values))
