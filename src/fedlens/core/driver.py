"""Drives an algorithm over an engine: accepts one answer a request, commits states, counts everything."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedlens.base.errors import RunFailed
from fedlens.base.profiling import scope, scoped
from fedlens.core.norm_bounds import NormBounds
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
from fedlens.core.step_counts import Work
from fedlens.core.traffic import Traffic
from fedlens.core.types import is_client


@dataclass
class Tally:
    """Counts of a round over the clients of the federation; requests for data at the server are left out."""

    replies: int = 0
    failed: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    batches: dict[ClientId, int] = field(default_factory=lambda: defaultdict(int))
    per_client: list[dict[str, Any]] = field(default_factory=list)
    replied: set[ClientId] = field(default_factory=set)
    norms: list[tuple[ClientId, int, float]] = field(
        default_factory=list
    )  # client, exchange, norm of the update
    failures: dict[ClientId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unbounded: list[str] = field(default_factory=list)  # operations whose replies the norm bound all refused
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def failed_round(self) -> bool:
        """Whether no client replied, for a reason other than the norm bound."""
        return self.failed > 0 and self.clients == 0 and not self.unbounded

    @property
    def clients(self) -> int:
        """How many clients replied; a client that is asked several times counts once.

        In a round of several asks only the last that went to clients counts: a client that sent a gradient but did not
        train has not taken part, and a round in which no client trained has failed.
        """
        return len(self.replied)

    @property
    def batches_max(self) -> int:
        """The batches of the client with the most batches."""
        return max(self.batches.values(), default=0)

    def asked(self, ask: Ask, round: int) -> None:
        """Counts the bytes of an ask, and records what it carries."""
        at_clients = any(is_client(request.client) for request in ask.requests)
        if ask.order == "request" and at_clients:
            self.replied = set()
        shared = nbytes(ask.shared)
        sent = [
            shared + (nbytes(request.payload) if request.payload else 0)
            for request in ask.requests
            if is_client(request.client)
        ]
        self.bytes_down += sum(sent)
        self.traffic.asked(ask, round, sum(sent))

    def accepted(self, reply: Reply) -> None:
        """Counts an accepted reply. A reply from data at the server sends no bytes.

        Such a reply without `batches` did not train, so its `loss` and `examples` are not summed.
        """
        at_client = is_client(reply.client)
        trained = at_client or "batches" in reply.metrics
        for name, value in reply.metrics.items():
            if trained or name not in ("loss", "examples"):
                self.sums[name] += value
        self.bytes_up += reply.nbytes if at_client else 0
        if not trained:
            return
        self.replies += 1
        self.replied.add(reply.client)
        self.batches[reply.client] += int(reply.metrics.get("batches", 0))
        self.per_client.append({"client": reply.client, "exchange": reply.id.exchange, **reply.metrics})
        if norm := reply.norms.get("update"):
            self.norms.append((reply.client, reply.id.exchange, norm))

    def failure(self, client: ClientId, reason: str) -> None:
        """Counts a reply that is missing or was refused."""
        self.failed += 1
        self.failures[client][reason] += 1

    def add_evaluation(self, other: Tally) -> None:
        """Adds the bytes, failures and messages of an evaluation, but no training."""
        self.traffic.add(other.traffic)
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down
        self.failed += other.failed
        for client, reasons in other.failures.items():
            self.failures[client].update(reasons)


class Driver:
    """Drives an algorithm's generators over an engine.

    Only the driver decides which answers count. It rejects a second answer to the same request. It commits a client's
    new state once the algorithm has read the reply without refusing it. All requests of an ask see the states as they
    were when it was sent. If a client appears twice, the state of the later slot is kept.

    In `drive`, asks to clients carry norm bounds from the replies accepted before.

    Args:
        answered: called once an answer has been read.
    """

    def __init__(
        self,
        engine: Engine,
        states: ClientStates,
        answered: Callable[[Ask, Answer, Work], None] = lambda ask, answer, work: None,
    ) -> None:
        self.engine = engine
        self.states = states
        self._answered = answered
        self.tally = Tally()
        self.norms = NormBounds()
        self.work = Work()  # of the phase in progress
        self._out: set[Id] = set()
        # The number of the next exchange by round: evaluation continues the numbering of training.
        self._next: dict[int, int] = {}

    def drive(self, steps: Generator[Ask, Answers, Any], round: int) -> Any:
        """Runs a generator of asks to its end and returns its value.

        If the norm bound rejected every reply, it restarts, and `tally.unbounded` names the operations.
        """
        try:
            return self.begin(steps, round, ahead=False, bounded=True).finish()
        finally:
            self.tally.unbounded = self.norms.round_done(self.tally.clients > 0)

    def begin(
        self, steps: Generator[Ask, Answers, Any], round: int, ahead: bool = True, bounded: bool = False
    ) -> Driven:
        """Takes the first ask of a generator; `ahead` sends it, so that an engine with idle workers can begin.

        `bounded` refuses replies whose norms are far beyond those accepted before (`fedlens.core.norm_bounds`).
        """
        if not isinstance(steps, Generator):
            raise RunFailed(
                f"the algorithm returned a {type(steps).__name__}, not a generator of asks",
                hint="write round() and evaluate() as generators: 'yield' every Ask, return the result",
            )
        return Driven(self, steps, round, ahead, bounded)

    def number(self, round: int) -> int:
        """The number of the next exchange of this round."""
        number = self._next.get(round, 0)
        # Older rounds have no further asks.
        self._next = {r: n for r, n in self._next.items() if r >= round - 1} | {round: number + 1}
        return number

    def exchange(
        self, ask: Ask, round: int, exchange: int, ahead: bool = False, bounded: bool = False
    ) -> Generator[Answer, None, None]:
        """The answers to one ask; each is checked to be the first to its request.

        In request order the ask is sent when the first answer is read, or at once if it is `ahead`. In arrival order it
        is sent at once, because its answers may be read in a later exchange.
        """
        if bounded:
            ask = self.norms.bounded(ask)
        if not ahead or ask.order == "arrival":
            sent = self._send(ask, round, exchange) if ask.order == "arrival" else None
            return self._answers(ask, round, exchange, sent, bounded)
        answers = self._ahead(ask, round, exchange)
        next(answers)  # sends the ask; closing the answers cancels it from here on
        return answers

    def _ahead(self, ask: Ask, round: int, exchange: int) -> Generator[Any, None, None]:
        sent = self._send(ask, round, exchange)
        answers = self._answers(ask, round, exchange, sent)
        try:
            yield None
            for answer in answers:
                if isinstance(answer, Reply) and answer.state is not None:
                    raise RunFailed(
                        f"the operation '{ask.op}' of an evaluation changes a client's state, but the "
                        "next round has already started with the old state",
                        hint="set evaluation.overlap=false",
                    )
                yield answer
        finally:
            answers.close()
            sent.close()
            self._out = {i for i in self._out if i[:2] != (round, exchange)}

    def _send(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        if not ask.requests and ask.order == "request":  # in arrival order, earlier answers may still be out
            return _no_answers()
        self.tally.asked(ask, round)
        self._out.update(Id(round, exchange, slot) for slot in range(len(ask.requests)))
        return self.engine.answer(ask, round, exchange)

    def _answers(
        self,
        ask: Ask,
        round: int,
        exchange: int,
        sent: Generator[Answer, None, None] | None,
        bounded: bool = False,
    ) -> Generator[Answer, None, None]:
        staged = self.states.staging()
        work = self.work
        work.ask([request.client for request in ask.requests])
        answers = sent or self._send(ask, round, exchange)
        try:
            for answer in scoped("engine", answers):
                if answer.id not in self._out:
                    # The first answer counts; this one is only recorded as a failure.
                    self.tally.failure(answer.client, "answered a request twice, or one that was not asked")
                    continue
                self._out.discard(answer.id)
                work.answer()
                if isinstance(answer, Reply):
                    self.tally.traffic.replied(ask, round, answer)
                try:
                    yield answer
                finally:
                    self._settle(answer, staged, at_once=ask.order == "arrival")
                    if bounded:
                        self.norms.answered(ask.op, answer)
                    self._answered(ask, answer, work)
                del answer  # frees its tree before the next answer comes
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


def _no_answers() -> Generator[Answer, None, None]:
    """The answers to an ask without requests, in request order."""
    yield from ()


class Driven:
    """A generator of asks in progress; see `Driver.begin`."""

    def __init__(
        self,
        driver: Driver,
        steps: Generator[Ask, Answers, Any],
        round: int,
        ahead: bool,
        bounded: bool = False,
    ) -> None:
        self._driver, self._steps, self._round, self._ahead = driver, steps, round, ahead
        self._bounded = bounded
        self._value: Any = None
        self._answers = self._asked(lambda: next(steps), ahead)

    def _asked(self, step: Callable[[], Ask], ahead: bool = False) -> Generator[Answer, None, None] | None:
        """The answers to the next ask; None after the last, when the value is set."""
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
                f"the evaluation of round {self._round} asks several times, but the next round has already started",
                hint="set evaluation.overlap=false",
            )
        number = self._driver.number(self._round)
        return self._driver.exchange(ask, self._round, number, ahead, self._bounded)

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
