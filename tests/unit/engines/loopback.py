"""Sites in this process: a link that computes each ask where a site would, and can lose, delay, repeat or forge."""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedlens.core.protocol import Failure, Id, Payload, Program
from fedlens.core.schema import Schema
from fedlens.core.wire.message import Caps, Message, read_payload, seal
from fedlens.core.wire.plain_schema import from_plain
from fedlens.data.partition.roster import Roster
from fedlens.engines.executor import Executor, Item
from fedlens.engines.inline import inline
from fedlens.engines.links.link import Arrived, Link
from fedlens.engines.links.post import answer_body
from fedlens.identity.keys import KeyPair

CAPS = Caps(2**28)
Fault = Callable[[Message], str | None]
"""What happens to an ask: "lost" and "mute" bring no answer, "late" brings it at `release`; None is all well."""


class Clock:
    """Seconds that pass only while the server waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Site:
    """Runs asks, and keeps the states of its clients."""

    name: str
    program: Program
    roster: Roster
    key: KeyPair = field(default_factory=KeyPair.make)
    takes: Callable[[str], Schema | None] = lambda op: Schema()
    states: dict[str, Payload] = field(default_factory=dict)
    logs: dict[str, Payload] = field(default_factory=dict)
    asked: list[Message] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        self.program = inline(device="cpu").applied(self.program)
        self.executor = Executor(self.program)

    def answer(self, ask: Message, blobs: Mapping[bytes, bytes]) -> tuple[Message, bytes]:
        """The answer to an ask, as any site would give it."""
        self.asked.append(ask)
        fields, handle = ask.fields, ask.details["state"]
        shared = read_payload(blobs[fields.shared], CAPS)
        item = Item(
            Id(fields.round, fields.exchange, fields.slot),
            self.roster.row(fields.client),
            read_payload(blobs[fields.payload], CAPS),
            {} if handle is None else self.states[handle],
        )
        takes = self.takes(fields.operation)
        if takes is None or takes.fault({**shared, **item.payload}) is not None:
            return self.sealed(ask, {"outcome": "failure", "reason": "refused"}, b"")
        if takes.log:
            item.payload["log"] = self.logs.get(fields.client, {})
        expect = replace(from_plain(ask.details["expect"]), log=takes.log)
        with self.program.computing():
            found = self.executor.alone(fields.operation, shared, item, expect)
        self.computed += 1
        if isinstance(found, Failure):
            return self.sealed(ask, {"outcome": "failure", "reason": "operation"}, b"")
        if "log" in found.payload:
            self.logs[fields.client] = found.payload.pop("log")
        details = {"outcome": "reply", "metrics": dict(found.metrics), "state": self.kept(found.state)}
        return self.sealed(ask, details, answer_body(found.payload, found.letters))

    def kept(self, state: Payload | None) -> dict[str, Any] | None:
        """Keeps a state under a handle."""
        if state is None:
            return None
        handle = hashlib.sha256(f"{self.name} {len(self.states)}".encode()).hexdigest()
        self.states[handle] = state
        return {"at-site": handle, "bytes": 1}

    def sealed(self, ask: Message, details: Mapping[str, Any], body: bytes) -> tuple[Message, bytes]:
        """The message."""
        fields = ask.fields._replace(direction="answer", ask=ask.digest, head=bytes(32))
        return seal(self.key, "answer", fields, {**details, "log_lines": 0}, body), body


class LoopbackLink(Link):
    """All sites of a roster, asked one after the other in a thread of their own."""

    def __init__(
        self,
        program: Program,
        roster: Roster,
        clock: Clock,
        fault: Fault = lambda ask: None,
        takes: Callable[[str], Schema | None] = lambda op: Schema(),
    ) -> None:
        self.clock, self.fault = clock, fault
        self.sites = {name: Site(name, program, roster, takes=takes) for name in roster.sites}
        self.away: set[str] = set()
        self.queue: deque[tuple[str, Message, dict[bytes, bytes]]] = deque()
        self.held: list[Arrived] = []
        self.ready: list[Arrived] = []
        self.closed = False
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def online(self) -> Mapping[str, float]:
        return {name: 1e9 if name in self.away else 0.0 for name in self.sites}

    def send(self, site: str, message: Message, blobs: Mapping[bytes, bytes], /) -> None:
        self.queue.append((site, message, dict(blobs)))

    def collect(self, seconds: float, waiting: Collection[bytes], /) -> list[Arrived]:
        if not self.ready and self.queue:
            self._compute(*self.queue.popleft())
        arrived, self.ready = self.ready, []
        self.clock.now += 0.0 if arrived else max(seconds, 0.001)
        return arrived

    def _compute(self, site: str, ask: Message, blobs: dict[bytes, bytes]) -> None:
        fault = self.fault(ask)
        if fault == "lost" or site in self.away:
            return
        message, body = self._thread.submit(self.sites[site].answer, ask, blobs).result()
        if fault == "forged":
            message, body = self.sites[site].sealed(ask, message.details, b"\x08" + bytes(7) + b"{}......")
        if fault == "heavy":
            payload = read_payload(body, CAPS)["payload"] | {
                "weight": float(self.sites[site].roster.sizes().max())
            }
            message, body = self.sites[site].sealed(ask, message.details, answer_body(payload))
        if fault == "stale":
            fields = message.fields._replace(attempt=message.fields.attempt + 1)
            message = seal(self.sites[site].key, "answer", fields, message.details, body)
        arrived = arrival(site, message, body)
        if fault == "late":
            self.held.append(arrived)
        elif fault == "another's":
            self.ready.append(replace(arrived, site=next(name for name in self.sites if name != site)))
        else:
            self.ready += [arrived, arrival(site, message, body)] if fault == "twice" else [arrived]

    def release(self) -> None:
        """Late answers arrive."""
        self.ready, self.held = [*self.ready, *self.held], []

    def close(self) -> None:
        self.closed = True
        self._thread.shutdown()


def arrival(site: str, message: Message, body: bytes) -> Arrived:
    """A message as a link hands it over."""
    return Arrived(site, message, io.BytesIO(message.head + body))
