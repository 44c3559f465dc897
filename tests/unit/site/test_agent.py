"""What a site answers, to which asks, and what it does not, with a server that only plays messages."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import math
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens.base.errors import DataError, IdentityError, RunFailed
from fedlens.core.protocol import Client, ClientDataSource, Outcome, Payload, Program
from fedlens.core.random import Rng, Secrets
from fedlens.core.schema import Bound, NumberField, Schema, TensorField
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.core.wire.message import Caps, Message, MessageError, read, read_payload, write_payload
from fedlens.core.wire.plain_schema import to_plain
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.partition.roster import Roster
from fedlens.files import jsonl
from fedlens.identity.file_cipher import FileCipher
from fedlens.site import agent as agent_module
from fedlens.site.agent import Agent, SiteLimits
from fedlens.site.answering import Answering
from fedlens.site.answers_log import AnswersLog
from fedlens.site.client_logs import ClientLogs
from fedlens.site.connection import Closed, SiteRefused
from fedlens.site.kept_states import KeptStates
from fedlens.site.log_export import AskedLog
from fedlens.site.operation_thread import OperationThread
from fedlens.site.site_log import WAITING, SiteLog
from tests.agent_kit import DIGEST, control, proposal
from tests.unit.site.ask_kit import SERVER, SITE, OpenedProgram, ProposedProgram, ask_of

ROSTER = Roster.of([
    SiteCensus("a", [CountedClient("a", 10, 4)]),
    SiteCensus("b", [CountedClient("b", 30, 2)]),
])  # fmt: skip
EXPECT = Schema(
    {"sum": TensorField((2,), torch.float32), "weight": NumberField(above=0, most=30)}, metrics={"n": Bound()}
)
TAKES = Schema({"model": TensorField((2,), torch.float32), "do": NumberField()})
ROOT = bytes(32)


class Nothing(ClientDataSource):
    def data_of(self, client: int | str) -> None:
        return None


class Operation:
    """Adds up, or what a test puts in its place."""

    def __init__(self) -> None:
        self.calls = 0
        self.instead: Callable[[Payload, Client], Any] = lambda payload, client: None

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        self.calls += 1
        other = self.instead(payload, client)
        if other is not None:
            assert isinstance(other, Outcome)
            return other
        count = client.state.get("count", 0) + 1
        return Outcome(
            {"sum": payload["model"] + count, "weight": 10.0}, {"count": count}, {"examples": 10.0}
        )


def takes(op: str) -> Schema | None:
    return TAKES if op == "train" else None


Part = Callable[["Server"], Awaitable[None]]


@dataclass
class Server:
    """A server and a connection to it, in one object."""

    message: tuple[Message, bytes] | None = None
    open: dict[bytes, tuple[Message, bytes]] = field(default_factory=dict)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    answers: list[tuple[Message, bytes]] = field(default_factory=list)
    censuses: list[SiteCensus] = field(default_factory=list)
    haves: list[set[bytes]] = field(default_factory=list)
    beats: int = 0
    renewals: int = 0
    polls: int = 0
    counts: bool = True
    refuses: bool = False
    refusal: Exception | None = None
    beat_refusal: Exception | None = None
    again: set[bytes] = field(default_factory=set)
    proposed: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.changed, self.down, self.waiting = asyncio.Event(), False, 0
        self.propose(ROSTER)

    def propose(self, roster: Roster | None, attempt: int = 1) -> None:
        self.message = proposal(SERVER, ROOT, roster, "a", attempt=attempt)
        self.proposed.add(self.message[0].digest)

    # What the agent calls.

    async def next(
        self, have: Collection[bytes], experiment: bytes | None = None
    ) -> tuple[Message, bytes] | None:
        self.haves.append(set(have))
        self.polls += 1
        await asyncio.sleep(0)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        for digest in have:
            if digest in self.open and self.open[digest][0].purpose != "ask":
                del self.open[digest]
        return next((each for digest, each in self.open.items() if digest not in have), None)

    async def experiment(self) -> tuple[Message, bytes] | None:
        return self.message

    async def link(self) -> None:
        """Waits for the link, as a connection does."""
        self.waiting += self.down
        await self.until(lambda: not self.down)

    async def blob(self, digest: bytes, size: int) -> bytes:
        if digest not in self.blobs:
            raise Closed
        return self.blobs[digest]

    async def answer(self, ask: bytes, parts: Sequence[Any], check: Callable[[], object]) -> bool:
        await self.link()
        check()
        content = b"".join(bytes(part) for part in parts)
        if self.refuses:
            self.answers.append(opened_answer(content))
            raise MessageError("mismatch", "it is no answer")
        if ask not in self.again:
            self.open.pop(ask, None)
        self.again.discard(ask)
        await asyncio.sleep(0)
        self.answers.append(opened_answer(content))
        return self.counts

    async def census(self, parts: Sequence[bytes], check: Callable[[], object]) -> None:
        await self.link()
        check()
        message, _ = opened_answer(b"".join(parts))
        assert message.fields.ask in self.proposed
        assert message.purpose == "census"
        self.censuses.append(SiteCensus.from_plain("a", message.details))

    async def acknowledge(self, message: bytes) -> None:
        del self.open[message]

    async def renew(self) -> None:
        self.renewals += 1
        raise SiteRefused("renewal")

    async def beat(self) -> None:
        while True:
            self.beats += 1
            if self.beat_refusal is not None:
                refusal, self.beat_refusal = self.beat_refusal, None
                raise refusal
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        pass

    # What a test calls.

    def ask(
        self, details: Mapping[str, Any] | None = None, do: Any = 0, at: float = 0.0, **changes: Any
    ) -> Message:
        """Sends an ask for training from `at`."""
        shared = write_payload({"model": torch.full((2,), at)})
        body = write_payload({"do": do})
        digest = hashlib.sha256(shared).digest()
        given = {"expect": to_plain(EXPECT), "shared_size": len(shared), **(details or {})}
        ask = ask_of(body, digest, given, **changes)
        self.blobs[digest] = shared
        self.open[ask.digest] = (ask, body)
        return ask

    def asked(self) -> tuple[Message, list[bytes]]:
        """An ask, and its bodies as the agent hands them over."""
        ask = self.ask()
        return ask, [self.open[ask.digest][1], self.blobs[ask.fields.shared]]

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not ready():
                await asyncio.sleep(0.001)

    async def answered(self, ask: Message) -> Message:
        """The next answer to this ask."""
        before = len(self.answers)

        def found() -> list[Message]:
            return [one for one, _ in self.answers[before:] if one.fault_as_answer_to(ask) is None]

        await self.until(lambda: bool(found()))
        return found()[0]

    async def reason(self, ask: Message) -> str | None:
        """The outcome of an ask: the reason of a failure; None for a reply."""
        message = await self.answered(ask)
        if message.details["outcome"] == "reply":
            return None
        assert message.details["size"] == 0
        return str(message.details["reason"])


def opened_answer(content: bytes) -> tuple[Message, bytes]:
    stream = io.BytesIO(content)
    return read(stream, SITE.public), stream.read()


class Site:
    """The folder of a site and what it computes with; `play` runs an agent beside a test's part."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.operation, self.lines = folder / "site", Operation(), list[str]()
        self.due, self.limits, self.once = False, SiteLimits(), False
        self.approved = True
        self.refused: Exception | None = None
        self.program = Program({"train": self.operation, "evaluate": self.operation}, Nothing(), 0)
        self.read, self.opened = 0, list[OpenedProgram]()
        self.clock = 1000.0
        self.thread: OperationThread | None = None  # one that the agent does not close

    def agent(self, server: Server) -> Agent:
        def read(text: str, run: str, terms: ExperimentTerms) -> ProposedProgram:
            self.read += 1
            if self.refused is not None:
                raise self.refused
            return ProposedProgram(
                "a", DIGEST, self.program, ROSTER, lambda: self.approved, takes, self.opened, terms
            )

        keys: Any = SimpleNamespace(
            name="a", identity=lambda: SITE, renewal_due=lambda now: self.due, chains=dict
        )
        connection: Any = server

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(0)

        return Agent(
            self.folder, keys, connection, read, self.lines.append, self.limits, once=self.once,
            clock=lambda: self.clock, sleep=sleep, thread=self.thread,
        )  # fmt: skip

    def play(self, part: Part) -> Server:
        """Runs an agent, which is cancelled when the part ends."""

        async def both() -> Server:
            server = Server()
            task = asyncio.create_task(self.agent(server).run())
            try:
                parts = asyncio.create_task(part(server))
                await asyncio.wait({task, parts}, return_when=asyncio.FIRST_COMPLETED)
                if not parts.done():
                    parts.cancel()
                    await task
                await parts
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return server

        return asyncio.run(both())

    def log(self) -> str:
        return (self.folder / "log" / "site.jsonl").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_an_ask_is_answered_once_and_its_bytes_come_again(site: Site) -> None:
    async def part(server: Server) -> None:
        ask = server.ask()
        server.again.add(ask.digest)  # the server has lost the answer
        message = await server.answered(ask)
        await server.until(lambda: len(server.answers) == 2)
        assert server.answers[0][0].head == server.answers[1][0].head
        assert message.details["state"]["bytes"] > 0
        reply = read_payload(server.answers[1][1], Caps(10_000))["payload"]
        assert reply["sum"].tolist() == [1.0, 1.0]

    site.play(part)
    assert site.operation.calls == 1
    first, second = (line.partition("train for a: ")[2].partition(",")[0] for line in site.lines)
    assert (first, second) == ("reply", "again")


def test_an_ask_that_overtakes_the_roster_waits_for_it(site: Site) -> None:
    async def part(server: Server) -> None:
        server.propose(None, attempt=2)
        polls = server.polls
        await server.until(lambda: server.polls > polls + 3)
        server.propose(
            ROSTER, attempt=2
        )  # which 'fedlens site review' fetches, so that the poll does not end
        assert await server.reason(server.ask(attempt=2)) is None

    site.play(part)


def test_a_state_goes_on_from_round_to_round_and_over_a_restart(site: Site) -> None:
    handle = ""

    async def first(server: Server) -> None:
        nonlocal handle
        handle = (await server.answered(server.ask())).details["state"]["at-site"]

    async def second(server: Server) -> None:
        message = await server.answered(server.ask({"state": handle}, round=2))
        assert read_payload(server.answers[-1][1], Caps(10_000))["payload"]["sum"].tolist() == [2.0, 2.0]
        assert message.fields.head != ROOT  # the log goes on

    site.play(first)
    site.play(second)


def test_a_run_that_is_due_is_purged_while_the_server_is_away(site: Site) -> None:
    site.limits = SiteLimits(keep_days=30)
    kept = site.folder / "states"

    async def first(server: Server) -> None:
        await server.answered(server.ask())
        assert list(kept.glob("*.safetensors"))
        site.clock += 29 * 86_400.0

    async def second(server: Server) -> None:
        async def away() -> None:
            await asyncio.Event().wait()

        server.experiment = away  # type: ignore[method-assign]
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert list(kept.glob("*.safetensors"))
        site.clock += 2 * 86_400.0
        await server.until(lambda: not list(kept.glob("*.safetensors")))

    site.play(first)
    site.play(second)


def test_the_next_ask_acknowledges_an_answer(site: Site) -> None:
    async def part(server: Server) -> None:
        for slot in range(3):
            ask = server.ask(slot=slot)
            await server.answered(ask)
            assert [path.name for path in (site.folder / "work").iterdir()] == [ask.digest.hex()]

    site.play(part)


def test_another_ask_under_a_number_and_one_of_an_old_attempt_are_refused(site: Site) -> None:
    async def part(server: Server) -> None:
        assert await server.reason(server.ask()) is None
        assert await server.reason(server.ask(nonce=b"1" * 16)) == "refused"
        server.propose(ROSTER, attempt=3)
        assert await server.reason(server.ask(attempt=3)) is None
        assert await server.reason(server.ask(attempt=2, slot=1)) == "refused"
        assert await server.reason(server.ask(attempt=3, slot=1)) is None

    site.play(part)
    assert site.operation.calls == 3


def fails(error: BaseException) -> Callable[[Payload, Client], Any]:
    def instead(payload: Payload, client: Client) -> Any:
        raise error

    return instead


def replies(payload: Mapping[str, Any], **metrics: float) -> Callable[[Payload, Client], Any]:
    return lambda _, client: Outcome(dict(payload), None, metrics)


GOOD = {"sum": torch.ones(2), "weight": 10.0}


@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        (fails(ValueError("/scans/Mary-Smith.png")), "operation"),
        (fails(SystemExit(1)), "operation"),
        (fails(MemoryError("/scans/Mary-Smith.png")), "memory"),
        (fails(torch.cuda.OutOfMemoryError("CUDA out of memory")), "memory"),
        (lambda payload, client: payload["model"].add_(1) and None, "operation"),
        (replies({**GOOD, "sum": torch.full((2,), math.nan)}), "operation"),
        (replies({**GOOD, "sum": torch.ones(3)}), "operation"),
        (replies({**GOOD, "images": torch.ones(2)}), "operation"),
        (replies({**GOOD, "weight": 11.0}), "operation"),
        (replies(GOOD, examples=3.0), "data"),
        (replies(GOOD, secret=3.0), "operation"),
        (replies(GOOD, examples=10.0), None),
    ],
)
def test_only_what_the_ask_and_the_site_allow_goes_out(
    site: Site, instead: Callable[[Payload, Client], Any], reason: str | None
) -> None:
    site.operation.instead, site.limits = instead, SiteLimits(min_examples=5)

    async def part(server: Server) -> None:
        assert await server.reason(server.ask()) == reason
        assert all(b"Mary" not in message.head + body for message, body in server.answers)

    site.play(part)
    assert site.operation.calls == 1
    assert ('"reason":"' in site.log().partition('"stopped"')[0]) == (reason is not None)
    assert not any("Mary" in line for line in site.lines)


def test_an_answer_that_no_message_can_carry_is_a_failure(site: Site) -> None:
    name = "n" * 70_000
    site.operation.instead = replies(GOOD, **{name: 1.0})

    async def part(server: Server) -> None:
        ask = server.ask({"expect": to_plain(Schema(metrics={name: Bound()}))})
        assert await server.reason(ask) == "operation"

    site.play(part)
    assert "cannot be sent" in site.log()


def test_the_text_of_an_error_is_in_the_log_of_the_site(site: Site) -> None:
    site.operation.instead = fails(ValueError("/scans/Mary-Smith.png"))

    async def part(server: Server) -> None:
        await server.answered(server.ask())

    site.play(part)
    assert "Mary-Smith" in site.log()
    assert (site.folder / "log" / "site.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("details", "changes", "reason"),
    [
        ({}, {"operation": "evaluate"}, "refused"),
        ({}, {"operation": "no such"}, "refused"),
        ({}, {"round": 21}, "refused"),
        ({}, {"do": "text"}, "refused"),
        ({}, {"client": "b"}, "contract"),
        ({}, {"run": "other"}, "contract"),
        ({}, {"attempt": 2}, "contract"),
        ({"expect": 7}, {}, "refused"),
        ({"state": "0" * 64}, {}, "state"),
        ({"state": 7}, {}, "state"),
        ({"keep": 7}, {}, "state"),
        ({"most": 10}, {}, "refused"),
    ],
)
def test_an_ask_that_is_not_allowed_is_refused_before_anything_runs(
    site: Site, details: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    async def part(server: Server) -> None:
        assert await server.reason(server.ask(details, **changes)) == reason
        assert await server.reason(server.ask(slot=7, attempt=1 + ("attempt" in changes))) == (
            "contract" if "attempt" in changes else None
        )

    site.play(part)
    assert site.operation.calls == ("attempt" not in changes) + (details == {"most": 10})


def test_a_client_with_too_few_examples_does_not_compute(site: Site) -> None:
    site.limits = SiteLimits(min_examples=11)

    async def part(server: Server) -> None:
        assert await server.reason(server.ask()) == "data"

    site.play(part)
    assert site.operation.calls == 0


def test_exclusions_are_read_before_every_round_and_an_error_in_them_stops_it(site: Site) -> None:
    async def part(server: Server) -> None:
        for round, slot, reads in ((1, 0, 1), (1, 1, 1), (2, 0, 2)):
            assert await server.reason(server.ask(round=round, slot=slot)) is None
            assert len(site.opened[0].reads) == reads
            site.opened[0].excluded = {"lines": 1, "images_left_out": 1, "sha256": "aa"}

        def unreadable() -> None:
            raise DataError("withdrawn.txt is missing")

        site.opened[0].reread = unreadable  # type: ignore[method-assign]
        assert await server.reason(server.ask(round=3)) == "data"
        assert await server.reason(server.ask(round=3, slot=1)) == "data"
        site.opened[0].reread = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        assert await server.reason(server.ask(round=3, slot=2)) == "operation"

    site.play(part)
    told = AskedLog.read(site.folder).told
    changes = [
        (told[at - 1]["round"], line["sha256"], line["run"])
        for at, line in enumerate(told)
        if line.get("kind") == "exclude"
    ]
    assert changes == [(1, "aa", "run")]  # after the answers of round 1, and once
    said = [line for line in site.lines if "failed" in line]
    assert said == [  # each kind once, and nothing of a text, which may name a patient
        "train for a in round 3 failed: images or labels cannot be used, or are too few; look at them with: fedlens "
        "site check. The text of this and later failures is in log/site.jsonl",
        "train for a in round 3 failed: it raised an error; tell the operator of the server, without what the text "
        "says of persons. The text of this and later failures is in log/site.jsonl",
    ]


def test_nothing_is_told_before_a_person_approves(site: Site) -> None:
    site.approved = False

    async def part(server: Server) -> None:
        await server.until(lambda: server.polls > 3)
        assert not server.censuses
        assert "site review" in waiting.read_text()
        assert await server.reason(server.ask()) == "contract"
        site.approved = True
        await server.until(lambda: bool(server.censuses))
        assert await server.reason(server.ask(slot=1)) is None
        await server.until(lambda: not waiting.exists())
        site.approved = False
        await server.until(waiting.exists)

    waiting = site.folder / WAITING
    server = site.play(part)
    assert not waiting.exists()
    assert len(server.censuses) == 1
    assert sum("site review" in line for line in site.lines) == 2


def test_a_rejection_ends_a_run_that_was_approved(site: Site) -> None:
    async def part(server: Server) -> None:
        ask = server.ask()
        sent = server.open[ask.digest]
        assert await server.reason(ask) is None
        site.approved = False
        server.open[ask.digest] = sent  # the server has lost the answer, and gets no other copy
        assert await server.reason(ask) == "contract"
        assert await server.reason(server.ask(slot=1)) == "contract"
        site.approved = True
        assert await server.reason(server.ask(slot=2)) is None

    site.play(part)
    assert site.operation.calls == 2


@pytest.mark.parametrize("restart", [False, True])
def test_an_answer_that_waits_for_the_link_is_not_sent_after_a_rejection(site: Site, restart: bool) -> None:
    async def waiting(server: Server) -> None:
        await server.until(lambda: bool(server.censuses))
        server.down, ask = not restart, server.ask()
        server.refuses = restart  # it is answered, and still in `work`
        if restart:
            await server.answered(ask)
            return
        await server.until(lambda: server.waiting == 1)
        site.approved, server.down = False, False
        assert await server.reason(ask) == "contract"
        assert [message.details["outcome"] for message, _ in server.answers] == ["failure"]
        assert site.operation.calls == 1

    site.play(waiting)
    if restart:
        site.approved = False

        async def again(server: Server) -> None:
            assert await server.reason(server.ask()) == "contract"

        assert len(site.play(again).answers) == 1
    assert site.operation.calls == 1


def test_a_census_that_waits_for_the_link_is_not_sent_after_a_rejection(site: Site) -> None:
    async def part(server: Server) -> None:
        server.down = True
        await server.until(lambda: server.waiting == 1)
        site.approved, server.down = False, False
        await server.until(lambda: any("the census is not sent" in line for line in site.lines))
        assert not server.censuses
        site.approved = True
        await server.until(lambda: len(server.censuses) == 1)

    site.play(part)


def test_a_census_comes_again_with_each_message_and_each_start(site: Site) -> None:
    async def part(server: Server) -> None:
        server.propose(None)
        await server.until(lambda: len(server.censuses) == 1)
        server.propose(ROSTER)
        await server.until(lambda: len(server.censuses) == 2 and len(site.opened) == 1)
        server.propose(ROSTER, attempt=2)
        await server.until(lambda: len(server.censuses) == 3)
        assert await server.reason(server.ask(attempt=2)) is None
        assert len(site.opened) == 1  # what is built stays
        assert not site.opened[0].closed
        other = Roster.of([SiteCensus("a", [CountedClient("a", 9, 4)])])
        server.propose(other, attempt=2)
        await server.until(lambda: len(site.opened) == 2)

    site.play(part)
    assert site.read == 1
    assert [each.closed for each in site.opened] == [1, 1]
    kinds = [line.get("kind") for line in jsonl.read(site.folder / "log" / "asked.jsonl")]
    assert kinds.index("experiment") < kinds.index("census")  # who approved what the census tells


@pytest.mark.parametrize("error", [DataError("not these data"), ValueError("not these data")])
def test_an_experiment_that_does_not_fit_is_said_once_and_not_told(site: Site, error: Exception) -> None:
    site.refused = error

    async def part(server: Server) -> None:
        await server.until(lambda: server.polls > 3)
        assert await server.reason(server.ask()) == "contract"

    assert not site.play(part).censuses
    assert sum("not these data" in line for line in site.lines) == 1


def test_a_message_that_is_no_experiment_is_refused(site: Site) -> None:
    async def part(server: Server) -> None:
        good, body = server.message or (ask_of(), b"")
        half = {**good.details, "settings": "\ud800"}  # half of a pair, which is no text in UTF-8
        for details in ({**good.details, "contract": "0" * 64}, {}, half):
            server.message = control(SERVER, ROOT, "experiment", details, body, "run", 1), body
            before = len(site.lines)
            await server.until(lambda before=before: len(site.lines) > before)  # type: ignore[misc]
        server.message = good, body
        assert await server.reason(server.ask()) is None

    site.play(part)
    assert all("refused: it is no experiment" in line for line in site.lines[:3])


def test_a_full_disk_is_a_failure_and_the_ask_can_come_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def part(server: Server) -> None:
        assert await server.reason(server.ask()) is None
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            ask = server.ask(slot=1)
            assert await server.reason(ask) == "disk"
        server.open[ask.digest] = ask, write_payload({"do": 0})
        assert await server.reason(ask) is None

    site.play(part)


def test_heartbeats_go_on_while_the_site_computes(site: Site) -> None:
    beats = threading.Event()
    site.operation.instead = lambda payload, client: beats.wait(60) and None

    async def part(server: Server) -> None:
        ask = server.ask()
        await server.until(lambda: site.operation.calls == 1)
        before = server.beats
        await server.until(lambda: server.beats > before + 3)
        beats.set()
        assert await server.reason(ask) is None

    site.play(part)


def test_a_cancelled_operation_writes_nothing_and_is_computed_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts, put = list[Message](), KeptStates.put

    def counted(states: KeptStates, ask: Message, state: Payload) -> Mapping[str, Any]:
        puts.append(ask)
        return put(states, ask, state)

    monkeypatch.setattr(KeptStates, "put", counted)
    go, ended = threading.Event(), threading.Event()

    def slow(payload: Payload, client: Client) -> Any:
        go.wait(60)
        ended.set()

    site.operation.instead, site.thread = slow, OperationThread()

    async def stopped(server: Server) -> None:
        server.ask()
        await server.until(lambda: site.operation.calls == 1)

    site.play(stopped)  # it does not wait for the operation
    assert not go.is_set()

    async def other(server: Server) -> None:
        site.operation.instead = lambda payload, client: None
        go.set()
        await asyncio.to_thread(ended.wait, 60)
        assert await server.reason(server.ask()) is None

    server = site.play(other)
    assert site.operation.calls == 2
    assert len(puts) == 1
    assert (site.folder / "log" / "asked.jsonl").read_text().count('"decision"') == 1
    assert server.answers[0][0].details["log_lines"] == 2  # the census, and who approved


def test_a_site_stops_if_the_server_has_seen_another_log(site: Site) -> None:
    """As after a backup of its folder was restored."""

    async def answer(server: Server) -> None:
        assert await server.reason(server.ask()) is None

    server = site.play(answer)
    log = AnswersLog(site.folder / "log", site.folder / "work")
    lines, head = log.state
    log.close()
    assert server.answers[0][0].details["log_lines"] < lines

    async def seen(server: Server) -> None:
        assert await server.reason(server.ask({"seen": [lines, head.hex()]}, round=2)) is None
        assert site.operation.calls == 2
        server.ask({"seen": [lines + 9, head.hex()]}, round=3)
        await asyncio.sleep(60)

    with pytest.raises(DataError, match="does not have what the server saw of it"):
        site.play(seen)
    assert site.operation.calls == 2


def test_nothing_is_written_after_a_stop(site: Site) -> None:
    folder = site.folder
    folder.mkdir(mode=0o700)
    log = AnswersLog(folder / "log", folder / "work")
    logs = ClientLogs(folder / "client-logs", FileCipher(SITE))
    answering = Answering(SITE, log, KeptStates(folder / "states"), logs, SiteLog(folder / "log"), print)
    opened = OpenedProgram(site.program, {"a": 0}, {0: (10, 4)}, takes)
    ask, bodies = Server().asked()
    site.operation.instead = lambda payload, client: answering.stop()
    with pytest.raises(RunFailed, match="the site stops"):
        answering.answered(opened, ask, bodies)
    assert site.operation.calls == 1
    assert log.find(ask) is None
    assert not list((folder / "work").iterdir())
    assert not list((folder / "states").glob("*.safetensors"))
    answering.answered(opened, ask, Server().asked()[1])
    assert site.operation.calls == 1


def test_a_cache_lives_as_long_as_the_experiment(site: Site) -> None:
    def cached(payload: Payload, client: Client) -> Any:
        client.scratch["calls"] = client.scratch.get("calls", 0) + 1
        return Outcome({**GOOD, "weight": float(client.scratch["calls"])}, None, {})

    site.operation.instead = cached

    async def part(server: Server) -> None:
        for slot in range(2):
            await server.answered(server.ask(slot=slot))
        assert read_payload(server.answers[-1][1], Caps(10_000))["payload"]["weight"] == 2

    site.play(part)


def test_a_second_process_is_refused(site: Site) -> None:
    async def part(server: Server) -> None:
        await server.until(lambda: bool(server.censuses))
        said = f"another process uses the folder site: number {os.getpid()}, as a rule 'fedlens site start'"
        with pytest.raises(IdentityError, match=said):
            await asyncio.wait_for(site.agent(server).run(), 30)
        assert await server.reason(server.ask()) is None

    site.play(part)


def test_a_late_answer_is_dropped_in_silence(site: Site) -> None:
    async def part(server: Server) -> None:
        server.counts = False
        await server.answered(server.ask())
        closed = server.ask(slot=1, at=1.0)
        del server.blobs[closed.fields.shared]
        polls = server.polls
        await server.until(lambda: server.polls > polls + 1)
        server.open.clear()
        assert await server.reason(server.ask(slot=2)) is None

    site.play(part)
    assert len(site.lines) == 2
    assert '"kind":"late"' in site.log()


def test_an_answer_that_the_server_refuses_is_not_sent_again(site: Site) -> None:
    async def part(server: Server) -> None:
        server.refuses = True
        await server.answered(server.ask())
        polls = server.polls
        await server.until(lambda: server.polls > polls + 3)
        server.refuses = False
        await server.answered(server.ask(slot=1))
        assert len(server.answers) == 2

    site.play(part)


def test_a_run_ends_with_goodbye_and_the_agent_with_it_if_once(site: Site) -> None:
    site.once = True

    async def part(server: Server) -> None:
        assert await server.reason(server.ask()) is None
        message = control(SERVER, ROOT, "goodbye", {"outcome": "finished"}, b"", "run", 1)
        server.open[message.digest] = message, b""
        await asyncio.Event().wait()

    async def both() -> Server:
        server = Server()
        parts = asyncio.create_task(part(server))
        async with asyncio.timeout(60):
            await site.agent(server).run()
        parts.cancel()
        return server

    server = asyncio.run(both())
    assert not server.open  # acknowledged
    assert site.lines[-1] == "the run run has finished"
    assert site.opened[0].closed == 1
    assert not list((site.folder / "work").iterdir())


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("stopped", "the run run has stopped"),
        ("finished", "the run run has finished; waiting for the next experiment, until Ctrl-C"),
    ],
)
def test_without_once_it_waits_for_the_next_run(outcome: str, said: str, site: Site) -> None:
    async def part(server: Server) -> None:
        message = control(SERVER, ROOT, "goodbye", {"outcome": outcome}, b"", "run", 1)
        server.open[message.digest] = message, b""
        await server.until(lambda: bool(site.lines))
        assert site.lines == [said]
        server.propose(ROSTER, attempt=2)
        assert await server.reason(server.ask(attempt=2)) is None

    site.play(part)


def test_a_certificate_is_renewed_when_due_and_a_failure_is_tried_in_an_hour(site: Site) -> None:
    site.due = True

    async def part(server: Server) -> None:
        await server.until(lambda: server.polls > 5)
        assert server.renewals == 1
        site.clock += 3601
        await server.until(lambda: server.renewals == 2)

    site.play(part)
    assert "not renewed" in site.lines[0]


@pytest.mark.parametrize("reason", ["pending", "suspended"])
def test_a_site_waits_for_the_operator(site: Site, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[str]()
    monkeypatch.setattr(SiteLog, "waits", lambda notes, sentence: waits.append(sentence))

    async def part(server: Server) -> None:
        server.refusal = SiteRefused(reason)
        await server.until(lambda: bool(site.lines))
        assert await server.reason(server.ask()) is None

    assert len(site.play(part).censuses) == 2  # it came back
    assert [each for each in waits if each] == [str(SiteRefused(reason))]
    assert waits[-1] == ""


def test_an_operation_that_a_suspension_interrupts_is_answered_after_it(site: Site) -> None:
    go = threading.Event()
    site.operation.instead = lambda payload, client: go.wait(60) and None

    async def part(server: Server) -> None:
        ask = server.ask()
        await server.until(lambda: site.operation.calls == 1)
        server.beat_refusal = SiteRefused("suspended")
        await server.until(lambda: any("suspended" in line for line in site.lines))
        go.set()
        assert await server.reason(ask) is None
        assert await server.reason(server.ask(slot=1)) is None

    site.play(part)
    assert site.operation.calls == 2


def test_a_site_that_was_revoked_ends(site: Site) -> None:
    async def part(server: Server) -> None:
        server.refusal = SiteRefused("revoked")
        await asyncio.Event().wait()

    with pytest.raises(SiteRefused, match="revoked"):
        site.play(part)
    stopped = json.loads(site.log().splitlines()[-1])
    assert (stopped["kind"], stopped["reason"].partition(";")[0]) == ("stopped", "this site was revoked")


def test_secrets_that_nobody_used_for_an_hour_are_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = Secrets()
    site.program = Program(site.program.ops, Nothing(), 0, secrets=lambda client: secrets)
    secrets.token("mask")
    secrets._used["mask"] -= 4000
    now = 0.0
    monkeypatch.setattr(agent_module, "monotonic", lambda: now)

    async def part(server: Server) -> None:
        nonlocal now
        assert await server.reason(server.ask()) is None
        now, polls = 10.0, server.polls
        await server.until(lambda: server.polls > polls + 3)
        assert secrets._known
        now = 3601.0
        await server.until(lambda: not secrets._known)

    site.play(part)


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("step", range(24))
def test_a_kill_at_any_write_of_an_answer_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """State, answer and line are written in this order; whatever is there after a kill, the same ask goes through."""
    ask, calls = None, iter(range(1000))

    async def first(server: Server) -> None:
        nonlocal ask
        await server.answered(server.ask())
        handle = server.answers[0][0].details["state"]["at-site"]
        ask = server.ask({"state": handle}, round=2)
        for name in ("write", "fsync", "replace"):
            patched.setattr(os, name, failing(name))
        await server.until(lambda: len(server.answers) == 2)

    def failing(name: str) -> Callable[..., object]:
        real = vars(os)[name]

        def call(*args: object, **options: object) -> object:
            if threading.current_thread().name == "fedlens-operation" and next(calls) >= step:
                raise Killed  # and everything after it
            return real(*args, **options)

        return call

    with monkeypatch.context() as patched:
        try:
            site.play(first)
            done = True
        except Killed:
            done = False
    assert ask is not None
    assert done == (next(calls) < step + 1)

    async def again(server: Server) -> None:
        assert ask is not None
        server.ask()
        server.open = {ask.digest: (ask, write_payload({"do": 0}))}
        if done:
            server.again.add(ask.digest)
        message = await server.answered(ask)
        assert message.details["outcome"] == "reply"
        assert read_payload(server.answers[-1][1], Caps(10_000))["payload"]["sum"].tolist() == [2.0, 2.0]
        state = message.details["state"]["at-site"]
        assert await server.reason(server.ask({"state": state}, round=3)) is None
        assert read_payload(server.answers[-1][1], Caps(10_000))["payload"]["sum"].tolist() == [3.0, 3.0]

    site.play(again)
    lines = [json.loads(line) for line in (site.folder / "log" / "asked.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "kind" not in line] == [1, 2, 3]
