"""The search for a method's settings in one case: the due runs, and the chosen point.

The search is a function of its points and of the lines of the runs so far. A study that was killed therefore
continues by itself, in any order of its runs and with any number of jobs, to the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlens.report.study_results import RunLine
from fedlens.studies.halving import best, has_reached, kept, rungs, score
from fedlens.studies.planned import DueRun, PlannedRun, Point


@dataclass(frozen=True)
class SearchRules:
    """The rules of tuning, the same for every method and case.

    Attributes:
        metric: of the study, None for the main metric of the task; compared on validation data, see
            `fedlens.report.study_results.validation_metric`.
        last: number of evaluations whose mean is a value.
        halving, first: the best 1/halving continue after round `first`, `first * halving`, ...; None without rungs.
    """

    metric: str | None = None
    last: int = 1
    halving: int | None = None
    first: int | None = None


class SearchCell(Protocol):
    """One method in one case, as tuning sees it."""

    @property
    def points(self) -> Sequence[Point]:
        """The points of its grid, in order."""

    @property
    def seeds(self) -> Sequence[int]:
        """Each point runs with every one of them; points are compared by their mean."""

    @property
    def rounds(self) -> int:
        """The rounds of a whole run."""

    def run(self, point: Point, seed: int) -> PlannedRun:
        """The tuning run of a point."""


@dataclass(frozen=True)
class Search:
    """The state of the tuning of a cell.

    Attributes:
        due: the runs that must come next; empty if a point has been chosen.
        chosen: the point of the final runs, None as long as runs are due.
    """

    due: Sequence[DueRun]
    chosen: Point | None


def searched(cell: SearchCell, rules: SearchRules, lines: Mapping[str, RunLine]) -> Search:
    """Returns the state of the tuning of a cell at these results, with the due runs.

    A cell with one point needs no run. Raises `ConfigError` if a run lacks the metric.
    """
    points = list(cell.points)
    runs = [[cell.run(point, seed) for seed in cell.seeds] for point in points]
    left = list(range(len(points)))
    for at in rungs(cell.rounds, rules.first, rules.halving):
        if len(left) == 1:
            break
        rung = None if at >= cell.rounds else at
        reached = [(run, has_reached(lines.get(run.digest), rung)) for k in left for run in runs[k]]
        if due := [DueRun(run, rung) for run, done in reached if not done]:
            return Search(due, None)
        scores = [score([lines[run.digest] for run in runs[k]], rules.metric, rung, rules.last) for k in left]
        number = kept(len(left), rules.halving) if rung is not None and rules.halving else 1
        left = [left[place] for place in best(scores, number)]
    return Search([], points[left[0]])


def each_once(due: Sequence[DueRun]) -> list[DueRun]:
    """Merges due runs of equal digest, with the largest `until`, in order of their first appearance."""
    by_digest: dict[str, DueRun] = {}
    for one in due:
        other = by_digest.setdefault(one.run.digest, one)
        if other.until is not None and (one.until is None or one.until > other.until):
            by_digest[one.run.digest] = DueRun(other.run, one.until)
    return list(by_digest.values())
