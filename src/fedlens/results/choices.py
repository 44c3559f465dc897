"""The settings that tuning chose in a study, and whether they lie at the edge of the tried values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedlens.results.rows import Results


def edges(results: Results, method: str, case: Mapping[str, Any]) -> set[str]:
    """The settings of a cell of which tuning chose a value at the edge of those that were tried, see `at_edge`."""
    tried, chosen = tried_values(results, method, case), chosen_values(results, method, case)
    return {setting for setting, value in chosen.items() if at_edge(tried.get(setting, ()), value)}


def chosen_values(results: Results, method: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen value of each tuned setting of a cell: the point of its final runs.

    Empty without tuning, or before tuning is complete.
    """
    points = (
        row.point
        for row in results.info.entries
        if (row.role, row.method) == ("final", method) and row.case == case
    )
    return dict(next(points, {}))


def tried_values(results: Results, method: str, case: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The distinct values that the tuning runs of a cell have of each setting, numbers in rising order.

    A cell without tuning runs has the values of the grid of the study file.
    """
    tried: dict[str, list[Any]] = {}
    for row in results.info.entries:
        if (row.role, row.method) == ("tune", method) and row.case == case:
            for setting, value in row.point.items():
                tried.setdefault(setting, []).append(value)
    return {name: distinct(values) for name, values in (tried or results.info.grids.get(method, {})).items()}


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """The distinct values: numbers in rising order, others in the given order.

    >>> distinct([0.1, 0.01, 0.1]), distinct(["sgd", "adam", "sgd"])
    ((0.01, 0.1), ('sgd', 'adam'))
    """
    once: list[Any] = []
    for value in values:
        if value not in once:
            once.append(value)
    return tuple(sorted(once)) if all(map(is_number, once)) else tuple(once)


def at_edge(values: Iterable[Any], chosen: Any) -> bool:
    """Whether a chosen number is the smallest or the largest of the tried numbers.

    Both values of a grid of two lie at its edge. A grid of one value has no edge, and neither have names.

    >>> at_edge([0.01, 0.1, 1.0], 0.1), at_edge([0.01, 0.1, 1.0], 1.0), at_edge([0.7, 0.9], 0.9)
    (False, True, True)
    >>> at_edge([0.1], 0.1), at_edge(["sgd", "adam"], "adam")
    (False, False)
    """
    numbers = distinct(value for value in values if is_number(value))
    return len(numbers) > 1 and is_number(chosen) and not numbers[0] < chosen < numbers[-1]


def is_number(value: Any) -> bool:
    """Whether a value of a setting is a finite number, so that it has an order; True and False are names."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
