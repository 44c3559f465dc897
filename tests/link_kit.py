"""A federation on this machine: both ends of a link, messages, and a proxy that does what networks do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from fedlens.core.wire.message import PROTOCOL, Message, seal, write_payload
from fedlens.engines.links.connections import Limits, listen
from fedlens.engines.links.https import HttpsLink
from fedlens.engines.links.link import Arrived
from fedlens.identity.authority import server_context
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.identity.tls import FederationContext
from fedlens.site.connection import ServerConnection, Timing
from tests.unit.identity.federation_kit import HOST, NOW, federation_in, joined

T = TypeVar("T")
FAST = Limits(header=60, idle=60, stall=60, poll=0.2, sweep=0.02, young=0, addresses=0)


@dataclass
class Federation:
    """A server's folder, its sites, and what its link told the operator."""

    folder: Path
    limits: Limits = FAST
    clock: Callable[[], float] = lambda: NOW
    notices: list[tuple[str, str, str]] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self.registry = federation_in(self.folder)
        self.key = self.registry.identity()
        self.root = hashlib.sha256(self.registry.root).digest()
        self.spool = self.folder / "spool"
        self.spool.mkdir()

    def site(self, name: str, accepted: bool = True) -> SiteKeys:
        """A site that has joined."""
        if accepted:
            keys = joined(self.registry, name, self.folder)
        else:
            invitation = self.registry.invite(name)
            keys = SiteKeys.join(self.folder / name, invitation)
            keys.install(self.registry.enrol(keys.enrolment(invitation), HOST), NOW)
        keys.port = self.port
        return keys

    @contextmanager
    def link(self, port: int = 0) -> Iterator[HttpsLink]:
        """The server's end, which listens at `self.port`."""
        sockets = listen(HOST, port)
        self.port = sockets[0].getsockname()[1]
        link = HttpsLink(
            sockets, server_context(self.registry.folder), self.registry, self.spool,
            lambda *notice: self.notices.append(notice), self.limits, self.clock,
        )  # fmt: skip
        try:
            yield link
        finally:
            link.close()

    def ask(
        self, client: str = "ward-a", shared: bytes = b"", body: bytes = b"", details: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Message:  # fmt: skip
        """An ask to a client, signed by the server."""
        fields = SignedFields(
            root=self.root, run="run", attempt=1, round=1, exchange=0, slot=0, client=client, operation="train",
            direction="ask", nonce=bytes(16), payload=b"", shared=hashlib.sha256(shared).digest() if shared else b"",
            report=b"", ask=b"", head=b"", signer=b"",
        )._replace(**changes)  # fmt: skip
        return seal(self.key, "ask", fields, {"shared_size": len(shared), **(details or {})}, body)


def blobs(*bodies: bytes) -> dict[bytes, bytes]:
    """The bodies by their SHA-256."""
    return {hashlib.sha256(body).digest(): body for body in bodies}


def answer_to(
    ask: Message,
    key: KeyPair,
    payload: Any = None,
    body: bytes = b"",
    purpose: str = "answer",
    details: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[bytes]:
    """The head and the body of an answer, signed by `key`."""
    body = body or write_payload(payload or {})
    fields = ask.fields._replace(direction="answer", ask=ask.digest)._replace(**changes)
    return [seal(key, purpose, fields, {"outcome": "reply", **(details or {})}, body).head, body]


def within(task: Callable[[], Awaitable[T]], seconds: float = 120) -> T:
    """Runs a site's part in an event loop of its own."""

    async def limited() -> T:
        return await asyncio.wait_for(task(), seconds)

    return asyncio.run(limited())


@contextmanager
def beside(task: Callable[[], Awaitable[Any]], seconds: float = 120) -> Iterator[None]:
    """Runs a site's part in a thread beside the block, and waits for it; its error is raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            within(task, seconds)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


@dataclass
class At:
    """`async with At(keys) as connection`: a site's end, which hardly waits between attempts."""

    keys: SiteKeys
    most: int = 2**30
    options: dict[str, Any] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    async def __aenter__(self) -> ServerConnection:
        options = {"timing": Timing(quiet=60, first=0.01, longest=0.05), "clock": lambda: NOW, **self.options}
        self.connection = ServerConnection(
            self.keys, lambda: client_context(self.keys.folder), self.most, self.troubles.append, **options
        )
        return self.connection

    async def __aexit__(self, *error: object) -> None:
        await self.connection.close()


async def request(
    federation: Federation, context: ssl.SSLContext | None, method: str, path: str,
    headers: Mapping[str, str] | None = None, data: Any = None, local: str = HOST,
) -> tuple[int, Mapping[str, str], bytes]:  # fmt: skip
    """One request as an attacker would make it: status, headers, body. Without a context it has no certificate."""
    if context is None:
        context = FederationContext.trusting(federation.registry.root, ssl.PROTOCOL_TLS_CLIENT)
    connector = aiohttp.TCPConnector(ssl=context, local_addr=(local, 0))
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        url = f"https://{HOST}:{federation.port}{path}"
        given = {"fedlens-protocol": str(PROTOCOL), **(headers or {})}
        async with session.request(method, url, headers=given, data=data) as response:
            return response.status, dict(response.headers), await response.read()


async def put(
    federation: Federation, keys: SiteKeys, ask: Message, data: bytes, start: int = 0
) -> tuple[int, str]:
    """Sends bytes as the answer to an ask; the status, and the reason of a refusal."""
    headers = {"Content-Range": f"bytes {start}-{start + len(data) - 1}/{start + len(data)}"}
    context = client_context(keys.folder)
    status, answer, _ = await request(
        federation, context, "PUT", f"/answer/{ask.digest.hex()}", headers, io.BytesIO(data)
    )
    return status, answer.get("fedlens-reason", "")


def bodies(arrived: list[Arrived]) -> list[bytes]:
    """The bodies of what arrived."""
    return [each.body() for each in arrived]


class Proxy:
    """Forwards connections to a port in a thread, and does to each one what is next in `faults`.

    A fault is the direction ("down" or "up"), the kind ("cut", "delay", "flip", "repeat" or "stall"), and the bytes
    after which it happens. With `password` it is a proxy for CONNECT, and asks for user:password if that is not empty.
    """

    def __init__(self, port: int, password: str | None = None) -> None:
        self.target, self.password = port, password
        self.faults: list[tuple[str, str, int]] = []
        self.happened: list[str] = []
        self.loop, self.stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self.connected, HOST, 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await self.stop.wait()
            server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            for _ in range(5):  # transports close their sockets in later steps of the loop
                await asyncio.sleep(0)

        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(serve(),))
        self.thread.start()
        started.wait()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()
        self.loop.close()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port, fault, ends = self.target, self.faults.pop(0) if self.faults else ("", "", 0), [writer]
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            if self.password is not None:
                try:
                    header = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:  # as of a check whether the port is open
                    return writer.close()
                given = base64.b64encode(self.password.encode())
                if self.password and b"Proxy-Authorization: Basic " + given not in header:
                    writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    writer.close()
                    return
                port = int(header.split()[1].rpartition(b":")[2])
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            far_reader, far_writer = await asyncio.open_connection(HOST, port)
            ends.append(far_writer)
            try:
                await asyncio.gather(
                    self.pump(reader, far_writer, fault if fault[0] == "up" else None, ends),
                    self.pump(far_reader, writer, fault if fault[0] == "down" else None, ends),
                )
            finally:
                for end in ends:
                    end.transport.abort()

    async def pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: tuple[str, str, int] | None,
        ends: list[asyncio.StreamWriter],
    ) -> None:
        passed = 0
        while data := await reader.read(2**16):
            passed += len(data)
            if fault is not None and passed >= fault[2]:
                self.happened.append(kind := fault[1])
                if kind == "cut":
                    for end in ends:
                        end.transport.abort()
                    return
                if kind == "stall":
                    await asyncio.Event().wait()
                if kind == "delay":
                    await asyncio.sleep(0.02)
                else:
                    data, fault = (
                        {"flip": data[:-1] + bytes([data[-1] ^ 1]), "repeat": data + data}[kind],
                        None,
                    )
            writer.write(data)
            await writer.drain()
        writer.close()
