"""Between algorithm and engine: each request answered once, states committed on acceptance, all of it counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.errors import RunFailed
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


@dataclass
class Tally:
    """What happened in a round, over the clients of the federation (what the server holds itself is left out)."""

    clients: int = 0
    failed: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    batches_max: int = 0
    per_client: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[ClientId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def asked(self, ask: Ask) -> None:
        """Counts what goes out."""
        shared = nbytes(ask.shared)
        for request in ask.requests:
            if not isinstance(request.client, str):
                self.bytes_down += shared + nbytes(request.payload)

    def accepted(self, reply: Reply) -> None:
        """Counts a reply that was folded; of what the server holds itself only work done on it counts, no bytes."""
        if not isinstance(reply.client, str):
            self.bytes_up += reply.nbytes
        elif "batches" not in reply.metrics:
            return
        self.clients += 1
        for name, value in reply.metrics.items():
            self.sums[name] += value
        self.batches_max = max(self.batches_max, int(reply.metrics.get("batches", 0)))
        self.per_client.append({"client": reply.client, "exchange": reply.id.exchange, **reply.metrics})

    def failure(self, client: ClientId, reason: str) -> None:
        """Counts what did not come or was not good."""
        self.failed += 1
        self.failures[client][reason] += 1


class Gate:
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

    def drive(self, steps: Generator[Ask, Answers, Any], round: int) -> Any:
        """Runs a generator of asks to its end and returns its value."""
        exchange = 0
        if not isinstance(steps, Generator):
            raise RunFailed(
                f"the algorithm gave a {type(steps).__name__} where a generator of asks was wanted",
                hint="its round() and evaluate() have to 'yield' every Ask and to return what comes of it",
            )
        try:
            ask = next(steps)
            while True:
                answers = self.exchange(ask, round, exchange)
                try:
                    ask = steps.send(answers)
                finally:
                    answers.close()
                exchange += 1
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    def exchange(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """The answers to one ask, each checked for being the first to its request.

        In request order the ask is sent when the first answer is looked for; in arrival order at once, as its
        answers may be looked for in a later exchange.
        """
        sent = self._send(ask, round, exchange) if ask.order == "arrival" else None
        return self._answers(ask, round, exchange, sent)

    def _send(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        self.tally.asked(ask)
        self._out.update(Id(round, exchange, slot) for slot in range(len(ask.requests)))
        return self.engine.answer(ask, round, exchange)

    def _answers(
        self, ask: Ask, round: int, exchange: int, sent: Generator[Answer, None, None] | None
    ) -> Generator[Answer, None, None]:
        staged: dict[ClientId, Any] = {}
        answers = sent or self._send(ask, round, exchange)
        try:
            for answer in answers:
                if answer.id not in self._out:
                    # The first answer stands; this one is counted and goes no further.
                    self.tally.failure(answer.client, "answered a request twice, or one that was not asked")
                    continue
                self._out.discard(answer.id)
                try:
                    yield answer
                finally:
                    self._settle(answer, staged, at_once=ask.order == "arrival")
        finally:
            answers.close()
            if ask.order == "request":
                self._out = {i for i in self._out if i[:2] != (round, exchange)}
            for client, state in staged.items():
                self.states.commit(client, state)

    def _settle(self, answer: Answer, staged: dict[ClientId, Any], at_once: bool) -> None:
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
                    staged[answer.client] = answer.state
