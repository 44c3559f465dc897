"""Between algorithm and engine: each request answered once, states committed on acceptance, all of it counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedlens.core.errors import RunFailed
from fedlens.core.profiling import scope, scoped
from fedlens.core.protocol import (
    Answer,
    Answers,
    Ask,
    ClientId,
    ClientStates,
    Engine,
    Failure,
    Id,
    Reply,
)
from fedlens.core.schema import nbytes
from fedlens.core.states import Staging


@dataclass
class Tally:
    """What happened in a round, over the clients of the federation (what the server holds itself is left out)."""

    replies: int = 0
    failed: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    batches: dict[ClientId, int] = field(default_factory=lambda: defaultdict(int))
    per_client: list[dict[str, Any]] = field(default_factory=list)
    replied: set[ClientId] = field(default_factory=set)
    failures: dict[ClientId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def clients(self) -> int:
        """How many clients replied, each counted once however often it was asked.

        Where a round asks several times, one after the other, those that replied in the last: a client that was there
        for a gradient and not for training has not taken part, and a round in which nobody trained came to nothing.
        """
        return len(self.replied)

    @property
    def batches_max(self) -> int:
        """The batches of the client that did most."""
        return max(self.batches.values(), default=0)

    def asked(self, ask: Ask) -> None:
        """Counts what goes out."""
        if ask.order == "request":
            self.replied = set()
        shared = nbytes(ask.shared)
        for request in ask.requests:
            if not isinstance(request.client, str):
                self.bytes_down += shared + (nbytes(request.payload) if request.payload else 0)

    def accepted(self, reply: Reply) -> None:
        """Counts a reply that was folded; of what the server holds itself only work done on it counts, no bytes."""
        if not isinstance(reply.client, str):
            self.bytes_up += reply.nbytes
        elif "batches" not in reply.metrics:
            return
        self.replies += 1
        self.replied.add(reply.client)
        self.batches[reply.client] += int(reply.metrics.get("batches", 0))
        for name, value in reply.metrics.items():
            self.sums[name] += value
        self.per_client.append({"client": reply.client, "exchange": reply.id.exchange, **reply.metrics})

    def failure(self, client: ClientId, reason: str) -> None:
        """Counts what did not come or was not good."""
        self.failed += 1
        self.failures[client][reason] += 1

    def and_measuring(self, other: Tally) -> None:
        """Adds what measuring the model cost: bytes and failures, and no training."""
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down
        self.failed += other.failed
        for client, reasons in other.failures.items():
            self.failures[client].update(reasons)


class Driver:
    """Drives an algorithm's generators over an engine.

    It is the one place that decides what counts as an answer: a second answer to the same request is refused, a
    proposed client state is committed only when the algorithm has taken the reply without refusing it, and all the
    requests of an ask see the states as they were when it was asked (a client that appears twice included; of its
    two proposals the later slot's stays).
    """

    def __init__(self, engine: Engine, states: ClientStates) -> None:
        self.engine = engine
        self.states = states
        self.tally = Tally()
        self._out: set[Id] = set()
        # The number of the next exchange by round: evaluation counts on where training ended.
        self._next: dict[int, int] = {}

    def drive(self, steps: Generator[Ask, Answers, Any], round: int) -> Any:
        """Runs a generator of asks to its end and returns its value."""
        return self.begin(steps, round, ahead=False).finish()

    def begin(self, steps: Generator[Ask, Answers, Any], round: int, ahead: bool = True) -> Driven:
        """Takes the first ask of a generator; `ahead` sends it, so that an engine with idle workers can begin."""
        if not isinstance(steps, Generator):
            raise RunFailed(
                f"the algorithm gave a {type(steps).__name__} where a generator of asks was wanted",
                hint="its round() and evaluate() have to 'yield' every Ask and to return what comes of it",
            )
        return Driven(self, steps, round, ahead)

    def number(self, round: int) -> int:
        """The number of the next exchange of this round."""
        number = self._next.get(round, 0)
        # Of older rounds nothing is asked any more.
        self._next = {r: n for r, n in self._next.items() if r >= round - 1} | {round: number + 1}
        return number

    def exchange(
        self, ask: Ask, round: int, exchange: int, ahead: bool = False
    ) -> Generator[Answer, None, None]:
        """The answers to one ask, each checked for being the first to its request.

        In request order the ask is sent when the first answer is looked for, unless it is `ahead`; in arrival order at
        once, as its answers may be looked for in a later exchange.
        """
        if not ahead or ask.order == "arrival":
            sent = self._send(ask, round, exchange) if ask.order == "arrival" else None
            return self._answers(ask, round, exchange, sent)
        answers = self._ahead(ask, round, exchange)
        next(answers)  # which sends the ask, and sees to it that closing the answers takes it back
        return answers

    def _ahead(self, ask: Ask, round: int, exchange: int) -> Generator[Any, None, None]:
        sent = self._send(ask, round, exchange)
        answers = self._answers(ask, round, exchange, sent)
        try:
            yield None
            for answer in answers:
                if isinstance(answer, Reply) and answer.state is not None:
                    raise RunFailed(
                        f"the operation '{ask.op}' of an evaluation changes what a client keeps, and the next "
                        "round has begun with what it kept before",
                        hint="set evaluation.beside=false",
                    )
                yield answer
        finally:
            answers.close()
            sent.close()
            self._out = {i for i in self._out if i[:2] != (round, exchange)}

    def _send(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        self.tally.asked(ask)
        self._out.update(Id(round, exchange, slot) for slot in range(len(ask.requests)))
        return self.engine.answer(ask, round, exchange)

    def _answers(
        self, ask: Ask, round: int, exchange: int, sent: Generator[Answer, None, None] | None
    ) -> Generator[Answer, None, None]:
        staged = self.states.staging()
        answers = sent or self._send(ask, round, exchange)
        try:
            for answer in scoped("engine", answers):
                if answer.id not in self._out:
                    # The first answer stands; this one is counted and goes no further.
                    self.tally.failure(answer.client, "answered a request twice, or one that was not asked")
                    continue
                self._out.discard(answer.id)
                try:
                    yield answer
                finally:
                    self._settle(answer, staged, at_once=ask.order == "arrival")
                del answer  # or its tree would lie there until the next has come
        finally:
            answers.close()
            if ask.order == "request":
                self._out = {i for i in self._out if i[:2] != (round, exchange)}
            staged.commit()

    def _settle(self, answer: Answer, staged: Staging, at_once: bool) -> None:
        if isinstance(answer, Failure):
            self.tally.failure(answer.client, answer.reason)
        elif answer.refused is not None:
            self.tally.failure(answer.client, answer.refused)
        else:
            self.tally.accepted(answer)
            if answer.state is not None:
                if at_once:
                    self.states.commit(answer.client, answer.state)
                else:
                    staged.put(answer.client, answer.state)


class Driven:
    """A generator of asks on its way; see `Driver.begin`."""

    def __init__(self, gate: Driver, steps: Generator[Ask, Answers, Any], round: int, ahead: bool) -> None:
        self._gate, self._steps, self._round, self._ahead = gate, steps, round, ahead
        self._value: Any = None
        self._answers = self._asked(lambda: next(steps), ahead)

    def _asked(self, step: Callable[[], Ask], ahead: bool = False) -> Generator[Answer, None, None] | None:
        """The answers to the next ask; None where there is none, and the value is known."""
        try:
            with scope("aggregate.server"):
                ask = step()
        except StopIteration as stop:
            self._value = stop.value
            return None
        except BaseException:
            self._steps.close()
            raise
        if self._ahead and not ahead:
            raise RunFailed(
                f"the evaluation of round {self._round} asks several times, and the next round has begun "
                "after the first",
                hint="set evaluation.beside=false",
            )
        return self._gate.exchange(ask, self._round, self._gate.number(self._round), ahead)

    def finish(self) -> Any:
        """Runs to the end and returns the generator's value."""
        try:
            while (answers := self._answers) is not None:
                try:
                    self._answers = self._asked(partial(self._steps.send, answers))
                finally:
                    answers.close()
            return self._value
        finally:
            self._steps.close()
