"""The progress of a phase of a run: requests answered, and local steps taken here. No import of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

Phase = Literal["training", "evaluating"]


@dataclass(eq=False)
class StepCount:
    """Counts the local steps that one process takes, so that another thread can read how far a client is.

    An engine that trains in this process puts it into the operations' `scratch`, under its class.

    Attributes:
        clients: clients begun so far.
        together: the clients that train at the moment: one, or a group computed at once.
        steps: the steps that they take.
        done: the steps that they have taken.

    >>> count = StepCount()
    >>> count.begin(steps=4)
    >>> count.done += 1
    >>> count.finished
    0.25
    """

    clients: int = 0
    together: int = 0
    steps: int = 0
    done: int = 0

    def begin(self, steps: int, clients: int = 1) -> None:
        """Notes that these clients begin to train, with so many steps."""
        self.done, self.steps, self.together = 0, steps, clients
        self.clients += clients

    @property
    def finished(self) -> float:
        """How many clients have finished; the current ones count in proportion to their steps."""
        part = min(1.0, self.done / self.steps) if self.steps else 0.0
        return self.clients - self.together * (1.0 - part)


def steps_of(scratch: Mapping[Any, Any]) -> StepCount:
    """The count of the process with this `scratch`; an unused one if the engine keeps none."""
    count: StepCount | None = scratch.get(StepCount)
    return StepCount() if count is None else count


@dataclass(eq=False)
class Work:
    """One phase of a run in progress: the training of a round, or its evaluation.

    The driver updates it as answers arrive. Another thread may read it at any time.

    Attributes:
        phase: what is being done.
        round, rounds: the round, and the last one of the run.
        evaluations: how often the whole run evaluates.
        asked: requests of the current exchange.
        answered: how many of them are answered, failures included.
        exchanges: exchanges begun in this phase; an algorithm may need several.
        began: when the phase began, in seconds of `clock`.
        weigh: the expected work of each client of an exchange; by default the same for all.
        count: the steps taken in this process; None where the engine counts none.
        tell: called after each answer.
    """

    phase: Phase = "training"
    round: int = 0
    rounds: int = 0
    evaluations: int = 0
    weigh: Callable[[Sequence[Any]], Sequence[float]] | None = None
    count: Callable[[], StepCount | None] = lambda: None
    tell: Callable[[Work], None] = lambda work: None
    clock: Callable[[], float] = time.monotonic
    asked: int = 0
    answered: int = 0
    exchanges: int = 0
    began: float = field(init=False)
    _ends: list[float] = field(default_factory=list, init=False)  # the summed weights up to each request
    _begun: float = field(default=0.0, init=False)  # clients that the count had finished before the exchange

    def __post_init__(self) -> None:
        self.began = self.clock()

    def ask(self, clients: Sequence[Any]) -> None:
        """Notes that a request goes to each of these clients."""
        count = self.count()
        self._begun = 0.0 if count is None else float(count.clients)
        self._ends = [] if self.weigh is None else list(accumulate(self.weigh(clients)))
        self.asked, self.answered, self.exchanges = len(clients), 0, self.exchanges + 1
        self.tell(self)

    def answer(self) -> None:
        """Notes an answer."""
        self.answered += 1
        self.tell(self)

    @property
    def fraction(self) -> float:
        """The part of the current exchange that is done, from 0 to 1.

        >>> work = Work(weigh=lambda clients: [3.0, 1.0])
        >>> work.ask(["large", "small"])
        >>> work.answer()
        >>> work.fraction
        0.75
        """
        # Read once: `ask` replaces them in another thread.
        count, ends, asked = self.count(), self._ends, self.asked
        here = 0.0 if count is None else count.finished - self._begun
        at = min(max(float(self.answered), here), float(asked))
        if not ends or not ends[-1]:
            return at / asked if asked else 0.0
        done = min(int(at), len(ends))
        before = ends[done - 1] if done else 0.0
        after = ends[done] if done < len(ends) else before
        return (before + (at - done) * (after - before)) / ends[-1]
