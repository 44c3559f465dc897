"""Computes the answer to an ask at a site: checks what comes in, runs the operation, checks what goes out, keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.base.errors import DataError, DecodingError, FedlensError, HookError, RunFailed, told
from fedlens.base.printable import printable
from fedlens.core.protocol import Failure, Id, Program, Reply
from fedlens.core.schema import NumberField, Schema
from fedlens.core.types import Payload
from fedlens.core.wire.message import Caps, Message, MessageError, read_payload, seal
from fedlens.core.wire.plain_schema import from_plain
from fedlens.core.wire.sent_fields import answer_fields
from fedlens.engines.executor import Executor, Item
from fedlens.engines.links.post import answer_body
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields
from fedlens.site.answers_log import AnswersLog, AskRefused, check_approved
from fedlens.site.client_logs import ClientLogs
from fedlens.site.kept_states import KeptStates, StateLost
from fedlens.site.site_log import SiteLog

_REASONS: Sequence[tuple[type[BaseException], str]] = (
    (StateLost, "state"),
    (DataError, "data"),
    (MemoryError, "memory"),
    (HookError, "operation"),
    (RunFailed, "disk"),
)
_TO_DO = {
    "state": "the state of a client is lost; the run goes on without this client",
    "data": "images or labels cannot be used, or are too few; look at them with: fedlens site check",
    "memory": "there is not enough memory; free some, or set [compute] device in site.toml",
    "operation": "it raised an error; tell the operator of the server, without what the text says of persons",
    "disk": "the disk refuses; make room on it",
    "refused": "the server asks for what was not approved; tell its operator",
    "policy": "[allow] of site.toml refuses it; leave it so, or change the line and start the site again",
}
_MEMORY = ("out of memory", "MemoryError", "can't allocate memory")


class Opened(Protocol):
    """An experiment that a site has built; see `fedlens.site.workplace.Workplace`."""

    @property
    def program(self) -> Program:
        """The operations and the data; another object after `reread` has changed the data."""

    @property
    def rounds(self) -> int:
        """How many rounds were approved."""

    @property
    def rows(self) -> Mapping[str, int]:
        """The row of each client of this site, by its name."""

    def reread(self) -> object:
        """Reads again which examples are left out. Raises `DataError` if that is not known."""

    @property
    def excluded(self) -> Mapping[str, Any]:
        """What the log says of the exclusion list."""

    def examples(self, row: int, /) -> Sequence[int]:
        """How many examples the client trains on, and how many it holds out."""

    def computing(self) -> AbstractContextManager[None]:
        """Sets PyTorch's threads and options for the time of an operation."""

    def takes(self, op: str) -> Schema | None:
        """What a client may be asked by this operation; None if nothing."""

    def refused(
        self,
        op: str,
        row: int | None = None,
        work: int | None = None,
        releases: Sequence[Mapping[str, Any]] = (),
    ) -> Sequence[str]:
        """Why the policy of the site refuses an operation: for any client, or for that in a row and its work."""

    def release(self, op: str, row: int, work: int | None = None, /) -> Mapping[str, Any] | None:
        """What the client in a row releases by an operation that adds noise for each example; None for others."""

    @property
    def reports_metrics(self) -> bool:
        """Whether losses and counts may leave the site."""

    def close(self) -> None:
        """Frees its memory."""


class Answering:
    """Answers asks, one after the other, in one thread.

    Args:
        key: the identity key of the site.
        log: the site's answers.
        states: the states of its clients.
        logs: their logs of secure sums.
        notes: receives the texts of errors.
        say: receives a sentence at the first failure of each kind.
        min_examples: how many examples must be behind each number that is sent.
        most: bytes of the largest body.

    Attributes:
        largest: how many examples the largest client of the federation trains on.
    """

    def __init__(
        self,
        key: KeyPair,
        log: AnswersLog,
        states: KeptStates,
        logs: ClientLogs,
        notes: SiteLog,
        say: Callable[[str], None],
        min_examples: int = 1,
        most: int = 2**32,
    ) -> None:
        self._key, self._log, self._states, self._logs = key, log, states, logs
        self._notes, self._say, self._said = notes, say, set[str]()
        self._min_examples, self._most = min_examples, most
        self._executor: tuple[Program, Executor] | None = None
        self._round: tuple[str, int, int] | None = None  # run, attempt and round whose exclusions were read
        self.largest = 0
        self._writing = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Nothing is written any more; returns when what is being written is on the disk."""
        self._stopped = True
        with self._writing:
            pass

    def _check_running(self) -> None:
        if self._stopped:
            raise RunFailed("the site stops")

    def ended(self, run: str, clients: Iterable[str]) -> None:
        """Removes the states of a run that has ended, but for those in its checkpoints, and its clients' answers."""
        with self._writing:
            self._check_running()
            self._states.ended(run)
            self._logs.acknowledge(run, clients)

    def forget(self) -> None:
        """Drops what the last experiment left in memory."""
        self._executor = self._round = None
        self._said.clear()

    # -- one ask --------------------------------------------------------------------------------------------------

    def answered(
        self,
        opened: Opened | None,
        ask: Message,
        bodies: list[bytes],
        missing: Callable[[], str | None] | None = None,
    ) -> tuple[Any, str]:
        """The bytes of an answer, which may be sent, and its outcome: "reply", or the reason of a failure.

        Args:
            opened: the experiment; None if the site has none that this ask could belong to.
            bodies: the ask's own body, and the one that is shared; it is emptied, so that they can be freed.
            missing: says why the experiment may not be computed any more, once the operation has ended.

        Raises `RunFailed` if the answer cannot be kept: then none goes out.
        """
        try:
            if opened is None:
                raise AskRefused("contract", "no experiment of this run is approved and open")
            reply, log = self._reply(opened, ask, bodies)
            content = answer_body(reply.payload, reply.letters)
            if len(content) > min(self._most, ask.details.get("most", self._most)):
                raise AskRefused(
                    "refused", f"the answer has {len(content):,} bytes, more than the ask accepts"
                )
            state = reply.state
            details: dict[str, Any] = {"outcome": "reply", "metrics": dict(reply.metrics)}
            fields = answer_fields(reply.payload, reply.metrics, reply.letters)
            del reply
        except Exception as error:  # such as one of a file of the site: no ask ends its agent
            return self.failed(ask, error)
        with self._writing:
            self._check_running()
            try:
                check_approved(missing)
                if log is not None:
                    self._logs.put(ask.fields.run, ask.fields.client, log)
                details["state"] = None if state is None else self._states.put(ask, state)
                del state
                return self._kept(ask, details, content, fields, sealed=log is not None), "reply"
            except (RunFailed, StateLost, AskRefused) as error:
                refusal: FedlensError = error
            except MessageError as error:
                refusal = AskRefused("operation", f"the answer cannot be sent: {error.what}")
        return self.failed(ask, refusal)

    def failed(self, ask: Message, error: BaseException, keep: bool = True) -> tuple[Any, str]:
        """The bytes of an answer that has the reason of an error, and that reason. The text stays in the site's log.

        Args:
            keep: whether the ask is answered by it once and for all; False for an ask under a number that is taken.
        """
        reason = _reason(error)
        fields = ask.fields
        self._notes.note(
            "failure", reason=reason, run=fields.run, round=fields.round, client=fields.client,
            operation=fields.operation, text=told(error),
        )  # fmt: skip
        self._say_once(fields, reason)
        details: dict[str, Any] = {"outcome": "failure", "reason": reason, "metrics": {}, "state": None}
        with self._writing:
            if not self._stopped:
                try:
                    if keep:
                        return self._kept(ask, details, b""), reason
                    answer = self._sealed(ask, details, b"")
                    self._log.note(ask, answer)
                    return answer.head, reason
                except RunFailed as full:
                    # It has nothing of the data. The ask is not in the log, so it may be answered if it comes again.
                    self._notes.note("disk", text=told(full))
                    details["reason"] = reason = "disk"
            return self._sealed(ask, details, b"").head, reason

    def _say_once(self, fields: SignedFields, reason: str) -> None:
        """Says where something failed and what to do, at the first failure of a kind. Its text may name a patient."""
        if reason in _TO_DO and reason not in self._said:
            self._said.add(reason)
            where = f"{fields.operation} for {fields.client} in round {fields.round}"
            line = (
                f"{where} failed: {_TO_DO[reason]}. The text of this and later failures is in log/site.jsonl"
            )
            self._say(printable(line, line_feeds=False))

    def _kept(
        self,
        ask: Message,
        details: Mapping[str, Any],
        content: bytes,
        fields: Sequence[str] = (),
        sealed: bool = False,
    ) -> Any:
        about = {"state": (details["state"] or {}).get("at-site"), "fields": fields}
        return self._log.keep(ask, self._sealed(ask, details, content), content, about, sealed)

    def _sealed(self, ask: Message, details: Mapping[str, Any], content: bytes) -> Message:
        count, head = self._log.state
        fields = ask.fields._replace(direction="answer", ask=ask.digest, head=head)
        return seal(self._key, "answer", fields, {**details, "log_lines": count}, content)

    # -- what comes in, and what goes out -------------------------------------------------------------------------

    def _reply(self, opened: Opened, ask: Message, bodies: list[bytes]) -> tuple[Reply, Payload | None]:
        """The reply to an ask, and the client's log if the operation has one.

        Raises `AskRefused`, `StateLost` and `DataError` for an ask that has no reply.
        """
        fields = ask.fields
        if (takes := opened.takes(fields.operation)) is None:
            raise AskRefused("refused", f"'{fields.operation}' is not asked of clients")
        # Each round draws other batches: with more of them the server would learn more than was approved.
        if fields.round > opened.rounds:
            raise AskRefused("refused", f"round {fields.round} of an experiment of {opened.rounds} rounds")
        if fields.client not in opened.rows:
            raise AskRefused("contract", f"'{fields.client}' is no client of this site")
        if (fields.run, fields.attempt, fields.round) != self._round:
            opened.reread()
            with self._writing:
                self._check_running()
                self._log.changed("exclude", opened.excluded, fields.run)
            if takes.log:
                self._logs.acknowledge(fields.run, opened.rows, fields.round)
            self._round = fields.run, fields.attempt, fields.round
        row = opened.rows[fields.client]
        sizes = opened.examples(row)
        if sizes[fields.operation == EVALUATE_OWN] < self._min_examples:
            raise AskRefused("data", f"'{fields.client}' has fewer examples than min_examples")
        shared, payload, expect = self._read(ask, bodies)
        asked = {**shared, **payload}
        if (fault := replace(takes, log=False).fault(asked)) is not None:
            raise AskRefused("refused", f"'{fields.operation}' is asked with what it does not take: {fault}")
        work = asked.get("work")
        release = opened.release(fields.operation, row, work)
        releases = [] if release is None else [*self._logs.releases(fields.client), release]
        for sentence in opened.refused(fields.operation, row, work, releases):
            raise AskRefused("policy", sentence)
        with self._writing:
            self._check_running()
            state = self._states.get(ask)
            if release is not None:  # before it is computed: an answer that is lost counts
                self._logs.released(fields.run, fields.round, fields.client, release)
        if takes.log:
            payload["log"] = self._logs.get(fields.run, fields.client)
        expect = replace(self._bounded(expect, sizes[0]), log=takes.log)
        item = Item(Id(fields.round, fields.exchange, fields.slot), row, payload, state)
        try:
            with opened.computing():
                answer = self._runner(opened.program).answer(fields.operation, shared, item, expect)
        except AskRefused:  # it was given up, and may have left its cache half written
            self._executor = None
            raise
        if isinstance(answer, Failure):
            raise AskRefused(
                "memory" if any(each in answer.reason for each in _MEMORY) else "operation", answer.reason
            )
        behind = answer.metrics.get("examples", 0.0)
        if 0 < behind < self._min_examples:
            raise AskRefused("data", f"{behind:g} examples are behind the answer, fewer than min_examples")
        if not opened.reports_metrics:
            answer.metrics = {}
        log = answer.payload.get("log", payload["log"]) if takes.log else None
        answer.payload = {n: value for n, value in answer.payload.items() if log is None or n != "log"}
        return answer, log

    def _read(self, ask: Message, bodies: list[bytes]) -> tuple[dict[str, Any], dict[str, Any], Schema]:
        """The shared payload, the ask's own, and the schema of a valid reply. Raises `AskRefused`."""
        caps = Caps(self._most)
        try:
            expect = from_plain(ask.details.get("expect"))
            shared = read_payload(bodies.pop(), caps, "ask") if ask.fields.shared else {}
            return shared, read_payload(bodies.pop(), caps, "ask"), expect
        except (DecodingError, IndexError) as error:
            raise AskRefused("refused", f"the ask is not readable: {told(error)}") from error

    def _bounded(self, expect: Schema, examples: int) -> Schema:
        """The schema with the client's own size in place of that of the largest client, as a bound on its weight."""
        weight = (expect.fields or {}).get("weight")
        if not isinstance(weight, NumberField) or weight.most != self.largest:
            return expect
        own = replace(weight, most=float(examples))
        return replace(expect, fields={**(expect.fields or {}), "weight": own})

    def _runner(self, program: Program) -> Executor:
        if self._executor is None or self._executor[0] is not program:
            self._executor = program, Executor(program)
        return self._executor[1]


def _reason(error: BaseException) -> str:
    """The word for an error that the server is told."""
    if isinstance(error, AskRefused):
        return error.reason
    return next((word for kind, word in _REASONS if isinstance(error, kind)), "operation")
