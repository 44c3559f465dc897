"""Tables of progress: values at budgets of rounds, batches and bytes, and costs to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import MISSING, count, many, size
from fedlens.report.study_captions import (
    INTERVAL,
    conjoined,
    failure_notes,
    joined,
    metric_name,
    own_populations,
    seeds_text,
    shown_in_percent,
    tuning_words,
    unit,
)
from fedlens.report.study_cells import StudyCell, better
from fedlens.report.study_document_rows import (
    StatedRow,
    document_label,
    document_notes,
    stated,
    stated_budgets,
    stated_text,
    with_paper,
)
from fedlens.report.study_statistics import t_interval
from fedlens.report.table_view import TableView
from fedlens.results.rows import Row
from fedlens.results.table_format import StudyTable, TableCell

Measure = Literal["rounds", "batches", "bytes"]
Multipliers = Literal["row", "baseline", "case", "none"]

COLUMNS = {"rounds": "round", "batches": "batches", "bytes": "bytes"}
_MEANINGS = {
    "batches": "Batches: those of the busiest client of each round, summed, which stands for time.",
    "bytes": "Bytes: up, down and between clients, of all clients.",
}


def budgets(
    view: TableView,
    *,
    rounds: list[float] | None = None,
    batches: list[float] | None = None,
    bytes: list[float] | None = None,
    spread: Literal["interval", "none"] = "interval",
) -> StudyTable:
    """The metric at budgets: Acc@round, Acc@batch and Acc@bytes (hsu2020, table 2).

    Raises `ConfigError` without a budget.
    """
    given: Mapping[str, Sequence[float]] = {
        "rounds": rounds or [],
        "batches": batches or [],
        "bytes": bytes or [],
    }
    if not any(given.values()):
        raise ConfigError(
            "a table of budgets needs a budget",
            where=view.where,
            hint="set rounds, batches or bytes to a list",
        )
    columns = [
        (kind, budget)
        for kind, values in given.items()
        for budget in sorted({*values, *stated_budgets(view, kind)})
    ]
    rows = []
    for cell in view.cells:
        lines = view.results.runs(cell.method, cell.case)
        texts = [
            _at_budget(view, cell, [*lines.values()], kind, budget, spread == "interval")
            for kind, budget in columns
        ]
        of_paper = [
            stated_text(view, stated(view, cell.method, cell.case, {kind: budget}))
            for kind, budget in columns
        ]
        rows.append(_row(view, cell, texts, of_paper))
    names = [*view.dimension_head, "Method", *(f"at {_amount(kind, budget)}" for kind, budget in columns)]
    head, body = with_paper(names, rows)
    kinds = [kind for kind in given if any(name == kind for name, _ in columns)]
    several = len(view.info.seeds) > 1
    shown = f", mean ± half the {INTERVAL}" if several and spread == "interval" else ""
    caption = joined(
        f"{metric_name(view.metric)}{unit(view.metric)} at a budget of {conjoined(kinds)}{shown}, {_over(view)}.",
        "A number is that of the last evaluation within the budget.",
        *(_MEANINGS[kind] for kind in kinds if kind in _MEANINGS),
        own_populations(view.info),
        tuning_words(view.info),
        f"{MISSING}: the runs end before."
        if any(cell.text == MISSING for row in rows for cell in row.values)
        else "",
    )
    notes = [*failure_notes(view.cells, view.results), *document_notes(view, head)]
    title = view.title or f"{metric_name(view.metric)} at budgets"
    return StudyTable(view.name, title, caption, head, body, notes, len(view.dimension_head) + 1)


def value_at(line: Row, metric: str, column: str, budget: float) -> float | None:
    """The last value of a metric within a budget; None if the run ends before, or was not evaluated by then.

    Args:
        column: of the curve, such as "batches", that the budget counts.

    >>> curve = {"round": [1, 2], "batches": [10, 20], "test_accuracy": [0.5, 0.6]}
    >>> line = Row("", "", "finished", None, 2, "test_accuracy", curve)
    >>> [value_at(line, "test_accuracy", "batches", budget) for budget in (5, 15, 20, 30)]
    [None, 0.5, 0.6, None]
    """
    spent = line.curve.get(column, ())
    if not any(each is not None and each >= budget for each in spent):
        return None
    within = [value for k, value in line.series(metric) if (at := spent[k]) is not None and at <= budget]
    return within[-1] if within else None


def _at_budget(
    view: TableView, cell: StudyCell, lines: Sequence[Row], kind: str, budget: float, interval: bool
) -> str:
    if not cell.complete:
        return view.status(cell)
    at_budget = [value_at(line, view.metric, COLUMNS[kind], budget) for line in lines]
    values = [value for value in at_budget if value is not None]
    if not values or len(values) < len(at_budget):
        return MISSING
    whole = t_interval(values)
    if whole.half is None or not interval:
        return view.value(whole.mean)
    return f"{view.value(whole.mean)} ± {view.width(whole.half)}"


def targets(
    view: TableView,
    *,
    targets: list[float] | None = None,
    measures: list[Measure] | None = None,
    multipliers: Multipliers | None = None,
    relative: bool = False,
    to: str = "centralized",
) -> StudyTable:
    """Rounds, batches and bytes to a target, with multipliers (hsu2020, table 5).

    Args:
        targets: of the metric; those of the study by default. With `relative`, shares of the value of the method `to`.
        multipliers: times as much as the first target of the row ("row"), as the baseline ("baseline"), or as the same
            method in the first case ("case"). By default "row" with several targets, "baseline" with one.

    Raises `ConfigError` without a target, and if the study has no method `to`.
    """
    wanted = list(targets if targets is not None else view.info.targets)
    if not wanted:
        raise ConfigError(
            "a table of targets needs a target",
            where=view.where,
            hint='set "target" of the study, or "targets" here',
        )
    if relative:
        needs_method(view, to, f"{view.where}.to")
    kinds: list[Measure] = measures or ["rounds", "bytes"]
    against: Multipliers = multipliers or ("row" if len(wanted) > 1 else "baseline")
    columns = [(kind, target) for kind in kinds for target in wanted]
    at = "relative_target" if relative else "target"
    amounts = {
        (cell.method, repr(cell.case), column): amounts_to_target(
            view, cell, *column, to if relative else None
        )
        for cell in view.cells
        for column in columns
    }
    rows = []
    for cell in view.cells:
        texts = []
        for kind, target in columns:
            base = {
                "row": (cell.method, repr(cell.case), (kind, wanted[0])),
                "baseline": (view.info.baseline, repr(cell.case), (kind, target)),
                "case": (cell.method, repr(view.info.cases[0]), (kind, target)),
                "none": None,
            }[against]
            reached = amounts[cell.method, repr(cell.case), (kind, target)]
            texts.append(_with_multiplier(view, cell, kind, reached, amounts.get(base) if base else None))
        of_paper = [
            stated_text(view, stated(view, cell.method, cell.case, {at: target}), count=True)
            if kind == "rounds"
            else ""
            for kind, target in columns
        ]
        rows.append(_row(view, cell, texts, of_paper))
    caption = _targets_caption(view, kinds, against, to if relative else None)
    suffix = " of " + view.label(to) if relative else ""
    named = [f"{kind.capitalize()} to {_target(view, target, relative)}{suffix}" for kind, target in columns]
    head, body = with_paper([*view.dimension_head, "Method", *named], rows)
    notes = [*_ends(view), *failure_notes(view.cells, view.results), *document_notes(view, head)]
    title = view.title or f"{conjoined(kinds).capitalize()} to a target"
    return StudyTable(view.name, title, caption, head, body, notes, len(view.dimension_head) + 1)


def _targets_caption(view: TableView, kinds: Sequence[Measure], against: Multipliers, to: str | None) -> str:
    """The caption of `targets`; `to` is the method that relative targets refer to, None for absolute ones."""
    return joined(
        f"{conjoined(kinds).capitalize()} to the first evaluation in which {metric_name(view.metric).lower()} is at "
        f"{'most' if better(view.metric, 1.0) < 0 else 'least'} the target, {_over(view, 'mean ')}.",
        f"A target is a share of the final value of {view.label(to)} in the same case."
        if to is not None
        else "",
        "Not reached: by so many of the runs, which then have no mean.",
        {
            "row": "In brackets: times as much as for the first target of the row.",
            "baseline": f"In brackets: times as much as for {view.label(view.info.baseline)} in the same case.",
            "case": "In brackets: times as much as for the same method in the first case.",
            "none": "",
        }[against],
        *(_MEANINGS[kind] for kind in kinds if kind in _MEANINGS),
        own_populations(view.info),
        tuning_words(view.info),
    )


def needs_method(view: TableView, method: str, where: str) -> None:
    """Raises `ConfigError` if the table does not have a method."""
    if method not in view.info.methods:
        raise ConfigError(
            f"the table has no method '{method}' that values are relative to",
            where=where,
            hint=nearest(method, view.info.methods),
        )


def amount_to(line: Row, metric: str, target: float, amounts: Sequence[float | None]) -> float | None:
    """The amount at the first evaluation that reaches the target: at least it, or at most for losses; None if none.

    >>> curve = {"round": [1, 2, 3], "test_loss": [2.0, 1.0, 0.5]}
    >>> line = Row("", "", "finished", None, 3, "test_loss", curve)
    >>> amount_to(line, "test_loss", 1.0, curve["round"]), amount_to(line, "test_loss", 0.1, curve["round"])
    (2, None)
    """
    reached = [k for k, value in line.series(metric) if better(metric, value) >= better(metric, target)]
    return amounts[reached[0]] if reached else None


def amounts_to_target(
    view: TableView, cell: StudyCell, kind: Measure, target: float, relative_to: str | None
) -> list[float | None] | None:
    """The amount of each run to a target, None if it does not reach it; None without counted amounts."""
    if not cell.complete:
        return None
    if relative_to is not None:
        reference = view.cell(relative_to, cell.case)
        if reference is None or not reference.complete:
            return None
        target = target * statistics.fmean(reference.values.values())
    reached = []
    for line in view.results.runs(cell.method, cell.case).values():
        amounts = line.curve.get(COLUMNS[kind], ())
        if not any(amount is not None for amount in amounts):
            return None
        reached.append(amount_to(line, view.metric, target, amounts))
    return reached


def _with_multiplier(
    view: TableView,
    cell: StudyCell,
    kind: Measure,
    reached: Sequence[float | None] | None,
    base: Sequence[float | None] | None,
) -> str:
    if reached is None:
        return MISSING if cell.complete else view.status(cell)
    spent = [amount for amount in reached if amount is not None]
    if len(spent) < len(reached):
        missed = len(reached) - len(spent)
        return "not reached" if len(reached) == 1 else f"not reached by {missed} of {len(reached)}"
    text = _FORMATS[kind](statistics.fmean(spent))
    reference = [amount for amount in base or () if amount is not None]
    if base and len(reference) == len(base) and math.fsum(reference):
        text += f" ({statistics.fmean(spent) / statistics.fmean(reference):.1f}×)"
    return text


def mean_count(value: float) -> str:
    """Returns a mean of counts in words, with one decimal digit for small numbers that are not whole.

    >>> mean_count(2.0), mean_count(2.4), mean_count(1234.4)
    ('2', '2.4', '1,234')
    """
    return count(value) if value >= 100 or value == round(value) else f"{value:.1f}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "rounds": mean_count,
    "batches": mean_count,
    "bytes": size,
}


def _ends(view: TableView) -> list[str]:
    """A sentence on the number of rounds of the runs."""
    rounds = {
        line.rounds for cell in view.cells for line in view.results.runs(cell.method, cell.case).values()
    }
    if not rounds:
        return []
    low, high = min(rounds), max(rounds)
    return [
        f"Runs have {count(low)} to {count(high)} rounds."
        if low < high
        else f"Runs have {many(low, 'round')}."
    ]


def _target(view: TableView, target: float, relative: bool) -> str:
    return f"{100 * target:g} %" if relative or shown_in_percent(view.metric) else f"{target:g}"


def _amount(kind: str, budget: float) -> str:
    return size(budget) if kind == "bytes" else many(int(budget), kind[:-1], kind)


def _over(view: TableView, prefix: str = "") -> str:
    seeds = seeds_text(view.info.seeds)
    return f"{prefix}over {seeds}" if len(view.info.seeds) > 1 else seeds


def _row(view: TableView, cell: StudyCell, texts: Sequence[str], of_paper: Sequence[str]) -> StatedRow:
    names = [*view.dimension_cells(cell.case), TableCell(view.label(cell.method))]
    return StatedRow(names, [*map(TableCell, texts)], of_paper, document_label(view, cell.method))
