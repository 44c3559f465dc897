"""Tuning: the seeds and runs of each method, the runs that are due, and the chosen point.

The due runs and the choice are functions of the plan and of the lines of the runs so far. A study that was killed
therefore continues by itself, in any order of its runs and with any number of jobs, to the same choice.

Successive halving has synchronous rungs. All points of a cell run to the first rung; the best 1/eta of them continue to
the next rung, which is eta times as long (Jamieson and Talwalkar 2016, algorithm 1). A decision reads each curve up to
the round of the rung and no further, so it is the same however far the runs have come since.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from fedlens.base.errors import ConfigError
from fedlens.base.format import many, smaller_is_better
from fedlens.results.rows import Row, validation_metric
from fedlens.studies.cells import StudyCells
from fedlens.studies.expansion import Case, Method
from fedlens.studies.planned import DueRun, PlannedRun, Point
from fedlens.studies.study_file import Places
from fedlens.studies.study_settings import StopSettings, StudySettings, TuneSettings

_FIRST_SEED = 100  # of tuning: a study to which a seed is added keeps its tuning runs
DIVERGED = "diverged in round"  # first words of the reason of a run whose loss diverged
# The number of failed seeds, and the mean value of the others; the smaller the better.
Score = tuple[int, float]


def tuning_seeds(study: StudySettings, methods: Sequence[Method], places: Places) -> dict[str, list[int]]:
    """Returns the tuning seeds of each method; empty without tuning.

    Every method has the same number of runs. Without tuning seeds there are as many as the study has: the numbers from
    100 on, without those that the results use. With a budget, a method with fewer points has more of them.
    Without `refit`, the seeds of the study come first, because a tuning run is then also a final run.

    Raises `ConfigError` if that is impossible.
    """
    tune = study.tune
    if tune is None:
        return {}
    points = {method.name: number_of_points(method) for method in methods}
    others = (seed for seed in count(_FIRST_SEED) if seed not in study.seeds)
    further = islice(others, tune.budget or len(study.seeds))
    default = [*([] if tune.refit else study.seeds), *further]
    listed = ", ".join(f"{name} {number}" for name, number in points.items())
    if tune.budget is not None and tune.seeds is None:
        where = places.locate("tune", "budget")
        for name, number in points.items():
            if tune.budget % number:
                raise ConfigError(
                    f"tune.budget is {tune.budget}, but must be a multiple of the {number} points of '{name}'",
                    where=where,
                    hint=f"set it to a multiple of the number of points of every method ({listed})",
                )
        return {name: default[: tune.budget // number] for name, number in points.items()}
    seeds = tune.seeds or default[: len(study.seeds)]
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


def number_of_points(method: Method) -> int:
    """Returns the number of points that tuning chooses among."""
    return len(method.tuned.points)


def number_of_tuning_runs(cells: StudyCells, method: Method) -> int:
    """The tuning runs of a method in one case; 0 where one point needs no choice."""
    points = 0 if cells.tune is None else number_of_points(method)
    return points * len(cells.tuning_seeds[method.name]) if points > 1 else 0


@dataclass(frozen=True)
class SearchRules:
    """The rules of tuning, the same for every method and case.

    Attributes:
        metric: of the study, None for the main metric of the task; compared on validation data, see
            `fedlens.results.rows.validation_metric`.
        last: number of evaluations whose mean is a value.
        halving, first: the best 1/halving continue after round `first`, `first * halving`, ...; None without rungs.
    """

    metric: str | None = None
    last: int = 1
    halving: int | None = None
    first: int | None = None


@dataclass(frozen=True)
class SearchCell:
    """One method in one case, as tuning sees it.

    Attributes:
        points: of its grid, in order.
        seeds: each point runs with every one of them; points are compared by their mean.
        rounds: of a whole run.
        run: the tuning run of a point with a seed.
    """

    points: Sequence[Point]
    seeds: Sequence[int]
    rounds: int
    run: Callable[[Point, int], PlannedRun]


@dataclass(frozen=True)
class Search:
    """The state of the tuning of a cell.

    Attributes:
        due: the runs that must come next; empty if a point has been chosen.
        chosen: the point of the final runs, None as long as runs are due.
    """

    due: Sequence[DueRun]
    chosen: Point | None


def searched(cell: SearchCell, rules: SearchRules, lines: Mapping[str, Row]) -> Search:
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


def rules_of(cells: StudyCells) -> SearchRules:
    """The rules of the search."""
    study, stop = cells.settings, cells.settings.stop or StopSettings()
    return SearchRules(study.metric, study.last, stop.halving, stop.first)


def search_cell(cells: StudyCells, method: Method, case: Case) -> SearchCell:
    """A method in a case, as its search sees it."""
    points = cells.points(method)
    rounds = max(cells.made(method, case, point, "tune").config.rounds for point in points)
    return SearchCell(
        points,
        cells.tuning_seeds[method.name],
        rounds,
        lambda point, seed: cells.run(method, case, point, "tune", seed),
    )


def search_of(cells: StudyCells, method: Method, case: Case, lines: Mapping[str, Row]) -> Search:
    """Returns the state of the tuning of a method in a case.

    Raises `ConfigError` if a run lacks the metric that is compared.
    """
    return searched(search_cell(cells, method, case), rules_of(cells), lines)


def tuning_due(plan: StudyCells, lines: Mapping[str, Row]) -> list[DueRun]:
    """The tuning runs that must come next, over all methods and cases; empty when all points are chosen."""
    return [due for method, case in plan.pairs for due in search_of(plan, method, case, lines).due]


def tuning_runs(plan: StudyCells) -> list[PlannedRun]:
    """All tuning runs; a method with one point has none."""
    return [
        plan.run(method, case, point, "tune", seed)
        for method, case in plan.pairs
        if number_of_tuning_runs(plan, method)
        for point in plan.points(method)
        for seed in plan.tuning_seeds[method.name]
    ]


def chosen_point(plan: StudyCells, method: Method, case: Case, lines: Mapping[str, Row]) -> Point | None:
    """The point with the best mean validation value, the first of equal ones; None while runs are missing."""
    return {} if plan.tune is None else search_of(plan, method, case, lines).chosen


def refuse_rungs(plan: StudyCells, places: Places) -> None:
    """Raises `ConfigError` if the first rung is invalid."""
    stop = plan.settings.stop
    if plan.tune is None or stop is None or stop.first is None:
        return
    for method, case in plan.pairs:
        configs = [plan.made(method, case, point, "tune").config for point in plan.points(method)]
        every = max(config.evaluation.every for config in configs)
        check_rungs(
            stop.first, every, min(config.rounds for config in configs), places.locate("stop", "first")
        )


def effort(plan: StudyCells) -> list[str]:
    """A sentence on halving; empty without."""
    if plan.tune is None:
        return []
    rules = rules_of(plan)
    if rules.halving is None or rules.first is None:
        return []
    numbers = {
        tuple(reaching(len(cell.points), cell.rounds, rules.first, rules.halving).items())
        for cell in (search_cell(plan, *pair) for pair in plan.pairs)
    }
    words = f"Successive halving of tuning runs kept one point in {rules.halving}"
    shown = "; ".join(
        ", ".join(f"{points} to round {rung}" for rung, points in one) for one in sorted(numbers) if one
    )
    return [f"{words}: {shown}." if len(numbers) == 1 and shown else f"{words}, from round {rules.first}."]


def rungs(rounds: int, first: int | None = None, eta: int | None = None) -> list[int]:
    """The rounds at which points are compared, the last of them after all `rounds`.

    >>> rungs(500, first=50, eta=3), rungs(500)
    ([50, 150, 450, 500], [500])
    """
    rung_rounds: list[int] = []
    if first is not None and eta is not None:
        at = first
        while at < rounds:
            rung_rounds.append(at)
            at *= eta
    return [*rung_rounds, rounds]


def kept(points: int, eta: int) -> int:
    """Returns how many of `points` continue after a rung: 1/eta of them, rounded down, and at least one.

    >>> [kept(points, 3) for points in (12, 4, 2, 1)]
    [4, 1, 1, 1]
    """
    return max(1, points // eta)


def has_reached(line: Row | None, rung: int | None) -> bool:
    """Whether a run needs no more rounds for a comparison at `rung`; None for the end of the run.

    A failed run needs no more rounds.
    """
    if line is None:
        return False
    return line.status in ("finished", "failed") or (rung is not None and line.rounds >= rung)


def failed_before(line: Row, rung: int | None) -> bool:
    """Whether a run had failed or diverged when round `rung` was over; None for the end of the run.

    A run that failed later was compared at the rung while it still ran, and that comparison stands. A diverged run was
    stopped by its last complete round; other failures happen in the round after it.
    """
    if line.status != "failed":
        return False
    diverged = (line.reason or "").startswith(DIVERGED)
    return rung is None or line.rounds < rung or (line.rounds == rung and diverged)


def value_at(line: Row, metric: str, rung: int | None = None, last: int = 1) -> float | None:
    """The mean of the last `last` values of `metric` up to round `rung`, None for the whole run.

    None if the run failed until then, or its value or loss is not finite in the last evaluation.

    >>> curve = {"round": [0, 1, 2, 3], "validation_accuracy": [0.1, 0.5, 0.6, 0.9]}
    >>> line = Row("d", "r", "finished", None, 3, "test_accuracy", curve)
    >>> value_at(line, "validation_accuracy", rung=2), value_at(line, "validation_accuracy", rung=2, last=2)
    (0.6, 0.55)
    """
    if failed_before(line, rung) or line.not_finite(metric, rung):
        return None
    rounds = line.curve.get("round", ())
    values = [
        value
        for index, value in line.series(metric)
        if rung is None or (at := rounds[index]) is None or at <= rung
    ][-last:]
    return statistics.fmean(values) if values else None


def score(lines: Sequence[Row], metric: str | None, rung: int | None = None, last: int = 1) -> Score:
    """Returns the score of a point, from its runs with every tuning seed; smaller is better.

    A point with fewer failed runs is better than one with more. A run that diverged has failed.

    Args:
        metric: of the study, None for the main metric of each run; the score uses its validation counterpart, see
            `fedlens.results.rows.validation_metric`.

    Raises `ConfigError` if a run that did not fail lacks the metric.
    """
    values: list[float] = []
    failed = 0
    for line in lines:
        column = validation_metric(metric or line.main)
        if not failed_before(line, rung):
            _check_has(line, column)
        value = value_at(line, column, rung, last)
        if value is None:
            failed += 1
        else:
            values.append(value if smaller_is_better(column) else -value)
    return failed, statistics.fmean(values) if values else 0.0


def best(scores: Sequence[Score], number: int) -> list[int]:
    """The indices of the `number` best scores, in their order; of equal ones the first are taken.

    >>> best([(0, -0.5), (1, -0.9), (0, -0.7), (0, -0.7)], 2), best([(0, -0.7), (0, -0.7)], 1)
    ([2, 3], [0])
    """
    ranked = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    return sorted(ranked[:number])


def _check_has(line: Row, metric: str) -> None:
    """Raises `ConfigError` if a run has no column for the metric that points are compared by."""
    if line.curve and metric not in line.curve:
        columns = [name for name in line.curve if name.startswith("validation_")]
        raise ConfigError(
            f"tuning needs the metric '{metric}', which the run {line.run} lacks",
            where="metric",
            hint=f"choose one of {', '.join(columns)}" if columns else "set data.validation, or tune.share",
        )


def reaching(points: int, rounds: int, first: int | None = None, eta: int | None = None) -> dict[int, int]:
    """Returns how many of `points` run to each rung, by its round. The last remaining point is chosen and stops.

    >>> reaching(9, 500, first=50, eta=3), reaching(4, 500)
    ({50: 9, 150: 3}, {500: 4})
    """
    points_by_rung: dict[int, int] = {}
    for rung in rungs(rounds, first, eta):
        if points > 1:
            points_by_rung[rung] = points
            points = kept(points, eta or points)
    return points_by_rung


def check_rungs(first: int, every: int, rounds: int, where: str = "stop.first") -> None:
    """Raises `ConfigError` if the first rung precedes the first evaluation of a trained model, or stops no run.

    Args:
        every: rounds between evaluations, see `evaluation.every`.
        rounds: of a run.
    """
    if first >= rounds:
        raise ConfigError(
            f"the first rung is round {first}, but a run has {many(rounds, 'round')}, so halving would stop no run",
            where=where,
            hint=f"set stop.first to at most {rounds - 1}, or remove halving and first"
            if rounds > 1
            else "remove halving and first",
        )
    if first < every:
        raise ConfigError(
            f"the first rung is round {first}, but runs are first evaluated after round {every}",
            where=where,
            hint=f"set stop.first to {every} or more, or evaluation.every to {first} or less",
        )
