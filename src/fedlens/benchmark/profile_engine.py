"""An engine whose operations report the time of their parts from the workers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fedlens.algorithms.client_evaluation import OP as EVALUATE_OWN
from fedlens.benchmark.profile_clock import Clock
from fedlens.core.outcomes import StackedOutcomes
from fedlens.core.profiling import recording
from fedlens.core.protocol import (
    Answer,
    Ask,
    BatchedOp,
    Call,
    Client,
    ClientStates,
    Engine,
    Failure,
    Obstacle,
    Op,
    Outcome,
    Payload,
    Program,
    Trial,
)
from fedlens.core.random import Rng

TIMED = "timed "  # prefix of the name of an operation that reports its time
Result = TypeVar("Result")
_METRIC, _PROCESS = "profile:", "profile:process"


@dataclass(frozen=True)
class TimedOp:
    """An operation that adds the seconds of its parts to the reply's metrics; `TimedEngine` takes them out again.

    In the driver's process it does nothing: the driver's own clock runs there.
    """

    op: Op
    part: str  # charged with what belongs to no inner part
    driver: int  # the driver's process

    def __call__(self, payload: Payload, client: Client, rng: Rng, /) -> Outcome:
        outcome, spent = self.timed(lambda: Outcome(*self.op(payload, client, rng)))
        return outcome._replace(metrics={**outcome.metrics, **spent}) if spent else outcome

    def timed(self, work: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
        """The result, and the metrics with the time that it took; none in the driver's process."""
        if os.getpid() == self.driver:
            return work(), {}
        clock = Clock()
        with recording(clock.part), clock.part(self.part):
            result = work()
        spent = {_METRIC + part: seconds for part, seconds in clock.seconds.items()}
        return result, {**spent, _PROCESS: float(os.getpid())}


@dataclass(frozen=True)
class TimedBatchedOp(TimedOp):
    """The same for an operation that can answer several calls at once; the first reply carries the time of all."""

    op: BatchedOp

    def together(self, calls: Sequence[Call], /) -> Sequence[Outcome | Exception]:
        """The outcome of each call."""
        outcomes, spent = self.timed(lambda: self.op.together(calls))
        if not spent:
            return outcomes
        if isinstance(outcomes, StackedOutcomes):
            first, rows = outcomes.rows[0], range(max(outcomes.rows) + 1)
            columns = {
                name: [value if row == first else 0.0 for row in rows] for name, value in spent.items()
            }
            return StackedOutcomes(outcomes.payload, {**outcomes.metrics, **columns}, outcomes.rows)
        timed = list(outcomes)
        for at, outcome in enumerate(timed):
            if not isinstance(outcome, Exception):
                timed[at] = outcome._replace(metrics={**outcome.metrics, **spent})
                break
        return timed

    def obstacle(self) -> Obstacle | None:
        """None: the operation itself is part of the program too, and reports its own."""
        return None

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The operation's."""
        return self.op.footprint(device, largest, data)

    def trial(self, steps: int) -> Trial | None:
        """None: an engine is chosen by the operation itself."""
        return None


def timed_ops(ops: Mapping[str, Op]) -> dict[str, Op]:
    """The operations, and each a second time with `TIMED` before its name."""
    timed: dict[str, Op] = {}
    for name, op in ops.items():
        part = "evaluation" if name in ("evaluate", EVALUATE_OWN) else "client"
        if isinstance(op, BatchedOp):
            timed[TIMED + name] = TimedBatchedOp(op, part, os.getpid())
        else:
            timed[TIMED + name] = TimedOp(op, part, os.getpid())
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
                self.processes |= {int(value)} if value else set()  # 0 in the replies after a group's first
            else:
                self.workers[name.removeprefix(_METRIC)] += value
