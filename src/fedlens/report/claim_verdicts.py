"""Whether the results of a study show the claims of its document, by intervals over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedlens.report.claim_expression import (
    TOKEN,
    CellTerm,
    ClaimComparison,
    Condition,
    dimension_of,
    parse_claim,
)
from fedlens.report.format import number
from fedlens.report.study_budget_tables import COLUMNS, amounts_to_target, value_at
from fedlens.report.study_captions import case_name, cell_name, shown, shown_in_percent
from fedlens.report.study_cells import StudyCell, cell_of, with_metric
from fedlens.report.study_results import StudyInfo, StudyResults
from fedlens.report.study_statistics import t_interval
from fedlens.report.table_format import StudyTable, TableCell
from fedlens.report.table_view import TableView

Answer = Literal["shows", "does not show", "cannot tell", "not run at this scale", "not computed"]
Cell = tuple[str, Mapping[str, Any]]  # a method and a case
_NAMED = 3  # comparisons that a verdict names


@dataclass(frozen=True)
class ComparedCells:
    """A comparison of a claim in one case.

    Attributes:
        words: the comparison, the case and the number.
        mean, low, high: of the compared number over seeds, paired by seed; None where it has none.
        holds: True if the whole interval satisfies the claim, False if all of it contradicts the claim, None otherwise.
        reason: why it is None.
    """

    words: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    holds: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim of a document, and whether the results show it.

    Attributes:
        where: the place of the claim in the document.
        holds: the expression over cells; empty for a claim without one.
        answer: "shows" if the whole interval of every selected cell satisfies the claim, "does not show" if the whole
            interval of some cell contradicts it, and otherwise "cannot tell".
        reason: why the answer is neither "shows" nor "does not show".
        compared: each comparison in each case that it selects.
    """

    text: str
    where: str
    holds: str
    scale: str
    answer: Answer
    reason: str = ""
    compared: Sequence[ComparedCells] = ()

    @property
    def line(self) -> str:
        """The claim with its verdict and the numbers, in one line."""
        return f"{self.words}: {self.text}{f' ({self.numbers})' if self.numbers else ''}"

    @property
    def words(self) -> str:
        """The answer with its reason."""
        return f"{self.answer}{': ' if self.reason else ''}{self.reason}"

    @property
    def numbers(self) -> str:
        """The numbers that decide the answer, in words."""
        decisive = {"shows": True, "does not show": False}.get(self.answer)
        words = list(dict.fromkeys(each.words for each in self.compared if each.holds is decisive))
        more = f"; and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
        return "; ".join(words[:_NAMED]) + more


def claim_verdicts(results: StudyResults) -> list[ClaimVerdict]:
    """The verdict on each claim of the study's document, in order."""
    return [_verdict(results, claim) for claim in results.info.document.get("claims", ())]


def claims_table(results: StudyResults) -> StudyTable:
    """The claims of the study's document, with the verdict on each."""
    rows = [
        list(map(TableCell, (each.text, each.where, each.words, each.numbers, each.scale)))
        for each in claim_verdicts(results)
    ]
    caption = (
        "Shows: the whole interval of every number satisfies the claim. Does not show: the whole interval of a number "
        "contradicts it. Numbers: the mean over seeds, paired by seed, and its 95 % t interval, each for itself and "
        "not corrected for their number. With methods on both sides, the number is the left side minus the right."
    )
    head = ["Claim", "Where", "Verdict", "Numbers", "Scale"]
    return StudyTable(
        "claims", "Claims of the document", caption, head, rows, (), len(head), results.info.caveats
    )


def _verdict(results: StudyResults, claim: Mapping[str, Any] | str) -> ClaimVerdict:
    table = {"text": claim} if isinstance(claim, str) else claim  # in files of earlier versions
    holds = table.get("holds", "")
    known = table["text"], table.get("where", ""), holds, results.info.scale
    if not holds:
        return ClaimVerdict(*known, "not computed", table.get("why", ""))
    results = with_metric(results, table.get("metric"))
    compared: list[ComparedCells] = []
    reasons: list[str] = []
    for comparison in parse_claim(holds):
        try:
            for case, cells in selected_cells(results.info, comparison):
                compared.append(_compared(results, comparison, case, cells, table.get("at", {})))
        except LookupError as error:
            reasons.append(str(error.args[0]))
    if any(each.holds is False for each in compared):
        return ClaimVerdict(*known, "does not show", "", compared)
    if reasons:
        return ClaimVerdict(*known, "not run at this scale", reasons[0], compared)
    reasons = [each.reason for each in compared if each.holds is None]
    return ClaimVerdict(*known, "cannot tell" if reasons else "shows", *reasons[:1] or [""], compared)


def selected_cells(
    info: StudyInfo, comparison: ClaimComparison
) -> list[tuple[Mapping[str, Any], Sequence[Cell]]]:
    """The cells of a comparison, in order, in each case that it selects.

    Raises `LookupError` if the study does not have one of them.
    """
    selected: list[tuple[Mapping[str, Any], Sequence[Cell]]] = []
    for case in info.cases:
        if _satisfies(info, case, comparison.where):
            cells = [(_method(info, cell.method), _case(info, case, cell)) for cell in comparison.cells]
            if cells not in [other for _, other in selected]:
                selected.append((case, cells))
    if not selected:
        raise LookupError("no such case")
    return selected


def _method(info: StudyInfo, name: str) -> str:
    if name not in info.methods:
        raise LookupError(f"no method '{name}'")
    return name


def _case(info: StudyInfo, case: Mapping[str, Any], cell: CellTerm) -> Mapping[str, Any]:
    """The case with the values that the cell fixes, and those of `case` for the other dimensions."""
    fixed = [dimension_of(each, info.dimensions) for each in cell.fixed]
    for other in info.cases:
        same = all(other[key] == value for key, value in case.items() if key not in fixed)
        if same and _satisfies(info, other, cell.fixed):
            return other
    raise LookupError(
        f"no case {', '.join(f'{each.dimension} = {shown(each.value)}' for each in cell.fixed)}"
    )


def _satisfies(info: StudyInfo, case: Mapping[str, Any], conditions: Sequence[Condition]) -> bool:
    return all(each.holds(case[dimension_of(each, info.dimensions)]) for each in conditions)


def _compared(
    results: StudyResults,
    comparison: ClaimComparison,
    case: Mapping[str, Any],
    cells: Sequence[Cell],
    at: Mapping[str, float],
) -> ComparedCells:
    words = _words(results.info, comparison, case, cells)
    measured = [_measured(results, *each, at) for each in zip(comparison.cells, cells, strict=True)]
    for cell in measured:
        if not cell.complete:
            why = next(iter(cell.failed.values()), "not finished")
            reason = f"not run: {cell_name(results, cell)} ({why})"
            return ComparedCells(f"{words}: {reason}", reason=reason)
    sums = (_sum(comparison.terms, [cell.values[seed] for cell in measured]) for seed in measured[0].values)
    values = [value for value in sums if value is not None]
    if not values:
        return ComparedCells(words, reason="a value to divide by is 0")
    interval = t_interval(values)
    if interval.low is None or interval.high is None:
        holds, reason = None, "one seed"
    else:
        ends = comparison.holds(interval.low), comparison.holds(interval.high)
        holds, reason = (ends[0], "") if ends[0] == ends[1] else (None, "the interval contains the bound")
    share = (
        "%" in comparison.text or "point" in comparison.text or (shown_in_percent(results.metric) and not at)
    )
    bounds = (interval.low, interval.mean, interval.high)
    low, mean, high = (number(x) if x is None or not share else f"{100 * x:.1f}" for x in bounds)
    unit = "" if not share else " points" if len(comparison.terms) > 1 else " %"
    between = "" if interval.low is None else f" [{low}, {high}]"
    return ComparedCells(
        f"{words}: {mean}{between}{unit}",
        interval.mean,
        interval.low,
        interval.high,
        interval.n,
        holds,
        reason,
    )


def _sum(terms: Sequence[CellTerm], values: Sequence[float]) -> float | None:
    """The sum of the terms from the values of their cells at a seed; None if one is divided by 0."""
    total, left = 0.0, iter(values)
    for term in terms:
        value, over = next(left), next(left) if term.over else 1.0
        if not over:
            return None
        total += term.factor * value / over
    return total


def _measured(results: StudyResults, name: CellTerm, cell: Cell, at: Mapping[str, float]) -> StudyCell:
    """The values of a cell by seed: at the end of training, at a budget, or the rounds to a target."""
    narrow = with_metric(results, name.metric)
    found = cell_of(narrow, *cell)
    for kind, limit in at.items() if found.complete else ():
        runs = results.runs(*cell)
        if kind in COLUMNS:
            values = [value_at(line, narrow.metric, COLUMNS[kind], limit) for line in runs.values()]
        else:
            to = "centralized" if kind == "relative_target" else None
            reached = amounts_to_target(TableView(narrow, "claims"), found, "rounds", limit, to)
            values = reached or [None] * len(runs)
        by_seed = dict(zip(runs, values, strict=True))
        lost = {seed: f"{kind} {limit:g} not reached" for seed, value in by_seed.items() if value is None}
        kept = {seed: value for seed, value in by_seed.items() if value is not None}
        found = replace(found, values=kept, failed=lost)
    return found


def _words(
    info: StudyInfo, comparison: ClaimComparison, case: Mapping[str, Any], cells: Sequence[Cell]
) -> str:
    """A comparison with the labels of the methods that ran, and the case that is not in its brackets."""
    labels = {name.method: info.methods[cell[0]] for name, cell in zip(comparison.cells, cells, strict=True)}
    text = TOKEN.sub(lambda found: labels.get(found[0].strip('"'), found[0]), comparison.text)
    fixed = [{dimension_of(each, info.dimensions) for each in cell.fixed} for cell in comparison.cells]
    where = case_name(info, {key: case[key] for key in case if not all(key in keys for keys in fixed)})
    return f"{text}{f' at {where}' if where else ''}"
