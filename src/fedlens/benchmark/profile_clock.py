"""A clock that charges every moment to one part of a round."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

# Parts whose inner parts count as theirs: a rule's own forward passes are not those of training.
WHOLE = ("evaluation", "rule")


class Clock:
    """Seconds by part; `part` is a recorder of `fedlens.core.profiling`.

    A part inside another one stops the other's clock, so that nothing counts twice. `data.augmentation` is a share of
    the part `data`.

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

    def part(self, name: str) -> _Part:
        """A context whose time is charged to this part."""
        return _Part(self, name)

    def enter(self, name: str) -> None:
        """Begins a part."""
        self._charge()
        self._open.append(self._open[-1] if self._open and self._open[-1] in WHOLE else name)

    def leave(self) -> None:
        """Ends the part that began last."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()  # so that what a part launched is charged to it
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class _Part:
    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.clock.leave()


def by_part(seconds: Mapping[str, float], parts: Iterable[str]) -> dict[str, float]:
    """The seconds of each part, its shares added up, in the order of `parts`."""
    total = dict.fromkeys(parts, 0.0)
    for name, value in seconds.items():
        total[name.partition(".")[0]] += value
    return total
