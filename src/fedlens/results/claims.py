"""The claims of a paper, such as "fedavgm - fedavg > 20 points where alpha <= 0.05", and the verdicts on them.

A verdict compares the interval of a number over seeds with the claim.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import setting
from fedlens.results.cells import (
    COLUMNS,
    Cell,
    amounts_to_target,
    at_budget,
    cells,
    final,
    mean_change,
    scaled,
)
from fedlens.results.rows import Results, StudyInfo
from fedlens.results.statistics import t_interval
from fedlens.results.study_table import StudyTable, TableCell, TableView
from fedlens.results.words import case_name, cell_name, shown

Span = tuple[int, int]
_NAME = r'(?:"[^"]+"|[^\W\d][\w.]*(?:-[\w.]+)*)'
NAME = re.compile(_NAME)
_NUMBER = r"\d+(?:\.\d+)?(?![\w.])"
_CELL = rf"({_NAME})(?:\s*\(([^()]*)\))?"
_TERM = re.compile(rf"\s*([-+])?\s*(?:({_NUMBER})\s*(points?|%)?)?\s*(?:(?(2)of\s+){_CELL})?\s*")
_CONDITION = re.compile(rf"\s*({_NAME})\s*([<>!]=|[<>=])\s*(?:({_NUMBER})|({_NAME}))\s*")
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True)
class Condition:
    """A condition on a dimension of the cases, such as `alpha <= 0.05`; `place` is its index in the expression."""

    dimension: str
    sign: str
    value: str | float
    place: int

    def holds(self, value: Any) -> bool:
        """Whether a value of the dimension satisfies it.

        >>> Condition("alpha", "<=", 0.05, 0).holds(0.0), Condition("case", "=", "IID", 0).holds("two classes")
        (True, False)
        """
        if self.sign in _SIGNS:
            numbers = isinstance(value, int | float) and not isinstance(self.value, str)
            return numbers and _SIGNS[self.sign](value, self.value)
        return (value == self.value or setting(value) == self.value) == (self.sign == "=")


@dataclass(frozen=True)
class CellTerm:
    """A cell in a sum, such as `fedavg(alpha=100)`.

    Attributes:
        factor: what it is multiplied by.
        conditions: those in its brackets.
    """

    factor: float
    method: str
    conditions: Sequence[Condition]
    place: int

    @property
    def fixed(self) -> list[Condition]:
        """Its own values of dimensions; other dimensions have those of the selected case."""
        return [each for each in self.conditions if each.dimension != "metric"]

    @property
    def metric(self) -> str | None:
        """Its own metric."""
        return next((str(each.value) for each in self.conditions if each.dimension == "metric"), None)


@dataclass(frozen=True)
class ClaimComparison:
    """A comparison of a sum of cells with a number, in all cases that satisfy the conditions `where`."""

    terms: Sequence[CellTerm]
    sign: str
    bound: float
    text: str
    where: Sequence[Condition]

    def holds(self, value: float) -> bool:
        """Whether it is true for a value of the sum."""
        return _SIGNS[self.sign](value, self.bound)


def parse_claim(text: str) -> list[ClaimComparison]:
    """The comparisons of an expression, all of which must hold.

    Raises `ConfigError` with the position where the expression cannot be read.

    >>> [found] = parse_claim("fedavgm - fedavg > 20 points where alpha <= 0.05")
    >>> [(term.factor, term.method) for term in found.terms], found.sign, found.bound, found.where[0].value
    ([(1.0, 'fedavgm'), (-1.0, 'fedavg')], '>', 0.2, 0.05)
    >>> parse_claim("fedavgm > fedavg where")
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: expected a condition such as 'alpha < 0.05' (character 23).
    """
    return _Parser(text).comparisons()


class _Parser:
    """Splits an expression into spans, from the outermost to the innermost rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        # No separator is in quotes.
        self._masked = re.sub('"[^"]*"', lambda quoted: "_" * len(quoted[0]), text)

    def comparisons(self) -> list[ClaimComparison]:
        """CHAIN {and CHAIN} [where CONDITIONS], with CHAIN: SUM SIGN SUM {SIGN SUM}"""
        (body, *conditions), _ = self._split(r"\bwhere\b", (0, len(self._text)))
        where = [each for span in conditions for each in self._conditions(span, *_SIGNS, "=", "!=")]
        found = []
        for chain in self._split(r"\band\b", body)[0]:
            spans, signs = self._split("[<>]=?", chain)
            sums = [self._sum(span) for span in spans]
            if not signs or not any(terms for terms, _ in sums):
                raise self._error("expected a comparison with a method", chain[1] if not signs else chain[0])
            between = sum(bool(terms) for terms, _ in sums) == 1  # one sum between two numbers
            for k, ((left, low), (right, high)) in enumerate(pairwise(sums)):
                text = self._text[slice(*chain)] if between else self._text[spans[k][0] : spans[k + 1][1]]
                terms = [
                    *left,
                    *(replace(term, factor=-term.factor if left else term.factor) for term in right),
                ]
                sign, bound = (signs[k], high - low) if left else (_MIRRORED[signs[k]], low - high)
                found.append(ClaimComparison(terms, sign, bound, text.strip(), where))
        return found

    def _sum(self, span: Span) -> tuple[list[CellTerm], float]:
        """[-] TERM {+ TERM | - TERM}, with TERM: NUMBER [points | %] [of CELL], or CELL"""
        terms: list[CellTerm] = []
        total, (at, end) = 0.0, span
        while at < end or at == span[0]:
            found = _TERM.match(self._text, at, end)
            if found is None or not (found[2] or found[4]) or (at > span[0] and not found[1]):
                raise self._error("expected a method or a number, with spaces around a minus", at)
            factor = (-1.0 if found[1] == "-" else 1.0) * float(found[2] or 1) / (100 if found[3] else 1)
            if found[4]:
                fixed = self._conditions(found.span(5), "=") if found[5] is not None else []
                terms.append(CellTerm(factor, found[4].strip('"'), fixed, found.start(4)))
            else:
                total += factor
            at = found.end()
        return terms, total

    def _conditions(self, span: Span, *signs: str) -> list[Condition]:
        """DIMENSION SIGN VALUE {, DIMENSION SIGN VALUE}"""
        conditions = []
        for start, end in self._split(",", span)[0]:
            found = _CONDITION.fullmatch(self._text, start, end)
            if found is None or found[2] not in signs:
                raise self._error(f"expected a condition such as 'alpha {signs[0]} 0.05'", start)
            value = float(found[3]) if found[3] else found[4].strip('"')
            conditions.append(Condition(found[1].strip('"'), found[2], value, found.start(1)))
        return conditions

    def _split(self, separator: str, span: Span) -> tuple[list[Span], list[str]]:
        """The spans between the separators, and the separators."""
        found = [*re.compile(separator).finditer(self._masked, *span)]
        edges = [span[0], *(edge for each in found for edge in each.span()), span[1]]
        return list(zip(edges[::2], edges[1::2], strict=True)), [each[0] for each in found]

    def _error(self, what: str, place: int) -> ConfigError:
        return ConfigError(what, where=f"character {place + 1}")


Answer = Literal["shows", "does not show", "cannot tell", "not run at this scale", "not computed"]
Place = tuple[str, Mapping[str, Any]]  # a method and a case
SATISFIES, CONTRADICTS = "one seed, which satisfies it", "one seed, which contradicts it"
_BRACKET = re.compile(r"\s*\((?:(?:case|metric)=)?")
_NAMED = 3  # numbers of a verdict that are named
_MEANINGS = {
    "shows": "Shows: the whole interval of every number satisfies the claim.",
    "does not show": "Does not show: the whole interval of a number contradicts the claim.",
}
_NUMBERS = (
    "Numbers: the mean over seeds, paired by seed, and its 95 % t interval, each for itself and not corrected for "
    "their number; shares in per cent.",
    "With methods on both sides, a number is the left side minus the right.",
)


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
    holds: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim of a paper, and whether the results show it.

    Attributes:
        where: the place of the claim in the paper.
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
    def text_and_place(self) -> str:
        """The claim, and where the paper makes it."""
        return f"{self.text} ({self.where})" if self.where else self.text

    @property
    def words(self) -> str:
        """The answer with its reason."""
        return ": ".join(filter(None, [self.answer, self.reason]))

    @property
    def numbers(self) -> str:
        """The numbers that decide the answer, in words."""
        decisive = {"shows": True, "does not show": False}.get(self.answer)
        words = list(dict.fromkeys(each.words for each in self.compared if each.holds is decisive))
        more = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
        return "; ".join([*words[:_NAMED], *more])


def claim_verdicts(results: Results) -> list[ClaimVerdict]:
    """The verdict on each claim of the study's document, in order."""
    claims = results.info.document.get("claims", ())
    made = {repr((cell.method, cell.case)): cell for cell in cells(results)} if claims else {}
    return [_verdict(results, made, claim) for claim in claims]


def claims_table(results: Results) -> StudyTable:
    """The claims of the study's document, with the verdict on each."""
    head = ["Claim", "Verdict", "Numbers", "Scale"]
    verdicts = claim_verdicts(results)
    rows = [[*map(TableCell, (v.text_and_place, v.words, v.numbers, v.scale))] for v in verdicts]
    caption = "What the paper claims, and whether the results show it."
    notes = [words for answer, words in _MEANINGS.items() if any(v.answer == answer for v in verdicts)]
    notes += _NUMBERS if any(v.numbers for v in verdicts) else ()
    title = "Claims of the paper"
    return StudyTable("claims", title, caption, head, rows, notes, len(head), results.info.caveats)


def check_claim(holds: str, info: StudyInfo, where: str) -> None:
    """Raises `ConfigError` if an expression cannot be read, or names what the study `info` does not have.

    Args:
        where: the place of the expression, for messages.
    """
    try:
        for comparison in parse_claim(holds):
            selected_cells(info, comparison)
    except ConfigError as error:
        raise ConfigError(error.what, where=f"{where}, {error.where}", hint=error.hint) from None


def _verdict(results: Results, made: Mapping[str, Cell], claim: Any) -> ClaimVerdict:
    claim = {"text": claim} if isinstance(claim, str) else claim  # in files of earlier versions
    holds = claim.get("holds", "")
    verdict = partial(ClaimVerdict, claim["text"], claim.get("where", ""), holds, results.info.scale)
    if not holds:
        return verdict("not computed", claim.get("why", ""))
    metric = claim.get("metric") or results.metric
    compared: list[ComparedCells] = []
    absent = ""
    for comparison in parse_claim(holds):
        try:
            selected = selected_cells(results.info, comparison)
        except ConfigError as error:
            absent = absent or error.what
        else:
            compared += [
                _compared(results.info, made, metric, comparison, places, claim.get("at", {}))
                for places in selected
            ]
    undecided = [each.reason for each in compared if each.holds is None]
    undecided.sort(key=CONTRADICTS.__ne__)
    if any(each.holds is False for each in compared):
        return verdict("does not show", "", compared)
    if absent:
        return verdict("not run at this scale", absent, compared)
    return verdict("cannot tell" if undecided else "shows", (undecided or [""])[0], compared)


def selected_cells(info: StudyInfo, comparison: ClaimComparison) -> list[list[Place]]:
    """The cell of each term of a comparison, in each case that it selects.

    Raises `ConfigError` with the position in the expression if the study does not have one of them.
    """
    cases = _cases(info, comparison.where)
    selected = [[_cell(info, term, case) for term in comparison.terms] for case in cases]
    return [cells for k, cells in enumerate(selected) if cells not in selected[:k]]


def _cell(info: StudyInfo, term: CellTerm, case: Mapping[str, Any]) -> Place:
    method = _stand_in(info, "methods", term.method)
    if method not in info.methods:
        raise _absent("method", method, info.methods, term.place)
    return method, _cases(info, term.fixed, case)[0]


def _stand_in(info: StudyInfo, kind: Literal["methods", "cases"], name: Any) -> Any:
    """The method or the case of this scale that stands for one of the scale "paper"; the name itself without one."""
    return info.document.get("stand_ins", {}).get(kind, {}).get(name, name)


def _cases(
    info: StudyInfo, conditions: Sequence[Condition], case: Mapping[str, Any] | None = None
) -> list[Mapping[str, Any]]:
    """The cases that satisfy the conditions, and are like `case` in all other dimensions."""
    keys = [_dimension(info, each) for each in conditions]
    here = [replace(each, value=_stand_in(info, "cases", each.value)) for each in conditions]
    others = {key: value for key, value in (case or {}).items() if key not in keys}
    found = [
        each
        for each in info.cases
        if others.items() <= each.items()
        and all(condition.holds(each.get(key)) for condition, key in zip(here, keys, strict=True))
    ]
    if not found:
        wanted = ", ".join(f"{each.dimension} {each.sign} {shown(each.value)}" for each in conditions)
        raise _absent("case", wanted, [case_name(info, each) for each in info.cases], conditions[0].place)
    return found


def _dimension(info: StudyInfo, condition: Condition) -> str:
    """The key of a dimension that is named by its key, the end of it, or its label."""
    name = condition.dimension
    for key, label in info.dimensions.items():
        if name in (key, label) or key.endswith(f".{name}"):
            return key
    raise _absent("dimension", name, {*info.dimensions, *info.dimensions.values()}, condition.place)


def _absent(kind: str, name: str, known: Iterable[str], place: int) -> ConfigError:
    return ConfigError(f"no {kind} '{name}'", where=f"character {place + 1}", hint=nearest(name, known))


def _compared(
    info: StudyInfo,
    made: Mapping[str, Cell],
    metric: str,
    comparison: ClaimComparison,
    places: Sequence[Place],
    at: Mapping[str, float],
) -> ComparedCells:
    words, values = _words(info, comparison, places), dict.fromkeys(info.seeds, 0.0)
    results = Results(replace(info, metric=metric), {})
    for term, place in zip(comparison.terms, places, strict=True):
        cell = _measured(info, made, term.metric or metric, place, at)
        if not cell.complete:
            why = next(iter(cell.failed.values()), "not finished")
            return ComparedCells(words, reason=f"not run: {cell_name(results, cell)} ({why})")
        values = {
            seed: total + term.factor * cell.values[seed]
            for seed, total in values.items()
            if seed in cell.values
        }
    found = t_interval(list(values.values()))
    ends = {comparison.holds(end) for end in (found.low, found.high) if end is not None}
    holds = ends.pop() if len(ends) == 1 else None
    shown_as = "rounds" if any("target" in kind for kind in at) else comparison.terms[0].metric
    low, mean, high = (
        TableView(results, "").value(each, shown_as) for each in (found.low, found.mean, found.high)
    )
    if found.seeds == 1:
        reason = SATISFIES if comparison.holds(found.mean) else CONTRADICTS
        return ComparedCells(f"{words}: {mean}", found.mean, reason=reason)
    reason = "" if holds is not None else "the interval contains the bound"
    return ComparedCells(f"{words}: {mean} [{low}, {high}]", found.mean, found.low, found.high, holds, reason)


def _measured(
    info: StudyInfo, made: Mapping[str, Cell], metric: str, place: Place, at: Mapping[str, float]
) -> Cell:
    """The values of a cell at the end of training, at a budget, the rounds to a target, or the changes at the end."""

    def cell_of(method: str, case: Mapping[str, Any]) -> Cell:
        cell = made.get(repr((method, case)), Cell(method, case, missing=info.seeds))
        return cell.with_values(metric, final(metric, info.last))

    cell = cell_of(*place)
    for kind, limit in at.items() if cell.complete else ():
        if kind == "changes":
            values = cell.each(mean_change(metric, int(limit)))
        elif kind in COLUMNS:
            values = cell.each(at_budget(metric, kind, limit))
        else:
            target = scaled(limit, cell_of("centralized", cell.case)) if kind == "relative_target" else limit
            amounts = amounts_to_target(cell, metric, "rounds", target) or ()
            values = dict(zip(cell.runs, amounts, strict=False))
        reached = {seed: value for seed, value in values.items() if value is not None}
        lost = {seed: f"{kind} {limit:g} not reached" for seed in cell.runs if seed not in reached}
        cell = replace(cell, values=reached, failed=lost)
    return cell


def _words(info: StudyInfo, comparison: ClaimComparison, cells: Sequence[Place]) -> str:
    """A comparison with the labels of the methods that ran, and the dimensions that it does not fix."""
    labels: dict[Any, Any] = {}
    varied: dict[str, Any] = {}
    for term, (method, case) in zip(comparison.terms, cells, strict=True):
        labels |= {term.method: info.methods[method]} | {
            each.value: _stand_in(info, "cases", each.value) for each in term.fixed
        }
        labels |= {term.metric: str(term.metric).replace("_", " ")}
        fixed = [_dimension(info, each) for each in term.fixed]
        varied |= {key: value for key, value in case.items() if key not in fixed}
    text = _BRACKET.sub(" (", comparison.text)
    text = NAME.sub(lambda found: labels.get(found[0].strip('"')) or found[0], text)
    return " at ".join(filter(None, [text, case_name(info, varied)]))
