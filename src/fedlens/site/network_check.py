"""Finds out which step of the way from a site to its server fails: name, port, proxy, TLS, certificate, clock."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import time
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from cryptography import x509

from fedlens.base.errors import IdentityError, one_line
from fedlens.core.wire.message import PROTOCOL
from fedlens.identity.authority import day
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.identity.tls import FederationContext, peer_name
from fedlens.site.connection import SiteRefused
from fedlens.site.site_log import OFF

_WAIT = 15.0  # seconds for one step
_MOST_CLOCK = 300.0  # seconds by which the two clocks may differ
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which ssl.VerifyFlags does not name
_MOST_HEADER = 65_536
_HANGS_UP = "ask IT whether a firewall or a proxy closes it"


@dataclass(frozen=True)
class Step:
    """The result of one step.

    Attributes:
        name: "name", "port", "proxy", "TLS", "certificate", "clock" or "acceptance".
        ok: whether it worked; None for an experiment that is not approved.
        what: a sentence without a full stop.
        hint: what to do about it; empty if it worked.
    """

    name: str
    ok: bool | None
    what: str
    hint: str = ""


class _Failed(Exception):
    """A step failed, so the later ones make no sense."""

    def __init__(self, name: str, what: str, hint: str) -> None:
        super().__init__(what)
        self.step = Step(name, False, what, hint)


def check_network(
    keys: SiteKeys, passphrase: bytes | None = None, clock: Callable[[], float] = time
) -> Iterator[Step]:
    """The steps from this site to its server, one after the other, up to the first that fails.

    Nothing of the site is sent but its certificate, and a request that has no body. A proxy is taken from
    `https_proxy` and `no_proxy`, as the site does.

    Args:
        keys: the site's keys.
        passphrase: of the keys, if they are encrypted.
        clock: returns seconds since 1970.
    """
    try:
        yield from _steps(keys, passphrase, clock)
    except _Failed as failed:
        yield failed.step


def _steps(keys: SiteKeys, passphrase: bytes | None, clock: Callable[[], float]) -> Iterator[Step]:
    proxy = proxy_for(keys.host)
    host, port = (proxy.hostname or "", proxy.port or 80) if proxy else (keys.host, keys.port)
    addresses = _addresses(host, port, "the proxy" if proxy else "the server")
    yield Step("name", True, f"{'the proxy ' if proxy else ''}{host} is {', '.join(addresses)}")
    _connect(host, port, bool(proxy)).close()
    yield Step("port", True, f"port {port} of {host} is open")
    if proxy:
        _tunnel(keys, proxy).close()
        yield Step("proxy", True, f"the proxy connects to {keys.host}:{keys.port}")
    # The dates are looked at here, so that a wrong clock is told from a wrong certificate.
    ends = _handshake(keys, proxy)
    yield Step("TLS", True, "the server speaks TLS 1.3, and its certificate is of this federation")
    begins_on, ends_on, ahead = ends
    now = clock()
    if ahead is not None and abs(now - ahead) > _MOST_CLOCK:
        minutes = round((now - ahead) / 60)
        way = "ahead of" if minutes > 0 else "behind"
        what = f"the clock of this machine is {abs(minutes):,} min {way} that of the server"
        raise _Failed(
            "clock", f"{what}: {day(now)} here, {day(ahead)} there", "set the clock, or use a time server"
        )
    if not begins_on <= now <= ends_on:
        what = f"the certificate of the server is valid from {day(begins_on)} to {day(ends_on)}, and it is {day(now)}"
        raise _Failed(
            "clock", what, "compare the clocks of both machines; if they are right, tell the operator"
        )
    yield Step("clock", True, "the clocks agree" if ahead is not None else "the server did not say its time")
    try:
        keys.check_certificate(now)
    except IdentityError as error:
        raise _Failed("certificate", error.what, error.hint or "") from None
    own = keys.certificate()
    yield Step("certificate", True, f"the certificate of {keys.name} is valid until {day(own.not_after)}")
    yield _acceptance(keys, passphrase, proxy)


def proxy_for(host: str) -> SplitResult | None:
    """The proxy that the environment names for a host; None without one. Raises `_Failed` if it is not a URL."""
    text = getproxies().get("https")
    if not text or proxy_bypass(host):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    try:
        named = bool(proxy.hostname) and proxy.port != 0
    except ValueError:
        named = False
    if proxy.scheme != "http" or not named:  # its text may have a password
        raise _Failed("proxy", "https_proxy is not the URL of a proxy", "write http://HOST:PORT")
    return proxy


def _addresses(host: str, port: int, thing: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        what = f"{host}, the name of {thing}, has no address: {error.strerror or error}"
        told = "https_proxy" if thing == "the proxy" else "the invitation"
        hint = f"compare it with {told}, and ask whether the name server of this network knows it"
        raise _Failed("name", what, hint) from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _connect(host: str, port: int, proxy: bool = False) -> socket.socket:
    place = f"the proxy {host}:{port}" if proxy else f"port {port} of {host}"
    try:
        return socket.create_connection((host, port), timeout=_WAIT)
    except TimeoutError:
        what = f"{place} does not answer within {_WAIT:g} s"
    except ConnectionRefusedError as error:
        what = f"{place} refuses connections: {error.strerror or error}"
    except OSError as error:
        what = f"{place} cannot be reached: {error.strerror or error}"
        raise _Failed("port", what, f"ask IT for a way to {host}, TCP port {port}") from None
    if proxy:
        raise _Failed("port", what, "compare it with https_proxy, and ask IT whether the proxy runs")
    hint = (
        f"ask IT to allow outgoing connections to {host}, TCP port {port}, and the operator whether the server runs, "
        "which it need not between two runs"
    )
    raise _Failed("port", what, hint)


def _tunnel(keys: SiteKeys, proxy: SplitResult) -> socket.socket:
    """A connection through the proxy. Raises `_Failed`."""
    raw = _connect(proxy.hostname or "", proxy.port or 80, True)
    target = f"[{keys.host}]:{keys.port}" if ":" in keys.host else f"{keys.host}:{keys.port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username is not None:
        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
    try:
        raw.sendall("\r\n".join([*lines, "", ""]).encode())
        header = b""
        while b"\r\n\r\n" not in header and len(header) < _MOST_HEADER:
            piece = raw.recv(1)  # a byte more would be one of TLS
            if not piece:
                break
            header += piece
    except OSError as error:
        raise _Failed(
            "proxy", f"the proxy hangs up: {error.strerror or error}", "ask IT what it allows"
        ) from None
    words, text = header.split(b" ", 2), header.decode("latin-1").lower()
    status = words[1].decode("latin-1") if len(words) > 1 else "nothing"
    if status == "200":
        return raw
    raw.close()
    offered = re.findall(r"^proxy-authenticate: *(\w+)", text, re.MULTILINE)
    if status == "407" and ("basic" in offered or not offered):
        hint = "set https_proxy=http://NAME:PASSWORD@HOST:PORT"
        raise _Failed("proxy", "the proxy asks for a name and a password, or refuses these", hint)
    if status == "407":
        hint = "run a local relay such as px or cntlm, and set https_proxy to it"
        raise _Failed(
            "proxy", f"the proxy asks for {' or '.join(offered)}, which fedlens does not speak", hint
        )
    if status in ("502", "503", "504"):
        hint = "ask the operator whether the server runs, which it need not between two runs"
        raise _Failed("proxy", f"the proxy answers {status}; it cannot reach {target}: {OFF}", hint)
    hint = f"ask IT to allow CONNECT to {target} without inspection of TLS"
    raise _Failed("proxy", f"the proxy refuses {target}: it answers {one_line(status)}", hint)


def _socket(keys: SiteKeys, proxy: SplitResult | None) -> socket.socket:
    return _tunnel(keys, proxy) if proxy else _connect(keys.host, keys.port)


def _handshake(keys: SiteKeys, proxy: SplitResult | None) -> tuple[float, float, float | None]:
    """When the server's certificate begins and ends, and the server's time. Raises `_Failed`."""
    context = FederationContext.trusting(keys.root, ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= _NO_CHECK_TIME
    try:
        with context.wrap_socket(_socket(keys, proxy), server_hostname=keys.host) as end:
            peer = peer_name(end)
            assert peer is not None  # a server always shows a certificate
            keys.see_server(peer)
            response = _asked(end, keys.host, "HEAD", "/next")
            said = response.getheader("Date") if response is not None else None
    except IdentityError as error:
        raise _Failed("TLS", error.what, error.hint or "tell the operator") from None
    except ssl.SSLCertVerificationError as error:
        what = f"the certificate at {keys.host}:{keys.port} is not one of this federation: {error.verify_message}"
        hint = f"it is signed by {_signer(keys, proxy)}: ask IT to leave {keys.host}:{keys.port} out of the inspection "
        raise _Failed("TLS", what, hint + "of TLS, or compare the host with the invitation") from None
    except ssl.SSLEOFError:
        raise _Failed("TLS", "the connection ends in the handshake", _HANGS_UP) from None
    except ssl.SSLError as error:
        reason = (error.reason or "it answers something else").lower().replace("_", " ")
        what = f"{keys.host}:{keys.port} does not speak TLS 1.3: {reason}"
        hint = "compare host and port with the invitation, and ask IT whether something inspects TLS"
        raise _Failed("TLS", what, hint) from None
    except OSError as error:
        what = f"the connection ends in the handshake: {error.strerror or error}"
        raise _Failed("TLS", what, _HANGS_UP) from None
    ahead = None
    if said:
        with suppress(ValueError):
            ahead = parsedate_to_datetime(said).timestamp()
    return peer.not_before.timestamp(), peer.not_after.timestamp(), ahead


def _signer(keys: SiteKeys, proxy: SplitResult | None) -> str:
    """Who has signed the certificate that is shown in place of the server's; it comes from a stranger."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent or believed
    try:
        with context.wrap_socket(_socket(keys, proxy), server_hostname=keys.host) as end:
            shown = end.getpeercert(binary_form=True) or b""
        return one_line(repr(x509.load_der_x509_certificate(shown).issuer.rfc4514_string()))
    except (OSError, ValueError, _Failed):
        return "an unknown authority"


def _asked(end: ssl.SSLSocket, host: str, method: str, path: str) -> HTTPResponse | None:
    """The response to a request without a body; None if the server closes the connection."""
    connection = HTTPConnection(host)
    connection.sock = end
    try:
        connection.request(method, path, headers={"fedlens-protocol": str(PROTOCOL), "User-Agent": "fedlens"})
        response = connection.getresponse()
        response.close()  # the socket stays open as long as it is read from
        return response
    except (OSError, HTTPException):
        return None


def _acceptance(keys: SiteKeys, passphrase: bytes | None, proxy: SplitResult | None) -> Step:
    """Whether the server serves this site."""
    try:
        with client_context(keys.folder, passphrase).wrap_socket(
            _socket(keys, proxy), server_hostname=keys.host
        ) as end:
            response = _asked(end, keys.host, "HEAD", "/next")
    except IdentityError as error:
        raise _Failed("certificate", error.what, error.hint or "") from None
    except OSError as error:
        raise _Failed(
            "acceptance", f"the server hangs up: {one_line(str(error))}", "ask its operator"
        ) from None
    if response is None:  # so it ends where it does not know the issuer of the certificate
        refused = SiteRefused("unknown")
        return Step("acceptance", False, refused.what, refused.hint or "")
    reason = response.getheader("fedlens-reason", "")
    if response.status in (403, 426):
        refused = SiteRefused(reason)
        return Step("acceptance", False, refused.what, refused.hint or "")
    if response.getheader("fedlens-protocol") != str(PROTOCOL):
        refused = SiteRefused("protocol")
        return Step("acceptance", False, refused.what, refused.hint or "")
    return Step("acceptance", True, f"the operator of {keys.federation} has accepted this site")
