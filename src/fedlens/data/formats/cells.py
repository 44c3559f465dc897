"""Interprets the cells of a table: numbers, strings, missing values, coordinates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What programs write for a missing value. "None" is left out: "none" is a class in many tables.
_MISSING = {"nan", "null", "n/a", "#n/a", "<na>"}
_LIMITS = {"lat": 90.0, "latitude": 90.0, "lon": 180.0, "longitude": 180.0, "lng": 180.0, "long": 180.0}


def missing(text: str) -> str | None:
    """The problem of a cell without a value, as the rest of a sentence; None if it has one.

    Besides empty cells, these are NaN, null, N/A, #N/A and <NA> in any case, and NA in capitals.

    >>> missing("mercy"), missing(""), missing("NaN")
    (None, 'is empty', "is 'NaN', which stands for a missing value")
    """
    if not text:
        return "is empty"
    stands = text == "NA" or text.lower() in _MISSING
    return f"is '{text}', which stands for a missing value" if stands else None


def typed(values: Sequence[Any]) -> NDArray[Any]:
    """The cells as whole numbers, else numbers, else strings, without losing information; an empty cell is NaN.

    >>> typed(["1", "2"]).tolist(), typed(["1.5", None]).tolist(), typed(["007", "8"]).tolist()
    ([1, 2], [1.5, nan], ['007', '8'])
    """
    texts = ["" if value is None else str(value) for value in values]
    full = [text for text in texts if text]
    if not full or not all(map(is_number, full)):
        return np.array(texts, dtype=str)
    if len(full) == len(texts) and all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts):
        return np.array([int(text) for text in texts], np.int64)
    return np.array([float(text) if text else math.nan for text in texts])


def is_number(text: str) -> bool:
    """Whether a cell is a number. 007 is a name, and so is 1_000, which Python accepts as a number."""
    return re.fullmatch(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is not None


def coordinates(columns: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """The columns of latitudes and longitudes, and the largest valid degree of each.

    They are recognized by name, in any case: lat and latitude, lon, longitude, lng and long. Both must exist: a column
    `long` alone may be anything.

    >>> coordinates({"Latitude": np.zeros(1), "lng": np.zeros(1)}), coordinates({"long": np.zeros(1)})
    ({'Latitude': 90.0, 'lng': 180.0}, {})
    """
    limits = {name: _LIMITS[name.lower()] for name in columns if name.lower() in _LIMITS}
    return limits if len(set(limits.values())) == 2 else {}


def degrees(column: Sequence[Any]) -> NDArray[np.float64]:
    """The numbers in a column of coordinates; NaN for other cells."""
    return np.array([_degrees(value) for value in column], np.float64)


def off_the_sphere(name: str, limit: float, column: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """(row, problem, hint) of each cell that is not in -limit .. limit degrees."""
    for row, value in enumerate(column):
        if not abs(_degrees(value)) <= limit:
            none = value == "" or (isinstance(value, float) and math.isnan(value))
            what = (
                f"'{name}' is missing"
                if none
                else f"'{name}' is {value}, which is not a coordinate in degrees"
            )
            yield row, what, f"write degrees from -{limit:g} to {limit:g}"


def _degrees(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan
