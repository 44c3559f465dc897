"""The kinds of tables of progress: values at budgets of rounds, batches and bytes, and costs to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from fedlens.base.errors import ConfigError
from fedlens.base.format import MISSING, count, many, size
from fedlens.results.cells import Cell
from fedlens.results.table_format import StudyTable, TableCell
from fedlens.results.table_view import Column, TableView
from fedlens.results.values import at_budget, better, is_counted, to_target
from fedlens.results.words import (
    INTERVAL,
    conjoined,
    metric_name,
    own_populations,
    seeds_text,
    shown_in_percent,
    tuning_words,
    unit,
)

Measure = Literal["rounds", "batches", "bytes"]
Multipliers = Literal["row", "baseline", "case", "none"]
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
    given = {"rounds": rounds or [], "batches": batches or [], "bytes": bytes or []}
    if not any(given.values()):
        raise ConfigError(
            "a table of budgets needs a budget",
            where=view.where,
            hint="set rounds, batches or bytes to a list",
        )
    wanted = [
        (kind, budget)
        for kind, values in given.items()
        for budget in sorted({*values, *(s.at[kind] for s in view.all_stated if kind in s.at)})
    ]

    def text(cell: Cell, kind: str, budget: float) -> str:
        if not cell.complete:
            return view.status(cell)
        reached = cell.each(at_budget(view.metric, kind, budget)).values()
        values = [value for value in reached if value is not None]
        return view.mean(values, spread) if values and len(values) == len(reached) else MISSING

    columns = [
        Column(
            f"at {size(at) if kind == 'bytes' else many(int(at), kind[:-1], kind)}",
            [TableCell(text(cell, kind, at)) for cell in view.cells],
            [view.stated_text(view.stated(cell.method, cell.case, {kind: at})) for cell in view.cells],
        )
        for kind, at in wanted
    ]
    kinds = list(dict.fromkeys(kind for kind, _ in wanted))
    of = f", mean ± half the {INTERVAL}" if len(view.info.seeds) > 1 and spread == "interval" else ""
    words = (
        f"{metric_name(view.metric)}{unit(view.metric)} at a budget of {conjoined(kinds)}{of}, {_over(view)}.",
        "A number is that of the last evaluation within the budget.",
        *(_MEANINGS[kind] for kind in kinds if kind in _MEANINGS),
        own_populations(view.info),
        tuning_words(view.info),
        f"{MISSING}: the runs end before."
        if any(cell.text == MISSING for column in columns for cell in column.cells)
        else "",
    )
    return view.table_of_cells(f"{metric_name(view.metric)} at budgets", words, columns)


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
        view.refuse_absent(to)
    kinds: list[Measure] = measures or ["rounds", "bytes"]
    against: Multipliers = multipliers or ("row" if len(wanted) > 1 else "baseline")
    places = [(kind, target) for kind in kinds for target in wanted]
    amounts = {
        (cell.method, repr(cell.case), (kind, target)): amounts_to_target(
            cell, view.metric, kind, scaled(target, view.cell(to, cell.case)) if relative else target
        )
        for cell in view.cells
        for kind, target in places
    }

    def text(cell: Cell, kind: Measure, target: float) -> str:
        here = (cell.method, repr(cell.case), (kind, target))
        base = {
            "row": (*here[:2], (kind, wanted[0])),
            "baseline": (view.info.baseline, *here[1:]),
            "case": (cell.method, repr(view.info.cases[0]), here[2]),
            "none": None,
        }[against]
        reached = amounts[here]
        if reached is None:
            return MISSING if cell.complete else view.status(cell)
        return _with_multiplier(kind, reached, amounts.get(base) if base else None)

    def stated(cell: Cell, kind: Measure, target: float) -> str:
        at = {"relative_target" if relative else "target": target}
        return view.stated_text(view.stated(cell.method, cell.case, at), True) if kind == "rounds" else ""

    share, of = relative or shown_in_percent(view.metric), f" of {view.label(to)}" if relative else ""
    columns = [
        Column(
            f"{kind.capitalize()} to {f'{100 * target:g} %' if share else f'{target:g}'}{of}",
            [TableCell(text(cell, kind, target)) for cell in view.cells],
            [stated(cell, kind, target) for cell in view.cells],
        )
        for kind, target in places
    ]
    words = _targets_words(view, kinds, against, to if relative else None)
    return view.table_of_cells(f"{conjoined(kinds).capitalize()} to a target", words, columns, _ends(view))


def scaled(share: float, reference: Cell | None) -> float | None:
    """A share of the mean value of a cell; None if that is not complete."""
    complete = reference is not None and reference.complete
    return share * statistics.fmean(reference.values.values()) if complete and reference else None


def amounts_to_target(cell: Cell, metric: str, kind: str, target: float | None) -> list[float | None] | None:
    """The amount of each run to a target, None if it does not reach it; None without a target or counted amounts."""
    if not cell.complete or target is None or not all(is_counted(row, kind) for row in cell.runs.values()):
        return None
    return [*cell.each(to_target(metric, kind, target)).values()]


def _targets_words(
    view: TableView, kinds: Sequence[Measure], against: Multipliers, to: str | None
) -> list[str]:
    """The caption of `targets`; `to` is the method that relative targets refer to, None for absolute ones."""
    least = "most" if better(view.metric, 1.0) < 0 else "least"
    return [
        f"{conjoined(kinds).capitalize()} to the first evaluation in which {metric_name(view.metric).lower()} is at "
        f"{least} the target, {_over(view, 'mean ')}.",
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
    ]


def _with_multiplier(kind: str, reached: Sequence[float | None], base: Sequence[float | None] | None) -> str:
    spent = [amount for amount in reached if amount is not None]
    if missed := len(reached) - len(spent):
        return "not reached" if len(reached) == 1 else f"not reached by {missed} of {len(reached)}"
    mean = statistics.fmean(spent)
    text = size(mean) if kind == "bytes" else mean_count(mean)
    reference = [amount for amount in base or () if amount is not None]
    if base and len(reference) == len(base) and math.fsum(reference):
        text += f" ({mean / statistics.fmean(reference):.1f}×)"
    return text


def mean_count(value: float) -> str:
    """Returns a mean of counts in words, with one decimal digit for small numbers that are not whole.

    >>> mean_count(2.0), mean_count(2.4), mean_count(1234.4)
    ('2', '2.4', '1,234')
    """
    return count(value) if value >= 100 or value == round(value) else f"{value:.1f}"


def _ends(view: TableView) -> list[str]:
    """A sentence on the number of rounds of the runs."""
    rounds = {row.rounds for cell in view.cells for row in view.results.runs(cell.method, cell.case).values()}
    if not rounds:
        return []
    low, high = min(rounds), max(rounds)
    return [
        f"Runs have {count(low)} to {count(high)} rounds."
        if low < high
        else f"Runs have {many(low, 'round')}."
    ]


def _over(view: TableView, prefix: str = "") -> str:
    seeds = seeds_text(view.info.seeds)
    return f"{prefix}over {seeds}" if len(view.info.seeds) > 1 else seeds
