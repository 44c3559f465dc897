"""The server's end of the link over HTTPS: one TLS 1.3 port, which sites call.

    POST /enrol           a request to join; the only path without a site's certificate
    POST /renew           a request for a new certificate
    POST /left            a notice that the site has left; its next GET /next takes it back
    GET  /next            the next message, or 204 after `Limits.poll` or when the experiment is another one;
                          `?have=DIGEST,...` names the messages already received
    HEAD /next            a heartbeat; `?have=` as above
    GET  /blob/SHA256     a body, from a byte on (`Range: bytes=N-`); only for a site with an open ask that names it
    PUT  /answer/DIGEST   the answer to the ask of this digest, from a byte on (`Content-Range: bytes N-M/TOTAL`)
    HEAD /answer/DIGEST   how much of it has arrived (`fedlens-received`); 204 if it was accepted
    PUT  /census          a message that answers no ask
    GET  /experiment      the settings to be approved

Everything else is 404. Responses to sites that are refused have a word of a fixed list in `fedlens-reason`. aiohttp
runs in a thread of its own with its own event loop, so an engine that waits or computes does not delay a site.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import queue
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from time import time

from aiohttp import web

from fedlens.base.errors import IdentityError, RunFailed, told
from fedlens.core.wire.message import MOST_HEAD, PROTOCOL, Message, MessageError, check_body, read
from fedlens.engines.links.connections import Connection, Connections, Limits, RateLimit
from fedlens.engines.links.link import Arrived, Link, Notice
from fedlens.engines.links.outbox import Inbox, Outbox, Outgoing
from fedlens.engines.links.uploads import Upload, most_of_answer
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.tls import FederationContext, Peer

_PIECE = 2**18
_FAULTS = 10  # notices in a minute of what one site does wrong; all of it is counted
_RANGE = re.compile(r"bytes=(\d{1,15})-")
_CONTENT_RANGE = re.compile(r"bytes (?:\*|(\d{1,15})-\d{1,15})/(\d{1,15})")
_HAVE = re.compile(r"(?:[0-9a-f]{64}(?:,[0-9a-f]{64}){0,63})?")
_STATUS = {"too large": 413, "offset": 409}


class _Refused(Exception):
    """A response with this status, without a body."""

    def __init__(self, status: int, reason: str | None = None, close: bool = False, **headers: str) -> None:
        self.status, self.close = status, close
        self.headers = headers | ({"fedlens-reason": reason} if reason else {})


class HttpsLink(Link):
    """Serves the sites of a federation on listening sockets, see `listen`.

    Args:
        listeners: sockets that listen; they are closed with the link.
        context: TLS 1.3 with the server's certificate and optional certificates of clients.
        registry: the federation, whose folder says which sites are accepted. Other processes may change it.
        spool: an existing folder for bodies of answers; the files in it have no names.
        notice: receives what an operator should know.
        limits: what a peer may take.
        clock: the time by which certificates end, in seconds since 1970.
    """

    def __init__(
        self,
        listeners: Collection[socket.socket],
        context: FederationContext,
        registry: FederationFolder,
        spool: Path,
        notice: Notice,
        limits: Limits | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        self._listeners, self._context, self._registry = list(listeners), context, registry
        self._root = hashlib.sha256(registry.root).digest()
        self._spool, self._notice, self._clock = spool, notice, clock
        self._limits = limits or Limits()
        self._connections = Connections(self._limits)
        self._rates = RateLimit(self._limits.enrol_per_address), RateLimit(self._limits.enrol_in_all)
        self._faults = RateLimit(_FAULTS)
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._failure: BaseException | None = None
        self.refused: Counter[tuple[str, str]] = Counter()
        """How often a message of a site was refused, by the site's name and the reason."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fedlens-link", daemon=True)
        self._thread.start()

    # The four methods, called in the engine's thread.

    def online(self) -> dict[str, float]:
        """The seconds since each site that ever came was last heard of."""
        now = self._loop.time()
        return {name: now - site.seen for name, site in self._outbox.sites.copy().items() if site.seen}

    def send(self, site: str, message: Message, blobs: Mapping[bytes, bytes], /) -> None:
        """Keeps a message for a site until it is answered, or acknowledged if it is no ask."""
        self._call(self._outbox.post, site, message, dict(blobs))

    def collect(self, seconds: float, waiting: Collection[bytes], /) -> list[Arrived]:
        """The messages that have arrived; waits for the first one for at most so many seconds.

        Raises `RunFailed` if the link has stopped.
        """
        self._call(self._outbox.keep, frozenset(waiting))
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._inbox.get(seconds))
            while True:
                arrived.append(self._inbox.get(0))
        if self._failure is not None:
            raise RunFailed(
                f"the link to the sites stopped: {told(self._failure)}", hint="start the server again"
            )
        return [each for each in arrived if each is not None]

    def keeps(self, site: str, digest: bytes) -> bool:
        """Whether a message still waits for a site, which has neither acknowledged nor answered it."""
        found: Future[bool] = Future()
        self._call(lambda: found.set_result(digest in self._outbox.site(site).messages))
        try:
            return found.result(timeout=10)
        except TimeoutError:  # the link has stopped, or is busy
            return self._thread.is_alive()

    def use(self, chain: Path, passphrase: bytes | None) -> None:
        """Loads a new certificate of the server, for connections that begin later."""
        self._call(self._context.load_chain, chain, passphrase)  # no handshake is under way in its thread

    def close(self) -> None:
        """Closes all connections and sockets. May be called twice."""
        self._call(self._stop.set)
        self._thread.join()
        with suppress(queue.Empty):
            while True:
                if (left := self._inbox.get(0)) is not None:
                    left.file.close()

    def _call(self, function: Callable[..., None], *values: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *values)

    # What follows runs in the link's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # the engine's thread raises it
            self._failure = error
        finally:
            self._inbox.put(None)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        server = web.Server(self._handle, handler_cancellation=True)  # type: ignore[arg-type, unused-ignore]
        tasks = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._sweep())]
        for listener in self._listeners:
            listener.setblocking(False)
            tasks.append(asyncio.create_task(self._connections.accept(listener, self._context, server)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for listener in self._listeners:
                listener.close()
            for connection in self._connections:
                connection.abort()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            for _ in range(10):  # a transport closes its socket in a later step of the loop
                await asyncio.sleep(0)
            self._outbox.keep(frozenset())

    async def _sweep(self) -> None:
        """Closes the connections of sites that were revoked or suspended, or whose certificate ended."""
        folder, seen = self._registry.folder / "sites", 0
        while True:
            await asyncio.sleep(self._limits.sweep)
            last, seen = seen, folder.stat().st_mtime_ns
            for connection in self._connections:
                peer = connection.peer
                if peer and (
                    self._ended(peer)
                    or (seen != last and self._registry.refusal(peer) not in (None, "pending"))
                ):
                    connection.abort()

    def _ended(self, peer: Peer) -> bool:
        return peer.not_after.timestamp() <= self._clock()

    def _refusal(self, peer: Peer) -> str | None:
        return "expired" if self._ended(peer) else self._registry.refusal(peer)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection: Connection = request.protocol.connection  # type: ignore[attr-defined]
        connection.limit(None)
        try:
            response = await self._route(request, connection)
        except _Refused as refused:
            if request.writer.output_size > 0:  # another response is under way: a second one would follow it
                connection.abort()
                raise ConnectionResetError from None
            response = web.Response(status=refused.status, headers=refused.headers)
            if refused.close:
                response.force_close()
        except TimeoutError:
            connection.abort()
            raise
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._tell("error", connection.group, told(error))
            raise
        finally:
            connection.limit(self._limits.idle)
        if not response.prepared:
            response.headers["Server"] = "fedlens"
            if connection.peer is not None:
                response.headers["fedlens-protocol"] = str(PROTOCOL)
        return response

    async def _route(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        peer = connection.peer
        if peer is None:
            if (request.method, request.path) == ("POST", "/enrol") and self._registry.enrolling():
                return await self._enrol(request, connection)
            raise _Refused(404, close=True)
        if request.headers.get("fedlens-protocol") != str(PROTOCOL):
            raise _Refused(426, "protocol", close=True)
        self._admit(peer, connection)
        kind, _, name = request.path.removeprefix("/").partition("/")
        handler = {
            ("GET", "next"): self._next,
            ("HEAD", "next"): self._beat,
            ("GET", "blob"): self._blob,
            ("PUT", "answer"): self._answer,
            ("HEAD", "answer"): self._received,
            ("PUT", "census"): self._census,
            ("GET", "experiment"): self._experiment,
            ("POST", "renew"): self._signed,
            ("POST", "left"): self._signed,
        }.get((request.method, kind))
        if handler is None or bool(name) != (kind in ("blob", "answer")):
            raise _Refused(404)
        return await handler(request, peer, name)

    def _admit(self, peer: Peer, connection: Connection | None = None) -> None:
        """Raises `_Refused` unless the site is accepted and its certificate is valid at this moment."""
        if (reason := self._refusal(peer)) is not None:
            raise _Refused(403, reason, close=True)
        if connection is None:
            return
        site, now = self._outbox.site(peer.name), self._loop.time()
        if site.network not in ("", connection.network) and now - site.seen < self._limits.addresses:
            what = (
                f"requests from {site.network} and {connection.network} within {self._limits.addresses:g} s"
            )
            self._registry.suspend(peer.name, what)
            self._notice("suspended", peer.name, what)
            raise _Refused(403, "suspended", close=True)
        if site.network != connection.network:
            self._notice("address", peer.name, f"it calls from {connection.network}")
        site.network, site.seen = connection.network, now

    async def _enrol(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        now = self._loop.time()
        near, everybody = self._rates
        if not (near.admits(connection.network, now) and everybody.admits("", now)):
            raise _Refused(429, close=True)
        text = await self._read(request, self._limits.enrol_size)
        try:
            answer = await asyncio.to_thread(self._registry.enrol, text, connection.network)
        except IdentityError as error:
            self._notice("enrolment", "", error.what)
            raise _Refused(403, close=True) from None
        response = web.Response(body=answer)
        response.force_close()
        return response

    async def _signed(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        text, leaves = await self._read(request, self._limits.enrol_size), request.path == "/left"
        self._admit(peer)
        try:
            function = self._registry.leave if leaves else self._registry.renew
            return web.Response(body=await asyncio.to_thread(function, peer, text))
        except IdentityError as error:
            self._tell(reason := "left" if leaves else "renewal", peer.name, error.what)
            raise _Refused(403, reason) from None

    async def _next(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        have, until = self._received_by(request, peer), self._loop.time() + self._limits.poll
        site = self._outbox.site(peer.name)
        self._registry.note_left(peer.name, 0.0)
        while not site.fresh:
            arrived = site.arrived
            waiting = (
                each for digest, each in site.messages.items() if digest not in have and not each.accepted
            )
            outgoing = next(waiting, None)
            if outgoing is not None:
                self._admit(peer)
                return await self._message(request, outgoing.message)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await arrived.wait()
                    continue
            break
        return web.Response(status=204)

    def _received_by(self, request: web.BaseRequest, peer: Peer) -> set[bytes]:
        """The digests in `have`; those of them that are no asks are done."""
        text, messages = request.query.get("have", ""), self._outbox.site(peer.name).messages
        if not _HAVE.fullmatch(text):
            raise _Refused(400)
        have = {bytes.fromhex(digest) for digest in text.split(",") if digest}
        for digest in have & messages.keys():
            if messages[digest].message.purpose != "ask":
                del messages[digest]
        return have

    async def _beat(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        self._received_by(request, peer)
        return web.Response(status=204)

    async def _experiment(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        site = self._outbox.site(peer.name)
        message, site.fresh = site.experiment, False
        return web.Response(status=204) if message is None else await self._message(request, message)

    async def _message(self, request: web.BaseRequest, message: Message) -> web.StreamResponse:
        body = self._outbox.blobs.get(message.fields.payload, b"")
        return await self._stream(
            request, 200, message.head + (body if len(body) <= self._limits.inline else b"")
        )

    async def _blob(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        blob = self._outbox.blob(peer.name, _digest(name))
        if blob is None:
            raise _Refused(404)
        asked = _RANGE.fullmatch(request.headers.get("Range", "bytes=0-"))
        start = int(asked[1]) if asked else 0
        if start > len(blob) or asked is None:
            raise _Refused(416)
        response = await self._stream(request, 206 if start else 200, memoryview(blob)[start:])
        self._admit(peer)
        return response

    async def _stream(
        self, request: web.BaseRequest, status: int, data: bytes | memoryview
    ) -> web.StreamResponse:
        """Sends the bytes; each piece has to leave in time, or the connection is closed."""
        response = web.StreamResponse(
            status=status, headers={"fedlens-protocol": str(PROTOCOL), "Server": "fedlens"}
        )
        response.content_length = len(data)
        await response.prepare(request)
        for start in range(0, len(data), _PIECE):
            async with asyncio.timeout(self._limits.stall + _PIECE / self._limits.slowest):
                await response.write(data[start : start + _PIECE])
        return response

    async def _read(
        self, request: web.BaseRequest, most: int, write: Callable[[bytes], None] | None = None
    ) -> bytes:
        """Reads a body of at most `most` bytes, which are counted; gives the pieces to `write`, or returns them."""
        kept = bytearray()
        write = write or kept.extend
        length = request.content_length
        if length is None or "Content-Encoding" in request.headers or "Transfer-Encoding" in request.headers:
            raise _Refused(411, close=True)
        if length > most:
            raise _Refused(413, "too large", close=True)
        begun, received = self._loop.time(), 0
        while received < length:
            limit = begun + self._limits.stall + received / self._limits.slowest
            async with asyncio.timeout_at(limit):
                piece = await request.content.readany()
            received += len(piece)
            if not piece or received > length:
                raise _Refused(400, close=True)
            write(piece)
        return bytes(kept)

    async def _received(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        outgoing = self._ask(peer, name)
        if outgoing.accepted:
            return web.Response(status=204)
        received = outgoing.upload.received if outgoing.upload else 0
        return web.Response(headers={"fedlens-received": str(received)})

    async def _answer(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        outgoing = self._ask(peer, name)
        if outgoing.accepted:  # it counts once
            raise _Refused(204, "duplicate", close=True)
        most = most_of_answer(outgoing.message, self._limits.message)
        upload = outgoing.upload = outgoing.upload or Upload(self._spool, most)
        place = _CONTENT_RANGE.fullmatch(request.headers.get("Content-Range", ""))
        if place is None:
            raise _Refused(400, close=True)
        total = int(place[2])
        start = total if place[1] is None else int(place[1])
        try:
            upload.begin(request, start, total)
            await self._read(request, total - start, lambda piece: upload.write(request, piece))
            if upload.complete:
                if outgoing.check is None:
                    outgoing.check = asyncio.ensure_future(self._accept(peer, outgoing, upload))
                    outgoing.check.add_done_callback(lambda check: check.cancelled() or check.exception())
                await asyncio.shield(outgoing.check)
        except MessageError as error:
            raise self._refused(peer, error, upload.received) from error
        except OSError as error:
            if isinstance(error, TimeoutError | ConnectionError):
                raise
            outgoing.close()
            self._tell("disk", peer.name, f"its answer cannot be kept: {error.strerror or told(error)}")
            raise _Refused(507, close=True) from error
        return web.Response(status=201 if upload.complete else 202)

    async def _accept(self, peer: Peer, outgoing: Outgoing, upload: Upload) -> None:
        """Checks a complete answer in another thread, then the site again, and counts the answer once."""
        try:
            message = await asyncio.to_thread(upload.checked, outgoing.message, peer.identity)
            self._admit(peer)
            self._ask(peer, outgoing.message.digest.hex())  # it may have been closed
        except BaseException:
            upload.close()
            outgoing.upload = outgoing.check = None
            raise
        outgoing.accepted, outgoing.upload = True, None
        self._inbox.put(Arrived(peer.name, message, upload.file))

    async def _census(self, request: web.BaseRequest, peer: Peer, name: str) -> web.StreamResponse:
        stream = io.BytesIO(await self._read(request, MOST_HEAD + self._limits.inline))
        try:
            message = read(stream, peer.identity)
            fields, start = message.fields, stream.tell()
            if (message.purpose, fields.direction, fields.root) != ("census", "answer", self._root):
                raise MessageError("mismatch", "it is no census for this federation")
            body = stream.read()
            check_body(message, hashlib.sha256(body).digest(), len(body))
        except MessageError as error:
            raise self._refused(peer, error) from error
        self._admit(peer)
        stream.seek(start)
        self._inbox.put_census(Arrived(peer.name, message, stream))
        return web.Response(status=201)

    def _refused(self, peer: Peer, error: MessageError, received: int = 0) -> _Refused:
        """The response to a message that is refused, which is counted and told the operator."""
        if error.reason != "offset":  # which only says where to go on
            self.refused[peer.name, error.reason] += 1
            self._tell("refused", peer.name, error.what)
        received_header = {"fedlens-received": str(received)}
        return _Refused(_STATUS.get(error.reason, 422), error.reason, close=True, **received_header)

    def _tell(self, kind: str, site: str, what: str) -> None:
        """Tells the operator of a fault, unless the site has filled the log with others in the last minute."""
        if self._faults.admits(site, self._loop.time()):
            self._notice(kind, site, what)

    def _ask(self, peer: Peer, name: str) -> Outgoing:
        """The open ask of this site with this digest. An answer to any other is late, or not this site's to give."""
        outgoing = self._outbox.site(peer.name).messages.get(_digest(name))
        if outgoing is None or outgoing.message.purpose != "ask":
            self.refused[peer.name, "late"] += 1
            raise _Refused(410, "late", close=True)
        return outgoing


def _digest(name: str) -> bytes:
    if not re.fullmatch("[0-9a-f]{64}", name):
        raise _Refused(404)
    return bytes.fromhex(name)
