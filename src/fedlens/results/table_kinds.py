"""The kinds of tables of what methods reach: each is a function from a `TableView` and its options to a table.

`summary`, `differences`, `choices`, `budgets`, `targets` and `relative` list their columns; `TABLES` in `tables.py` has
all kinds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedlens.base.errors import ConfigError
from fedlens.base.format import MISSING, count, many, number, size
from fedlens.base.summary_text import conjoined
from fedlens.results.cells import (
    Cell,
    CellTest,
    amounts_to_target,
    at_budget,
    better,
    chosen_values,
    edges,
    scaled,
)
from fedlens.results.rows import validation_metric
from fedlens.results.statistics import Spread, ratios
from fedlens.results.study_table import Column, StudyTable, TableCell, TableView
from fedlens.results.words import (
    INTERVAL,
    bold_words,
    case_name,
    cell_name,
    final_value,
    mean_count,
    metric_name,
    own_populations,
    p_text,
    seeds_text,
    shown,
    shown_in_percent,
    tuning_words,
    unit,
    untested_words,
)

Lines = Literal["methods", "cases"]
Measure = Literal["rounds", "batches", "bytes"]
Multipliers = Literal["row", "baseline", "case", "none"]
_MEANINGS = {
    "batches": "Batches: those of the busiest client of each round, summed, which stands for time.",
    "bytes": "Bytes: up, down and between clients, of all clients.",
}
_WIDTHS = {
    "interval": f"mean ± half the {INTERVAL} of the mean",
    "deviation": "mean ± standard deviation",
    "none": "mean",
}


def summary(
    view: TableView, *, spread: Spread = "interval", rows: Lines = "methods", compare: bool = True
) -> StudyTable:
    """The final value of each method in each case: mean and interval or deviation over seeds.

    Bold is a value that is better than the baseline's, italic one that is worse, by the same rule as in `differences`.

    Args:
        compare: false for no test: of many points of a grid no one is a baseline.
    """
    info, metric = view.info, f"{metric_name(view.metric)}{unit(view.metric)}"
    compared = view.compared() if compare and info.baseline in info.methods else []
    bold = {id(each.cell): each.test for each in compared if each.bold}

    def cell_of(method: str, case: Mapping[str, Any]) -> TableCell:
        cell = view.cell(method, case)
        if cell is None or not cell.complete:
            return TableCell(view.status(cell))
        text = view.mean([*cell.values.values()], spread) + _star(view, cell)
        test = bold.get(id(cell))
        up = test is not None and better(view.metric, test.difference.mean) > 0
        return TableCell(text, bold=up, italic=test is not None and not up)

    several = len(info.seeds) > 1
    names, columns, labels = _by_method_and_case(view, rows, cell_of, view.stated_text)
    words = (
        f"{metric}: {_WIDTHS[spread]} over {seeds_text(info.seeds)}."
        if several
        else f"{metric} of {seeds_text(info.seeds)}.",
        own_populations(info),
        final_value(info),
        *_tests(
            view,
            compared,
            f"better than {view.label(info.baseline)} in the same case, italic: worse",
            several,
        ),
    )
    return view.table(f"{metric_name(view.metric)} of each method", words, names, columns, labels)


def differences(view: TableView, *, baseline: str | None = None) -> StudyTable:
    """Differences to the baseline, paired by seed, with intervals and Holm-adjusted p values.

    Raises `ConfigError` if the baseline is not among the methods, or if no other method is.
    """
    base = baseline or view.info.baseline
    if base not in view.info.methods:
        raise ConfigError(
            f"the baseline '{base}' is not among the methods of the table",
            where=f"{view.where}.baseline",
            hint=f"methods: {', '.join(view.info.methods)}",
        )
    if len(view.info.methods) < 2:
        raise ConfigError(
            "a table of differences needs at least two methods, and the study has one",
            where=view.where,
            hint="remove the table, or add a method",
        )
    compared = view.compared(base)
    rows = [_difference(view, each) for each in compared]
    heads = ("Difference", "Interval", "Seeds", "p", "Adjusted p")
    columns = [Column(head, [row[k] for row in rows]) for k, head in enumerate(heads)]
    names = [view.names(each.cell, _star(view, each.cell)) for each in compared]
    unit_words = " in percentage points" if unit(view.metric) else ""
    words = (
        f"{metric_name(view.metric)}: difference to {view.label(base)}{unit_words}, "
        f"paired by seed over {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        f"Interval: {INTERVAL} of the mean difference, each for itself and not corrected for their number."
        if any(row[1].text != MISSING for row in rows)
        else "",
        *_tests(view, compared, f"differs from {view.label(base)}"),
    )
    title = f"Differences to {view.label(base)}"
    return view.table(title, words, ([*view.dimension_head, "Method"], names), columns)


def _difference(view: TableView, each: CellTest) -> list[TableCell]:
    if each.test is None:
        return [TableCell(view.status(each.cell)), *[TableCell(MISSING)] * 4]
    mean = each.test.difference
    interval = MISSING
    if mean.low is not None and mean.high is not None:
        interval = f"[{view.signed(mean.low)}, {view.signed(mean.high)}]"
    texts = (
        view.signed(mean.mean),
        interval,
        str(mean.seeds),
        p_text(each.test.p),
        p_text(each.test.adjusted),
    )
    return [TableCell(text, bold=each.bold and k in (0, 4)) for k, text in enumerate(texts)]


def choices(view: TableView) -> StudyTable:
    """The settings that tuning chose in each cell, with a star at each value at the edge of what was tried.

    Raises `ConfigError` for a study without tuning.
    """
    if not view.info.tuning:
        raise ConfigError(
            "the study tunes no settings, so it has no table of choices",
            where=view.where,
            hint="remove the table, or add [tune]",
        )
    metric = validation_metric(view.metric)
    score = f"{metric_name(metric)}{unit(metric)}"
    found = [(cell, chosen_values(view.results, cell.method, cell.case)) for cell in view.cells]
    settings = list(dict.fromkeys(key for _, point in found for key in point))
    rows, searched, starred = [], False, False
    for cell, point in found:
        at_edge = edges(view.results, cell.method, cell.case)
        values = {key: f"{shown(value)}{'*' if key in at_edge else ''}" for key, value in point.items()}
        texts = [values.get(key, MISSING) for key in settings]
        if settings and not values:
            texts[0] = "not chosen yet"
        tuned = [
            row
            for row in view.results.rows
            if (row.role, row.method) == ("tune", cell.method) and row.case == cell.case
        ]
        at_choice = [row for row in tuned if row.point == point]
        scores = [row.final(metric, view.info.last) for row in at_choice]
        measured = [value for value in scores if value is not None]
        known = measured and len(measured) == len(scores)
        texts += [
            ", ".join(map(number, sorted(rate for rate in cell.rates if rate is not None))) or MISSING,
            view.value(statistics.fmean(measured), metric) if known else MISSING,
            str(len({row.digest for row in tuned})),  # once each, though successive halving continues it
        ]
        searched, starred = searched or bool(tuned), starred or bool(at_edge)
        rows.append([*view.names(cell), *map(TableCell, texts)])
    stars = ""
    if starred:
        stars = "* The value lies at the edge of those that were tried, so a better one may lie beyond."
    elif all(point for _, point in found):
        stars = "No chosen number lies at the edge of those that were tried."
    notes = [
        *tuning_words(view.info),
        f"{score}: the mean over the seeds of tuning." if searched else "",
        "Effective rate: local rate / (1 - server momentum).",
        stars if searched else "",
        *view.info.notes,
    ]
    caption = "The settings that each method was run with, and its score with them in tuning."
    head = [*view.dimension_head, "Method", *settings, "Effective rate", score, "Runs of tuning"]
    labels = len(view.dimension_head) + 1
    title = view.title or "Settings chosen by tuning"
    return StudyTable(view.name, title, caption, head, rows, [*filter(None, notes)], labels)


def relative(view: TableView, *, to: str = "centralized", rows: Lines = "methods") -> StudyTable:
    """Relative accuracy: each value divided by that of the method `to` in the same case and at the same seed.

    Source: hsu2020, section 6. The line of `to` itself has its values.

    Raises `ConfigError` if the study has no method `to`.
    """
    view.refuse_absent(to)
    metric, share = metric_name(view.metric), "test_accuracy"  # ratios are shown as shares

    def text(method: str, case: Mapping[str, Any]) -> str:
        cell, reference = view.cell(method, case), view.cell(to, case)
        if cell is None or not cell.complete:
            return view.status(cell)
        if method == to:
            return view.mean([*cell.values.values()], metric=view.metric)
        if reference is None or not reference.complete:
            return f"{view.label(to)}: {view.status(reference)}"
        found = ratios(cell.values, reference.values)
        return view.mean(found, metric=share) if found else MISSING

    def stated_of(method: str, case: Mapping[str, Any]) -> str:
        """The paper's ratio, where it states both values; of `to`, its value."""
        value, reference = view.stated(method, case), view.stated(to, case)
        if method == to or value is None:
            return view.stated_text(method, case)
        if reference is None or reference.number == 0 or reference.value is None:
            return ""
        return value.word + view.value(value.number / reference.number, share)

    own_labels = {to: f"{view.label(to)}: {metric.lower()}{unit(view.metric)}"}
    spread = f", mean ± half the {INTERVAL} over" if len(view.info.seeds) > 1 else " of"
    words = (
        f"{metric} divided by that of {view.label(to)} in the same case and at the same seed, in %"
        f"{spread} {seeds_text(view.info.seeds)}.",
        own_populations(view.info),
        final_value(view.info),
        *tuning_words(view.info),
        _zero_words(view, to),
    )
    title = f"{metric} relative to {view.label(to)}"
    table = _by_method_and_case(view, rows, lambda *place: TableCell(text(*place)), stated_of, own_labels)
    return view.table(title, words, *table)


def _zero_words(view: TableView, to: str) -> str:
    """The seeds at which the method `to` has the value 0, so that nothing can be divided by it; empty without."""
    zero = [
        (cell_name(view.results, cell), [seed for seed, value in cell.values.items() if not value])
        for cell in view.cells
        if cell.method == to
    ]
    named = [f"{name} ({seeds_text(seeds)})" for name, seeds in zero if seeds]
    return f"No ratio where the value to divide by is 0: {', '.join(named)}." if named else ""


def _by_method_and_case(
    view: TableView,
    rows: Lines,
    cell_of: Callable[[str, Mapping[str, Any]], TableCell],
    stated_of: Callable[[str, Mapping[str, Any]], str],
    labels: Mapping[str, str] | None = None,
) -> tuple[tuple[Sequence[str], Sequence[Sequence[TableCell]]], list[Column], Sequence[str]]:
    """The names of the rows, a column a case (or a method), and the paper's labels, for `TableView.table`.

    Methods of the paper that the study does not run are among them.

    Args:
        rows: what a row is.
        stated_of: what the paper states about a method in a case; empty for nothing.
        labels: instead of those of the study.
    """
    cases, own = view.info.cases, {**view.info.methods, **(labels or {})}
    stated = {
        method: [stated_of(method, case) for case in cases]
        for method in dict.fromkeys([*own, *(value.method for value in view.all_stated)])
    }
    methods = [method for method in stated if method in own or any(stated[method])]
    none = [TableCell(MISSING)] * len(cases)
    cells = {m: [cell_of(m, case) for case in cases] if m in own else none for m in methods}
    if rows == "cases":
        names = view.dimension_head, [view.dimension_cells(case) for case in cases]
        return (
            names,
            [Column(own.get(m), cells[m], stated[m], view.document_label(m)) for m in methods],
            (),
        )
    columns = [
        Column(
            case_name(view.info, case) or "value",
            [cells[m][k] for m in methods],
            [stated[m][k] for m in methods],
        )
        for k, case in enumerate(cases)
    ]
    lines = [[TableCell(own.get(method, "not run"))] for method in methods]
    return (["Method"], lines), columns, [*map(view.document_label, methods)]


def _tests(view: TableView, compared: Sequence[CellTest], meaning: str, untested: bool = True) -> list[str]:
    """How settings were chosen, what bold and stars mean, and what has no test."""
    return [
        *tuning_words(view.info),
        bold_words(compared, view.info, meaning),
        "* A chosen setting lies at the edge of the values that were tried."
        if any(_star(view, cell) for cell in view.cells)
        else "",
        untested_words(compared, view.results) if untested else "",
    ]


def _star(view: TableView, cell: Cell) -> str:
    return "*" if edges(view.results, cell.method, cell.case) else ""


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

    def column(kind: str, budget: float) -> Column:
        def text(cell: Cell) -> str:
            if not cell.complete:
                return view.status(cell)
            reached = cell.each(at_budget(view.metric, kind, budget)).values()
            values = [value for value in reached if value is not None]
            return view.mean(values, spread) if len(values) == len(reached) else MISSING

        head = f"at {size(budget) if kind == 'bytes' else many(int(budget), kind[:-1], kind)}"
        return view.column(head, text, lambda cell: view.stated_text(cell.method, cell.case, {kind: budget}))

    columns = [column(*place) for place in wanted]
    kinds = list(dict.fromkeys(kind for kind, _ in wanted))
    of = f", mean ± half the {INTERVAL}" if len(view.info.seeds) > 1 and spread == "interval" else ""
    words = (
        f"{metric_name(view.metric)}{unit(view.metric)} at a budget of {conjoined(kinds)}{of}, {_over(view)}.",
        "A number is that of the last evaluation within the budget.",
        *(_MEANINGS[kind] for kind in kinds if kind in _MEANINGS),
        own_populations(view.info),
        *tuning_words(view.info),
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
    share, of = relative or shown_in_percent(view.metric), f" of {view.label(to)}" if relative else ""

    def amounts(cell: Cell | None, kind: Measure, target: float) -> list[float | None] | None:
        if cell is None:
            return None
        at = scaled(target, view.cell(to, cell.case)) if relative else target
        return amounts_to_target(cell, view.metric, kind, at)

    def column(kind: Measure, target: float) -> Column:
        def text(cell: Cell) -> str:
            reached = amounts(cell, kind, target)
            if reached is None:
                return MISSING if cell.complete else view.status(cell)
            base = {
                "row": (cell, kind, wanted[0]),
                "baseline": (view.cell(view.info.baseline, cell.case), kind, target),
                "case": (view.cell(cell.method, view.info.cases[0]), kind, target),
                "none": (None, kind, target),
            }[against]
            return _with_multiplier(kind, reached, amounts(*base))

        def stated(cell: Cell) -> str:
            at = {"relative_target" if relative else "target": target}
            return view.stated_text(cell.method, cell.case, at, count=True) if kind == "rounds" else ""

        head = f"{kind.capitalize()} to {f'{100 * target:g} %' if share else f'{target:g}'}{of}"
        return view.column(head, text, stated)

    columns = [column(kind, target) for kind in kinds for target in wanted]
    texts = " ".join(cell.text for column in columns for cell in column.cells)
    words = _targets_words(view, kinds, against, to if relative else None, texts)
    return view.table_of_cells(f"{conjoined(kinds).capitalize()} to a target", words, columns, _ends(view))


def _targets_words(
    view: TableView, kinds: Sequence[Measure], against: Multipliers, to: str | None, texts: str
) -> list[str]:
    """The caption and notes of `targets`: `to` is the method that relative targets refer to, `texts` all cells."""
    least = "most" if better(view.metric, 1.0) < 0 else "least"
    return [
        f"{conjoined(kinds).capitalize()} to the first evaluation in which {metric_name(view.metric).lower()} is at "
        f"{least} the target, {_over(view, 'mean ')}.",
        f"A target is a share of the final value of {view.label(to)} in the same case."
        if to is not None
        else "",
        "Not reached: by so many of the runs, which then have no mean." if "not reached by" in texts else "",
        {
            "row": "In brackets: times as much as for the first target of the row.",
            "baseline": f"In brackets: times as much as for {view.label(view.info.baseline)} in the same case.",
            "case": "In brackets: times as much as for the same method in the first case.",
            "none": "",
        }[against]
        if "×" in texts
        else "",
        *(_MEANINGS[kind] for kind in kinds if kind in _MEANINGS),
        own_populations(view.info),
        *tuning_words(view.info),
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


def _ends(view: TableView) -> list[str]:
    """A sentence on the number of rounds of the runs."""
    rounds = {row.rounds for cell in view.cells for row in cell.ended.values()}
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
