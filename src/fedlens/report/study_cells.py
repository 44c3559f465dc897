"""The cells of a study, a method in a case, with their values by seed, and the tests between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedlens.base.errors import nearest
from fedlens.base.format import smaller_is_better, split_of
from fedlens.report.study_statistics import (
    Interval,
    PairedTest,
    holm,
    is_bold,
    paired_test,
    t_interval,
)
from fedlens.results.rows import Results, Row

UNMEASURED = "{} was not measured"  # the words of `Row.problem`


@dataclass(frozen=True)
class StudyCell:
    """The results of a method in a case.

    Attributes:
        values: final values by seed.
        failed: by seed, why its run has no value.
        missing: the seeds whose runs are not finished yet.
    """

    method: str
    case: Mapping[str, Any]
    values: Mapping[int, float]
    failed: Mapping[int, str] = field(default_factory=dict)
    missing: Sequence[int] = ()

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


def cell_of(results: Results, method: str, case: Mapping[str, Any]) -> StudyCell:
    """The cell of a method in a case, with the final values of `results.metric`."""
    runs, values = results.runs(method, case), results.values(method, case)
    # A stopped run is paused and goes on; one that diverged has failed.
    runs = {seed: line for seed, line in runs.items() if line.status != "stopped"}
    failed = {seed: _reason(line, results.metric) for seed, line in runs.items() if seed not in values}
    planned = [
        row.seed for row in results.rows if (row.method, row.role) == (method, "final") and row.case == case
    ]
    # Before tuning has chosen, the entries of final runs do not exist, so the seeds of the study count.
    missing = [seed for seed in planned or results.info.seeds if seed not in runs]
    return StudyCell(method, case, values, failed, missing)


def _reason(line: Row, metric: str) -> str:
    """Why a run has no value, with the nearest metric that it has."""
    reason = line.problem(metric) or UNMEASURED.format(metric)
    metrics = [name for name in line.curve if split_of(name) or name.startswith("clients_")]
    return (
        f"{reason}, {nearest(metric, metrics)}" if metrics and reason == UNMEASURED.format(metric) else reason
    )


def study_cells(results: Results) -> list[StudyCell]:
    """All cells with planned runs, case by case, in the order of the study file."""
    planned = [(entry.method, dict(entry.case)) for entry in results.info.entries]
    return [
        cell_of(results, method, case)
        for case in results.info.cases
        for method in results.info.methods
        if (method, dict(case)) in planned
    ]


def with_metric(results: Results, metric: str | None) -> Results:
    """The results with another metric as the one that is compared; None leaves them as they are."""
    return replace(results, info=replace(results.info, metric=metric)) if metric else results


def better(metric: str, value: float) -> float:
    """A value with the sign that makes larger better: the negative of a loss.

    >>> better("test_accuracy", 0.5), better("test_loss", 0.5)
    (0.5, -0.5)
    """
    split = split_of(metric)
    return -value if smaller_is_better(split[1] if split else metric) else value


@dataclass(frozen=True)
class CellComparison:
    """The comparison of a cell with the cell of the baseline in the same case.

    Attributes:
        test: None if it was not tested, for the reason in `untested`.
        bold: see `fedlens.report.study_statistics.is_bold`.
    """

    cell: StudyCell
    baseline: StudyCell
    test: PairedTest | None
    untested: str | None = None
    bold: bool = False


def comparisons(
    cells: Sequence[StudyCell],
    baseline: str,
    tuning: Mapping[str, Any],
) -> list[CellComparison]:
    """Compares each cell with the baseline of its case, with Holm's correction over all comparisons.

    Args:
        cells: of one table.
        tuning: of the study, see `StudyInfo`.
    """
    bases = {repr(dict(cell.case)): cell for cell in cells if cell.method == baseline}
    pairs = [
        (cell, bases[repr(dict(cell.case))])
        for cell in cells
        if cell.method != baseline and repr(dict(cell.case)) in bases
    ]
    reasons = [_untested(cell, base) for cell, base in pairs]
    tests = [
        None if reason else paired_test(dict(cell.values), dict(base.values))
        for (cell, base), reason in zip(pairs, reasons, strict=True)
    ]
    adjusted = holm([test.p if test else None for test in tests])
    compared = []
    for (cell, base), reason, test, p in zip(pairs, reasons, tests, adjusted, strict=True):
        whole = replace(test, adjusted=p) if test else None
        if whole is not None and p is None:
            alone = whole.difference.n == 1
            reason = "one seed" if alone else "the difference is the same at every seed"
        compared.append(CellComparison(cell, base, whole, reason, is_bold(whole, tuning)))
    return compared


def _untested(cell: StudyCell, base: StudyCell) -> str | None:
    for each, whose in ((cell, ""), (base, " of the baseline")):
        if each.failed:
            return f"{len(each.failed)} of {each.planned} runs{whose} {'failed' if each.measured else 'have no value'}"
        if each.missing:
            return f"{len(each.missing)} of {each.planned} runs{whose} are not finished"
    return None if cell.values.keys() & base.values.keys() else "no seed in common"
