"""A message to a site and its answer, over TLS on this machine."""

from __future__ import annotations

import hashlib
import io
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from errno import ECONNREFUSED
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from aiohttp.client_reqrep import ConnectionKey

from fedlens.core.wire.message import Caps, MessageError, read, read_payload, write_payload
from fedlens.identity.authority import DAY, issue
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import signed_bytes
from fedlens.site.answers_log import AskRefused, check_approved
from fedlens.site.site_log import OFF
from tests.link_kit import At, Federation, Proxy, answer_to, blobs, within
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, issuer_of
from tests.unit.site.test_network_check import answering


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path)


def test_an_ask_goes_out_and_its_answer_comes_back(federation: Federation) -> None:
    model = write_payload({"w": torch.arange(1_000_000, dtype=torch.float32)})
    with federation.link() as link:
        site = federation.site("ward-a")
        ask = federation.ask(shared=model, body=(body := write_payload({"lr": 0.1})))
        link.send("ward-a", ask, blobs(model, body))

        async def agent() -> bool:
            async with At(site) as connection:
                received = await connection.next([])
                assert received is not None
                message, own = received
                assert message.digest == ask.digest
                assert read_payload(own, Caps(1000)) == {"lr": 0.1}
                shared = await connection.blob(message.fields.shared, message.details["shared_size"])
                assert shared == model
                assert await connection.next([message.digest]) is None
                payload = read_payload(shared, Caps(2**30))
                return await connection.answer(message.digest, answer_to(message, site.identity(), payload))

        assert within(agent)
        [arrived] = link.collect(60, [ask.digest])
        assert arrived.site == "ward-a"
        assert read_payload(arrived.body(), Caps(2**30))["w"].tolist()[-1] == 999_999
        assert link.collect(0, [ask.digest]) == []
        assert link.online().keys() == {"ward-a"}


def test_a_message_that_does_not_tell_its_size_is_refused(federation: Federation) -> None:
    whole = federation.ask(shared=b"")
    text = b'{"map":{}}'
    fields = whole.fields._replace(report=hashlib.sha256(text).digest())
    signed = signed_bytes("ask", fields)
    parts = (
        len(signed).to_bytes(8, "big"),
        signed,
        federation.key.sign(signed),
        len(text).to_bytes(8, "big"),
        text,
    )
    message = read(io.BytesIO(b"".join(parts)), federation.key.public)
    with federation.link() as link:
        site = federation.site("ward-a")
        link.send("ward-a", message, {})

        async def agent() -> None:
            async with At(site) as connection:
                with pytest.raises(MessageError, match="not the one that was signed"):
                    await connection.next([])

        within(agent)


@pytest.mark.parametrize("message", ["answer", "census"])
def test_nothing_more_is_sent_once_a_check_before_a_try_raises(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """The first try meets a broken link, and the approval lapses before the second."""
    tries, checks = list[str](), list[str]()

    @asynccontextmanager
    async def request(method: str, path: str, *more: object) -> AsyncIterator[tuple[object, None]]:
        tries.append(method)
        if method == "PUT":
            raise OSError("the link is down")
        yield SimpleNamespace(status=200, headers={"fedlens-received": "2"}), None

    def check() -> None:
        checks.append("check")
        check_approved(lambda: "it lapsed" if len(checks) > 1 else None)

    with federation.link():
        site = federation.site("ward-a")

    async def agent() -> None:
        async with At(site) as connection:
            monkeypatch.setattr(connection, "_request", request)
            with pytest.raises(AskRefused, match="it lapsed"):
                await (
                    connection.answer(bytes(32), [b"answer"], check)
                    if message == "answer"
                    else connection.census([b"census"], check)
                )

    within(agent)
    assert tries == (["PUT", "HEAD"] if message == "answer" else ["PUT"])


def _cannot(kind: type[aiohttp.ClientConnectorError], cause: OSError) -> aiohttp.ClientConnectorError:
    return kind(KEY, cause)


KEY = ConnectionKey("fed", 443, True, True, None, None, None)
REFUSED = ConnectionRefusedError(ECONNREFUSED, "Connect call failed ('10.0.0.1', 443)")
BOTH = OSError(f"Multiple exceptions: [Errno 101] Network is unreachable, {REFUSED}")
NAME = OSError(-2, "Name or service not known")
EARLY = ssl.SSLCertVerificationError("not yet valid")
EARLY.verify_code = 9
PROXY = SimpleNamespace(real_url="https://fed/")


@pytest.mark.parametrize(
    ("error", "said", "off"),
    [
        (_cannot(aiohttp.ClientConnectorError, REFUSED), "fed:443 refuses connections", True),
        (_cannot(aiohttp.ClientConnectorError, BOTH), "fed:443 refuses connections", True),
        (
            _cannot(aiohttp.ClientConnectorError, OSError(101, "unreachable")),
            "cannot connect to fed:443",
            False,
        ),
        (_cannot(aiohttp.ClientConnectorDNSError, NAME), "fed has no address here: Name or", False),
        (_cannot(aiohttp.ClientProxyConnectionError, REFUSED), "cannot connect to the proxy fed:443", False),
        (aiohttp.ClientHttpProxyError(PROXY, (), status=503), "the proxy answers 503; it cannot", True),  # type: ignore[arg-type]
        (aiohttp.ClientHttpProxyError(PROXY, (), status=403), "the proxy answers 403", False),  # type: ignore[arg-type]
        (aiohttp.ClientConnectorCertificateError(KEY, EARLY), "set the clock of this machine", False),
    ],
)
def test_a_server_that_is_off_is_told_from_a_broken_network(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, off: bool
) -> None:
    tries = iter([error])

    @asynccontextmanager
    async def request(*given: object) -> AsyncIterator[None]:
        for each in tries:
            raise each
        yield None

    with federation.link():
        at = At(federation.site("ward-a"))

    async def agent() -> None:
        async with at as connection:
            monkeypatch.setattr(connection, "_request", request)
            with suppress(TypeError):  # of the second try, which has no response
                await connection.next([])

    within(agent)
    [trouble] = at.troubles
    assert said in trouble
    assert trouble.endswith(OFF) == off


def test_a_clock_that_is_behind_does_not_end_a_site(federation: Federation) -> None:
    times, ask = iter([NOW - DAY]), federation.ask()
    with federation.link() as link:
        at = At(federation.site("ward-a"), options={"clock": lambda: next(times, NOW)})
        link.send("ward-a", ask, {})

        async def agent() -> None:
            async with at as connection:
                assert await connection.next([]) is not None

        within(agent)
    [trouble] = at.troubles
    assert "is valid from" in trouble
    assert "set the clock of this machine" in trouble


@contextmanager
def impostor(federation: Federation, kind: str) -> Iterator[int]:
    """The port of a server that is not that of the federation, or not any more."""
    if kind == "alert":
        with answering(bytes([21, 3, 3, 0, 2, 2, 48])) as port:  # unknown CA, before any certificate
            yield port
        return
    pem, folder = federation.registry.folder / "server.pem", federation.folder
    good, tls = pem.read_bytes(), KeyPair.make()
    pair = federation.registry.identity().public, tls.public
    if kind == "authority":
        other = FederationFolder.create(folder / "inspection", (HOST, 443), ROOT, clock=lambda: NOW)
        pem.write_bytes((other.folder / "server.pem").read_bytes())
    else:
        ago, host = (100 * DAY, HOST) if kind == "expired" else (0, "127.0.0.9")
        pem.write_bytes(tls.pem() + issue(issuer_of(federation.registry), "server", pair, NOW - ago, host))
    with federation.link():
        pem.write_bytes(good)
        yield federation.port


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("authority", "is not one of this federation (SSLCertVerificationError"),
        ("expired", "certificate has expired"),
        ("host", "IP address mismatch"),
        ("alert", "cannot connect to "),
    ],
)
def test_another_tls_server_in_its_place_does_not_end_a_site(
    federation: Federation, kind: str, said: str
) -> None:
    site, ask = federation.site("ward-a"), federation.ask()

    async def sleep(seconds: float) -> None:
        way.target = federation.port

    at = At(site, options={"sleep": sleep})

    async def agent() -> bytes:
        async with at as connection:
            received = await connection.next([])
            assert received is not None
            return received[0].digest

    with impostor(federation, kind) as wrong, Proxy(wrong) as way, federation.link() as link:
        site.port = way.port
        link.send("ward-a", ask, {})
        assert within(agent) == ask.digest
    [trouble] = at.troubles
    assert said in trouble
