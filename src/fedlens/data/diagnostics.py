"""Collects all problems of a dataset, so that they are reported together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from fedlens.base.errors import DataError

OnError = Literal["stop", "skip"]
Result = TypeVar("Result")
_SHOWN = 5  # lines of an error, and findings of one kind that get a line each
_NOTED = 20  # of what was skipped


@dataclass(frozen=True)
class Finding:
    """One problem: where (file, and line or id), what is wrong, and how to fix it.

    `example` is true if leaving out one example (or box) solves the problem, false if it affects the whole set. `alike`
    is true if two names may be meant to be one: such a warning is said before others.

    >>> print(Finding("a.png", "the file is empty", "copy it again"))
    a.png: the file is empty; copy it again.
    """

    where: str
    what: str
    hint: str | None = None
    example: bool = True
    alike: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}{f'; {self.hint}' if self.hint else ''}."


@dataclass
class Findings:
    """The problems and warnings that a reader adds to while it continues reading.

    A problem stops a run (`settle`). A warning does not: it is likely a mistake, or needs the user's attention.
    The length and the iteration are those of the problems.

    Args:
        remedy: the hint for every problem, in place of its own: files that were published are fetched again, not
            corrected.

    >>> findings = Findings()
    >>> findings.add("a.png", "the file is empty", "copy it again")
    >>> len(findings), bool(Findings())
    (1, False)
    """

    found: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    remedy: str | None = None

    def add(self, where: object, what: str, hint: str | None = None, *, example: bool = True) -> None:
        """Adds a problem; the reader continues without the faulty part."""
        own = hint if self.remedy is None else None
        self.found.append(Finding(shortened(str(where)), shortened(what), own, example))

    def add_whole(self, where: object, what: str, hint: str | None = None) -> None:
        """Adds a problem of the whole set, which no skipping solves."""
        self.add(where, what, hint, example=False)

    def warn(self, where: object, what: str, hint: str | None = None, *, alike: bool = False) -> None:
        """Adds a warning about the whole set."""
        self.warnings.append(Finding(shortened(str(where)), shortened(what), hint, False, alike))

    def attempt(self, read: Callable[..., Result], *args: object, example: bool = True) -> Result | None:
        """`read(*args)`; None if it raises `DataError`, which is added as a problem."""
        try:
            return read(*args)
        except DataError as error:
            self.add(error.where, error.what, error.hint, example=example)
            return None

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def settle(self, on_error: OnError | None, *, advice: str | None = None) -> tuple[str, ...]:
        """Raises `DataError` if there are findings to stop at, else returns notes on what was skipped.

        With `on_error` "skip", findings of single examples become notes: the first 20, and a count of the others.
        Findings of the whole set always stop. So does every finding with "stop", or with None, which is for
        readers without this setting. The error lists the first findings, those of the whole set before those of
        examples, in one line where more than five are of one kind, and counts the others. `advice` tells the user
        how to see all of them.
        """
        whole = [finding for finding in self.found if not finding.example]
        stopping = unique(whole + ([f for f in self.found if f.example] if on_error != "skip" else []))
        if not stopping:
            notes = [f"skipped {finding}" for finding in self.found[:_NOTED]]
            more = len(self.found) - len(notes)
            return (*notes, f"skipped {more:,} more; {len(self.found):,} in all") if more else tuple(notes)
        first, *others = stopping
        skip = _SKIP if on_error == "stop" and not whole else None
        if not others:
            hint = "; ".join(filter(None, [first.hint or self.remedy, skip]))
            raise DataError(first.what, where=first.where, hint=hint or None)
        summary = summarized(stopping)
        lines = [f"{len(stopping):,} problems in the data", *(f"  {line}" for line, _ in summary[:_SHOWN])]
        if len(summary) > _SHOWN:
            lines.append(f"  And {sum(count for _, count in summary[_SHOWN:]):,} more")
        raise DataError("\n".join(lines), hint="; ".join(filter(None, [advice or self.remedy, skip])) or None)


def unique(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without those that repeat an earlier one: a table may be listed and be read, too."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.where, finding.what), finding)
    return list(first.values())


def by_kind(findings: Iterable[Finding]) -> list[list[Finding]]:
    """The findings in groups of one kind, in the order of their first ones.

    Two are of one kind if their sentences differ in numbers and quoted names alone.

    >>> found = [Finding(f"t.csv, line {at}", f"the file '{at}.png' does not exist") for at in range(3)]
    >>> [len(group) for group in by_kind([*found, Finding("a.png", "the file is empty")])]
    [3, 1]
    """
    groups: dict[tuple[str, str, bool], list[Finding]] = {}
    for finding in findings:
        what, hint = (_VARIABLE.sub("*", text or "") for text in (finding.what, finding.hint))
        groups.setdefault((what, hint.partition("*")[0], finding.example), []).append(finding)
    return list(groups.values())


def summarized(findings: Iterable[Finding]) -> list[tuple[str, int]]:
    """(line, number of findings in it): a line for each finding, but one for all of a kind if these are more than five.

    >>> summarized([Finding(f"{at}.png", "the file is empty", "copy it again") for at in range(7)])
    [('0.png: the file is empty; copy it again. 6 more of this kind.', 7)]
    """
    lines: list[tuple[str, int]] = []
    for group in by_kind(findings):
        if len(group) > _SHOWN:
            lines.append((f"{group[0]} {len(group) - 1:,} more of this kind.", len(group)))
        else:
            lines += [(str(finding), 1) for finding in group]
    return lines


def shortened(text: str, most: int = 1000) -> str:
    """A text with its middle left out if it has more than `most` characters, as a damaged file may contain any.

    >>> shortened("a" * 50, most=10)
    'aaaaa[...40 characters...]aaaaa'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}[...{len(text) - 2 * half:,} characters...]{text[-half:]}"


# Quoted names, which may contain apostrophes, and numbers.
_VARIABLE = re.compile(r"'.*?'(?![^\W_])|-?\d[\d,.]*")
_SKIP = 'or leave them out with data.dataset.on_error = "skip"'
