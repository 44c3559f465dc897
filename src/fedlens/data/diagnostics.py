"""What is wrong with data, one finding after the other, so that a person hears of all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fedlens.core.errors import DataError

OnError = Literal["stop", "skip"]
_SHOWN = 5  # of an error
_NOTED = 20  # of what was skipped


@dataclass(frozen=True)
class Finding:
    """One fault: where (a file, and the line or the id in it), what is wrong, and what to do about it.

    `example` says that leaving one example (or box) out would do; otherwise the whole set is at fault.

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
    """Collects findings while a reader goes on reading.

    >>> findings = Findings()
    >>> findings.add("a.png", "the file is empty", "copy it again")
    >>> len(findings), bool(Findings())
    (1, False)
    """

    found: list[Finding] = field(default_factory=list)

    def add(self, where: object, what: str, hint: str | None = None, *, example: bool = True) -> None:
        """Notes a fault; the reader goes on without what is at fault."""
        self.found.append(Finding(str(where), what, hint, example))

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def settle(self, on_error: OnError | None, *, advice: str | None = None) -> tuple[str, ...]:
        """After reading: nothing where there is nothing, else an error, or sentences on what was skipped: the first
        20, and how many more there are.

        Raises `DataError` with the first findings (those of the whole set before those of examples) and the number
        of the rest, unless `on_error` is "skip" and leaving examples out mends it. None stops too, and is for
        readers that have no such setting. `advice` is what a person can do to see them all.
        """
        whole = [finding for finding in self.found if not finding.example]
        stopping = whole + ([f for f in self.found if f.example] if on_error != "skip" else [])
        if not stopping:
            told = [f"skipped {finding}" for finding in self.found[:_NOTED]]
            rest = len(self.found) - len(told)
            return (*told, f"skipped {rest:,} more; {len(self.found):,} in all") if rest else tuple(told)
        first, *others = stopping
        skip = _SKIP if on_error == "stop" and not whole else None
        if not others:
            hint = "; ".join(filter(None, [first.hint, skip]))
            raise DataError(first.what, where=first.where, hint=hint or None)
        lines = [f"{len(stopping)} things are wrong", *(f"  {finding}" for finding in stopping[:_SHOWN])]
        if len(stopping) > _SHOWN:
            lines.append(f"  And {len(stopping) - _SHOWN} more")
        raise DataError("\n".join(lines), hint="; ".join(filter(None, [advice, skip])) or None)


_SKIP = 'or leave them out with data.dataset.on_error = "skip"'
