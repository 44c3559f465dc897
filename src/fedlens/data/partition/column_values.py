"""Columns of values beside the examples: missing values, and values as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_missing(value: Any) -> bool:
    """Whether this is None, NaN, NaT (which are not equal to themselves), or empty or blank text.

    >>> [is_missing(value) for value in (None, float("nan"), " ", "nan", 0)]
    [True, True, True, False, False]
    """
    if isinstance(value, str | bytes):
        return not value.strip()
    return value is None or bool(value != value)


def missing(column: NDArray[Any]) -> NDArray[np.bool_]:
    """bool [n]: which values of a column are missing."""
    if column.dtype.kind in "iub":
        return np.zeros(len(column), bool)
    return np.array([is_missing(value) for value in column.tolist()], bool)


def numbers(column: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [n]: the column as numbers, also from text; NaN for other values.

    >>> numbers(np.array(["-33.9", "north", ""])).tolist()
    [-33.9, nan, nan]
    """
    if column.dtype.kind in "fiu":
        return column.astype(np.float64)
    if column.dtype.kind not in "USO":
        return np.full(len(column), np.nan)
    return np.array([_number(value) for value in column.tolist()], np.float64)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
