"""Rounds of several candidates, in turn and in one run, so that a noisy machine hurts all alike."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from fedlens.core.errors import FedlensError

Kind = Literal["limit", "by hand", "fedlens", "peer"]
Choice = TypeVar("Choice")
_TRIALS = 25  # of a choice, at most
_TURN, _MOST = 0.5, 1000  # seconds and rounds


class Candidate(Protocol):
    """Something that trains rounds of a workload."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What the files say of it, such as its versions."""
        ...

    def round(self) -> float:
        """One round; its seconds."""
        ...

    def close(self) -> None:
        """Ends what was started for it."""
        ...


@dataclass
class Measurement:
    """A candidate and what came of it: the seconds of every turn, or why there are none.

    `start_up` is the time from its start to the end of its first round, and `first_round` that round alone, which
    fills caches and is not counted among `seconds`. `about` is what else the files say of it, such as its arrangement,
    and what the candidate itself has as `about`.
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
        """Whether it took all its turns."""
        return self.reason is None


def take_turns(
    measurements: Sequence[Measurement],
    turns: int,
    budget: float | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Starts all, takes a round of each to warm up, and then `turns` turns of half a second or one round each, in an
    order drawn anew for every turn.

    With a `budget` in seconds no turn is begun after it, but one is always taken. A candidate that fails is out, its
    measurement says why, and the others go on.
    """
    candidates: dict[int, Candidate] = {}  # by the measurement's place: two may have one name
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
    """Whatever is raised inside is the measurement's reason for having run no further."""
    try:
        yield
    except Exception as error:
        told = str(error) if isinstance(error, FedlensError) else f"{type(error).__name__}: {error}"
        measurement.reason = " ".join(told.split()).removesuffix(":").removesuffix(".")
        measurement.seconds.clear()


def _turn(candidate: Candidate) -> float:
    """Seconds of a round: the mean of as many as take half a second, and of one at least.

    A single short round would be one in caches that others have filled, which no run is.
    """
    took = [candidate.round()]
    while sum(took) < _TURN and len(took) < _MOST:
        took.append(candidate.round())
    return sum(took) / len(took)


def _end(candidate: Candidate) -> None:
    with suppress(Exception):  # what it measured stands
        candidate.close()


def fastest(choices: Sequence[Choice], start: Callable[[Choice], Candidate], seconds: float = 8.0) -> Choice:
    """The choice with the shortest round, of rounds taken in turn, for about `seconds` of each, after one to warm up.

    Shortest, since what else goes on makes a round longer and never shorter. A choice that fails is not taken; where
    all fail it is the first, which will say why when it has its turn.
    """
    if len(choices) == 1:
        return choices[0]
    measurements = [
        Measurement(str(number), "fedlens", partial(start, choice)) for number, choice in enumerate(choices)
    ]
    take_turns(measurements, _TRIALS, budget=seconds * len(choices))
    shortest = [min(measurement.seconds, default=math.inf) for measurement in measurements]
    return choices[shortest.index(min(shortest))]
