"""Rows of a parametrized test whose full table runs in the nightly tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values as parameters; in ci only a few of them, the others are nightly.

    In ci every two values of different axes meet, or, with two axes, every value occurs. The keys of a mapping are
    the ids of its values.

    >>> [row.id for row in covering("ab", "xyz") if not row.marks]
    ['a-x', 'a-z', 'b-y']
    """
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes]
    rows = list(product(*named))
    places = [*combinations(range(len(axes)), min(2, len(axes) - 1))]
    parts = {row: {(at, tuple(row[k] for k in at)) for at in places} for row in rows}
    missing, in_ci = set().union(*parts.values()), set()
    while missing:
        row = max(rows, key=lambda row: len(parts[row] & missing))
        missing -= parts[row]
        in_ci.add(row)
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, row, strict=True)),
            id="-".join(row),
            marks=() if row in in_ci else pytest.mark.nightly,
        )
        for row in rows
    ]
