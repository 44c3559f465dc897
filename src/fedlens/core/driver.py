"""Drives an algorithm over an engine: accepts one answer a request, commits states, counts everything."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
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
    Payload,
    Reply,
)
from fedlens.core.schema import nbytes
from fedlens.core.states import Held, Journal, Staging
from fedlens.core.step_counts import Work
from fedlens.core.traffic import Traffic
from fedlens.core.types import is_client, is_server


@dataclass
class Tally:
    """Counts of a round over the clients of the federation; requests for data at the server are left out."""

    replies: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_peer: int = 0  # of letters between clients
    letters_dropped: int = 0  # whose addressee was not asked
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    batches: dict[ClientId, int] = field(default_factory=lambda: defaultdict(int))
    rows: dict[ClientId, dict[str, Any]] = field(default_factory=dict)
    replied: set[ClientId] = field(default_factory=set)
    # Client, exchange, norm of the update.
    norms: list[tuple[ClientId, int, float]] = field(default_factory=list)
    failures: dict[ClientId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unbounded: list[str] = field(default_factory=list)  # operations whose replies the norm bound all refused
    traffic: Traffic = field(default_factory=Traffic)
    available: Sequence[int] | None = (
        None  # the clients that could be asked when the round began; None for all
    )

    @property
    def failed_round(self) -> bool:
        """Whether no client replied, for a reason other than the norm bound."""
        return self.failed > 0 and self.clients == 0 and not self.unbounded

    @property
    def clients(self) -> int:
        """How many clients took part: they answered an ask that counts (`Ask.counts`), however often."""
        return len(self.replied)

    @property
    def failed(self) -> int:
        """How many clients failed, however often."""
        return len(self.failures)

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """A row for each client that replied: the sums of its metrics, and its last exchange."""
        return list(self.rows.values())

    @property
    def batches_max(self) -> int:
        """The batches of the client with the most batches; of a blind sum, which has no single ones, its own number."""
        return max([int(self.sums.get("batches_max", 0)), *self.batches.values()])

    def asked(self, ask: Ask, round: int) -> None:
        """Counts the bytes of an ask, and records what it carries."""
        shared = nbytes(ask.shared)
        sent = [
            shared + (nbytes(request.payload) if request.payload else 0)
            for request in ask.requests
            if is_client(request.client) and not ask.measuring
        ]
        self.bytes_down += sum(sent)
        self.traffic.asked(ask, round, sum(sent))

    def accepted(self, ask: Ask, reply: Reply) -> None:
        """Counts an accepted reply. A reply from the server sends no bytes, and neither does one that only measures.

        `loss` and `examples` are not summed for a reply that only measures, nor for one without `batches` from data at
        the server, which did not train. The work of "@server" counts in the sums, and as no client's.
        """
        at_client = is_client(reply.client)
        worked = at_client or is_server(reply.client) or "batches" in reply.metrics
        worked = worked and not ask.measuring
        for name, value in reply.metrics.items():
            if worked or name not in ("loss", "examples"):
                self.sums[name] += value
        self.bytes_up += reply.nbytes if at_client and not ask.measuring else 0
        if not worked or is_server(reply.client):
            return
        self.replies += 1
        if ask.counts:
            self.replied.add(reply.client)
        self.batches[reply.client] += int(reply.metrics.get("batches", 0))
        row = self.rows.setdefault(reply.client, {"client": reply.client})
        row["exchange"] = reply.id.exchange
        for name, value in reply.metrics.items():
            row[name] = row.get(name, 0.0) + value
        if norm := reply.norms.get("update"):
            self.norms.append((reply.client, reply.id.exchange, norm))

    def posted(
        self, ask: Ask, round: int, sender: ClientId, to: Sequence[ClientId], content: Payload
    ) -> None:
        """Counts a letter: its bytes once an addressee, up to "@server" and down from it, else between clients."""
        size = 0 if ask.measuring else nbytes(content)
        to_clients, to_server = sum(map(is_client, to)) * size, sum(not is_client(k) for k in to) * size
        up, peer, down = (to_server, to_clients, 0) if is_client(sender) else (0, 0, to_clients)
        self.bytes_up += up
        self.bytes_peer += peer
        self.bytes_down += down
        self.traffic.posted(
            ask.op, round, sender, content, {"bytes_up": up, "bytes_peer": peer, "bytes_down": down}
        )

    def failure(self, client: ClientId, reason: str) -> None:
        """Counts a reply that is missing or was refused."""
        self.failures[client][reason] += 1

    def add_evaluation(self, other: Tally) -> None:
        """Adds the bytes, failures and messages of an evaluation, but no training."""
        self.traffic.add(other.traffic)
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down
        self.bytes_peer += other.bytes_peer
        self.letters_dropped += other.letters_dropped
        for client, reasons in other.failures.items():
            self.failures[client].update(reasons)


class Letters:
    """The letters of one round, or of one evaluation, by addressee and sender.

    >>> from fedlens.core.protocol import Request
    >>> letters = Letters()
    >>> letters.post(0, (1, 2), {"mass": 0.5})
    >>> ask, dropped = letters.delivered(Ask("mix", [Request(1)], deliver=True))
    >>> ask.requests[0].payload, dropped
    ({'letters': [(0, {'mass': 0.5})]}, 1)
    """

    def __init__(self) -> None:
        self._boxes: dict[ClientId, dict[ClientId, Payload]] = {}

    def post(self, sender: ClientId, to: Sequence[ClientId], content: Payload) -> None:
        """Adds a letter, not copied: the engine has. Raises `RunFailed` for a second one to the same addressee."""
        for addressee in to:
            box = self._boxes.setdefault(addressee, {})
            if sender in box:
                raise RunFailed(
                    f"client {sender} sent two letters to {addressee} before one was delivered",
                    hint="send both as one content, or deliver the first one by an ask with deliver=True",
                )
            box[sender] = content

    def delivered(self, ask: Ask) -> tuple[Ask, int]:
        """The ask with the letters to its clients, and how many others are dropped. All boxes are empty then."""
        requests = [
            replace(
                request,
                payload={**request.payload, "letters": list(self._boxes.pop(request.client, {}).items())},
            )
            for request in ask.requests
        ]
        return replace(ask, requests=requests), self.drop()

    def drop(self) -> int:
        """Empties all boxes; returns how many letters were in them."""
        dropped = sum(map(len, self._boxes.values()))
        self._boxes.clear()
        return dropped


class Driver:
    """Drives an algorithm's generators over an engine.

    Only the driver decides which answers count. It rejects a second answer to the same request. It commits a client's
    new state once the algorithm has read the reply without refusing it. All requests of an ask see the states as they
    were when it was sent. If a client appears twice, the state of the later slot is kept. Letters are taken from
    accepted replies and given to the clients of the next delivering ask.

    In `drive`, asks to clients carry norm bounds from the replies accepted before.

    Args:
        answered: called once an answer has been read.
        journal: where logs of clients and states that are held back are kept; by default in memory.
    """

    def __init__(
        self,
        engine: Engine,
        states: ClientStates,
        answered: Callable[[Ask, Answer, Work], None] = lambda ask, answer, work: None,
        journal: Journal | None = None,
    ) -> None:
        self.journal = Journal() if journal is None else journal
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

    def aside(self, steps: Generator[Ask, Answers, Any], round: int) -> Any:
        """Runs a generator between two rounds and returns its value; nothing is counted, observed or stored of it."""
        before, mark = (self.tally, self.work, self._answered), self.states.mark()
        self.tally, self.work, self._answered = Tally(), Work(), lambda ask, answer, work: None
        try:
            return self.begin(steps, round, ahead=False).finish()
        finally:
            self.tally, self.work, self._answered = before
            self.states.rewind(mark)

    def number(self, round: int) -> int:
        """The number of the next exchange of this round."""
        number = self._next.get(round, 0)
        # Older rounds have no further asks.
        self._next = {r: n for r, n in self._next.items() if r >= round - 1} | {round: number + 1}
        return number

    def exchange(
        self,
        ask: Ask,
        round: int,
        exchange: int,
        ahead: bool = False,
        bounded: bool = False,
        letters: Letters | None = None,
        held: Held | None = None,
    ) -> Generator[Answer, None, None]:
        """The answers to one ask; each is checked to be the first to its request.

        In request order the ask is sent when the first answer is read, or at once if it is `ahead`. In arrival order it
        is sent at once, because its answers may be read in a later exchange. `letters` are those of the asks before,
        `held` the states that asks of this round hold back.
        """
        letters = Letters() if letters is None else letters
        if bounded:
            ask = self.norms.bounded(ask)
        if not ahead or ask.order == "arrival":
            sent = self._send(ask, round, exchange, letters) if ask.order == "arrival" else None
            return self._answers(ask, round, exchange, letters, sent, bounded, held)
        answers = self._ahead(ask, round, exchange, letters)
        next(answers)  # sends the ask; closing the answers cancels it from here on
        return answers

    def _ahead(self, ask: Ask, round: int, exchange: int, letters: Letters) -> Generator[Any, None, None]:
        sent = self._send(ask, round, exchange, letters)
        answers = self._answers(ask, round, exchange, letters, sent)
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

    def _send(self, ask: Ask, round: int, exchange: int, letters: Letters) -> Generator[Answer, None, None]:
        _refuse_twice(ask)
        if not ask.requests and ask.order == "request":  # in arrival order, earlier answers may still be out
            return _no_answers()
        self.tally.asked(ask, round)
        if ask.deliver:
            ask, dropped = letters.delivered(ask)
            self.tally.letters_dropped += dropped
        if ask.logged:
            ask = self._with_logs(ask)
        self._out.update(Id(round, exchange, slot) for slot in range(len(ask.requests)))
        return self.engine.answer(ask, round, exchange)

    def _answers(
        self,
        ask: Ask,
        round: int,
        exchange: int,
        letters: Letters,
        sent: Generator[Answer, None, None] | None,
        bounded: bool = False,
        held: Held | None = None,
    ) -> Generator[Answer, None, None]:
        staged = self.states.staging()
        kept = (held or Held(self.journal, round)) if ask.holds else None
        if kept is not None:
            kept.begin()
        work = self.work
        work.ask([request.client for request in ask.requests])
        answers = sent or self._send(ask, round, exchange, letters)
        try:
            for answer in scoped("engine", answers):
                if answer.id not in self._out:
                    # The first answer counts; this one is only recorded as a failure.
                    self.tally.failure(answer.client, "answered a request twice, or one that was not asked")
                    continue
                self._out.discard(answer.id)
                work.answer()
                posted: Sequence[tuple[tuple[ClientId, ...], Payload]] = ()
                if isinstance(answer, Reply):
                    posted, answer.letters = answer.letters, ()
                    if ask.logged and "log" in answer.payload:
                        self.journal.keep_log(answer.client, log := answer.payload["log"])
                        answer.nbytes -= nbytes(log)
                        answer.payload = {k: v for k, v in answer.payload.items() if k != "log"}
                    self.tally.traffic.replied(ask, round, answer)
                elif is_server(answer.client):
                    raise _server_failed(ask, round, answer.reason)
                try:
                    yield answer
                finally:
                    self._settle(ask, answer, kept or staged)
                    if isinstance(answer, Reply) and answer.refused is None:
                        self._post(ask, round, answer.client, posted, letters)
                    posted = ()
                    if bounded and ask.expect.bounded:
                        self.norms.answered(ask.op, answer)
                    self._answered(ask, answer, work)
                del answer  # frees its tree before the next answer comes
        finally:
            answers.close()
            if ask.order == "request":
                self._out = {i for i in self._out if i[:2] != (round, exchange)}
            staged.commit()
            if kept is not None:
                kept.complete()

    def _with_logs(self, ask: Ask) -> Ask:
        """The ask with the log of each client, and a schema that allows a new one."""
        requests = [
            replace(request, payload={**request.payload, "log": self.journal.log_of(request.client)})
            for request in ask.requests
        ]
        return replace(ask, requests=requests, expect=replace(ask.expect, log=True))

    def _post(
        self,
        ask: Ask,
        round: int,
        sender: ClientId,
        posted: Sequence[tuple[tuple[ClientId, ...], Payload]],
        letters: Letters,
    ) -> None:
        for to, content in posted:
            letters.post(sender, to, content)
            self.tally.posted(ask, round, sender, to, content)

    def _settle(self, ask: Ask, answer: Answer, staged: Staging | Held) -> None:
        if isinstance(answer, Failure):
            self.tally.failure(answer.client, answer.reason)
        elif answer.refused is not None:
            if is_server(answer.client):
                raise _server_failed(ask, answer.id.round, answer.refused)
            self.tally.failure(answer.client, answer.refused)
        else:
            self.tally.accepted(ask, answer)
            if answer.state is not None:
                if ask.order == "arrival":
                    self.states.commit(answer.client, answer.state)
                else:
                    staged.put(answer.client, answer.state)


def _no_answers() -> Generator[Answer, None, None]:
    """The answers to an ask without requests, in request order."""
    yield from ()


def _refuse_twice(ask: Ask) -> None:
    """Raises `RunFailed` if an ask has two requests for "@server", or for any client that gets letters."""
    seen: set[ClientId] = set()
    for client in (request.client for request in ask.requests):
        if client in seen and (ask.deliver or is_server(client)):
            raise RunFailed(
                f"the ask '{ask.op}' asks {client} twice, and only one state or one box of letters is left",
                hint='ask it once, or as "@server:K" for each client K'
                if is_server(client)
                else "ask it once",
            )
        seen.add(client)


def _server_failed(ask: Ask, round: int, reason: str) -> RunFailed:
    return RunFailed(f"the server's operation '{ask.op}' failed in round {round}: {reason}")


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
        self._letters, self._held = Letters(), Held(driver.journal, round)
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
        return self._driver.exchange(
            ask, self._round, number, ahead, self._bounded, self._letters, self._held
        )

    def finish(self) -> Any:
        """Runs to the end and returns the generator's value."""
        try:
            while (answers := self._answers) is not None:
                try:
                    self._answers = self._asked(partial(self._steps.send, answers))
                finally:
                    answers.close()
            self._driver.tally.letters_dropped += self._letters.drop()
            if self._bounded:  # the training of the round
                self._held.commit(self._driver.states)
            return self._value
        finally:
            self._steps.close()
