"""The site's end of the link over HTTPS: it calls the server, waits out what passes, and says what does not.

Nothing listens at a site. A proxy is taken from `https_proxy` and `no_proxy`, with its name and password if it has
them; the TLS connection goes through its tunnel to the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from errno import ECONNREFUSED
from time import time
from typing import TypeVar

import aiohttp

from fedlens.base.errors import FedlensError, IdentityError, one_line, told
from fedlens.core.wire.message import MOST_HEAD, PROTOCOL, Message, MessageError, check_body, read
from fedlens.identity.site_keys import NotYetValid, SiteKeys
from fedlens.site.site_log import OFF

_PIECE = 2**18
_MOST_ENROL = 65_536
_NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL, which ssl does not name
_ASK = "ask its operator for a new invitation"
_T = TypeVar("_T")
_REFUSALS: Mapping[str, tuple[str, str]] = {
    "unknown": ("the server does not know this site", "ask its operator for an invitation"),
    "pending": (
        "the operator of the server has not accepted this site yet",
        "compare the eight words of the fingerprint with the operator over another channel",
    ),
    "suspended": (
        "this site is suspended: its identity was used from two addresses within a minute, or its log went back",
        "ask the operator of the server which, and find the copy of the site's folder, or its newest log",
    ),
    "revoked": ("this site was revoked", "ask the operator of the server for a new invitation"),
    "expired": (
        "the certificate of this site has expired",
        "ask the operator of the server for a new invitation",
    ),
    "protocol": (
        "the server speaks another protocol than this fedlens",
        "install the version that the server has",
    ),
    "left": (
        "the server does not accept the notice that this site has left",
        "compare the clocks of both machines",
    ),
    "renewal": ("the server does not renew the certificate of this site", "ask the operator of the server"),
}


class SiteRefused(IdentityError):
    """The server does not serve this site; trying again does not help. `reason` is a key of a fixed list."""

    exit_code = 1

    def __init__(self, reason: str, *, where: str | None = None) -> None:
        self.reason = reason
        what, hint = _REFUSALS.get(reason, ("the server refuses this site", "ask the operator of the server"))
        super().__init__(what, where=where, hint=hint)


class _Again(Exception):
    """The server is busy or has stopped in the middle: the same request may succeed later."""


class Closed(Exception):
    """What was asked for is not open any more: the server does not wait for this answer."""


@dataclass(frozen=True)
class Timing:
    """The times of a connection, in seconds.

    Attributes:
        quiet: without a byte, after which a connection is given up; more than the server's longest wait.
        heartbeat: between two signs of life.
        first, longest: the pause after the n-th failure in a row is random, up to `first` times 2^n and `longest`.
    """

    quiet: float = 60
    heartbeat: float = 15
    first: float = 0.5
    longest: float = 15


def _session(context: ssl.SSLContext) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context, limit=8),
        trust_env=True,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**18,
        headers={"fedlens-protocol": str(PROTOCOL), "User-Agent": "fedlens", "Accept-Encoding": "identity"},
    )


class ServerConnection:
    """Requests to the server. Each one is repeated until it succeeds; `SiteRefused` is raised where that cannot help.

    Args:
        keys: the site's folder, which knows its server.
        context: makes the TLS context of the site; it is called again after a renewal.
        most: bytes of the largest message that is accepted.
        trouble: receives one sentence each time a request fails and will be repeated.
        timing: the times of a connection.
        clock: the time by which the certificate ends, in seconds since 1970.
        sleep, uniform: how it waits, and how it draws how long.
        heard: called for each response of a server that serves this site.
    """

    def __init__(
        self,
        keys: SiteKeys,
        context: Callable[[], ssl.SSLContext],
        most: int,
        trouble: Callable[[str], None],
        timing: Timing | None = None,
        clock: Callable[[], float] = time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._keys, self._make_context, self._most, self._trouble = keys, context, most, trouble
        self._heard = heard
        self._root = hashlib.sha256(keys.root).digest()
        self._timing = timing or Timing()
        self._clock, self._sleep, self._uniform = clock, sleep, uniform
        self._session: aiohttp.ClientSession | None = None
        self._requests: Counter[aiohttp.ClientSession] = Counter()  # that are under way

    async def close(self) -> None:
        """Closes all connections; a later request opens new ones."""
        for each in {self._session, *self._requests} - {None}:
            await each.close()  # type: ignore[union-attr]
        self._session = None
        self._requests.clear()

    async def next(self, have: Collection[bytes]) -> tuple[Message, bytes] | None:
        """The next message from the server with its body, or None if none came in the time of one poll.

        `have` are the digests of messages that the site still has in hand: they do not come again. None also says
        that the experiment may have changed.

        Raises `MessageError` for a message that the server's key did not sign, or that is larger than accepted.
        """
        return await self._message("/next?have=" + ",".join(sorted(digest.hex() for digest in have)[:64]))

    async def experiment(self) -> tuple[Message, bytes] | None:
        """The settings to be approved, or None if the server has none for this site."""
        return await self._message("/experiment")

    async def _message(self, path: str) -> tuple[Message, bytes] | None:
        async def attempt() -> bytes:
            async with self._request("GET", path) as (response, limit):
                data = bytearray()
                await self._read(response, limit, data, hashlib.sha256(), MOST_HEAD + self._most)
                return bytes(data)

        data = await self._persist(attempt)
        if not data:
            return None
        stream = io.BytesIO(data)
        message = read(stream, self._keys.server_identity())
        if (message.fields.direction, message.fields.root) != ("ask", self._root):
            raise MessageError("mismatch", "it is no message of this federation's server")
        body, size = stream.read(), message.details.get("size", 0)
        if size and not body:
            with suppress(Closed):
                return message, await self.blob(message.fields.payload, size)
            return None
        check_body(message, hashlib.sha256(body).digest(), len(body))
        return message, body

    async def blob(self, digest: bytes, size: int) -> bytes:
        """The bytes with this SHA-256, which an open ask names with this size. A cut transfer goes on where it ended.

        Raises `MessageError` if they are more than accepted, or others, and `Closed` if no open ask names them.
        """
        if size > self._most:
            raise MessageError(
                "too large", f"a body of {size:,} bytes, and at most {self._most:,} are accepted"
            )
        received, hashed = bytearray(), hashlib.sha256()

        async def attempt() -> None:
            headers = {"Range": f"bytes={len(received)}-"}
            async with self._request("GET", f"/blob/{digest.hex()}", headers=headers) as (response, limit):
                if response.status == 200 and received:
                    raise _Again("the server began a body anew")
                await self._read(response, limit, received, hashed, size)
            if len(received) != size:
                raise _Again("a body was cut")

        await self._persist(attempt, lambda: len(received))
        if hashed.digest() != digest:
            raise MessageError("damaged", "a body is not the one that the ask names")
        return bytes(received)

    async def answer(
        self, ask: bytes, parts: Sequence[bytes], check: Callable[[], object] = lambda: None
    ) -> bool:
        """Sends the answer to the ask with this digest, and returns whether it counts; False if it is too late.

        `parts` are the head and the body. `check` is called before every try, however long the server was away, and
        nothing more is sent if it raises. Raises `MessageError` with the server's reason if it refuses the answer.
        """
        path, total = f"/answer/{ask.hex()}", sum(map(len, parts))
        start: int | None = 0

        async def attempt() -> bool:
            nonlocal start
            if start is None:
                async with self._request("HEAD", path) as (response, _):
                    if response.status == 204:
                        return True
                    received = response.headers.get("fedlens-received", "")
                    if not received.isdecimal() or int(received) > total:
                        raise _Again("the server does not say how much of an answer has arrived")
                    start = int(received)
            check()
            first, start = start, None  # whatever happens, the server knows where to go on
            last = f"{first}-{total - 1}" if first < total else "*"
            headers = {"Content-Range": f"bytes {last}/{total}", "Content-Length": str(total - first)}
            async with self._request(
                "PUT", path, headers, lambda limit: self._pieces(parts, first, limit)
            ) as (
                response,
                _,
            ):
                if response.status in (409, 202):
                    raise _Again("the server has another part of the answer")
                return True

        try:
            return await self._persist(attempt)
        except Closed:
            return False

    async def _pieces(
        self, parts: Sequence[bytes], start: int, limit: asyncio.Timeout
    ) -> AsyncIterator[memoryview]:
        for part in parts:
            view = memoryview(part)[start:]
            start = max(0, start - len(part))
            for at in range(0, len(view), _PIECE):
                yield view[at : at + _PIECE]
                limit.reschedule(asyncio.get_running_loop().time() + self._timing.quiet)

    async def census(self, parts: Sequence[bytes], check: Callable[[], object] = lambda: None) -> None:
        """Sends a message that answers no ask; `parts` are its head and its body, and `check` is as in `answer`."""
        await self._post("PUT", "/census", b"".join(parts), check)

    async def renew(self) -> None:
        """Installs a new certificate for a new TLS key, and uses it from now on."""
        self._keys.install(await self._post("POST", "/renew", self._keys.renewal()), self._clock())
        old, self._session = self._session, None
        if old is not None and not self._requests[old]:
            await old.close()

    async def leave(self) -> str | None:
        """Tells the server once that this site has left. Returns why it does not know; None if it does."""
        try:
            notice = self._keys.leaving(self._clock())
            async with self._request("POST", "/left", data=lambda _: notice):
                return None
        except (aiohttp.ClientError, OSError, _Again) as error:
            return _sentence(error)
        except Closed:
            return "the server has an earlier version of fedlens"
        except FedlensError as error:
            return error.what

    async def _post(
        self, method: str, path: str, data: bytes, check: Callable[[], object] = lambda: None
    ) -> bytes:
        async def attempt() -> bytes:
            check()
            headers = {"Content-Length": str(len(data))}
            async with self._request(method, path, headers, lambda limit: self._pieces([data], 0, limit)) as (
                response,
                limit,
            ):
                answer = bytearray()
                await self._read(response, limit, answer, hashlib.sha256(), _MOST_ENROL)
                return bytes(answer)

        return await self._persist(attempt)

    async def acknowledge(self, message: bytes) -> None:
        """Tells the server once that the message with this digest has arrived, where no poll follows."""
        with suppress(aiohttp.ClientError, OSError, _Again):
            async with self._request("HEAD", f"/next?have={message.hex()}"):
                pass

    async def beat(self) -> None:
        """Sends signs of life until it is cancelled, also while the site computes."""
        while True:
            await self._sleep(self._timing.heartbeat)
            with suppress(aiohttp.ClientError, OSError, _Again):
                async with self._request("HEAD", "/next"):
                    pass

    async def _persist(
        self, attempt: Callable[[], Awaitable[_T]], progress: Callable[[], int] = lambda: 0
    ) -> _T:
        """Repeats an attempt until it succeeds; a pause grows with the failures since the last progress."""
        failures, reached = 0, 0
        while True:
            try:
                return await attempt()
            except (aiohttp.ClientError, OSError, _Again) as error:
                self._trouble(_sentence(error))
            if progress() > reached:
                failures, reached = 0, progress()
            most = min(self._timing.longest, self._timing.first * 2 ** min(failures, 20))
            await self._sleep(self._uniform(0, most))
            failures += 1

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        data: Callable[[asyncio.Timeout], object] = lambda _: None,
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """One request, which ends with `TimeoutError` after `Timing.quiet` without a byte.

        Raises `SiteRefused` for what a repetition does not change, and `MessageError` for a message that is refused.
        """
        host, port = self._keys.host, self._keys.port
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}{path}"
        try:
            async with (
                self._connected() as session,
                asyncio.timeout(self._timing.quiet) as limit,
                session.request(
                    method, url, headers=headers, data=data(limit), allow_redirects=False
                ) as response,
            ):
                self._check(response)
                self._heard()
                yield response, limit
        except aiohttp.InvalidURL:  # its text has the password
            raise FedlensError("https_proxy is not a URL", hint="write http://HOST:PORT") from None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The connections of the newest certificate; those of the one before end with their last request."""
        # A sentence, where the server would only close the connection.
        try:
            self._keys.check_certificate(self._clock())
        except NotYetValid as error:  # a machine that has just started may get the time later
            raise _Again(str(error)) from None
        session = self._session = self._session or _session(self._make_context())
        self._requests[session] += 1
        try:
            yield session
        except SiteRefused:
            if session is self._session:
                raise
            raise _Again("the certificate was renewed meanwhile") from None
        finally:
            self._requests[session] -= 1
            if session is not self._session and self._requests[session] <= 0:
                del self._requests[session]
                await session.close()

    def _check(self, response: aiohttp.ClientResponse) -> None:
        status, reason = response.status, response.headers.get("fedlens-reason", "")
        if status in (403, 426):
            raise SiteRefused(reason)
        if status in (404, 410):
            if "fedlens-protocol" in response.headers:
                raise Closed
            raise SiteRefused("unknown")  # so answers a server that found no certificate of a site
        if status in (413, 422):
            raise MessageError(
                reason, f"the server refuses a message: {reason}", hint="see the log of the server"
            )
        if status >= 500 or status in (408, 429):
            raise _Again(f"the server answers {status}")
        if (
            response.headers.get("fedlens-protocol") != str(PROTOCOL)
            or "Content-Encoding" in response.headers
        ):
            raise SiteRefused("protocol")
        if status not in (200, 201, 202, 204, 206, 409):
            raise _Again(f"the server answers {status}")

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        limit: asyncio.Timeout,
        into: bytearray,
        hashed: hashlib._Hash,
        most: int,
    ) -> None:
        """Appends the body of a response, counted while it is read, so that `into` has at most `most` bytes."""
        while piece := await response.content.readany():
            if len(into) + len(piece) > most:
                raise MessageError("too large", f"the server sends more than {most:,} bytes")
            into += piece
            hashed.update(piece)
            limit.reschedule(asyncio.get_running_loop().time() + self._timing.quiet)


def _sentence(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the server, or what is between, sent nothing for too long"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        if isinstance(error.certificate_error, ssl.SSLCertVerificationError) and (
            error.certificate_error.verify_code == _NOT_YET_VALID
        ):
            return f"the certificate at {error.host}:{error.port} is not valid yet: set the clock of this machine"
        found = f"the certificate at {error.host}:{error.port} is not one of this federation"
        return f"{found} ({told(error.certificate_error)})"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        if error.status == 407:
            return "the proxy asks for a name and a password; set https_proxy=http://NAME:PASSWORD@HOST:PORT"
        away = f"; it cannot reach the server: {OFF}" if error.status in (502, 503, 504) else ""
        return f"the proxy answers {error.status}{away}"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return f"cannot connect to the proxy {error.host}:{error.port}: {error.strerror or 'it is closed'}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"{error.host} has no address here: {error.strerror or 'the name server does not know it'}"
    if isinstance(error, aiohttp.ClientConnectorError):
        # One of several addresses that refuses is enough: the other may be of IPv6, which the site does not have.
        if f"[Errno {ECONNREFUSED}]" in str(error.os_error):
            return f"{error.host}:{error.port} refuses connections: {OFF}"
        return f"cannot connect to {error.host}:{error.port}: {error.strerror or 'it is closed'}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    return one_line(str(error)) or type(error).__name__


async def enrol(context: ssl.SSLContext, server: tuple[str, int], request: bytes) -> bytes:
    """The server's answer to a request to join, over a connection without a certificate of a site.

    Raises `IdentityError` if the server refuses the invitation, and `FedlensError` if it has none open or is away.
    """
    host, port = server
    url, data = f"https://{f'[{host}]' if ':' in host else host}:{port}/enrol", bytearray()
    again = "wait a minute, and try again"
    refusals: Mapping[int, tuple[type[FedlensError], str, str]] = {
        403: (
            IdentityError,
            "the server refuses the invitation: it was used, it is too old, or of another federation",
            "if it was not used here, ask the operator whether 'fedlens federation list' has an alarm",
        ),
        404: (FedlensError, "the server has no open invitation", _ASK),
        429: (FedlensError, "the server had too many requests to join in the last minute", again),
    }
    try:
        async with (
            asyncio.timeout(60),
            _session(context) as session,
            session.post(url, data=request, allow_redirects=False) as response,
        ):
            if response.status != 200:
                other = FedlensError, f"the server answers {response.status}", again
                kind, what, hint = refusals.get(response.status, other)
                raise kind(what, where=f"{host}:{port}", hint=hint)
            while piece := await response.content.readany():
                data += piece
                if len(data) > _MOST_ENROL:
                    raise FedlensError("the server's answer is too long", where=f"{host}:{port}")
    except (aiohttp.ClientError, OSError) as error:
        hint = "check host, port, proxy and clock"
        raise FedlensError(f"cannot join: {_sentence(error)}", where=f"{host}:{port}", hint=hint) from None
    return bytes(data)
