"""A federation in this process: a server over TLS, and agents of sites in an event loop of their own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.core.protocol import Program
from fedlens.core.schema import Schema
from fedlens.core.wire.census import SiteCensus
from fedlens.core.wire.message import Message, seal, write_payload
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.partition.roster import Roster
from fedlens.engines.links.https import HttpsLink
from fedlens.engines.links.link import Link
from fedlens.engines.links.post import Post
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.site.agent import Agent
from fedlens.site.connection import ServerConnection, Timing
from fedlens.site.operation_thread import OperationThread
from tests.link_kit import Federation, beside
from tests.unit.identity.federation_kit import NOW
from tests.unit.site.ask_kit import ProposedProgram

TEXT = 'algorithm = "fedavg"\n'
DIGEST = hashlib.sha256(TEXT.encode()).hexdigest()


def control(
    key: KeyPair, root: bytes, purpose: str, details: Mapping[str, Any], body: bytes, run: str, attempt: int
) -> Message:
    """A message of the server that is no ask."""
    fields = SignedFields(
        root, run, attempt, 0, 0, 0, "", "", "ask", bytes(16), b"", b"", b"", b"", bytes(32), b""
    )
    return seal(key, purpose, fields, details, body)


def proposal(
    key: KeyPair,
    root: bytes,
    roster: Roster | None,
    site: str,
    run: str = "run",
    attempt: int = 1,
    terms: ExperimentTerms | None = None,
) -> tuple[Message, bytes]:
    """The message of an experiment to a site: before there is a roster, and after."""
    details: dict[str, Any] = {"settings": TEXT, "contract": DIGEST, "rows": None}
    details["terms"] = (terms or ExperimentTerms()).to_plain()
    sizes: dict[str, Any] = {}
    if roster is not None:
        details["rows"] = {roster.ids[row]: row for row in roster.rows_of(site)}
        counts = {"examples": roster.examples, "held_out": roster.held_out}
        sizes = {name: torch.from_numpy(np.array(values)) for name, values in counts.items()}
        sizes |= {"mean": None, "std": None, "images": 0}
    body = write_payload(sizes)
    return control(key, root, "experiment", details, body, run, attempt), body


@dataclass
class SitesOverTls:
    """A server's folder, and the folders of the sites of a roster that outlive server and agents."""

    folder: Path
    program: Program
    roster: Roster
    takes: Callable[[str], Schema | None]
    lines: list[str] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)
    proposed: dict[str, ProposedProgram] = field(default_factory=dict)
    ended: bool = False

    def __post_init__(self) -> None:
        self.federation = Federation(self.folder)
        self.names = sorted(set(self.roster.sites))
        self.keys: dict[str, SiteKeys] = {name: self.federation.site(name) for name in self.names}

    def agent(self, name: str, thread: OperationThread | None = None) -> Agent:
        """The agent of a site, which ends with a run."""
        keys = self.keys[name]
        keys.port = self.federation.port
        connection = ServerConnection(
            keys, lambda: client_context(keys.folder), 2**30, lambda _: None,
            timing=Timing(quiet=60, first=0.01, longest=0.05), clock=lambda: NOW,
        )  # fmt: skip
        self.proposed[name] = ProposedProgram(name, DIGEST, self.program, self.roster, takes=self.takes)

        def read(text: str, run: str, terms: ExperimentTerms) -> ProposedProgram:
            assert text == TEXT
            self.proposed[name].terms = terms
            return self.proposed[name]

        self.agents[name] = Agent(
            self.folder / "sites" / name, keys, connection, read, self.lines.append, once=True,
            clock=lambda: NOW, thread=thread,
        )  # fmt: skip
        return self.agents[name]

    @contextmanager
    def working(self, names: Collection[str] | None = None) -> Iterator[None]:
        """Agents of these sites, or all, in a thread beside the block. They compute one after the other."""
        thread = OperationThread()

        async def work() -> None:
            try:
                agents = [self.agent(name, thread) for name in names or self.names]
                async with asyncio.TaskGroup() as group:
                    for agent in agents:
                        group.create_task(agent.run())
            except BaseException as error:
                self.lines.append(f"the agents end: {error!r}")
                raise
            finally:
                self.ended = True

        (self.folder / "sites").mkdir(exist_ok=True)
        self.ended = False
        with beside(work):
            yield
        thread.close()

    @contextmanager
    def serving(self, attempt: int = 1, port: int = 0) -> Iterator[tuple[HttpsLink, Post]]:
        """A server that proposes the experiment; at the end of the block the run has ended."""
        key = self.federation.key
        with ExitStack() as held:
            link = held.enter_context(self.federation.link(port))
            for name in self.names:
                known = None if attempt == 1 else self.roster  # which is frozen in the first
                message, body = proposal(key, self.federation.root, known, name, attempt=attempt)
                link.send(name, message, {message.fields.payload: body})
            post = Post(link, key, self.federation.root, "run", attempt)
            yield link, post

    def gather(self, link: Link, attempt: int = 1, names: Collection[str] | None = None) -> list[SiteCensus]:
        """Waits for the census of these sites, and freezes the roster."""
        told: dict[str, SiteCensus] = {}
        while told.keys() < set(names or self.names):
            assert not self.ended, self.lines
            for arrived in link.collect(1.0, ()):
                told[arrived.site] = SiteCensus.from_plain(arrived.site, arrived.message.details)
                arrived.file.close()
        for name in self.names:
            message, body = proposal(
                self.federation.key, self.federation.root, self.roster, name, attempt=attempt
            )
            link.send(name, message, {message.fields.payload: body})
        return list(told.values())

    def goodbye(self, link: HttpsLink, outcome: str = "finished", attempt: int = 1) -> None:
        """The run has ended, and so do the agents, before the link may be closed."""
        key, root, details = self.federation.key, self.federation.root, {"outcome": outcome}
        told = {}
        for name in self.names:
            told[name] = control(key, root, "goodbye", details, b"", "run", attempt)
            link.send(name, told[name], {})
        while not self.ended and any(link.keeps(name, message.digest) for name, message in told.items()):
            link.collect(0.05, ())
