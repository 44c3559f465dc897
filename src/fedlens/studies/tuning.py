"""The choice of each method's point by the mean of its validation values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from fedlens.core.errors import ConfigError
from fedlens.report.study_results import RunLine
from fedlens.studies.cells import Point, StudyCells
from fedlens.studies.expansion import Case, Method
from fedlens.studies.places import Places
from fedlens.studies.planned import DueRun
from fedlens.studies.study_file import StudySettings


def tuning_seeds(study: StudySettings, methods: list[Method], places: Places) -> dict[str, list[int]]:
    """The seeds that each method's points are run with in tuning, by method; empty without tuning.

    Every method has the same number of runs. With a budget and without seeds of tuning, a method with fewer points
    has more seeds: those of the study, and the numbers after the largest of them.

    Raises `ConfigError` if that is impossible.
    """
    tune = study.tune
    if tune is None:
        return {}
    points = {method.name: len(method.tuned.points) for method in methods}
    listed = ", ".join(f"{name} {number}" for name, number in points.items())
    if tune.budget is not None and tune.seeds is None:
        where = places.locate("tune", "budget")
        for name, number in points.items():
            if tune.budget % number:
                raise ConfigError(
                    f"a budget of {tune.budget} runs gives the {number} points of '{name}' unequal numbers of runs",
                    where=where,
                    hint=f"set it to a multiple of each number of points ({listed})",
                )
        further = range(max(study.seeds) + 1, max(study.seeds) + 1 + tune.budget)
        seeds = [*study.seeds, *further]
        return {name: seeds[: tune.budget // number] for name, number in points.items()}
    seeds = tune.seeds or study.seeds
    budget = tune.budget or max(points.values()) * len(seeds)
    for name, number in points.items():
        if number * len(seeds) != budget:
            raise ConfigError(
                f"'{name}' has {number} points with {len(seeds)} seeds, {number * len(seeds)} tuning runs, "
                f"but every method must have {budget}",
                where=places.locate("tune", "budget" if tune.budget else "seeds" if tune.seeds else "on"),
                hint=f"give every method as many points ({listed}), or set a budget without tune.seeds: a method with "
                "fewer points then gets more seeds",
            )
    return {name: list(seeds) for name in points}


def tuning_due(plan: StudyCells, lines: Mapping[str, RunLine]) -> list[DueRun]:
    """The tuning runs that must be carried out before a point can be chosen; empty when all are done."""
    return [
        DueRun(run)
        for case in plan.cases
        for method in plan.methods
        for run in plan.tuning_runs(method, case)
        if run.digest not in lines
    ]


def chosen_point(plan: StudyCells, method: Method, case: Case, lines: Mapping[str, RunLine]) -> Point | None:
    """The point with the best mean validation value, the first of equal ones; None while runs are missing.

    A point with a failed run, or one without a value, is not chosen unless every point has one.
    """
    if plan.tune is None:
        return {}
    best: tuple[float, Point] | None = None
    first: Point | None = None
    for point in plan.points(method):
        runs = [plan.run(method, case, point, "tune", seed) for seed in plan.tuning_seeds[method.name]]
        found = [lines.get(run.digest) for run in runs]
        if any(line is None for line in found):
            return None
        first = point if first is None else first
        values = [_value(plan, line) for line in found if line is not None]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            mean = statistics.fmean(known)
            if best is None or mean > best[0]:
                best = (mean, point)
    return best[1] if best is not None else first


def _value(plan: StudyCells, line: RunLine) -> float | None:
    metric = plan.settings.metric or line.main
    return line.final(f"validation_{metric.partition('_')[2]}", plan.settings.last)
