"""An engine whose operations report the time of their parts from the workers."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.algorithms.peer_evaluation import EVALUATE_PEER
from fedlens.base.profiling import recording
from fedlens.core.calls import StackedOutcomes
from fedlens.core.engine_base import BareEngine
from fedlens.core.protocol import Answer, Ask, BatchedOp, Call, Client, Failure, Op, Outcome, Payload, Program
from fedlens.core.random import Rng
from fedlens.core.schema import Bound

PARTS = (
    "data", "forward", "backward", "optimizer", "rule", "client", "client.check", "aggregate", "aggregate.server",
    "engine", "evaluation", "other",
)  # fmt: skip
TIMED = "timed "  # prefix of the name of an operation that reports its time
_METRIC = "profile:"  # prefix of the metrics that are seconds of a part
_PROCESS = "profile process"  # the metric that is the id of the process
_METRICS = {_PROCESS: Bound(0, integer=True), **{_METRIC + part: Bound(0) for part in PARTS}}
Result = TypeVar("Result")


@dataclass(frozen=True)
class TimedOp:
    """An operation that adds the seconds of its parts to the reply's metrics; `TimedEngine` takes them out again.

    Attributes:
        op: the operation.
        part: charged with the time outside all inner parts.
        driver: the id of the driver's process, whose own clock runs: this one reports nothing from there.
    """

    op: Op
    part: str
    driver: int

    def __call__(self, payload: Payload, client: Client, rng: Rng, /) -> Outcome:
        outcome, seconds = self.timed(lambda: Outcome(*self.op(payload, client, rng)), 1)
        return outcome._replace(metrics={**outcome.metrics, **seconds})

    def timed(self, work: Callable[[], Result], replies: int) -> tuple[Result, dict[str, float]]:
        """The result of `work`, and the seconds of its parts as metrics of each of its replies."""
        process = os.getpid()
        if process == self.driver:
            return work(), {}
        clock = Clock()
        with recording(clock.part), clock.part(self.part):
            result = work()
        return result, {
            _PROCESS: process,
            **{_METRIC + part: value / replies for part, value in clock.seconds.items()},
        }


@dataclass(frozen=True)
class TimedBatchedOp(TimedOp):
    """The same for an operation that can answer several calls at once: the replies share the seconds of all."""

    op: BatchedOp

    def together(self, calls: Sequence[Call], /) -> Sequence[Outcome | BaseException]:
        """The outcome of each call."""
        outcomes, shares = self.timed(lambda: self.op.together(calls), len(calls))
        if isinstance(outcomes, StackedOutcomes):
            columns = {name: [share] * (max(outcomes.rows) + 1) for name, share in shares.items()}
            return StackedOutcomes(outcomes.payload, {**outcomes.metrics, **columns}, outcomes.rows)
        return [
            outcome if isinstance(outcome, BaseException) else outcome._replace(metrics={**outcome.metrics, **shares})
            for outcome in outcomes
        ]  # fmt: skip

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The footprint of the operation."""
        return self.op.footprint(device, largest, data)

    def obstacle(self) -> None:
        """None: the operation itself is part of the program too, and reports its own."""


def with_timed_ops(program: Program) -> Program:
    """The program, with each operation a second time: it reports its time, and has `TIMED` before its name."""
    ops, driver = dict(program.ops), os.getpid()
    for name, op in program.ops.items():
        part = "evaluation" if name in ("evaluate", EVALUATE_OWN, EVALUATE_PEER) else "client"
        ops[TIMED + name] = (
            TimedBatchedOp(op, part, driver) if isinstance(op, BatchedOp) else TimedOp(op, part, driver)
        )
    return replace(program, ops=ops)


@dataclass
class TimedEngine(BareEngine):
    """An engine that runs the timed operations while `seconds` is set.

    Attributes:
        seconds: where the seconds of parts inside operations of other processes are added up; None without the clock.
        processes: the ids of these processes.
        asked: the last ask.
    """

    seconds: dict[str, float] | None = None
    processes: set[int] = field(default_factory=set)
    asked: Ask | None = None

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask."""
        self.asked = ask
        if self.seconds is None:
            return super().answer(ask, round, exchange)
        expect = replace(ask.expect, metrics={**ask.expect.metrics, **_METRICS})
        timed = replace(ask, op=TIMED + ask.op, expect=expect)
        return self._stripped(super().answer(timed, round, exchange), self.seconds)

    def _stripped(
        self, answers: Generator[Answer, None, None], seconds: dict[str, float]
    ) -> Generator[Answer, None, None]:
        """The answers, without the seconds in their metrics."""
        try:
            for answer in answers:
                if not isinstance(answer, Failure):
                    for name in [name for name in answer.metrics if name.startswith(_METRIC)]:
                        seconds[name.removeprefix(_METRIC)] += answer.metrics.pop(name)
                    if _PROCESS in answer.metrics:
                        self.processes.add(int(answer.metrics.pop(_PROCESS)))
                yield answer
        finally:
            answers.close()


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
