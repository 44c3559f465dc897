"""A clock that asks at every moment which part of a round is going on."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

# Whatever goes on inside of these counts as theirs: a rule's own passes are not the training's.
WHOLE = ("evaluation", "rule")


class Clock:
    """Seconds by part. A part that begins inside another one stops the other's clock, so that nothing counts twice.

    A name such as `data.augmentation` is a share of the part `data`.

    >>> clock = Clock()
    >>> with clock.part("outer"):
    ...     with clock.part("inner"):
    ...         pass
    >>> sorted(clock.seconds), clock.calls["inner"]
    (['inner', 'outer'], 1)
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._since = 0.0

    def enter(self, part: str) -> None:
        """A part begins; `leave` ends it."""
        now = self._now()
        if self._inside:
            outer = self._inside[-1]
            self.seconds[outer] += now - self._since
            if outer in WHOLE:
                part = outer
        self._inside.append(part)
        self.calls[part] += 1
        self._since = now

    def leave(self) -> None:
        """The part that began last ends."""
        now = self._now()
        self.seconds[self._inside.pop()] += now - self._since
        self._since = now

    def within(self, part: str) -> bool:
        """Whether what is going on is this part already, or counts as a whole whatever is in it."""
        return bool(self._inside) and (self._inside[-1] == part or self._inside[-1] in WHOLE)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time inside is this part's."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    @staticmethod
    def _now() -> float:
        if on_gpu():
            torch.cuda.synchronize()  # what was launched in a part is the part's
        return time.perf_counter()


def on_gpu() -> bool:
    """Whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


def timed(clock: Clock, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its time counted; once, where it calls itself."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if clock.within(part):
            return function(*given, **named)
        clock.enter(part)
        try:
            return function(*given, **named)
        finally:
            clock.leave()

    return call


def timed_steps(clock: Clock, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes an iterator: each of its steps is counted."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Iterator[Any]:
        step = timed(clock, part, function(*given, **named).__next__)
        while True:
            try:
                item = step()
            except StopIteration:
                return
            yield item

    return call


def timed_maker(clock: Clock, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a function: both are counted."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return timed(clock, part, timed(clock, part, function)(*given, **named))

    return call
