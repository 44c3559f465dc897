"""The expressions of claims, such as "fedavgm - fedavg > 20 points where alpha <= 0.05", and their parser."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.format import setting

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
