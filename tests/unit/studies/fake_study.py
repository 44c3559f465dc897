"""A study without training: the curve of each run is a formula of its point, its seed and the round."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.results.rows import Row
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.tuning import Search, SearchRules, searched

Point = Mapping[str, Any]
Value = Callable[
    [Point, int, int], float | None
]  # of a point, a seed and a round; None for a run that fails there


@dataclass(frozen=True)
class FakeCell:
    """A cell of a study."""

    points: Sequence[Point]
    seeds: Sequence[int] = (0,)
    rounds: int = 27
    method: str = "fedavg"
    case: Mapping[str, Any] = field(default_factory=dict)

    def run(self, point: Point, seed: int) -> PlannedRun:
        settings = {"seed": seed, "method": self.method, "case": dict(self.case), **point}
        key = f"{self.method}-{point}-seed{seed}"
        return PlannedRun(self.method, self.case, point, "tune", seed, settings, key)


def line_of(due: DueRun, rounds: int, value: Value, metric: str = "validation_accuracy") -> Row:
    """The line of a run that was carried out as far as it is due."""
    until = rounds if due.until is None else min(due.until, rounds)
    found: dict[str, list[float | None]] = {"round": [], metric: []}
    status, reason = "finished" if until == rounds else "stopped", None
    for round in range(until + 1):
        measured = value(due.run.point, due.run.seed, round)
        if measured is None:
            status, reason, until = "failed", f"the loss of round {round} is not a finite number", round - 1
            break
        found["round"].append(round)
        found[metric].append(measured)
    return Row(due.run.digest, due.run.directory, status, reason, until, "test_accuracy", found)  # type: ignore[arg-type]


def played(cell: FakeCell, tuning: SearchRules, value: Value) -> tuple[Search, dict[str, Row]]:
    """Carries out all that is due, again and again, until a point is chosen."""
    lines: dict[str, Row] = {}
    for _ in range(1000):  # a search that does not end fails
        due = searched(cell, tuning, lines).due
        if not due:
            break
        lines |= {one.run.digest: line_of(one, cell.rounds, value) for one in due}
    return searched(cell, tuning, lines), lines


def played_with_kills(
    cell: FakeCell, tuning: SearchRules, value: Value, rng: random.Random
) -> tuple[Search, dict[str, Row]]:
    """The same, killed again and again after some runs, which finish in any order."""
    lines: dict[str, Row] = {}
    for _ in range(10_000):
        due = list(searched(cell, tuning, lines).due)
        if not due:
            break
        rng.shuffle(due)
        for one in due[: rng.randint(1, len(due))]:
            lines[one.run.digest] = line_of(one, cell.rounds, value)
        items = list(lines.items())
        rng.shuffle(items)
        lines = dict(items)
    return searched(cell, tuning, lines), lines
