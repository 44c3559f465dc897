"""The cells of a study: the runs that differ in the seed alone, the tests between them, and what tuning chose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

from fedlens.base.errors import nearest
from fedlens.base.format import smaller_is_better, split_of
from fedlens.results.rows import EFFECTIVE, Results, Role, Row
from fedlens.results.statistics import Interval, PairedTest, holm, is_bold, paired_test, t_interval

METHOD = "method"
Value: TypeAlias = Callable[[Row], float | None]

COLUMNS = {"rounds": "round", "batches": "batches", "bytes": "bytes"}
"""What budgets and targets count, and the columns of a curve that count it."""
_UNMEASURED = "{} was not measured"  # the words of `Row.problem`


@dataclass(frozen=True)
class Cell:
    """The runs of a method in a case, or of a point of its tuning, and their values.

    Attributes:
        values: by seed.
        failed: by seed, why its run has no value.
        missing: the seeds whose runs are not finished yet.
        runs: by seed; the status of one that is not finished is None.
        point: the tuned settings of runs of tuning.
    """

    method: str
    case: Mapping[str, Any]
    values: Mapping[int, float] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    missing: Sequence[int] = ()
    runs: Mapping[int, Row] = field(default_factory=dict)
    point: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, Any]:
        """What tells the cell from others: the method, the case, and the point of tuning."""
        return {METHOD: self.method, **self.case, **self.point}

    @property
    def planned(self) -> int:
        """The number of its runs, finished or not."""
        return len(self.values) + len(self.failed) + len(self.missing)

    @property
    def complete(self) -> bool:
        """Whether each of its runs has a value. Only complete cells have a mean and are compared."""
        return bool(self.values) and not self.failed and not self.missing

    @property
    def measured(self) -> bool:
        """Whether a run has a value or failed; false if all that ended lack the metric."""
        return bool(self.values) or not all(" was not measured" in reason for reason in self.failed.values())

    @property
    def interval(self) -> Interval | None:
        """The mean and the 95 % t interval over its seeds; None if it is not complete."""
        return t_interval(list(self.values.values())) if self.complete else None

    def each(self, value: Value) -> dict[int, float | None]:
        """A value of each run, by seed."""
        return {seed: value(row) for seed, row in self.runs.items()}

    def with_values(self, metric: str, value: Value) -> Cell:
        """The same runs with a value of each that has a result of `metric`, see `Row.problem`."""
        ended = {seed: row for seed, row in self.runs.items() if row.status in ("finished", "failed")}
        numbers = {seed: value(row) for seed, row in ended.items() if row.problem(metric) is None}
        values = {seed: number for seed, number in numbers.items() if number is not None}
        failed = {seed: _reason(row, metric) for seed, row in ended.items() if seed not in values}
        return replace(self, values=values, failed=failed)

    @property
    def ended(self) -> dict[int, Row]:
        """The runs that have ended, by seed."""
        return {seed: row for seed, row in sorted(self.runs.items()) if row.status is not None}

    @property
    def done(self) -> dict[int, Row]:
        """The runs with a result of their main metric, by seed."""
        return {seed: row for seed, row in self.ended.items() if why_lost(row) is None}

    @property
    def lost(self) -> dict[int, Row]:
        """The runs that failed or diverged, by seed."""
        return {seed: row for seed, row in self.ended.items() if why_lost(row) is not None}

    @property
    def rates(self) -> set[float | None]:
        """The effective learning rates of its runs that have ended; None is one that is not known."""
        return {effective_rate(row) for row in self.ended.values()}

    def finals(self, metric: str, last: int) -> dict[int, float]:
        """The final values by seed; none if a run was lost, since the others would be a biased sample."""
        numbers = {} if self.lost else {seed: row.final(metric, last) for seed, row in self.done.items()}
        return {seed: number for seed, number in numbers.items() if number is not None}


def reference_of(cells: Sequence[Cell], method: str, cell: Cell) -> Cell | None:
    """The cell of a method that another is divided by: that of the same settings, or its only one; None without."""
    references = [each for each in cells if each.method == method]
    keys = {**cell.keys, METHOD: method}
    same = [each for each in references if all(each.keys.get(k, v) == v for k, v in keys.items())]
    return (same or references)[0] if same or len(references) == 1 else None


def why_lost(row: Row) -> str | None:
    """Why a run has no result; None if it has one. A run that halving stopped has the result of its last round."""
    return None if row.status in (None, "stopped") else row.problem(row.main)


def cells(results: Results, role: Role = "final") -> list[Cell]:
    """The cells with planned runs, with the final values of `results.metric`.

    Those of final runs stand case by case in the order of the study file, those of tuning in the order of the plan.
    """
    info = results.info
    made: dict[str, Cell] = {}
    if role == "final":
        planned = {_text(row.method, row.case) for row in results.rows}
        pairs = [Cell(method, case, runs={}) for case in info.cases for method in info.methods]
        made = {text: cell for cell in pairs if (text := _text(cell.method, cell.case)) in planned}
    runs: dict[str, dict[int, Row]] = {text: {} for text in made}
    for row in results.rows:
        point = row.point if role == "tune" else {}
        text = _text(row.method, row.case, point)
        if row.role != role or (role == "final" and text not in made):
            continue
        made.setdefault(text, Cell(row.method, row.case, point=point))
        # A final run that is paused goes on.
        paused = role == "final" and row.status == "stopped"
        runs.setdefault(text, {})[row.seed] = replace(row, status=None) if paused else row
    value = final(results.metric, info.last)
    return [
        _filled(cell, runs[text], info.seeds).with_values(results.metric, value)
        for text, cell in made.items()
    ]


def _filled(cell: Cell, runs: Mapping[int, Row], seeds: Sequence[int]) -> Cell:
    # Before tuning has chosen, the entries of final runs do not exist, so the seeds of the study count.
    missing = [seed for seed in runs or seeds if seed not in runs or runs[seed].status in (None, "stopped")]
    return replace(cell, runs=runs, missing=missing)


def _text(method: str, *values: Mapping[str, Any]) -> str:
    return repr((method, *(sorted(each.items()) for each in values if each)))


def _reason(row: Row, metric: str) -> str:
    """Why a run has no value, with the nearest metric that it has."""
    reason, unmeasured = row.problem(metric), _UNMEASURED.format(metric)
    metrics = [name for name in row.curve if split_of(name) or name.startswith("clients_")]
    if metrics and reason in (None, unmeasured):
        return f"{unmeasured}, {nearest(metric, metrics)}"
    return reason or unmeasured


@dataclass(frozen=True)
class CellTest:
    """The comparison of a cell with the cell of the baseline in the same case.

    Attributes:
        test: None if it was not tested, for the reason in `untested`.
        bold: see `fedlens.results.statistics.is_bold`.
    """

    cell: Cell
    baseline: Cell
    test: PairedTest | None
    untested: str | None = None
    bold: bool = False


def comparisons(cells: Sequence[Cell], baseline: str, tuning: Mapping[str, Any]) -> list[CellTest]:
    """Compares each cell with the baseline of its case, with Holm's correction over all comparisons.

    Args:
        cells: of one table.
        tuning: of the study, see `StudyInfo`.
    """
    bases = {repr(dict(cell.case)): cell for cell in cells if cell.method == baseline}
    pairs = [
        (cell, base)
        for cell in cells
        if cell.method != baseline and (base := bases.get(repr(dict(cell.case)))) is not None
    ]
    reasons = [_untested(cell, base) for cell, base in pairs]
    tests = [
        None if reason else paired_test(cell.values, base.values)
        for (cell, base), reason in zip(pairs, reasons, strict=True)
    ]
    adjusted = holm([test.p if test else None for test in tests])
    compared = []
    for (cell, base), reason, test, p in zip(pairs, reasons, tests, adjusted, strict=True):
        whole = replace(test, adjusted=p) if test else None
        if whole is not None and p is None:
            alone = whole.difference.seeds == 1
            reason = "one seed" if alone else "the difference is the same at every seed"
        compared.append(CellTest(cell, base, whole, reason, is_bold(whole, tuning)))
    return compared


def _untested(cell: Cell, base: Cell) -> str | None:
    for each, whose in ((cell, ""), (base, " of the baseline")):
        if each.failed:
            return f"{len(each.failed)} of {each.planned} runs{whose} {'failed' if each.measured else 'have no value'}"
        if each.missing:
            return f"{len(each.missing)} of {each.planned} runs{whose} are not finished"
    return None if cell.values.keys() & base.values.keys() else "no seed in common"


def edges(results: Results, method: str, case: Mapping[str, Any]) -> set[str]:
    """The settings of a cell of which tuning chose a value at the edge of those that were tried, see `at_edge`."""
    tried, chosen = tried_values(results, method, case), chosen_values(results, method, case)
    return {setting for setting, value in chosen.items() if at_edge(tried.get(setting, ()), value)}


def chosen_values(results: Results, method: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen value of each tuned setting of a cell: the point of its final runs.

    Empty without tuning, or before tuning is complete.
    """
    points = (
        row.point
        for row in results.info.entries
        if (row.role, row.method) == ("final", method) and row.case == case
    )
    return dict(next(points, {}))


def tried_values(results: Results, method: str, case: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The distinct values that the tuning runs of a cell have of each setting, numbers in rising order.

    A cell without tuning runs has the values of the grid of the study file.
    """
    tried: dict[str, list[Any]] = {}
    for row in results.info.entries:
        if (row.role, row.method) == ("tune", method) and row.case == case:
            for setting, value in row.point.items():
                tried.setdefault(setting, []).append(value)
    return {name: distinct(values) for name, values in (tried or results.info.grids.get(method, {})).items()}


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """The distinct values: numbers in rising order, others in the given order.

    >>> distinct([0.1, 0.01, 0.1]), distinct(["sgd", "adam", "sgd"])
    ((0.01, 0.1), ('sgd', 'adam'))
    """
    once: list[Any] = []
    for value in values:
        if value not in once:
            once.append(value)
    return tuple(sorted(once)) if all(map(is_number, once)) else tuple(once)


def at_edge(values: Iterable[Any], chosen: Any) -> bool:
    """Whether a chosen number is the smallest or the largest of the tried numbers.

    Both values of a grid of two lie at its edge. A grid of one value has no edge, and neither have names.

    >>> at_edge([0.01, 0.1, 1.0], 0.1), at_edge([0.01, 0.1, 1.0], 1.0), at_edge([0.7, 0.9], 0.9)
    (False, True, True)
    >>> at_edge([0.1], 0.1), at_edge(["sgd", "adam"], "adam")
    (False, False)
    """
    numbers = distinct(value for value in values if is_number(value))
    return len(numbers) > 1 and is_number(chosen) and not numbers[0] < chosen < numbers[-1]


def is_number(value: Any) -> bool:
    """Whether a value of a setting is a finite number, so that it has an order; True and False are names."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def final(metric: str, last: int) -> Value:
    """The mean of the last evaluations of a metric."""
    return lambda row: row.final(metric, last)


def mean_change(metric: str, last: int) -> Value:
    """The mean size of the last changes of a metric from one evaluation to the next; None without a change."""

    def value(row: Row) -> float | None:
        values = [value for _, value in row.series(metric)][-last - 1 :]
        return statistics.fmean(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else None

    return value


def at_budget(metric: str, kind: str, budget: float) -> Value:
    """The last value of a metric within a budget; None if a run ends before, or was not evaluated by then.

    Args:
        kind: of `COLUMNS`.

    >>> curve = {"round": [1, 2], "batches": [10, 20], "test_accuracy": [0.5, 0.6]}
    >>> row = Row("", "", "finished", None, 2, "test_accuracy", curve)
    >>> [at_budget("test_accuracy", "batches", budget)(row) for budget in (5, 15, 20, 30)]
    [None, 0.5, 0.6, None]
    """

    def value(row: Row) -> float | None:
        spent = row.curve.get(COLUMNS[kind], ())
        if not any(each is not None and each >= budget for each in spent):
            return None
        within = [value for k, value in row.series(metric) if (at := spent[k]) is not None and at <= budget]
        return within[-1] if within else None

    return value


def to_target(metric: str, kind: str, target: float) -> Value:
    """The rounds, batches or bytes to the first evaluation that reaches a target; None if none does.

    A target is reached by a value of at least it, or at most for losses.

    >>> curve = {"round": [1, 2, 3], "test_loss": [2.0, 1.0, 0.5]}
    >>> row = Row("", "", "finished", None, 3, "test_loss", curve)
    >>> to_target("test_loss", "rounds", 1.0)(row), to_target("test_loss", "rounds", 0.1)(row)
    (2, None)
    """

    def value(row: Row) -> float | None:
        reached = (k for k, v in row.series(metric) if better(metric, v) >= better(metric, target))
        k = next(reached, None)
        return row.curve[COLUMNS[kind]][k] if k is not None and is_counted(row, kind) else None

    return value


def is_counted(row: Row, kind: str) -> bool:
    """Whether a run counted its rounds, batches or bytes."""
    return any(amount is not None for amount in row.curve.get(COLUMNS[kind], ()))


def scaled(share: float, reference: Cell | None) -> float | None:
    """A share of the mean of a cell; None if that is not complete."""
    mean = reference.interval if reference else None
    return share * mean.mean if mean else None


def amounts_to_target(cell: Cell, metric: str, kind: str, target: float | None) -> list[float | None] | None:
    """The amount of each run to a target, None if it does not reach it; None without a target or counted amounts."""
    if not cell.complete or target is None or not all(is_counted(row, kind) for row in cell.runs.values()):
        return None
    return [*cell.each(to_target(metric, kind, target)).values()]


def effective_rate(row: Row) -> float | None:
    """The effective learning rate of a run: its fact, or the setting of that name; None if neither is known.

    >>> row = Row.planned("", "", "fedavg", {"effective_lr": 0.1}, {}, "final", 0)
    >>> effective_rate(row), effective_rate(Row.planned("", "", "fedavg", {"local.lr": 0.1}, {}, "final", 0))
    (0.1, None)
    """
    rate = row.facts.get(EFFECTIVE)
    return rate if rate is not None else {**row.case, **row.point}.get(EFFECTIVE)


def better(metric: str, value: float) -> float:
    """A value with the sign that makes larger better: the negative of a loss.

    >>> better("test_accuracy", 0.5), better("test_loss", 0.5)
    (0.5, -0.5)
    """
    split = split_of(metric)
    return -value if smaller_is_better(split[1] if split else metric) else value
