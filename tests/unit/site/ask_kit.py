"""Asks to a site, and what a site computes with, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedlens.core.protocol import Program
from fedlens.core.random import Secrets
from fedlens.core.schema import Schema
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.core.wire.message import Message, seal
from fedlens.core.wire.plain_schema import to_plain
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.partition.roster import Roster
from fedlens.engines.inline import inline
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields

SERVER = KeyPair.make()
SITE = KeyPair.make()


def ask_of(
    body: bytes = b"", shared: bytes = b"", details: Mapping[str, Any] | None = None, **changes: Any
) -> Message:
    """An ask to the client "a" of the run "run"."""
    fields = SignedFields(
        root=bytes(32), run="run", attempt=1, round=1, exchange=0, slot=0, client="a", operation="train",
        direction="ask", nonce=bytes(16), payload=b"", shared=shared, report=b"", ask=b"", head=bytes(32), signer=b"",
    )._replace(**changes)  # fmt: skip
    given = {"expect": to_plain(Schema()), "state": None, "keep": [], "most": 2**30, **(details or {})}
    return seal(SERVER, "ask", fields, given, body)


def answer_of(ask: Message, body: bytes = b"", head: bytes = bytes(32)) -> Message:
    """A reply to an ask."""
    fields = ask.fields._replace(direction="answer", ask=ask.digest, head=head)
    return seal(SITE, "answer", fields, {"outcome": "reply", "state": None, "metrics": {}}, body)


def refusal_of(ask: Message, head: bytes = bytes(32), reason: str = "contract") -> Message:
    """No reply to an ask."""
    fields = ask.fields._replace(direction="answer", ask=ask.digest, head=head)
    return seal(SITE, "answer", fields, {"outcome": "failure", "reason": reason, "state": None}, b"")


def any_but_evaluate(op: str) -> Schema | None:
    """Takes every ask, except those for data at the server."""
    return None if op == "evaluate" else Schema()


@dataclass
class OpenedProgram:
    """A program over the data of all clients, as a site opens it."""

    program: Program
    rows: Mapping[str, int]
    sizes: Mapping[int, Sequence[int]]
    takes: Callable[[str], Schema | None] = any_but_evaluate
    reads: list[int] = field(default_factory=list)
    closed: int = 0
    rounds: int = 20
    reports_metrics: bool = True
    excluded: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {row: Secrets() for row in self.rows.values()}
        applied = inline(device="cpu").applied(self.program)
        self.program = replace(applied, secrets=applied.secrets or (lambda row: own[row]))  # type: ignore[index]

    def reread(self) -> None:
        self.reads.append(len(self.reads))

    def examples(self, client: int) -> Sequence[int]:
        return self.sizes[client]

    def release(self, op: str, row: int, work: int | None = None) -> None:
        pass

    def refused(
        self, op: str, row: int | None = None, work: int | None = None, releases: Sequence[Any] = ()
    ) -> Sequence[str]:
        return ()

    @contextmanager
    def computing(self) -> Iterator[None]:
        torch.set_num_threads(1)
        with self.program.computing():
            yield

    def close(self) -> None:
        self.closed += 1


@dataclass
class ProposedProgram:
    """An experiment whose program is known, at one site of a roster."""

    site: str
    digest: str
    program: Program
    roster: Roster
    is_approved: Callable[[], bool] = lambda: True
    takes: Callable[[str], Schema | None] = any_but_evaluate
    opened: list[OpenedProgram] = field(default_factory=list)
    terms: ExperimentTerms = field(default_factory=ExperimentTerms)
    excluded: Mapping[str, Any] = field(default_factory=dict)

    def missing(self) -> str | None:
        return (
            None
            if self.is_approved()
            else f"the experiment {self.digest[:12]} waits for: fedlens site review"
        )

    def approvers(self) -> list[str]:
        return [self.site]

    def census(self) -> SiteCensus:
        rows = self.roster.rows_of(self.site)
        clients = [
            CountedClient(self.roster.ids[k], int(self.roster.examples[k]), int(self.roster.held_out[k]))
            for k in rows
        ]
        return SiteCensus(self.site, clients, {}, self.digest)

    def open(self, rows: Mapping[str, int], sizes: Mapping[str, Any]) -> OpenedProgram:
        counted = {row: (int(sizes["examples"][row]), int(sizes["held_out"][row])) for row in rows.values()}
        self.opened.append(OpenedProgram(self.program, rows, counted, self.takes))
        return self.opened[-1]
