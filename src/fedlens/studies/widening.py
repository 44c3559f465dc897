"""Further values of a setting whose best value lies at the edge of the tried values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlens.report.study_choices import at_edge, distinct, is_number

Point = Mapping[str, Any]


def further_points(
    tried: Sequence[Point], best: Point, valid: Callable[[Point], bool] = lambda point: True
) -> list[Point]:
    """The best point with one setting moved a step beyond the edge, for each setting at whose edge it lies.

    A value that `valid` refuses, such as a momentum of 1.2, is replaced by a step towards 1, or else left out.

    >>> further_points([{"local.lr": 0.01}, {"local.lr": 0.1}], {"local.lr": 0.1})
    [{'local.lr': 1.0}]
    """
    points: list[Point] = []
    for setting, value in best.items():
        values = distinct(point[setting] for point in tried if setting in point)
        if not at_edge(values, value):
            continue
        for following in following_values(values, value):
            point = {**best, setting: following}
            if point in tried or valid(point):
                points += [point] if point not in tried else []
                break
    return points


def following_values(values: Sequence[Any], edge: float) -> list[float]:
    """Returns the values that may follow the edge of a grid, the preferred one first.

    The first is the geometric step of the grid: a grid that repeats every decade continues the pattern, others take
    their mean ratio. Where the values at the edge are not positive it is the mean arithmetic step; a grid without
    negative values gets none. The second, where the first exceeds 1, is the geometric step of the distance to 1:
    a momentum of 0.9 is followed by 0.97, because 1.16 is invalid.

    >>> following_values([0.01, 0.03, 0.1], 0.1), following_values([0.01, 0.03, 0.1], 0.01)
    ([0.3], [0.003])
    >>> following_values([0, 0.7, 0.9], 0.9), following_values([0, 0.7, 0.9], 0)
    ([1.16, 0.97], [])
    """
    numbers = [value for value in distinct(values) if is_number(value)]
    upper = edge == numbers[-1]
    outward = numbers if upper else numbers[::-1]  # ends at the edge
    if all(isinstance(value, int) for value in numbers):
        steps: list[float] = [round(_step(outward))]
    else:
        steps = [_rounded(_step(outward))]
        if upper and outward[0] >= 0 and edge < 1 <= steps[0]:
            steps.append(round(1 - _rounded(_step([1 - value for value in outward])), 12))
    steps = [step for step in steps if (step > edge if upper else step < edge)]
    return [step for step in steps if step >= 0 or numbers[0] < 0]


def _step(outward: Sequence[float]) -> float:
    """The value after the last one of numbers in order."""
    positive = [value for value in outward if value > 0]
    if len(positive) < 2 or positive[-1] != outward[-1]:
        return outward[-1] + (outward[-1] - outward[0]) / (len(outward) - 1)
    for back in range(1, len(positive)):
        decade = positive[-1] / positive[-1 - back]
        if math.isclose(decade, 10) or math.isclose(decade, 0.1):
            return positive[-back] * (10 if decade > 1 else 0.1)
    return positive[-1] * _ratio(positive)


def _ratio(numbers: Sequence[float]) -> float:
    """The mean ratio of positive numbers to the ones before."""
    return float((numbers[-1] / numbers[0]) ** (1 / (len(numbers) - 1)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
