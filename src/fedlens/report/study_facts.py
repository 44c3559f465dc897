"""Measured facts of runs in place of the settings of their data, as the axis of a figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fedlens.report.study_groups import METHOD, SeedGroups, SeedRuns

FACTS = {"emd": "mean EMD"}  # in RunLine.facts, with their words


def by_fact(groups: SeedGroups, fact: str, kept: Iterable[str]) -> SeedGroups:
    """The same runs, told apart by a fact of their data instead of the settings that made the data.

    A group gets the mean of the fact over its seeds, with four digits after the point. Groups without it have no such
    key.

    Args:
        kept: the keys that stay, besides the method.
    """
    keys = {METHOD, *kept}
    cells = [replace(cell, keys=_keys(cell, fact, keys)) for cell in groups.cells]
    info = groups.results.info
    named = replace(info, dimensions={**info.dimensions, fact: FACTS[fact]})
    return replace(groups, results=replace(groups.results, info=named), cells=cells)


def _keys(cell: SeedRuns, fact: str, kept: set[str]) -> dict[str, Any]:
    keys = {key: value for key, value in cell.keys.items() if key in kept}
    values = [value for run in cell.done.values() if (value := run.facts.get(fact)) is not None]
    return {**keys, fact: round(statistics.fmean(values), 4)} if values else keys
