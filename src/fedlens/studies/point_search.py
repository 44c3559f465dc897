"""The search for a method's settings in one case: the due runs, and the chosen point.

The search is a function of its points and of the lines of the runs so far. A study that was killed therefore
continues by itself, in any order of its runs and with any number of jobs, to the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedlens.report.study_results import RunLine
from fedlens.studies.halving import Score, best, has_reached, kept, rungs, score
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.widening import Point, further_points


@dataclass(frozen=True)
class SearchRules:
    """The rules of tuning, the same for every method and case.

    Attributes:
        metric: of the study, None for the main metric of the task; compared on validation data, see
            `fedlens.report.study_results.validation_metric`.
        last: number of evaluations whose mean is a value.
        widen: the runs that each method and case may add while its best point lies at an edge.
        halving, first: the best 1/halving continue after round `first`, `first * halving`, ...; None without rungs.
    """

    metric: str | None = None
    last: int = 1
    widen: int = 0
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

    def valid(self, point: Point) -> bool:
        """Whether the settings of a point are within their bounds."""


@dataclass(frozen=True)
class Search:
    """The state of the tuning of a cell.

    Attributes:
        due: the runs that must come next; empty if a point has been chosen.
        chosen: the point of the final runs, None as long as runs are due.
        tried: the points so far, those that widening added at the end.
        runs: the tuning runs so far, those due included.
        added: the number of points that widening added.
        rung: the round after which the chosen point was compared with others; None for the end of the runs.
    """

    due: Sequence[DueRun]
    chosen: Point | None
    tried: Sequence[Point]
    runs: Sequence[PlannedRun]
    added: int = 0
    rung: int | None = None


@dataclass
class _Play:
    """The tuning of one cell, played through from its start with the lines of the runs so far.

    Points are named by their index in `tried`; `runs` has those of each point, one a seed.
    """

    cell: SearchCell
    rules: SearchRules
    lines: Mapping[str, RunLine]
    tried: list[Point] = field(default_factory=list)
    runs: list[list[PlannedRun]] = field(default_factory=list)

    def start(self, points: Sequence[Point]) -> list[int]:
        """Adds points to those that are tried. Returns their indices."""
        before = len(self.tried)
        self.tried += points
        self.runs += [[self.cell.run(point, seed) for seed in self.cell.seeds] for point in points]
        return list(range(before, len(self.tried)))

    def missing(self, indices: Sequence[int], rung: int | None) -> list[DueRun]:
        """The runs of these points that have not reached the rung."""
        runs = [run for index in indices for run in self.runs[index]]
        return [DueRun(run, rung) for run in runs if not has_reached(self.lines.get(run.digest), rung)]

    def scores(self, indices: Sequence[int], rung: int | None) -> list[Score]:
        """The scores of points whose runs have all reached the rung."""
        lines = [[self.lines[run.digest] for run in self.runs[index]] for index in indices]
        return [score(of_point, self.rules.metric, rung, self.rules.last) for of_point in lines]

    def best(self, indices: Sequence[int], rung: int | None, number: int = 1) -> list[int]:
        """The best of these points at the rung."""
        return [indices[place] for place in best(self.scores(indices, rung), number)]

    def outcome(
        self, due: Sequence[DueRun], chosen: int | None = None, added: int = 0, rung: int | None = None
    ) -> Search:
        """The outcome so far."""
        runs = [run for of_point in self.runs for run in of_point]
        return Search(due, None if chosen is None else self.tried[chosen], self.tried, runs, added, rung)


def searched(cell: SearchCell, rules: SearchRules, lines: Mapping[str, RunLine]) -> Search:
    """Returns the state of the tuning of a cell at these results, with the due runs.

    A cell with one point needs no run. Raises `ConfigError` if a run lacks the metric.
    """
    search = _Play(cell, rules, lines)
    if len(cell.points) == 1:
        return Search([], cell.points[0], cell.points, [])
    points = compared = search.start(cell.points)
    rung = None
    for at in rungs(cell.rounds, rules.first, rules.halving):
        compared, rung = points, None if at >= cell.rounds else at
        if due := search.missing(points, rung):
            return search.outcome(due, rung=rung)
        if rung is not None and rules.halving:
            points = search.best(points, rung, kept(len(points), rules.halving))
            if len(points) == 1:
                break
    return _widened(search, compared, rung)


def _widened(search: _Play, compared: Sequence[int], rung: int | None) -> Search:
    """Tries further points while the best lies at an edge. They run to the rung of the last comparison."""
    pool = list(compared)
    start = len(search.tried)
    while True:
        [chosen] = search.best(pool, rung)
        added = len(search.tried) - start
        left = search.rules.widen // len(search.cell.seeds) - added
        further = further_points(search.tried, search.tried[chosen], search.cell.valid)[:left] if left else []
        if not further:
            return search.outcome([], chosen, added, rung)
        indices = search.start(further)
        pool += indices
        if due := search.missing(indices, rung):
            return search.outcome(due, None, added + len(further), rung)


def each_once(due: Sequence[DueRun]) -> list[DueRun]:
    """Merges due runs of equal digest, with the largest `until`, in order of their first appearance."""
    by_digest: dict[str, DueRun] = {}
    for one in due:
        other = by_digest.setdefault(one.run.digest, one)
        if other.until is not None and (one.until is None or one.until > other.until):
            by_digest[one.run.digest] = DueRun(other.run, one.until)
    return list(by_digest.values())
