"""The sentences of a table's caption: seeds, intervals, tests, tuning, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedlens.base.format import MISSING, count, heading, is_share, label, many, setting, split_of
from fedlens.base.summary_text import listed
from fedlens.results.cells import Cell, CellTest
from fedlens.results.rows import Results, StudyInfo
from fedlens.results.statistics import FEWEST_BOLD, tuned_on

INTERVAL = "95 % t interval"
_FEW = 5  # seeds of tuning; with fewer, two copies of a method differ too often
_MOST_NAMED = 12  # of cells in a sentence


def metric_name(metric: str) -> str:
    """A metric of metrics.jsonl at the start of a sentence.

    >>> metric_name("test_accuracy"), metric_name("validation_loss"), metric_name("clients_accuracy_mean")
    ('Test accuracy', 'Validation loss', 'Mean accuracy of the clients')
    """
    split = split_of(metric)
    return heading(f"{split[0]} {label(split[1])}" if split else metric)


def unit(metric: str) -> str:
    """ " (%)" for a share, else nothing.

    >>> unit("test_accuracy"), unit("test_loss")
    (' (%)', '')
    """
    return " (%)" if shown_in_percent(metric) else ""


def shown_in_percent(metric: str) -> bool:
    """Whether the values of a metric are shares.

    >>> shown_in_percent("test_map"), shown_in_percent("test_perplexity")
    (True, False)
    """
    split = split_of(metric)
    return is_share(split[1] if split else metric)


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds in a sentence.

    >>> seeds_text([0, 1, 2, 3]), seeds_text([3]), seeds_text([0, 5, 7])
    ('4 seeds (0 to 3)', 'one seed (3)', '3 seeds (0, 5, 7)')
    """
    if len(seeds) == 1:
        return f"one seed ({seeds[0]})"
    row = len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    named = f"{seeds[0]} to {seeds[-1]}" if row else ", ".join(map(str, seeds[:_MOST_NAMED]))
    return f"{len(seeds)} seeds ({named}{', ...' if not row and len(seeds) > _MOST_NAMED else ''})"


def own_populations(info: StudyInfo) -> str:
    """A sentence on what differs between seeds."""
    if len(info.seeds) == 1:
        return "A single seed shows no spread."
    return "Each seed has its own partition, initial weights and cohorts."


def final_value(info: StudyInfo) -> str:
    """A sentence on final values that are means; empty for the value of the last evaluation."""
    return f"A value is the mean of the last {info.last} evaluations." if info.last > 1 else ""


def tuning_words(info: StudyInfo) -> list[str]:
    """Sentences on how the settings of the methods were chosen; none without tuning."""
    tuning = info.tuning
    if not tuning:
        return []
    untuned = [name for name in info.methods if name in (tuning.get("untuned") or ())]
    if untuned and len(untuned) == len(info.methods):
        return ["Every method has a single point, so no settings were chosen."]
    share, budget = tuning.get("share"), tuning.get("budget")
    data = f"{100 * share:g} % of the training data, held out" if share else "held-out training data"
    each = "every method and case" if not untuned else "every other method in each case"
    runs = f", {many(int(budget), 'run')} of tuning for {each}" if budget else ""
    alone = ""
    if untuned:
        names = listed([info.methods[name] for name in untuned], _MOST_NAMED)
        alone = f"{names} {'has' if len(untuned) == 1 else 'have'} a single point and no tuning."
    by_method = [
        set(seeds) for name, seeds in (tuning.get("seeds_by_method") or {}).items() if name not in untuned
    ]
    seeds = sorted(set().union(*by_method)) if by_method else list(tuning.get("seeds") or ())
    whose = " that the results do not use" if tuning.get("own_seeds") else ""
    shared = [seed for seed in seeds if seed in info.seeds]
    too = ""
    if shared and set(seeds) != set(info.seeds):
        named = f"seed{'s' if len(shared) > 1 else ''} {', '.join(map(str, shared[:_MOST_NAMED]))}"
        too = f"The results use {named}{', ...' if len(shared) > _MOST_NAMED else ''}, too."
    fewest, most = tuned_on(tuning), len(seeds)
    if fewest == 1:
        where = f"one seed ({seeds[0]}){whose}" if most == 1 else "one seed for some methods"
        how = f"The numbers are those of these settings, which were chosen on {data}, on {where}{runs}."
        shifted = "One seed shifts the values of a method together, so nothing is bold."
        return [*filter(None, [how, alone, too, shifted])]
    by = (
        seeds_text(seeds)
        if fewest == most
        else f"{fewest} to {most} seeds, fewer where a method has more points"
    )
    few = "So few seeds leave some luck of the choice in the differences." if (fewest or 0) < _FEW else ""
    how = f"Settings were chosen on {data}, by the mean over {by}{whose}{runs}."
    return [*filter(None, [how, alone, too, few])]


def bold_words(compared: Sequence[CellTest], info: StudyInfo, meaning: str) -> str:
    """What bold means in a table, and over how many comparisons p is corrected.

    Args:
        meaning: "differs from FedAvg".
    """
    tested = sum(each.test is not None and each.test.p is not None for each in compared)
    if not tested:
        return ""
    correction = f"Holm's step-down correction over the {many(tested, 'comparison')} of this table"
    if tested == 1:
        correction = "one comparison, so no correction"
    if tuned_on(info.tuning) == 1:
        return f"p: two-sided paired t test; adjusted p: {correction}."
    text = f"Bold: {meaning}; adjusted p of the two-sided paired t test below 0.05 ({correction})"
    most = max(each.test.difference.seeds for each in compared if each.test is not None)
    if most < FEWEST_BOLD:
        return f"{text} and at least {FEWEST_BOLD} seeds, so nothing is bold here."
    return f"{text} and at least {FEWEST_BOLD} seeds."


def untested_words(compared: Iterable[CellTest], results: Results) -> str:
    """The comparisons that have no test, and why."""
    without = [each for each in compared if each.test is None or each.test.p is None]
    named = [f"{cell_name(results, each.cell)} ({each.untested})" for each in without]
    return f"No test: {listed(named, _MOST_NAMED)}." if named else ""


def failure_notes(cells: Iterable[Cell], results: Results) -> list[str]:
    """One sentence for each cell with failed runs, with their reasons."""
    notes = []
    for cell in cells:
        by_reason: dict[str, list[int]] = {}
        for seed, reason in cell.failed.items():
            by_reason.setdefault(reason.rstrip("."), []).append(seed)
        if by_reason:
            reasons = [
                f"{reason} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
                for reason, seeds in by_reason.items()
            ]
            ended = "failed" if cell.measured else "has no value" if cell.planned == 1 else "have no value"
            many_ended = f"{len(cell.failed)} of {many(cell.planned, 'run')} {ended}"
            notes.append(f"{cell_name(results, cell)}: {many_ended}: {'; '.join(reasons)}.")
    return notes


def cell_name(results: Results, cell: Cell) -> str:
    """A method and its case in a sentence."""
    where = case_name(results.info, cell.case)
    return f"{results.info.methods.get(cell.method, cell.method)}{f' at {where}' if where else ''}"


def case_name(info: StudyInfo, case: Mapping[str, Any]) -> str:
    """A case in a few words: "alpha 0.1, two classes"; empty for a study with one case."""
    return ", ".join(
        shown(value) if dimension == "case" else f"{info.dimensions.get(dimension, dimension)} {shown(value)}"
        for dimension, value in case.items()
    )


def shown(value: Any) -> str:
    """The value of a setting in a table: numbers with six digits.

    >>> shown(10.0), shown(0.00316227766017), shown([8, 16]), shown(True)
    ('10', '0.00316228', '8, 16', 'yes')
    """
    return f"{value:g}" if isinstance(value, float) else setting(value)


def p_text(p: float | None) -> str:
    """A p value with three digits after the point.

    >>> p_text(0.01234), p_text(0.00001), p_text(None)
    ('0.012', '< 0.001', '–')
    """
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def mean_count(value: float) -> str:
    """Returns a mean of counts in words, with one decimal digit for small numbers that are not whole.

    >>> mean_count(2.0), mean_count(2.4), mean_count(1234.4)
    ('2', '2.4', '1,234')
    """
    return count(value) if value >= 100 or value == round(value) else f"{value:.1f}"
