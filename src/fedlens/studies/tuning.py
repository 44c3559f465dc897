"""Tuning: which runs are due to choose a point of settings for a method in a case, and which point they choose.

Everything is a function of the plan and of the lines of the runs so far. A study that was killed therefore
continues by itself, in any order of its runs and with any number of jobs, to the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fedlens.core.errors import ConfigError
from fedlens.report.study_results import RunLine
from fedlens.studies.halving import Score, best, has_reached, kept, reaching, rungs, score
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.widening import Point, further_points

WIDEN = 4  # further points that `tune.widen = true` allows each method and case


@dataclass(frozen=True)
class Tuning:
    """The rules of tuning, the same for every method and case.

    Attributes:
        seeds: each point runs with every one of them; points are compared by their mean.
        metric: on validation data; None for that of the task, see `fedlens.studies.halving.validation_metric`.
        last: the number of evaluations that a value is the mean of.
        budget: runs a method and case; None for as many as the points need.
        widen: the number of further points that each method and case may try while its best lies at an edge.
        halving, first: the best 1/halving run on after round `first`, `first * halving`, ...; None without rungs.
        search: "optuna" suggests the points from ranges, "grid" takes those of the study file.
    """

    seeds: Sequence[int]
    metric: str | None = None
    last: int = 1
    budget: int | None = None
    widen: int = 0
    halving: int | None = None
    first: int | None = None
    search: Literal["grid", "optuna"] = "grid"

    @property
    def points(self) -> int:
        """The number of points that a search with Optuna tries."""
        return (self.budget or 0) // len(self.seeds)


class TunedCell(Protocol):
    """One method in one case, as tuning sees it."""

    @property
    def method(self) -> str:
        """Its name."""

    @property
    def case(self) -> Mapping[str, Any]:
        """Its case, by dimension."""

    @property
    def points(self) -> Sequence[Point]:
        """The points of its grid, in order."""

    @property
    def space(self) -> Mapping[str, Mapping[str, Any]]:
        """The ranges that Optuna searches, by setting: `low`, `high` and `log`, or `choices`."""

    @property
    def rounds(self) -> int:
        """The rounds of a whole run."""

    def run(self, point: Point, seed: int) -> PlannedRun:
        """The tuning run of a point."""

    def valid(self, point: Point) -> bool:
        """Whether the settings of a point are within their bounds."""


@dataclass(frozen=True)
class Tuned:
    """How far the tuning of a cell has come.

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
class _Search:
    """The tuning of one cell, played through from its start with the lines of the runs so far.

    Points are named by their index in `tried`; `runs` has those of each point, one a seed.
    """

    cell: TunedCell
    tuning: Tuning
    lines: Mapping[str, RunLine]
    tried: list[Point] = field(default_factory=list)
    runs: list[list[PlannedRun]] = field(default_factory=list)

    def start(self, points: Sequence[Point]) -> list[int]:
        """Adds points to those that are tried. Returns their indices."""
        before = len(self.tried)
        self.tried += points
        self.runs += [[self.cell.run(point, seed) for seed in self.tuning.seeds] for point in points]
        return list(range(before, len(self.tried)))

    def missing(self, indices: Sequence[int], rung: int | None) -> list[DueRun]:
        """The runs of these points that have not come to the rung yet."""
        runs = [run for index in indices for run in self.runs[index]]
        return [DueRun(run, rung) for run in runs if not has_reached(self.lines.get(run.digest), rung)]

    def scores(self, indices: Sequence[int], rung: int | None) -> list[Score]:
        """The scores of points whose runs have all come to the rung."""
        rules = self.tuning
        lines = [[self.lines[run.digest] for run in self.runs[index]] for index in indices]
        return [score(of_point, rules.metric, rung, rules.last) for of_point in lines]

    def best(self, indices: Sequence[int], rung: int | None, number: int = 1) -> list[int]:
        """The best of these points at the rung."""
        return [indices[place] for place in best(self.scores(indices, rung), number)]

    def outcome(
        self, due: Sequence[DueRun], chosen: int | None = None, added: int = 0, rung: int | None = None
    ) -> Tuned:
        """The outcome so far."""
        runs = [run for of_point in self.runs for run in of_point]
        return Tuned(due, None if chosen is None else self.tried[chosen], self.tried, runs, added, rung)


def tuned(cell: TunedCell, tuning: Tuning, lines: Mapping[str, RunLine]) -> Tuned:
    """How far the tuning of a cell has come with the runs of these lines, and what it needs next.

    A cell with one point needs no run. Raises `ConfigError` if a run lacks the metric.
    """
    search = _Search(cell, tuning, lines)
    if tuning.search == "optuna":
        return _searched(search)
    if len(cell.points) == 1:
        return Tuned([], cell.points[0], cell.points, [])
    points = compared = search.start(cell.points)
    rung = None
    for at in rungs(cell.rounds, tuning.first, tuning.halving):
        compared, rung = points, None if at >= cell.rounds else at
        if due := search.missing(points, rung):
            return search.outcome(due, rung=rung)
        if rung is not None and tuning.halving:
            points = search.best(points, rung, kept(len(points), tuning.halving))
            if len(points) == 1:
                break
    return _widened(search, compared, rung)


def _widened(search: _Search, compared: Sequence[int], rung: int | None) -> Tuned:
    """Tries further points while the best lies at an edge. They run to the rung of the last comparison."""
    pool = list(compared)
    start = len(search.tried)
    while True:
        [chosen] = search.best(pool, rung)
        added = len(search.tried) - start
        left = search.tuning.widen - added
        further = further_points(search.tried, search.tried[chosen], search.cell.valid)[:left] if left else []
        if not further:
            return search.outcome([], chosen, added, rung)
        indices = search.start(further)
        pool += indices
        if due := search.missing(indices, rung):
            return search.outcome(due, None, added + len(further), rung)


def _searched(search: _Search) -> Tuned:
    """The search with Optuna: a batch of points at a time, the next one from the values of all before."""
    from fedlens.studies.optuna_search import BATCH, OptunaSearch

    sampler = OptunaSearch(search.cell.space)
    while left := search.tuning.points - len(search.tried):
        indices = search.start(sampler.ask(min(BATCH, left)))
        if due := search.missing(indices, None):
            return search.outcome(due)
        sampler.tell([None if failed else value for failed, value in search.scores(indices, None)])
    [chosen] = search.best(range(len(search.tried)), None)
    return search.outcome([], chosen)


def merged(due: Sequence[DueRun]) -> list[DueRun]:
    """Due runs with each digest once, as far as the furthest needs it, in order of their first place."""
    found: dict[str, DueRun] = {}
    for one in due:
        other = found.setdefault(one.run.digest, one)
        if other.until is not None and (one.until is None or one.until > other.until):
            found[one.run.digest] = DueRun(other.run, one.until)
    return list(found.values())


def check_budget(cells: Sequence[TunedCell], tuning: Tuning, where: str = "tune.budget") -> int:
    """The tuning runs that every method has in every case.

    Raises `ConfigError`, with the numbers, if they differ between methods or from the budget.
    """
    seeds = len(tuning.seeds)
    times = f"{seeds} tuning seed{'s' * (seeds > 1)}"
    if tuning.search == "optuna":
        if not tuning.budget or tuning.budget % seeds:
            given = "is not set" if not tuning.budget else f"= {tuning.budget} is no multiple of {times}"
            raise ConfigError(
                f"tune.budget {given}", where=where, hint="set it to points x tuning seeds, such as "
                f"{12 * seeds} for 12 points"
            )  # fmt: skip
        return tuning.budget
    counts: dict[str, int] = {}
    for cell in cells:
        points = len({cell.run(point, tuning.seeds[0]).digest for point in cell.points})
        counts.setdefault(cell.method, points)
        if points != counts[cell.method]:
            counts[f"{cell.method} in {dict(cell.case)}"] = points
    wanted = tuning.budget
    if wanted is None:
        wanted = max(counts.values(), default=0) * seeds
    unequal = {name: points for name, points in counts.items() if points * seeds != wanted}
    if not unequal:
        return wanted
    needs = ", ".join(f"{name}: {points} x {seeds} = {points * seeds}" for name, points in counts.items())
    rule = (
        f"tune.budget is {wanted}" if tuning.budget is not None else "every method must have the same number"
    )
    even = wanted % seeds == 0
    raise ConfigError(
        f"the methods need different or other numbers of tuning runs (points x {times}): {needs}; {rule}",
        where=where,
        hint=f"give each method {wanted // seeds} points, by values of its grid, by 'points', or by [random] with "
        f"number = {wanted // seeds}"
        if even
        else f"set tune.budget to a multiple of {seeds}",
    )


def check_tuning(tuning: Tuning) -> None:
    """Raises `ConfigError` if two rules of tuning exclude each other."""
    for name, given in (("tune.widen", tuning.widen), ("stop.halving", tuning.halving)):
        if tuning.search == "optuna" and given:
            raise ConfigError(
                f"{name} is set beside tune.search = 'optuna'",
                where=name,
                hint=f"remove {name}, or set tune.search = 'grid'",
            )
    if not tuning.seeds:
        raise ConfigError("tune.seeds is empty", where="tune.seeds", hint="name at least one seed")


def budget_sentence(cell: TunedCell, tuning: Tuning, budget: int) -> str:
    """The same effort for every method, in words.

    The points are those of `cell`, which are as many as those of the others.
    """
    seeds = len(tuning.seeds)
    points = budget // seeds
    of_seeds = f"{seeds} seed{'s' * (seeds > 1)}"
    parts = [f"Each method was tuned with {budget} runs in each case: {points} points, {of_seeds}."]
    if points == 1 and tuning.search == "grid":
        return "Each method has one point of settings, so no run was needed to choose it."
    if tuning.search == "optuna":
        parts.append("Optuna suggested the points, from the same number of runs for each method.")
    if tuning.widen:
        parts.append(
            f"While the best point lay at the edge of its grid, up to {tuning.widen} further points "
            f"({tuning.widen * seeds} runs) were allowed to each method in each case."
        )
    if tuning.halving and tuning.first:
        numbers = reaching(points, cell.rounds, tuning.first, tuning.halving)
        told = ", ".join(f"{number} to round {rung}" for rung, number in numbers.items())
        parts.append(f"Successive halving ran {told}.")
    return " ".join(parts)
