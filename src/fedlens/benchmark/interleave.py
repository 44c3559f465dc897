"""Times rounds of several candidates in turn, so that noise of the machine affects all alike."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from fedlens.base.errors import FedlensError

Kind = Literal["limit", "by hand", "fedlens", "peer"]
Choice = TypeVar("Choice")
_TRIALS = 25  # turns of each choice, at most
_TURN, _MOST = 0.5, 1000  # seconds of a turn, and its rounds at most


class Candidate(Protocol):
    """Something that trains rounds of a workload."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts for the results file, such as versions."""
        ...

    def round(self) -> float:
        """Runs one round and returns its seconds."""
        ...

    def close(self) -> None:
        """Ends the processes that were started for it."""
        ...


@dataclass
class Measurement:
    """A candidate and its timings.

    Attributes:
        start: starts the candidate.
        about: facts for the results file, such as the arrangement; the candidate's own `about` is added.
        seconds: the mean seconds of a round in every turn; empty where the candidate failed.
        start_up: seconds from the start to the end of the first round.
        first_round: seconds of that round alone, which fills caches and is not among `seconds`.
        reason: why the candidate failed.
    """

    name: str
    kind: Kind
    start: Callable[[], Candidate]
    about: Mapping[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    start_up: float = 0.0
    reason: str | None = None
    first_round: float | None = None

    @property
    def ran(self) -> bool:
        """Whether it took all its turns so far."""
        return self.reason is None


def take_turns(
    measurements: Sequence[Measurement],
    turns: int,
    budget: float | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Times all candidates in turn: a round of each to warm up, then `turns` turns of half a second or one round.

    The order is drawn anew for every turn. After `budget` seconds no further turn begins, but one is always taken. A
    candidate that fails takes no further part; its measurement has the reason.
    """
    candidates: dict[int, Candidate] = {}  # by the index of the measurement: two may have the same name
    with ExitStack() as ends:
        for place, measurement in enumerate(measurements):
            say(f"starting {measurement.name}")
            began = time.perf_counter()
            with failure_recorded(measurement):
                candidates[place] = candidate = measurement.start()
                ends.callback(_end, candidate)
                measurement.about = {**measurement.about, **candidate.about}
                measurement.first_round = candidate.round()
            measurement.start_up = time.perf_counter() - began
        began = time.perf_counter()
        for turn in range(turns):
            if turn and budget is not None and time.perf_counter() - began > budget:
                break
            say(f"turn {turn + 1} of {turns}")
            for place in random.Random(turn).sample(range(len(measurements)), len(measurements)):
                if measurements[place].ran:
                    with failure_recorded(measurements[place]):
                        measurements[place].seconds.append(_turn(candidates[place]))
        for place, candidate in candidates.items():  # an engine may choose during the run
            measurements[place].about = {**measurements[place].about, **candidate.about}


@contextmanager
def failure_recorded(measurement: Measurement) -> Iterator[None]:
    """Records an exception as the reason why the measurement failed."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, FedlensError) else f"{type(error).__name__}: {error}"
        measurement.reason = " ".join(text.split()).removesuffix(":").removesuffix(".")
        measurement.seconds.clear()


def _turn(candidate: Candidate) -> float:
    """Mean seconds of as many rounds as take half a second, at least one.

    A single short round would run with caches that other candidates have filled, unlike the rounds of a run.
    """
    took = [candidate.round()]
    while sum(took) < _TURN and len(took) < _MOST:
        took.append(candidate.round())
    return sum(took) / len(took)


def _end(candidate: Candidate) -> None:
    with suppress(Exception):  # its measurements are complete
        candidate.close()


def fastest(choices: Sequence[Choice], start: Callable[[Choice], Candidate], seconds: float = 8.0) -> Choice:
    """The choice with the shortest round, of rounds taken in turn for about `seconds` of each.

    The shortest round counts because other load makes rounds longer, never shorter. A choice that fails is not taken;
    where all fail, the first is returned, and its own measurement gives the reason.
    """
    if len(choices) == 1:
        return choices[0]
    measurements = [
        Measurement(str(number), "fedlens", partial(start, choice)) for number, choice in enumerate(choices)
    ]
    take_turns(measurements, _TRIALS, budget=seconds * len(choices))
    shortest = [min(measurement.seconds, default=math.inf) for measurement in measurements]
    return choices[shortest.index(min(shortest))]
