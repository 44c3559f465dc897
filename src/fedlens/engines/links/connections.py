"""Accepts TLS connections, and limits how many there are and how long one may do nothing.

aiohttp counts no connections, and its parser waits for the rest of a header. So sockets are accepted here: each one is
counted from its first byte. Beyond a limit the oldest of the same kind is closed, so that an honest site behind the
address of an attacker gets through; one that is younger than `Limits.young` is spared, and the new one closed, so that
many sites that come back at once do not displace one another for ever.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from fedlens.base.errors import ConfigError, IdentityError
from fedlens.identity.tls import Peer, peer_name


@dataclass(frozen=True)
class Limits:
    """What one peer, or all of them together, may take. Times are in seconds.

    Attributes:
        handshake: the longest TLS handshake.
        header: from the handshake to the end of the first header.
        idle: between two requests of a connection.
        stall: without progress in a body, either way, beside what `slowest` allows.
        slowest: bytes a second of the slowest body.
        poll: the longest wait for a message; proxies cut tunnels that are idle for longer.
        anonymous_per_address, anonymous: connections without a site's certificate, per address (per /64 in IPv6) and
            in all.
        young: the age from which a connection without a certificate makes room for a new one.
        per_site: connections of one site.
        enrol_size: bytes of a request to join.
        enrol_per_address, enrol_in_all: requests to join in a minute.
        message: bytes of the largest message.
        inline: bytes of the largest body that is sent behind its head; a larger one is a blob.
        sweep: between two checks of all connections for certificates that ended or were revoked.
        addresses: within which two addresses of one site suspend it.
    """

    handshake: float = 5
    header: float = 10
    idle: float = 30
    stall: float = 20
    slowest: float = 4096
    poll: float = 25
    anonymous_per_address: int = 8
    anonymous: int = 64
    young: float = 1
    per_site: int = 16
    enrol_size: int = 16_384
    enrol_per_address: int = 10
    enrol_in_all: int = 60
    message: int = 2**31
    inline: int = 2**18
    sweep: float = 1
    addresses: float = 60


def network_of(address: str) -> str:
    """The address that is counted: of IPv6 the /64, which one machine has for itself.

    >>> network_of("2001:db8::7:1"), network_of("::ffff:10.0.0.1"), network_of("10.0.0.1")
    ('2001:db8::/64', '10.0.0.1', '10.0.0.1')
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host. Raises `ConfigError` if a port is taken or not allowed.

    >>> sockets = listen("127.0.0.1", 0)
    >>> [each.close() for each in sockets]
    [None]
    """
    sockets: list[socket.socket] = []
    try:
        for family, *_, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(socket.create_server(address[:2], family=family, backlog=512))
    except OSError as error:
        for each in sockets:
            each.close()
        raise ConfigError(
            f"cannot listen at port {port} of {host}: {error.strerror or error}",
            hint="end the process that uses it; sites call this port, unless another is forwarded to --bind",
        ) from None
    return sockets


@dataclass(eq=False)
class Connection:
    """One connection, from its first byte on."""

    network: str
    peer: Peer | None = None
    task: asyncio.Task[None] | None = None
    transport: asyncio.Transport | None = None
    timer: asyncio.TimerHandle | None = None
    group: str = ""  # the name of the site; empty without a certificate
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Closes it at once, without waiting for the other end."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def limit(self, seconds: float | None) -> None:
        """Closes it in so many seconds, unless the limit is set anew."""
        if self.timer is not None:
            self.timer.cancel()
        loop = asyncio.get_running_loop()
        self.timer = None if seconds is None else loop.call_later(seconds, self.abort)


class _Handler(web.RequestHandler):  # type: ignore[type-arg, misc, unused-ignore]
    """aiohttp's protocol of one connection, which tells when it opens and ends, and answers garbage without a text."""

    __slots__ = ("connection", "connections")

    def __init__(
        self, connections: Connections, connection: Connection, server: web.Server, **options: Any
    ) -> None:
        self.connection, self.connections = connection, connections
        super().__init__(server, **options)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connections.opened(self.connection, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.connections.forget(self.connection)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        response = web.Response(status=status)
        response.force_close()
        return response


class Connections:
    """The open connections, by the kind that is counted together: those without a certificate, those of each site."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: OrderedDict[Connection, None] = OrderedDict()

    def __iter__(self) -> Any:
        return iter(list(self._open))

    async def accept(self, listener: socket.socket, context: ssl.SSLContext, server: web.Server) -> None:
        """Accepts connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError:  # too many open files, or the other end has gone
                await asyncio.sleep(0.1)
                continue
            connection = Connection(network_of(address[0]))
            if not self._count(connection):
                client.close()
                continue
            connection.task = asyncio.create_task(self._shake(client, connection, context, server))
            await asyncio.sleep(0)  # the task owns the socket now, and the others have had their turn

    async def _shake(
        self, client: socket.socket, connection: Connection, context: ssl.SSLContext, server: web.Server
    ) -> None:
        loop = asyncio.get_running_loop()
        options = {
            "loop": loop, "access_log": None, "auto_decompress": False, "lingering_time": 2.0,
            "keepalive_timeout": self.limits.idle, "max_headers": 40, "read_bufsize": 2**18,
        }  # fmt: skip
        with suppress(OSError, asyncio.CancelledError):  # what does not finish its handshake is nobody
            try:
                await loop.connect_accepted_socket(
                    lambda: _Handler(self, connection, server, **options),
                    client,
                    ssl=context,
                    ssl_handshake_timeout=self.limits.handshake,
                    ssl_shutdown_timeout=2,
                )
            except BaseException:
                self.forget(connection)
                raise

    def opened(self, connection: Connection, transport: Any) -> None:
        """Called after the handshake."""
        connection.transport = transport
        with suppress(IdentityError):  # a certificate of the federation's root for something else
            connection.peer = peer_name(transport.get_extra_info("ssl_object"))
        connection.limit(self.limits.header)
        if connection.peer is not None:
            connection.group = connection.peer.name
            self._count(connection)

    def _count(self, connection: Connection) -> bool:
        """Counts a connection among those of its kind, closes one if they are too many; whether this one may stay."""
        self._open[connection] = None
        same = [each for each in self._open if each.group == connection.group]
        if connection.group:
            self._make_room(connection, same, self.limits.per_site, 0)
        else:
            near = [each for each in same if each.network == connection.network]
            self._make_room(connection, near, self.limits.anonymous_per_address, self.limits.young)
            self._make_room(connection, same, self.limits.anonymous, self.limits.young)
        return connection in self._open

    def _make_room(self, new: Connection, same: list[Connection], most: int, young: float) -> None:
        if sum(each in self._open for each in same) > most:
            oldest = min(same, key=lambda each: each.since)
            closed = oldest if oldest.since <= new.since - young else new
            self.forget(closed)
            closed.abort()

    def forget(self, connection: Connection) -> None:
        """Called when a connection has ended."""
        connection.limit(None)
        self._open.pop(connection, None)


class RateLimit:
    """Counts events of each key in a window of a minute.

    >>> limit = RateLimit(most=2)
    >>> [limit.admits("10.0.0.1", now) for now in (0, 1, 2, 61.5)]
    [True, True, False, True]
    """

    def __init__(self, most: int, keys: int = 4096) -> None:
        self._most, self._keys = most, keys
        self._times: OrderedDict[str, list[float]] = OrderedDict()

    def admits(self, key: str, now: float) -> bool:
        """Whether one more event of this key at this second is within the limit; it is counted if it is."""
        times = [time for time in self._times.pop(key, []) if time > now - 60]
        self._times[key] = times
        while len(self._times) > self._keys:
            self._times.popitem(last=False)
        if len(times) >= self._most:
            return False
        times.append(now)
        return True
