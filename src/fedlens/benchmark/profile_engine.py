"""An engine whose operations report the time of their parts from the workers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedlens.algorithms.client_evaluation import OP as EVALUATE_OWN
from fedlens.benchmark.profile_clock import Clock
from fedlens.core.profiling import recording
from fedlens.core.protocol import (
    Answer,
    Ask,
    Call,
    Client,
    ClientStates,
    Engine,
    Failure,
    Op,
    Outcome,
    Payload,
    Program,
)
from fedlens.core.random import Rng

TIMED = "timed "  # prefix of the name of an operation that reports its time
_METRIC, _PROCESS = "profile:", "profile:process"


@dataclass(frozen=True)
class TimedOp:
    """An operation that adds the seconds of its parts to the reply's metrics; `TimedEngine` takes them out again.

    In the driver's process it does nothing: the driver's own clock runs there.
    """

    op: Any
    part: str  # charged with what belongs to no inner part
    driver: int  # the driver's process

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        outcomes = self._timed(lambda: [Outcome(*self.op(payload, client, rng))])
        assert isinstance(outcomes[0], Outcome)
        return outcomes[0]

    def __getattr__(self, name: str) -> Any:
        # `obstacle` is asked of the operation itself, which is part of the program too.
        if name.startswith("__") or name in ("op", "obstacle"):
            raise AttributeError(name)
        value = getattr(self.op, name)
        return self._together if name == "together" else value

    def _together(self, calls: list[Call]) -> list[Outcome | Exception]:
        return self._timed(lambda: self.op.together(calls))

    def _timed(self, work: Callable[[], list[Outcome | Exception]]) -> list[Outcome | Exception]:
        if os.getpid() == self.driver:
            return work()
        clock = Clock()
        with recording(clock.part), clock.part(self.part):
            outcomes = work()
        spent = {_METRIC + part: seconds for part, seconds in clock.seconds.items()}
        spent[_PROCESS] = float(os.getpid())
        for at, outcome in enumerate(outcomes):
            if not isinstance(outcome, Exception):
                outcomes[at] = outcome._replace(metrics={**outcome.metrics, **spent})
                break
        return outcomes


def timed_ops(ops: Mapping[str, Op]) -> dict[str, Op]:
    """The operations, and each a second time with `TIMED` before its name."""
    evaluating = ("evaluate", EVALUATE_OWN)
    timed = {
        TIMED + name: TimedOp(op, "evaluation" if name in evaluating else "client", os.getpid())
        for name, op in ops.items()
    }
    return {**ops, **timed}


@dataclass
class TimedEngine:
    """An engine that is asked for the timed operations while `timing` is set.

    Attributes:
        workers: seconds by part inside operations that ran in other processes.
        processes: the ids of these processes.
        asked: the last ask.
    """

    engine: Engine
    timing: bool = False
    workers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    processes: set[int] = field(default_factory=set)
    asked: Ask | None = None

    def open(self, program: Program, states: ClientStates) -> None:
        """Opens the engine."""
        self.engine.open(program, states)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask."""
        self.asked = ask
        if not self.timing:
            return self.engine.answer(ask, round, exchange)
        return self._stripped(self.engine.answer(replace(ask, op=TIMED + ask.op), round, exchange))

    def _stripped(self, answers: Generator[Answer, None, None]) -> Generator[Answer, None, None]:
        try:
            for answer in answers:
                if not isinstance(answer, Failure):
                    self._take(answer.metrics)
                yield answer
        finally:
            answers.close()

    def _take(self, metrics: dict[str, float]) -> None:
        """Moves the times out of a reply's metrics."""
        for name in [name for name in metrics if name.startswith(_METRIC)]:
            value = metrics.pop(name)
            if name == _PROCESS:
                self.processes.add(int(value))
            else:
                self.workers[name.removeprefix(_METRIC)] += value
