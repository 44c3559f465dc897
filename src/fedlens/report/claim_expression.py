"""The expressions of claims, such as "fedavgm - fedavg > 20 points where alpha <= 0.05", and their parser."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fedlens.core.errors import ConfigError, nearest
from fedlens.report.format import setting
from fedlens.report.study_results import StudyInfo

TOKEN = re.compile(r'"[^"]+"|\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])|[^\W\d][\w.]*(?:-[\w.]+)*|[<>!]=|\S')
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FORM = "write it like 'fedavgm - fedavg > 20 points where alpha <= 0.05', with spaces around a minus"


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
        if self.sign in _ORDER:
            return isinstance(value, int | float) and _ORDER[self.sign](value, self.value)
        return (value == self.value or setting(value) == self.value) == (self.sign == "=")


@dataclass(frozen=True)
class CellTerm:
    """A cell in a sum, such as `fedavg(alpha=100)`, or the ratio of two.

    Attributes:
        fixed: the dimensions that have a value of their own; those of the selected case hold for the others.
        factor: 1 or -1.
        over: the cell that it is divided by.
    """

    method: str
    place: int
    fixed: Sequence[Condition] = ()
    metric: str | None = None
    factor: int = 1
    over: CellTerm | None = None


@dataclass(frozen=True)
class ClaimComparison:
    """A comparison of the sum of `terms` with a number, in all cases that satisfy the conditions `where`.

    Attributes:
        text: as written in the expression.
    """

    terms: Sequence[CellTerm]
    sign: str
    bound: float
    text: str
    where: Sequence[Condition] = ()

    @property
    def cells(self) -> list[CellTerm]:
        """All cells of the terms, in order."""
        return [cell for term in self.terms for cell in (term, term.over) if cell is not None]

    def holds(self, value: float) -> bool:
        """Whether it is true for a value of the sum."""
        return _ORDER[self.sign](value, self.bound)


def parse_claim(text: str, where: str = "holds") -> list[ClaimComparison]:
    """The comparisons of an expression, all of which must hold.

    Args:
        where: the place of the expression, for messages.

    Raises `ConfigError` with the position where the expression cannot be read.

    >>> [found] = parse_claim("fedavgm - fedavg > 20 points where alpha <= 0.05")
    >>> [(term.factor, term.method) for term in found.terms], found.sign, found.bound, found.where[0].value
    ([(1, 'fedavgm'), (-1, 'fedavg')], '>', 0.2, 0.05)
    >>> parse_claim("fedavgm > fedavg where", "claim 1")
    Traceback (most recent call last):
    fedlens.core.errors.ConfigError: expected a dimension, found the end (claim 1, character 23); write ...
    """
    return _Parser(text, where).claim()


def dimension_of(condition: Condition, dimensions: Mapping[str, str]) -> str:
    """The key of a condition's dimension, which the expression names by its key, the end of it, or its label.

    Raises `LookupError` if there is none.

    >>> dimension_of(Condition("alpha", "=", 0.1, 0), {"data.partition.alpha": "Dirichlet parameter"})
    'data.partition.alpha'
    """
    name = condition.dimension
    for key, label in dimensions.items():
        if name in (key, label) or key.endswith(f".{name}"):
            return key
    raise LookupError(f"no dimension '{name}'")


def refuse_unknown_names(comparisons: Sequence[ClaimComparison], info: StudyInfo, where: str) -> None:
    """Raises `ConfigError` if an expression names a method, a dimension or a value that the study does not have.

    Args:
        where: the place of the expression, for messages.
    """

    def refuse(kind: str, name: str, known: Iterable[str], place: int) -> None:
        known = list(known)
        if name not in known:
            raise ConfigError(
                f"unknown {kind} '{name}'", where=f"{where}, character {place + 1}", hint=nearest(name, known)
            )

    for comparison in comparisons:
        for cell in comparison.cells:
            refuse("method", cell.method, info.methods, cell.place)
        for one in (*comparison.where, *(each for cell in comparison.cells for each in cell.fixed)):
            try:
                key = dimension_of(one, info.dimensions)
            except LookupError:
                refuse("dimension", one.dimension, {*info.dimensions, *info.dimensions.values()}, one.place)
            values = [case[key] for case in info.cases if key in case]
            if one.sign not in _ORDER and not any(replace(one, sign="=").holds(value) for value in values):
                refuse(f"value of '{one.dimension}'", setting(one.value), map(setting, values), one.place)


class _Parser:
    """Reads an expression from left to right; a method for each rule of the grammar."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._next = text, where, 0
        self._tokens = [(found[0], found.start()) for found in TOKEN.finditer(text)] + [("", len(text))]

    def claim(self) -> list[ClaimComparison]:
        """COMPARISONS {and COMPARISONS} [where CONDITIONS]"""
        found = [*self._comparisons()]
        while self._take("and"):
            found += self._comparisons()
        where = self._conditions("=", "!=", *_ORDER) if self._take("where") else ()
        self._need("'and', 'where' or the end", "")
        return [replace(each, where=where) for each in found]

    def _comparisons(self) -> Iterator[ClaimComparison]:
        """SUM SIGN SUM {SIGN SUM}"""
        sums, places, signs = [], [], []
        while not signs or signs[-1]:
            places.append(self._place)
            sums.append(self._sum())
            signs.append(self._take(*_ORDER) if signs else self._need("a comparison", *_ORDER))
        places.append(self._place)
        between = len([terms for terms, _ in sums if terms]) == 1  # the same number, between two others
        for k, ((terms, number), (others, other)) in enumerate(pairwise(sums)):
            text = self._text[places[0] : places[-1]] if between else self._text[places[k] : places[k + 2]]
            text = text.strip().rstrip("<=> ")
            if terms:
                negative = [replace(term, factor=-term.factor) for term in others]
                yield ClaimComparison([*terms, *negative], signs[k], other - number, text)
            elif others:
                yield ClaimComparison(others, _MIRRORED[signs[k]], number - other, text)
            else:
                raise self.error("a comparison needs a method", places[k])

    def _sum(self) -> tuple[list[CellTerm], float]:
        """[-] TERM {+ TERM | - TERM}, with TERM: NUMBER [points | %], CELL, or CELL / CELL"""
        terms, total, sign = [], 0.0, self._take("-") or "+"
        while sign:
            factor, number = (-1 if sign == "-" else 1), self._number()
            if number is not None:
                total += factor * number / (100 if self._take("points", "point", "%") else 1)
            else:
                cell, over = self._cell(), self._cell() if self._take("/") else None
                terms.append(replace(cell, factor=factor, over=over))
            sign = self._take("+", "-")
        return terms, total

    def _cell(self) -> CellTerm:
        """METHOD [(CONDITIONS)]"""
        place, method, fixed = self._place, self._word("a method or a number"), []
        if self._take("("):
            fixed = self._conditions("=")
            self._need("',' or ')'", ")")
        metrics = [str(each.value) for each in fixed if each.dimension == "metric"]
        fixed = [each for each in fixed if each.dimension != "metric"]
        return CellTerm(method, place, fixed, metrics[0] if metrics else None)

    def _conditions(self, *signs: str) -> list[Condition]:
        """DIMENSION SIGN VALUE {, DIMENSION SIGN VALUE}"""
        found: list[Condition] = []
        while not found or self._take(","):
            place, dimension = self._place, self._word("a dimension")
            sign, number = self._need(" or ".join(signs), *signs), self._number()
            if number is None and sign in _ORDER:
                raise self.error(f"'{sign}' needs a number")
            value = self._word("a value") if number is None else number
            found.append(Condition(dimension, sign, value, place))
        return found

    @property
    def _place(self) -> int:
        return self._tokens[self._next][1]

    def _take(self, *wanted: str) -> str:
        """The next token if it is one of these, and else ""."""
        token = self._tokens[self._next][0]
        self._next += token != "" and token in wanted
        return token if token in wanted else ""

    def _need(self, what: str, *wanted: str) -> str:
        token = self._tokens[self._next][0]
        if token not in wanted:
            raise self.error(f"expected {what}, found {repr(token) if token else 'the end'}")
        return self._take(*wanted)

    def _word(self, what: str) -> str:
        token = self._tokens[self._next][0]
        is_word = token[:1] == '"' or (token[:1].isalpha() and token not in ("and", "where"))
        return self._need(what, *[token] * is_word).strip('"')

    def _number(self) -> float | None:
        token = self._tokens[self._next][0]
        return float(self._take(token)) if token[:1].isdigit() else None

    def error(self, what: str, place: int | None = None) -> ConfigError:
        """The error at the next token, or at `place`."""
        at = self._place if place is None else place
        return ConfigError(what, where=f"{self._where}, character {at + 1}", hint=_FORM)
