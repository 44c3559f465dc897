"""A server in this process, and sites that do what a script says, over TLS on 127.0.0.1."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import tomli_w

from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.core.wire.message import Message, seal, write_payload
from fedlens.files import jsonl
from fedlens.identity.site_keys import SiteKeys
from fedlens.result import Result
from fedlens.run.build import Built, build
from fedlens.server.progress import ServeProgress, SiteRow
from fedlens.server.serve import Served, serve
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from fedlens.site.connection import ServerConnection, SiteRefused
from tests.link_kit import At, Federation, within
from tests.unit.engines.loopback import Site

COMMON: dict[str, Any] = {
    "name": "wards",
    "rounds": 3,
    "algorithm": "scaffold",
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
    "checkpoint": {"seconds": 0},
    "evaluation": {"clients": "all"},
    "seed": 3,
}
SPLIT = {"validation": 0.2, "validation_from": "client"}
PARTITION = {"name": "dirichlet-classwise", "clients": 3, "alpha": 1.0}
SIMULATED = {**COMMON, "data": {"dataset": "digits", "partition": PARTITION, **SPLIT}, "engine": "inline"}
NAMES = ("ward-a", "ward-b", "ward-c")


def write_experiment(path: Path, made: Built, **changes: Any) -> Path:
    """An experiment file for the sites that have the data of a simulation."""
    data = made.client_data.dataset
    form = {
        "name": "sites",
        "classes": list(data.classes),
        "input_shape": [1, 8, 8],
        "mean": list(data.mean),
        "std": list(data.std),
        "test": "digits",
    }
    engine = {"name": "network", "max_share": 1.0, "patience": 60.0, "lost": 60.0}
    settings = {**COMMON, "data": {"dataset": form, **SPLIT}, "engine": engine} | changes
    path.write_text(tomli_w.dumps(settings))
    return path


def simulated() -> Built:
    """The simulation whose clients are the sites."""
    return build(plan_of(Source(SIMULATED)), Path(), download=False)


class Followed(ServeProgress):
    """Keeps what a display would show."""

    def __init__(self) -> None:
        self.port: queue.Queue[int] = queue.Queue()
        self.directory = Path()
        self.rows: Sequence[SiteRow] = ()
        self.notes: list[str] = []
        self.rounds: list[int] = []
        self.each_round: Callable[[int], None] = lambda round: None

    def waiting(self, directory: Path, address: str, run: str) -> None:
        self.directory = directory
        self.port.put(int(address.rpartition(":")[2]))

    def sites(self, rows: Sequence[SiteRow]) -> None:
        self.rows = rows

    def note(self, text: str) -> None:
        self.notes.append(text)

    def round_done(self, metrics: dict[str, Any]) -> None:
        self.rounds.append(metrics["round"])
        self.each_round(metrics["round"])


@dataclass
class WardSite:
    """A site of one client, which approves everything and computes each ask, until the goodbye."""

    keys: SiteKeys
    name: str
    made: Built
    census: SiteCensus
    outcome: str | None = None
    refused: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    rows: dict[str, int] | None = None
    asked: list[Message] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    site: Site | None = None
    on_ask: Callable[[Message], bool] = lambda ask: True  # whether it is answered

    def answered(self, round: int) -> bool:
        """Whether it has sent an answer of this round."""
        return round in self.done

    async def work(self) -> None:
        """Until the goodbye, or until the server refuses the site."""
        with suppress(SiteRefused):
            await self._work()

    async def _work(self) -> None:
        async with At(self.keys) as connection:
            current: Message | None = None
            have: set[bytes] = set()
            while self.outcome is None:
                got = await connection.experiment()
                if got is not None and (current is None or got[0].digest != current.digest):
                    current = await self.told(connection, current, got[0])
                taken = await connection.next(have)
                if taken is None:
                    continue
                message, body = taken
                have = {message.digest}
                if message.purpose == "goodbye":
                    self.outcome = message.details["outcome"]
                    await connection.next(have)
                elif self.on_ask(message):
                    await self.answer(connection, message, body)

    async def told(self, connection: ServerConnection, before: Message | None, message: Message) -> Message:
        """Sends a census to a new start of a run, and notes the rows."""
        run = (message.fields.run, message.fields.attempt)
        assert hashlib.sha256(message.details["settings"].encode()).hexdigest() == message.details["contract"]
        if message.details["refused"]:
            self.refused.append(message.details["refused"])
        self.rows = message.details["rows"]
        if before is None or (before.fields.run, before.fields.attempt) != run:
            self.attempts.append(message.fields.attempt)
            census = replace(self.census, contract=self.census.contract or message.details["contract"])
            fields = message.fields._replace(direction="answer", ask=message.digest)
            body = write_payload({})
            fields, details = fields._replace(head=bytes(32)), {**census.to_plain(), "log_lines": 0}
            sealed = seal(self.keys.identity(), "census", fields, details, body)
            await connection.census([sealed.head, body])
        return message

    async def answer(self, connection: ServerConnection, ask: Message, body: bytes) -> None:
        """Computes an ask."""
        assert self.rows is not None
        (row,) = self.rows.values()
        self.asked.append(ask)
        shared = await connection.blob(ask.fields.shared, ask.details["shared_size"])
        if self.site is None:
            self.site = Site(self.name, self.made.program, _OneRow(row), self.keys.identity())  # type: ignore[arg-type]
        message, sent = await asyncio.to_thread(
            self.site.answer, ask, {ask.fields.payload: body, ask.fields.shared: shared}
        )
        await connection.answer(ask.digest, [message.head, sent])
        self.done.add(ask.fields.round)


@dataclass(frozen=True)
class _OneRow:
    own: int

    def row(self, client: str) -> int:
        return self.own


class Wards:
    """A federation with its sites, and servers of it."""

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self.federation, self.made = Federation(folder), simulated()
        self.folder, self.progress = folder, Followed()
        held = self.made.federation.held_out
        assert held is not None
        sizes = zip(self.made.partition.sizes().tolist(), held.tolist(), strict=True)
        self.sites = {
            name: WardSite(
                self.federation.site(name), name, self.made, SiteCensus(name, [CountedClient(name, *size)])
            )
            for name, size in zip(names, sizes, strict=False)
        }
        self.experiment = write_experiment(folder / "experiment.toml", self.made)

    def serve(self, **options: Any) -> Result:
        """Serves the experiment in this thread."""
        how = {"bind": "127.0.0.1:0", "out": self.folder / "run", "report": False, **options}
        return serve(Served(str(self.experiment), self.federation.registry.folder, **how), self.progress)

    @contextmanager
    def at_work(self, *names: str) -> Iterator[None]:
        """Sites that work beside the block, as soon as a server listens, until its goodbye or the end of the block."""
        ended, failures = threading.Event(), list[BaseException]()
        self.progress.port = queue.Queue()
        chosen = [self.sites[name] for name in names or self.sites]

        async def works() -> None:
            port = await asyncio.to_thread(self.progress.port.get)
            if not port:
                return
            for site in chosen:
                site.keys.port = port
            tasks = [asyncio.create_task(site.work()) for site in chosen]
            stopped = asyncio.create_task(asyncio.to_thread(ended.wait))
            everybody = asyncio.create_task(asyncio.wait(tasks))
            await asyncio.wait([everybody, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    failures.append(error)
                task.cancel()
            ended.set()
            with suppress(asyncio.CancelledError, aiohttp.ClientError):
                await asyncio.gather(*tasks, return_exceptions=True)

        thread = threading.Thread(target=lambda: within(works, 300))
        thread.start()
        try:
            yield
        finally:
            self.progress.port.put(0)
            ended.set()
            thread.join()
        if failures:
            raise failures[0]


def events(directory: Path) -> list[dict[str, Any]]:
    """The lines of the log of a server."""
    return jsonl.read(directory / "serve.log.jsonl")


__all__ = ["Followed", "WardSite", "Wards", "events", "simulated", "write_experiment"]
