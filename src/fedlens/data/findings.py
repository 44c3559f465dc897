"""What is wrong with data, one finding after the other, so that a person hears of all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fedlens.core.errors import DataError

OnError = Literal["stop", "skip"]
_SHOWN = 5


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

    def settle(self, on_error: OnError, *, advice: str | None = None) -> tuple[str, ...]:
        """After reading: nothing where there is nothing, else an error, or what was skipped in sentences.

        Raises `DataError` with the first findings and the number of the rest, where `on_error` is "stop" or a
        finding is of the whole set. `advice` is what a person can do to see them all.
        """
        stopping = [f for f in self.found if not f.example] or (self.found if on_error == "stop" else [])
        if not stopping:
            return tuple(f"skipped {finding}" for finding in self.found)
        first, *others = stopping
        if not others:
            hint = "; ".join(filter(None, [first.hint, _SKIP if first.example else None]))
            raise DataError(first.what, where=first.where, hint=hint or None)
        lines = [f"{len(stopping)} things are wrong", *(f"  {finding}" for finding in stopping[:_SHOWN])]
        if len(stopping) > _SHOWN:
            lines.append(f"  and {len(stopping) - _SHOWN} more")
        hint = "; ".join(filter(None, [advice, _SKIP if all(f.example for f in stopping) else None]))
        raise DataError("\n".join(lines) + "\n", hint=hint or None)


_SKIP = 'or leave them out with data.dataset.on_error = "skip"'
