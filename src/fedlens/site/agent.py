"""What `fedlens site start` runs: asks the server for work, and answers, for weeks, through restarts of both."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any, Protocol, TypeVar

from fedlens.base.errors import DecodingError, FedlensError, IdentityError, RunFailed, one_line, told
from fedlens.core.wire.census import SiteCensus
from fedlens.core.wire.message import Caps, Message, MessageError, read_payload, seal
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.file_cipher import FileCipher
from fedlens.identity.private_files import one_writer, private_folder
from fedlens.identity.site_keys import SiteKeys
from fedlens.site.answering import Answering, Opened
from fedlens.site.answers_log import SENT, AnswersLog, AskRefused, check_approved
from fedlens.site.client_logs import LOGS, ClientLogs
from fedlens.site.connection import Closed, ServerConnection, SiteRefused
from fedlens.site.kept_states import KeptStates
from fedlens.site.operation_thread import OperationThread
from fedlens.site.retention import SiteRun, purge_due, runs_in_log
from fedlens.site.settings import SiteLimits
from fedlens.site.site_log import SiteLog

WAITED_FOR = frozenset({"pending", "suspended"})
"""Reasons of the server that its operator can end while the site waits."""
_PAUSE, _HOUR, _DAY = 30.0, 3600.0, 86_400.0
_T = TypeVar("_T")
_Missing = Callable[[], str | None]


class Proposed(Protocol):
    """An experiment that the server proposes, over the data of this site."""

    @property
    def digest(self) -> str:
        """SHA-256 of its text, in hexadecimal."""

    @property
    def terms(self) -> ExperimentTerms:
        """What the server says of it besides."""

    def missing(self) -> str | None:
        """Why it may not be computed now, as a sentence; None if people at the site approved it."""

    def approvers(self) -> Collection[str]:
        """Who approved it, by name."""

    def census(self) -> SiteCensus:
        """What the site tells of its data. Raises `DataError` if they do not fit the experiment."""

    @property
    def excluded(self) -> Mapping[str, Any]:
        """What the log says of the exclusion list that the census has read."""

    def open(self, rows: Mapping[str, int], sizes: Mapping[str, Any]) -> Opened:
        """Builds it over the roster; `sizes` are those of all clients by row."""


@dataclass
class _Experiment:
    """The server's last message of an experiment, and how far the site is with it.

    Attributes:
        waits: what it waits for, as it was said.
        told: whether its census was sent.
        opened: the experiment once it is built; `failed` if it cannot be.
    """

    message: Message
    body: bytes
    proposed: Proposed | None = None
    waits: str = ""
    told: bool = False
    failed: bool = False
    opened: Opened | None = None

    def needs(self) -> str:
        """What a person has to do, as a sentence; empty for nothing."""
        failed = self.failed or self.proposed is None
        return self.waits or (
            "the experiment cannot be computed here; log/site.jsonl says why" if failed else ""
        )

    def excluded(self) -> str | None:
        """The word with which the server says that it does not ask this site."""
        word = self.message.details.get("refused")
        return word if isinstance(word, str) else None

    def of(self, ask: Message) -> bool:
        """Whether an ask belongs to it."""
        ours, theirs = self.message.fields, ask.fields
        return (ours.run, ours.attempt) == (theirs.run, theirs.attempt)


@dataclass
class _Sending:
    """The answers that the server does not have yet.

    Attributes:
        queue: what is to be sent: an ask, the parts of its answer, and what says why they may not go out any more.
        have: the digests of the messages that the server need not send again.
    """

    queue: asyncio.Queue[tuple[Message, Sequence[Any], _Missing | None]] = field(
        default_factory=asyncio.Queue
    )
    have: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)


class Agent:
    """Answers the asks of a server, one after the other.

    Args:
        folder: of the site, with its keys in `keys`. The agent writes `log`, `work`, `states` and `client-logs`.
        keys: of the site.
        connection: to the server.
        read: makes an experiment of the server's text, the run and the terms. Raises `ConfigError` for one that sites
            refuse.
        say: receives one line for each ask, and for what a person should know.
        limits: what the site lends.
        once: end with the run.
        clock, sleep, uniform: the seconds since 1970; how it waits, and how it draws how long.
        thread: in which it computes; that of several sites in a test.

    Raises `IdentityError` if another process uses the folder, and `DataError` if its log or its states are damaged.
    """

    def __init__(
        self,
        folder: Path,
        keys: SiteKeys,
        connection: ServerConnection,
        read: Callable[[str, str, ExperimentTerms], Proposed],
        say: Callable[[str], None],
        limits: SiteLimits | None = None,
        *,
        once: bool = False,
        clock: Callable[[], float] = time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
        thread: OperationThread | None = None,
    ) -> None:
        self._folder, self._keys, self._connection = folder, keys, connection
        self._read, self._say, self._limits, self._once = read, say, limits or SiteLimits(), once
        self._clock, self._sleep, self._uniform, self._thread = clock, sleep, uniform, thread
        self._notes = SiteLog(private_folder(folder) / "log", clock)
        self._key = keys.identity()
        self._experiment: _Experiment | None = None
        self._finished: str | None = None
        self._renewed, self._purged, self._asked = -math.inf, -math.inf, monotonic()

    @property
    def resting(self) -> bool:
        """Whether the last run has finished and no other is proposed: then the server may well be away."""
        return self._finished is not None

    async def run(self) -> None:
        """Works until it is cancelled; with `once`, until a run has ended.

        An operation that is under way when it is cancelled is given up: it was not answered, so it is asked again.

        Raises `SiteRefused` if the server does not serve this site any more.
        """
        with ExitStack() as held:
            held.enter_context(one_writer(self._folder, wait=False))
            cipher, sent = FileCipher(self._key), self._folder / SENT if self._limits.keep_sent else None
            self._log = AnswersLog(self._folder / "log", self._folder / "work", self._clock, cipher, sent)
            held.callback(self._log.close)
            self._log.changed("rules", self._limits.rules)
            states, limits = KeptStates(self._folder / "states", self._clock), self._limits
            logs = ClientLogs(self._folder / LOGS, cipher)
            self._purge = partial(purge_due, self._folder, states, self._log, limits.keep_days)
            self._answering = Answering(
                self._key, self._log, states, logs, self._notes, self._say, limits.min_examples, limits.most
            )
            if (thread := self._thread) is None:
                thread = OperationThread()
                held.callback(thread.close)
            self._call = thread.call
            held.callback(self._answering.stop)  # first: what is being written is written
            self._notes.note("started", site=self._keys.name)
            reason = "the run has ended"
            try:
                while not await self._session():
                    await self._sleep(_PAUSE + self._uniform(0, _PAUSE))
            except BaseException as error:
                reason = _sentence(error)
                raise
            finally:
                await self._connection.close()
                self._close_experiment()
                self._notes.waits("")
                self._notes.note("stopped", reason=reason)

    async def _session(self) -> bool:
        """Works with the server; True if a run has ended, False if the site is to wait and try again."""
        self._sending = _Sending()
        parts = [self._connection.beat(), self._send(), self._listen(), self._purge_daily()]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except SiteRefused as refused:
            if refused.reason not in WAITED_FOR:
                raise
            self._tell("refused", str(refused))
            self._notes.waits(str(refused))
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return True

    async def _purge_daily(self) -> None:
        """Removes what is due, also while the server is away, which may take months."""
        while True:
            if (now := self._clock()) - self._purged >= _DAY:
                self._purged = now
                await self._call(self._purge, now)
            await self._sleep(_HOUR)

    # -- what the server sends ------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        sending = self._sending
        if self._experiment is not None:  # the site comes back: it tells its data again
            self._experiment.told = False
        await self._look()
        while True:
            self._notes.waits("" if self._experiment is None else self._experiment.needs())
            await self._renew()
            try:
                received = await self._connection.next(sending.have | sending.refused)
                if received is None:
                    self._rest()
                    await self._look()
                    continue
                message, body = received
            except MessageError as error:
                self._tell("message", f"a message of the server is refused: {error.what}")
                await self._sleep(self._uniform(0, _PAUSE))
                continue
            bodies = [body]
            del received, body  # whoever reads it frees it
            if message.purpose == "ask":
                await self._ask(message, bodies)
            else:
                sending.have.add(message.digest)
                if message.purpose == "goodbye" and await self._goodbye(message):
                    return

    async def _goodbye(self, message: Message) -> bool:
        """Ends a run; True if the agent ends with it."""
        run, finished = message.fields.run, message.details.get("outcome") == "finished"
        waits = "; waiting for the next experiment, until Ctrl-C" if finished and not self._once else ""
        self._tell("goodbye", f"the run {one_line(run)} has {'finished' if finished else 'stopped'}{waits}")
        if finished:
            self._finished = run
            self._log.acknowledge(self._sending.have)
            asked = runs_in_log(self._folder).get(run, SiteRun()).clients
            await self._call(self._answering.ended, run, asked)
        if self._experiment is not None and self._experiment.message.fields.run == run:
            self._close_experiment()
        if self._once:
            await self._connection.acknowledge(message.digest)
        return self._once

    def _rest(self) -> None:
        """Drops the secrets of clients that were not asked for an hour: a sum that needs them has failed."""
        opened = None if self._experiment is None else self._experiment.opened
        if opened is not None and monotonic() - self._asked > _HOUR:
            for row in opened.rows.values():
                opened.program.secrets_of(row).forget("", _HOUR)

    async def _renew(self) -> None:
        """Renews the certificate in its last 30 days, and after a rotation. A failure is tried again in an hour."""
        now = self._clock()
        if now - self._renewed < _HOUR or not self._keys.renewal_due(now):
            return
        self._renewed = now
        try:
            await self._connection.renew()
            self._tell("renewed", "the certificate was renewed")
        except (IdentityError, MessageError) as error:
            if isinstance(error, SiteRefused) and error.reason != "renewal":
                raise
            self._tell("renewal", f"the certificate was not renewed: {error}")

    # -- the experiment -------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Asks what the experiment is; tells the site's data once it is approved, and builds it once it has rows."""
        try:
            received = await self._connection.experiment()
            if received is None:
                return
            if self._experiment is None or received[0].digest != self._experiment.message.digest:
                await self._change(*received)
        except DecodingError as error:
            self._tell("message", f"the experiment of the server is refused: {error.what}")
            await self._sleep(self._uniform(0, _PAUSE))
            return
        experiment = self._experiment
        assert experiment is not None
        proposed = experiment.proposed
        rows = None if experiment.excluded() else experiment.message.details.get("rows")
        if proposed is None or experiment.failed:
            return
        if not self._approved(experiment, proposed):
            return
        if not experiment.told:
            census = await self._locally(experiment, proposed.census)
            if census is None:
                return
            await self._census(experiment, proposed, census)
        if experiment.opened is None and rows is not None:
            experiment.opened = await self._locally(experiment, self._open, proposed, rows, experiment.body)
            if experiment.opened is not None:
                self._tell_refused(experiment.opened)

    def _approved(self, experiment: _Experiment, proposed: Proposed) -> bool:
        """Whether it may be computed now; says once what it waits for."""
        missing = proposed.missing() or ""
        if missing and missing != experiment.waits:
            self._tell("waiting", missing)
        experiment.waits = missing
        return not missing

    async def _census(self, experiment: _Experiment, proposed: Proposed, census: SiteCensus) -> None:
        asked = experiment.message
        try:
            await self._call(self._log.introduce, self._keys.chains(), *self._approved_by(asked))
            await self._call(self._log.changed, "exclude", proposed.excluded, asked.fields.run)
            count, head = self._log.state
            fields = asked.fields._replace(direction="answer", ask=asked.digest, head=head)
            message = seal(self._key, "census", fields, {**census.to_plain(), "log_lines": count}, b"")
            await self._call(self._log.census, asked.fields.run, census)
            await self._connection.census([message.head], partial(check_approved, proposed.missing))
            experiment.told = True
        except MessageError as error:
            experiment.failed = True
            self._tell("census", f"the server refuses the census: {error.what}")
        except (RunFailed, AskRefused) as error:  # it is told at the next look
            self._tell("census", f"the census is not sent: {error}")

    async def _locally(self, experiment: _Experiment, function: Callable[..., _T], *values: Any) -> _T | None:
        """The result of a function of this site's data; None if the experiment cannot be computed here."""
        try:
            return await self._call(function, *values)
        except Exception as error:  # the server may send any experiment: none ends the agent
            experiment.failed = True
            self._tell("experiment", f"the experiment cannot be computed here: {_sentence(error)}")
            return None

    async def _change(self, message: Message, body: bytes) -> None:
        """Takes another message of an experiment; what is built stays if only the attempt is another."""
        details, before = message.details, self._experiment
        text, new = details.get("settings"), _Experiment(message, body)
        run, coded = message.fields.run, text.encode(errors="surrogatepass") if isinstance(text, str) else b""
        digest = hashlib.sha256(coded).hexdigest() if coded else None
        if message.purpose != "experiment" or digest is None or details.get("contract") != digest:
            raise MessageError("mismatch", "it is no experiment")
        self._log.check_seen(details.get("seen"))
        terms = ExperimentTerms.from_plain(details.get("terms"))
        if run != self._finished:
            self._finished = None
        known = None if before is None or before.message.fields.run != run else before.proposed
        if before is not None and known is not None and (known.digest, known.terms) == (digest, terms):
            new.proposed, new.waits = before.proposed, before.waits
            if (before.message.details.get("rows"), before.body) == (details.get("rows"), body):
                new.opened, before.opened = before.opened, None
        self._close_experiment()
        self._experiment = new
        if word := new.excluded():
            self._tell("excluded", f"the server does not ask this site: {one_line(word)}")
        if new.proposed is None:
            try:
                new.proposed = await self._call(self._read, text, run, terms)
            except Exception as error:
                self._tell("experiment", f"the experiment {digest[:12]} is refused: {_sentence(error)}")

    def _open(self, proposed: Proposed, rows: Any, body: bytes) -> Opened:
        if not isinstance(rows, Mapping) or not all(type(row) is int for row in rows.values()):
            raise MessageError("mismatch", "its rows are no numbers of clients")
        sizes = read_payload(body, Caps(self._limits.most), "experiment")
        self._answering.forget()
        opened = proposed.open(rows, sizes)
        self._answering.largest = int(max(sizes["examples"]))
        return opened

    def _tell_refused(self, opened: Opened) -> None:
        """Says which operations of the experiment the policy of the site refuses."""
        asked = [op for op in opened.program.ops if opened.takes(op) is not None]
        for sentence in [sentence for op in asked for sentence in opened.refused(op)]:
            self._tell("policy", f"this site does not answer: {sentence}")

    def _close_experiment(self) -> None:
        if self._experiment is not None and self._experiment.opened is not None:
            self._answering.forget()
            self._experiment.opened.close()
        self._experiment = None

    # -- asks -----------------------------------------------------------------------------------------------------

    async def _ask(self, ask: Message, bodies: list[bytes]) -> None:
        """Answers an ask: with what it was answered before, or by computing."""
        fields, begun, missing = ask.fields, monotonic(), None
        self._asked = begun
        self._log.check_seen(ask.details.get("seen"))
        try:
            if (known := self._experiment) is None or not known.of(ask) or known.opened is None:
                await self._look()  # it came before the ask
            known = self._experiment
            if known is None or known.proposed is None or known.message.fields.run != fields.run:
                raise AskRefused("contract", "no experiment of this run is approved and open")
            if not self._approved(known, known.proposed):
                raise AskRefused("contract", f"the experiment may not be computed: {known.waits}")
            missing = known.proposed.missing
            answer, outcome = await self._call(self._log.find, ask), "again"
            if answer is None:
                self._log.acknowledge(self._sending.have)
                await self._call(self._log.introduce, self._keys.chains(), *self._approved_by(ask))
                answer, outcome = await self._computed(ask, bodies, missing)
        except AskRefused as refused:
            answer, outcome = await self._call(self._answering.failed, ask, refused, False)
        except RunFailed as error:  # nothing was answered, and nothing may be sent
            self._tell("disk", f"an ask is not answered: {error}")
            self._sending.refused.add(ask.digest)
            return
        if answer is None:  # the server closed the ask
            return
        self._sending.have.add(ask.digest)
        self._sending.queue.put_nowait((ask, [answer], missing))
        about = f"round {fields.round}, {fields.operation} for {fields.client}"
        self._tell("ask", f"{about}: {outcome}, {len(answer):,} bytes, {monotonic() - begun:.1f} s")

    def _approved_by(self, ask: Message) -> tuple[Any, ...]:
        """The run of an ask, the digest of its experiment and who approved it; empty if the site has none for it."""
        known = self._experiment
        if known is None or known.proposed is None or not known.of(ask):
            return ()
        return ask.fields.run, known.proposed.digest, known.proposed.approvers()

    async def _computed(self, ask: Message, bodies: list[bytes], missing: _Missing) -> tuple[Any, str]:
        experiment = self._experiment
        opened = experiment.opened if experiment is not None and experiment.of(ask) else None
        fields, size = ask.fields, ask.details.get("shared_size", 0)
        try:
            if fields.shared and opened is not None:
                bodies.append(await self._connection.blob(fields.shared, size))
        except Closed:
            return None, "late"
        except MessageError as error:
            refused = AskRefused("refused", f"its shared body is refused: {error.what}")
            return await self._call(self._answering.failed, ask, refused)
        return await self._call(self._answering.answered, opened, ask, bodies, missing)

    async def _send(self) -> None:
        """Sends answers in their order. One that the server does not wait for any more is dropped."""
        sending = self._sending
        while True:
            ask, parts, missing = await sending.queue.get()
            try:
                if not await self._connection.answer(ask.digest, parts, partial(check_approved, missing)):
                    self._notes.note("late", ask=ask.digest.hex())
            except AskRefused as refused:
                self._tell("answer", f"an answer is not sent: {refused.what}")
                answer, _ = await self._call(self._answering.failed, ask, refused, False)
                sending.queue.put_nowait((ask, [answer], None))
                continue
            except MessageError as error:
                self._tell("answer", f"the server refuses an answer: {error.what}")
                sending.refused.add(ask.digest)  # it would come again at once
            del parts
            sending.have.discard(ask.digest)

    def _tell(self, kind: str, line: str) -> None:
        self._notes.note(kind, text=line)
        self._say(line)


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, FedlensError | asyncio.CancelledError) else told(error)


__all__ = ["WAITED_FOR", "Agent", "Opened", "Proposed", "SiteLimits"]
