"""Tuning: the seeds and runs of each method, the runs that are due, and the chosen point.

Everything follows from the plan and from the results so far; see `fedlens.studies.point_search`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.report.format import many
from fedlens.report.study_results import RunLine
from fedlens.studies.cells import Point, StudyCells
from fedlens.studies.expansion import Case, Method
from fedlens.studies.grid_settings import RandomDraws, Range
from fedlens.studies.halving import check_rungs, reaching
from fedlens.studies.places import Places
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.point_search import Search, SearchRules, searched
from fedlens.studies.study_file import StudySettings, TuneSettings

WIDEN = 4  # further points that `tune.widen = true` allows the method with the most seeds


def tuning_seeds(study: StudySettings, methods: Sequence[Method], places: Places) -> dict[str, list[int]]:
    """Returns the tuning seeds of each method; empty without tuning.

    Every method has the same number of runs. With a budget and without tuning seeds, a method with fewer points has
    more seeds: those of the study, and the numbers after the largest of them.

    Raises `ConfigError` if that is impossible.
    """
    tune = study.tune
    if tune is None:
        return {}
    _refuse_beside_optuna(study, methods, places)
    points = {method.name: number_of_points(study, method) for method in methods}
    listed = ", ".join(f"{name} {number}" for name, number in points.items())
    if tune.budget is not None and tune.seeds is None and not _by_budget(study, methods):
        where = places.locate("tune", "budget")
        for name, number in points.items():
            if tune.budget % number:
                raise ConfigError(
                    f"tune.budget is {tune.budget}, but must be a multiple of the {number} points of '{name}'",
                    where=where,
                    hint=f"set it to a multiple of the number of points of every method ({listed})",
                )
        further = range(max(study.seeds) + 1, max(study.seeds) + 1 + tune.budget)
        seeds = [*study.seeds, *further]
        return {name: seeds[: tune.budget // number] for name, number in points.items()}
    seeds = tune.seeds or study.seeds
    budget = tune.budget or max(points.values()) * len(seeds)
    for name, number in points.items():
        if number * len(seeds) != budget:
            raise ConfigError(
                f"'{name}' has {many(number, 'point')} with {many(len(seeds), 'seed')}, "
                f"{many(number * len(seeds), 'tuning run')}, "
                f"but every method must have {budget}",
                where=places.locate("tune", *_given(tune)),
                hint=f"give every method the same number of points (now {listed}), or set tune.budget without "
                "tune.seeds: a method with fewer points then gets more seeds",
            )
    return {name: list(seeds) for name in points}


def _given(tune: TuneSettings) -> list[str]:
    """The key of [tune] that fixes the number of runs; empty if it has none."""
    return ["budget"] if tune.budget else ["seeds"] if tune.seeds else []


def number_of_points(study: StudySettings, method: Method) -> int:
    """Returns the number of points that tuning chooses among, before widening.

    Optuna suggests as many as [random] has by its `number`, or else as the budget allows with the seeds of tuning.
    """
    assert study.tune is not None
    if study.tune.search == "grid":
        return len(method.tuned.points)
    draws = _draws(study, method)
    if draws:
        return max(one.number for one in draws)
    return (study.tune.budget or 0) // len(study.tune.seeds or study.seeds)


def number_of_tuning_runs(cells: StudyCells, method: Method) -> int:
    """The tuning runs of a method in one case before widening; 0 where one point needs no choice."""
    if cells.tune is None:
        return 0
    points = number_of_points(cells.settings, method)
    return points * len(cells.tuning_seeds[method.name]) if points > 1 or cells.tune.search != "grid" else 0


def _draws(study: StudySettings, method: Method) -> list[RandomDraws]:
    """The tables [random] whose settings Optuna searches for a method."""
    of_method = study.methods[method.table].random if study.methods else None
    return [
        one
        for one in (of_method, study.random)
        if one is not None and set(one.ranges) <= set(method.tuned.values)
    ]


def _by_budget(study: StudySettings, methods: Sequence[Method]) -> bool:
    """Whether the number of points follows from the budget."""
    return (
        study.tune is not None
        and study.tune.search == "optuna"
        and not any(_draws(study, m) for m in methods)
    )


def _refuse_beside_optuna(study: StudySettings, methods: Sequence[Method], places: Places) -> None:
    """Raises `ConfigError` for settings that a search with Optuna cannot follow."""
    tune = study.tune
    if tune is None or tune.search == "grid":
        return
    where = places.locate("tune", "search")
    halving = study.stop is not None and study.stop.halving is not None
    for name, given in (("tune.widen", tune.widen), ("stop.halving", halving)):
        if given:
            raise ConfigError(
                f"search = 'optuna' excludes {name}",
                where=where,
                hint=f"remove {name}, or set search = 'grid'",
            )
    for method in methods:
        draws = _draws(study, method)
        if study.methods and study.methods[method.table].points is not None:
            raise ConfigError(
                f"search = 'optuna' cannot search the list 'points' of '{method.table}'",
                where=where,
                hint="give ranges with 'random', or set search = 'grid'",
            )
        if len({one.number for one in draws}) > 1:
            raise ConfigError(
                f"the random tables of '{method.table}' and of the study have different numbers of points",
                where=places.locate("random", "number"),
                hint="Optuna searches both together: set the same number",
            )
        if not draws and (tune.budget is None or tune.budget % len(tune.seeds or study.seeds)):
            seeds = len(tune.seeds or study.seeds)
            raise ConfigError(
                f"the number of points that Optuna tries for '{method.name}' is not set",
                where=where,
                hint=f"set tune.budget to a multiple of {seeds}, the number of seeds, or use [random] with its number",
            )


def rules_of(cells: StudyCells, method: Method) -> SearchRules:
    """The rules of the search. Only the number of points of Optuna depends on the method."""
    study, tune = cells.settings, cells.settings.tune
    assert tune is not None
    return SearchRules(
        metric=study.metric,
        last=study.last,
        widen=widening_runs(cells),
        halving=study.stop.halving if study.stop else None,
        first=study.stop.first if study.stop else None,
        search=tune.search,
        points=number_of_points(study, method),
    )


def widening_runs(cells: StudyCells) -> int:
    """The runs that each method may add in each case while its best point lies at an edge."""
    if cells.tune is None or not cells.tune.widen:
        return 0
    return WIDEN * max(len(seeds) for seeds in cells.tuning_seeds.values())


@dataclass(frozen=True)
class _Cell:
    """A method in a case, as its search sees it."""

    cells: StudyCells
    method: Method
    case: Case

    @property
    def points(self) -> Sequence[Point]:
        return self.cells.points(self.method)

    @property
    def seeds(self) -> Sequence[int]:
        return self.cells.tuning_seeds[self.method.name]

    @property
    def space(self) -> Mapping[str, Mapping[str, Any]]:
        return space(self.cells.settings, self.method)

    @property
    def rounds(self) -> int:
        made = (self.cells.made(self.method, self.case, point, "tune") for point in self.points)
        return max(one.config.rounds for one in made)

    def run(self, point: Point, seed: int) -> PlannedRun:
        return self.cells.run(self.method, self.case, point, "tune", seed)

    def valid(self, point: Point) -> bool:
        try:
            self.cells.made(self.method, self.case, point, "tune")
        except ConfigError:
            return False
        return True


def space(study: StudySettings, method: Method) -> dict[str, dict[str, Any]]:
    """What Optuna searches for a method: ranges of [random], and the values of grids as choices."""
    ranges = {key: one for draws in reversed(_draws(study, method)) for key, one in draws.ranges.items()}
    return {
        key: _table(ranges[key]) if key in ranges else {"choices": list(values)}
        for key, values in method.tuned.values.items()
    }


def _table(one: Range) -> dict[str, Any]:
    if one.choices is not None:
        return {"choices": list(one.choices)}
    return {"low": one.low, "high": one.high, "log": one.log}


def search_of(cells: StudyCells, method: Method, case: Case, lines: Mapping[str, RunLine]) -> Search:
    """Returns the state of the tuning of a method in a case.

    Raises `ConfigError` if a run lacks the metric that is compared.
    """
    return searched(_Cell(cells, method, case), rules_of(cells, method), lines)


def tuning_due(plan: StudyCells, lines: Mapping[str, RunLine]) -> list[DueRun]:
    """The tuning runs that must come next, over all methods and cases; empty when all points are chosen."""
    return [due for search in _searches(plan, lines) for due in search.due]


def tuning_runs(plan: StudyCells, lines: Mapping[str, RunLine]) -> list[PlannedRun]:
    """The tuning runs that are known so far: widening and Optuna add to them as lines come in."""
    return [run for search in _searches(plan, lines) for run in search.runs]


def chosen_point(plan: StudyCells, method: Method, case: Case, lines: Mapping[str, RunLine]) -> Point | None:
    """The point with the best mean validation value, the first of equal ones; None while runs are missing."""
    return {} if plan.tune is None else search_of(plan, method, case, lines).chosen


def _searches(plan: StudyCells, lines: Mapping[str, RunLine]) -> list[Search]:
    return [search_of(plan, method, case, lines) for case in plan.cases for method in plan.methods]


def refuse_search(plan: StudyCells, places: Places) -> None:
    """Raises `ConfigError` if the first rung is invalid, or Optuna could suggest an invalid setting."""
    if plan.tune is None:
        return
    stop = plan.settings.stop
    for case in plan.cases:
        for method in plan.methods:
            if stop is not None and stop.first is not None:
                configs = [plan.made(method, case, point, "tune").config for point in plan.points(method)]
                every = max(config.evaluation.every for config in configs)
                rounds = min(config.rounds for config in configs)
                check_rungs(stop.first, every, rounds, places.locate("stop", "first"))
            if plan.tune.search == "optuna":
                from fedlens.studies.optuna_search import OptunaSearch

                searched_space = space(plan.settings, method)
                OptunaSearch(searched_space)
                for key, table in searched_space.items():
                    for value in table.get("choices") or (table["low"], table["high"]):
                        plan.made(method, case, {**plan.points(method)[0], key: value}, "tune")


def effort(plan: StudyCells, lines: Mapping[str, RunLine]) -> list[str]:
    """Sentences on widening, halving and Optuna; empty for a plain grid."""
    if plan.tune is None:
        return []
    first, sentences = plan.methods[0], []
    rules = rules_of(plan, first)
    if rules.search == "optuna":
        sentences.append("Optuna suggested the points of tuning.")
    if rules.widen:
        added = [
            search.added * len(plan.tuning_seeds[method.name])
            for case in plan.cases
            for method in plan.methods
            for search in [search_of(plan, method, case, lines)]
        ]
        used = f"{min(added)}" if min(added) == max(added) else f"{min(added)} to {max(added)}"
        sentences.append(
            "While the best point lay at the edge of its grid, every method was allowed "
            f"{rules.widen} further tuning runs in each case; {used} were used."
        )
    if rules.halving is not None and rules.first is not None:
        numbers = {
            tuple(reaching(len(cell.points), cell.rounds, rules.first, rules.halving).items())
            for case in plan.cases
            for method in plan.methods
            for cell in [_Cell(plan, method, case)]
        }
        kept = f"Successive halving of tuning runs kept one point in {rules.halving}"
        rungs = "; ".join(
            ", ".join(f"{points} to round {rung}" for rung, points in one) for one in sorted(numbers) if one
        )
        sentences.append(
            f"{kept}: {rungs}." if len(numbers) == 1 and rungs else f"{kept}, from round {rules.first}."
        )
    return sentences
