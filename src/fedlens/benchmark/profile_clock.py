"""A clock that charges every moment to one part of a round."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

# Parts whose inner parts count as theirs: a rule's own forward passes are not those of training.
WHOLE = ("evaluation", "rule")


class Clock:
    """Seconds by part; `part` is a recorder of `fedlens.base.profiling`.

    A part inside another one stops the other's clock, so no moment counts twice.

    >>> clock = Clock()
    >>> with clock.part("outer"):
    ...     with clock.part("inner"):
    ...         pass
    >>> sorted(clock.seconds)
    ['inner', 'outer']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def part(self, name: str) -> Clock:
        """Begins a part, which the `with` statement around this call ends.

        One object serves all parts: a `contextmanager` for each would double what the clock adds to a step.
        """
        self._charge()
        self._open.append(self._open[-1] if self._open and self._open[-1] in WHOLE else name)
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()  # so that a part pays for the work it launched
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
