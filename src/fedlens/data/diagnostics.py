"""Collects all problems of a dataset, so that they are reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from fedlens.core.errors import DataError

OnError = Literal["stop", "skip"]
Result = TypeVar("Result")
_SHOWN = 5  # of an error
_NOTED = 20  # of what was skipped


@dataclass(frozen=True)
class Finding:
    """One problem: where (file, and line or id), what is wrong, and how to fix it.

    `example` is true if leaving out one example (or box) solves the problem, false if it affects the whole set.

    >>> print(Finding("a.png", "the file is empty", "copy it again"))
    a.png: the file is empty; copy it again.
    """

    where: str
    what: str
    hint: str | None = None
    example: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}{f'; {self.hint}' if self.hint else ''}."


@dataclass
class Findings:
    """The problems and warnings that a reader adds to while it continues reading.

    A problem stops a run (`settle`). A warning does not: it is likely a mistake, or needs the user's attention.
    The length and the iteration are those of the problems.

    >>> findings = Findings()
    >>> findings.add("a.png", "the file is empty", "copy it again")
    >>> len(findings), bool(Findings())
    (1, False)
    """

    found: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def add(self, where: object, what: str, hint: str | None = None, *, example: bool = True) -> None:
        """Adds a problem; the reader continues without the faulty part."""
        self.found.append(Finding(str(where), shortened(what), hint, example))

    def add_whole(self, where: object, what: str, hint: str | None = None) -> None:
        """Adds a problem of the whole set, which no skipping solves."""
        self.add(where, what, hint, example=False)

    def warn(self, where: object, what: str, hint: str | None = None) -> None:
        """Adds a warning about the whole set."""
        self.warnings.append(Finding(str(where), shortened(what), hint, example=False))

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
        examples, and counts the others. `advice` tells the user how to see all of them.
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
            hint = "; ".join(filter(None, [first.hint, skip]))
            raise DataError(first.what, where=first.where, hint=hint or None)
        lines = [f"{len(stopping)} problems in the data", *(f"  {finding}" for finding in stopping[:_SHOWN])]
        if len(stopping) > _SHOWN:
            lines.append(f"  And {len(stopping) - _SHOWN} more")
        raise DataError("\n".join(lines), hint="; ".join(filter(None, [advice, skip])) or None)


def unique(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without those that repeat an earlier one: a table may be listed and be read, too."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.where, finding.what), finding)
    return list(first.values())


def shortened(text: str, most: int = 1000) -> str:
    """A text with its middle left out if it has more than `most` characters, as a damaged file may contain any.

    >>> shortened("a" * 50, most=10)
    'aaaaa[...40 characters...]aaaaa'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}[...{len(text) - 2 * half:,} characters...]{text[-half:]}"


_SKIP = 'or leave them out with data.dataset.on_error = "skip"'
