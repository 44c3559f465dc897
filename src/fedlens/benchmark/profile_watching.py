"""An engine and an algorithm as the clock sees them: the same work, its time counted on either side of the seam."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedlens.algorithms.client_evaluation import OP as EVALUATE_OWN
from fedlens.benchmark.profile_clock import Clock
from fedlens.benchmark.profile_seams import Watch
from fedlens.core.protocol import Answer, Answers, Ask, Call, Client, Engine, Failure, Op, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.engines.inline import Inline

TIMED = "timed "  # before the name of an operation that tells what it took
_MARK, _PROCESS = "profile:", "profile:process"
_END: Any = object()


@dataclass(frozen=True)
class Timed:
    """An operation that counts its own time where the clock of the driver does not reach: in another process.

    What it took travels with the reply's metrics, and `Watched` takes it out of them.
    """

    op: Any
    part: str  # what is no part of its own counts as this
    driver: int  # the driver's process

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        if os.getpid() == self.driver:
            return Outcome(*self.op(payload, client, rng))
        found, spent = self._counted(lambda: self.op(payload, client, rng))
        outcome = Outcome(*found)
        return outcome._replace(metrics={**outcome.metrics, **spent})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "op":
            raise AttributeError(name)
        found = getattr(self.op, name)
        return partial(self._together, found) if name == "together" else found

    def _together(
        self, together: Callable[[Any], list[Outcome | Exception]], calls: list[Call]
    ) -> list[Outcome | Exception]:
        if os.getpid() == self.driver:
            return together(calls)
        found: list[Outcome | Exception]
        found, spent = self._counted(lambda: together(calls))
        for at, outcome in enumerate(found):
            if not isinstance(outcome, Exception):
                found[at] = outcome._replace(metrics={**outcome.metrics, **spent})
                break
        return found

    def _counted(self, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        watch = _watch(self.op)
        watch.clock.seconds.clear()
        with watch, watch.clock.part(self.part):
            found = work()
        spent = {_MARK + part: seconds for part, seconds in watch.clock.seconds.items()}
        return found, {**spent, _PROCESS: float(os.getpid())}


_WATCHES: dict[int, tuple[Any, Watch]] = {}


def _watch(op: Any) -> Watch:
    """The one of this operation, made once a process: making it takes longer than a small client."""
    if id(op) not in _WATCHES:
        _WATCHES[id(op)] = op, Watch(Clock(), [op])
    return _WATCHES[id(op)][1]


def timed_ops(ops: Mapping[str, Op]) -> dict[str, Op]:
    """The operations, and each a second time, under another name, with a clock."""
    here = os.getpid()
    measuring = ("evaluate", EVALUATE_OWN)
    return {
        **ops,
        **{
            TIMED + name: Timed(op, "evaluation" if name in measuring else "client.loop", here)
            for name, op in ops.items()
        },
    }


@dataclass
class Watched:
    """An engine, as a gate uses it. With a `clock` it asks for the timed operations.

    Attributes:
        workers: seconds by part inside of operations that ran in other processes.
        processes: the processes that they ran in.
        asked: the last ask of a round.
    """

    engine: Engine
    clock: Clock | None = None
    workers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    processes: set[int] = field(default_factory=set)
    asked: Ask | None = None

    def open(self, program: Any, states: Any) -> None:
        """Opens the engine."""
        self.engine.open(program, states)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()

    @property
    def part(self) -> str:
        """What the engine's own time is: work on the clients where it does it itself, else waiting for who does."""
        return "client.reply" if isinstance(chosen(self.engine), Inline) else "waiting"

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask."""
        self.asked = ask
        if self.clock is None:
            return self.engine.answer(ask, round, exchange)
        with self.clock.part(self.part):
            answers = self.engine.answer(replace(ask, op=TIMED + ask.op), round, exchange)
        return self._timed(answers, self.clock)

    def _timed(self, answers: Generator[Answer, None, None], clock: Clock) -> Generator[Answer, None, None]:
        part = self.part
        try:
            while True:
                with clock.part(part):
                    answer = next(answers, _END)
                if answer is _END:
                    return
                self._take(answer)
                yield answer
        finally:
            answers.close()

    def _take(self, answer: Answer) -> None:
        """Takes what an operation says of its own time out of its reply."""
        if isinstance(answer, Failure):
            return
        for name in [name for name in answer.metrics if name.startswith(_MARK)]:
            value = answer.metrics.pop(name)
            if name == _PROCESS:
                self.processes.add(int(value))
            else:
                self.workers[name.removeprefix(_MARK)] += value


def chosen(engine: Any) -> Any:
    """The engine itself, where one has chosen another."""
    return getattr(engine, "chosen", engine)


def timed_exchange(
    clock: Clock, part: str, steps: Generator[Ask, Answers, Any]
) -> Generator[Ask, Answers, Any]:
    """An algorithm's round or evaluation: what it does between its asks and their answers is counted as `part`."""
    sent: Any = None
    try:
        while True:
            with clock.part(part):
                try:
                    ask = steps.send(sent)
                except StopIteration as stop:
                    return stop.value
            sent = yield ask
    finally:
        steps.close()


def tops(seconds: Mapping[str, float], known: Iterable[str]) -> dict[str, float]:
    """The seconds of each part, its shares added up, in the order of `known`."""
    found = dict.fromkeys(known, 0.0)
    for name, value in seconds.items():
        found[name.partition(".")[0]] += value
    return found
