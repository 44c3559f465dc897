"""The link of real sites on a bad network and among hostile peers: what is refused, what survives, what it costs."""

from __future__ import annotations

import hashlib
import itertools
import random
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from fedlens.base.errors import ConfigError, FedlensError, IdentityError, RunFailed
from fedlens.core.wire.message import PROTOCOL, Message
from fedlens.engines.links import https
from fedlens.engines.links.connections import listen
from fedlens.engines.links.https import HttpsLink
from fedlens.identity.authority import DAY
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.identity.tls import FederationContext
from fedlens.site.connection import SiteRefused, enrol
from tests.link_kit import FAST, At, Federation, Proxy, answer_to, beside, blobs, bodies, put, request, within
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, context_with, forged, issuer_of, joined


def ended(end: socket.socket) -> bool:
    """Whether the other side closes a connection, with or without a farewell."""
    end.settimeout(60)
    try:
        while end.recv(4096):
            pass
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return True


def test_it_calls_through_a_proxy_with_a_password(
    federation: Federation, link: HttpsLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, ask = federation.site("ward-a"), federation.ask()
    link.send("ward-a", ask, {})
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def sleep(seconds: float) -> None:
        monkeypatch.setenv("https_proxy", f"http://ward:secret@{HOST}:{proxy.port}")

    at = At(site, options={"sleep": sleep})

    async def agent() -> Message | None:
        async with at as connection:
            received = await connection.next([])
            return received[0] if received else None

    with Proxy(federation.port, "ward:secret") as proxy:
        monkeypatch.setenv("https_proxy", f"http://{HOST}:{proxy.port}")
        received = within(agent)
        assert received is not None
        assert received.digest == ask.digest
    hint = "set https_proxy=http://NAME:PASSWORD@HOST:PORT"
    assert at.troubles == [f"the proxy asks for a name and a password; {hint}"]


def test_without_a_certificate_only_a_request_to_join_is_answered(
    federation: Federation, link: HttpsLink, tmp_path: Path
) -> None:
    async def stranger(method: str, path: str) -> tuple[int, bytes]:
        status, headers, body = await request(federation, None, method, path)
        assert "fedlens-protocol" not in headers
        return status, body

    paths = [
        ("GET", "/next"),
        ("GET", "/experiment"),
        ("PUT", "/census"),
        ("POST", "/renew"),
        ("POST", "/left"),
        ("GET", "/"),
        ("GET", "/enrol"),
    ]
    paths += [("GET", f"/blob/{'0' * 64}"), ("PUT", f"/answer/{'0' * 64}"), ("POST", "/enrol")]
    for method, path in paths:
        assert within(lambda method=method, path=path: stranger(method, path)) == (404, b""), path
    invitation = federation.registry.invite("ward-b")
    keys = SiteKeys.join(tmp_path / "ward-b", invitation)
    keys.port = federation.port

    def join(keys: SiteKeys) -> bytes:
        context = FederationContext.trusting(keys.root, ssl.PROTOCOL_TLS_CLIENT)
        return within(lambda: enrol(context, (HOST, keys.port), keys.enrolment(invitation)))

    assert keys.install(join(keys), NOW) == "pending"
    thief = SiteKeys.join(tmp_path / "thief", invitation)
    thief.port = federation.port
    with pytest.raises(FedlensError, match="the server refuses the invitation"):
        join(thief)
    status, _, _ = within(lambda: request(federation, None, "POST", "/enrol", data=b"x" * 16_385))
    assert status == 413
    statuses = [within(lambda: request(federation, None, "POST", "/enrol", data=b"{}"))[0] for _ in range(10)]
    assert set(statuses) == {403, 429}
    assert statuses[-1] == 429


def test_a_site_that_is_not_accepted_gets_a_reason_and_no_message(
    federation: Federation, link: HttpsLink
) -> None:
    def refused(keys: SiteKeys) -> str:
        async def agent() -> None:
            async with At(keys) as connection:
                await connection.next([])

        with pytest.raises(SiteRefused) as caught:
            within(agent)
        return caught.value.reason

    pending, revoked = federation.site("ward-p", accepted=False), federation.site("ward-r")
    for name in ("ward-p", "ward-r"):
        link.send(name, federation.ask(name), {})
    federation.registry.revoke("ward-r")
    suspended = federation.site("ward-s")
    federation.registry.suspend("ward-s", "two addresses")
    assert [refused(keys) for keys in (pending, revoked, suspended)] == ["pending", "revoked", "suspended"]
    gone = federation.site("ward-g")
    (federation.registry.folder / "sites" / "ward-g.json").unlink()
    assert refused(gone) == "unknown"


def contexts(federation: Federation, folder: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    """TLS contexts of peers that are no accepted site, and what is wrong with each."""
    root, site = federation.registry.root, federation.site("ward-s")
    yield "no certificate", FederationContext.trusting(root, ssl.PROTOCOL_TLS_CLIENT)
    yield "pending", client_context(federation.site("ward-p", accepted=False).folder)
    revoked, unknown = (client_context(federation.site(name).folder) for name in ("ward-r", "ward-u"))
    federation.registry.revoke("ward-r")
    (federation.registry.folder / "sites" / "ward-u.json").unlink()
    yield from (("revoked", revoked), ("unknown", unknown))
    stolen, key = issuer_of(federation.registry), site.identity().public
    for kind, name, days in (
        ("made by a thief", "ward-s", 0),
        ("expired", "ward-s", 100),
        ("no site", "ward-x", 0),
    ):
        path, _ = forged(folder, stolen, name, NOW - days * DAY, identity=key)
        yield kind, context_with(path, root)
    yield "the server's", context_with(federation.registry.folder / "server.pem", root)
    other = FederationFolder.create(folder / "other", (HOST, 443), ROOT, clock=lambda: NOW)
    yield "another federation's", context_with(joined(other, "ward-s", folder / "o").folder / "tls.pem", root)


def test_a_peer_that_is_no_accepted_site_gets_no_byte_of_a_model(
    federation: Federation, link: HttpsLink, tmp_path: Path
) -> None:
    model, kinds = random.Random(0).randbytes(100_000), []
    for kind, context in contexts(federation, tmp_path):
        ask = federation.ask("ward-s", shared=model, body=model, slot=len(kinds))
        for name in ("ward-p", "ward-r", "ward-u", "ward-s"):
            link.send(name, ask, blobs(model))
        digest = hashlib.sha256(model).hexdigest()
        for method, path in (
            ("GET", "/next"),
            ("GET", "/experiment"),
            ("GET", f"/blob/{digest}"),
            ("HEAD", "/next"),
        ):
            try:
                status, headers, body = within(
                    lambda context=context, method=method, path=path: request(
                        federation, context, method, path
                    )
                )
            except (aiohttp.ClientError, OSError):
                continue  # closed in the handshake
            assert (status in (403, 404), body) == (True, b""), (kind, path, status, headers)
        kinds.append(kind)
    assert len(kinds) == 9
    assert "ward-s" not in link.online()
    own = client_context(federation.folder / "ward-s")
    assert within(lambda: request(federation, own, "GET", f"/blob/{digest}"))[2] == model


def test_a_site_says_itself_that_its_certificate_ended(federation: Federation, link: HttpsLink) -> None:
    site = federation.site("ward-a")

    async def agent() -> None:
        async with At(site, options={"clock": lambda: NOW + 91 * 86400}) as connection:
            await connection.next([])

    with pytest.raises(IdentityError, match="the certificate of ward-a expired on"):
        within(agent)


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_an_open_connection_ends_with_its_certificate(tmp_path: Path, end: str) -> None:
    clock = [NOW]
    federation = Federation(tmp_path, limits=replace(FAST, poll=60), clock=lambda: clock[0])
    with federation.link() as link:
        site = federation.site("ward-a")

        async def agent() -> None:
            async with At(site) as connection:
                await connection.next([])

        with pytest.raises(SiteRefused) as caught, beside(agent):  # noqa: PT012 - the site waits beside it
            while "ward-a" not in link.online():
                time.sleep(0.01)
            if end == "revoked":
                federation.registry.revoke("ward-a")
            else:
                clock[0] += 91 * 86400
        assert caught.value.reason == end


def test_two_addresses_of_one_identity_suspend_it(tmp_path: Path) -> None:
    federation = Federation(tmp_path, limits=replace(FAST, addresses=3600))
    with federation.link():
        context = client_context(federation.site("ward-a").folder)

        async def twice() -> list[int]:
            return [
                (await request(federation, context, "HEAD", "/next", local=at))[0]
                for at in (HOST, HOST, "127.0.0.2")
            ]

        assert within(twice) == [204, 204, 403]
    assert federation.registry.site("ward-a").state == "suspended"
    assert [kind for kind, *_ in federation.notices] == ["address", "suspended"]


def test_slow_and_silent_sockets_do_not_keep_a_site_out(federation: Federation, link: HttpsLink) -> None:
    site = federation.site("ward-a")
    context = FederationContext.trusting(federation.registry.root, ssl.PROTOCOL_TLS_CLIENT)
    opened: list[socket.socket] = []
    try:
        for number in range(250):
            plain = socket.create_connection((HOST, federation.port))
            opened.append(plain)
            if number >= 50:  # silent after the handshake
                opened[-1] = context.wrap_socket(plain, server_hostname=HOST)
        anonymous = [each for each in link._connections if not each.group]
        assert len(anonymous) <= FAST.anonymous_per_address
        assert all(map(ended, opened[:200]))
        ask = federation.ask()
        link.send("ward-a", ask, {})

        async def agent() -> bool:
            async with At(site) as connection:
                assert await connection.next([])
                return await connection.answer(ask.digest, answer_to(ask, site.identity()))

        assert within(agent)
    finally:
        for each in opened:
            each.close()
    assert len(bodies(link.collect(60, [ask.digest]))) == 1


@contextmanager
def hostile(federation: Federation) -> Iterator[None]:
    """50 sockets that send a byte of a header every 200 ms, and 200 that are silent after their handshake."""
    context = FederationContext.trusting(federation.registry.root, ssl.PROTOCOL_TLS_CLIENT)
    with ExitStack() as opened:

        def open_one(number: int) -> socket.socket:
            place = (HOST, federation.port), 60, (f"127.1.0.{number + 1}", 0)
            plain = opened.enter_context(socket.create_connection(*place))
            return opened.enter_context(context.wrap_socket(plain, server_hostname=HOST))

        for number in range(50, 250):
            with suppress(OSError):  # it was closed to make room
                open_one(number)
        slow = [open_one(number) for number in range(50)]
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.2):
                for each in slow:
                    with suppress(OSError):
                        each.send(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.mark.nightly
def test_a_round_beside_slow_and_silent_sockets_takes_hardly_longer(
    federation: Federation, link: HttpsLink
) -> None:
    site, body = federation.site("ward-a"), random.Random(0).randbytes(3_000_000)
    slots = itertools.count()

    async def seconds() -> float:
        """A round over a new connection: a body each way."""
        ask, begun = federation.ask(shared=body, slot=next(slots)), time.perf_counter()
        link.send("ward-a", ask, blobs(body))
        async with At(site) as connection:
            assert await connection.next([])
            assert await connection.blob(ask.fields.shared, len(body)) == body
            assert await connection.answer(ask.digest, answer_to(ask, site.identity(), body=body))
        assert len(bodies(link.collect(60, [ask.digest]))) == 1
        return time.perf_counter() - begun

    alone: list[float] = []
    beside_them: list[float] = []
    within(seconds)
    for _ in range(10):  # in turn, since the machine's other work changes
        alone += [within(seconds) for _ in range(5)]
        with hostile(federation):
            assert len([each for each in link._connections if not each.group]) >= FAST.anonymous // 2
            beside_them += [within(seconds) for _ in range(5)]
    ratio = statistics.median(beside_them) / statistics.median(alone)
    assert ratio <= 1.2, f"{ratio:.2f} times"


@pytest.mark.parametrize("said", [None, b"", b"GET / HTTP/1.1\r\nHost: a"])
def test_a_peer_that_does_not_finish_its_handshake_or_header_is_closed(
    tmp_path: Path, said: bytes | None
) -> None:
    federation = Federation(tmp_path, limits=replace(FAST, handshake=0.3, header=0.3, idle=3600))
    with federation.link(), socket.create_connection((HOST, federation.port)) as plain:
        end = plain
        if said is not None:
            context = FederationContext.trusting(federation.registry.root, ssl.PROTOCOL_TLS_CLIENT)
            end = context.wrap_socket(plain, server_hostname=HOST)
            end.sendall(said)
        assert ended(end)
        end.close()


def test_many_connections_of_one_site_close_its_oldest(tmp_path: Path) -> None:
    federation = Federation(tmp_path, limits=replace(FAST, per_site=3))
    with federation.link() as link:
        context = client_context(federation.site("ward-a").folder)
        opened = []
        for _ in range(10):
            end = context.wrap_socket(socket.create_connection((HOST, federation.port)), server_hostname=HOST)
            end.sendall(f"HEAD /next HTTP/1.1\r\nHost: a\r\nfedlens-protocol: {PROTOCOL}\r\n\r\n".encode())
            assert end.recv(12) == b"HTTP/1.1 204"
            opened.append(end)
        assert len([each for each in link._connections if each.group == "ward-a"]) == 3
        assert all(map(ended, opened[:7]))
        for end in opened:
            end.close()


def test_an_answer_counts_once_and_only_for_its_ask_and_its_sender(
    federation: Federation, link: HttpsLink
) -> None:
    site, other = federation.site("ward-a"), federation.site("ward-b")
    ask, second = federation.ask(), federation.ask(round=2)
    link.send("ward-a", ask, {})
    link.send("ward-a", second, {})
    good = b"".join(answer_to(ask, site.identity()))

    async def attacker() -> list[tuple[int, str]]:
        key = site.identity()
        return [
            await put(
                federation, other, ask, b"".join(answer_to(ask, other.identity()))
            ),  # another site's ask
            await put(
                federation, site, ask, b"".join(answer_to(ask, other.identity()))
            ),  # another's signature
            await put(federation, site, second, good),  # replayed for another ask
            await put(federation, site, ask, b"".join(answer_to(ask, key, client="ward-b"))),
            await put(federation, site, ask, b"".join(answer_to(ask, key, root=bytes(32)))),
            await put(federation, site, ask, b"".join(answer_to(ask, key, purpose="census"))),
            await put(federation, site, ask, good[:-1] + bytes([good[-1] ^ 1])),
            await put(federation, site, ask, good),
            await put(federation, site, ask, good),  # once more
        ]

    refused = (422, "mismatch")
    expected = [
        (410, "late"),
        (422, "signature"),
        refused,
        refused,
        refused,
        refused,
        (422, "damaged"),
        (201, ""),
    ]
    assert within(attacker) == [*expected, (204, "duplicate")]
    assert len(bodies(link.collect(60, [second.digest]))) == 1
    assert within(lambda: put(federation, site, ask, good)) == (410, "late")  # closed by now
    assert link.refused["ward-a", "mismatch"] == 4
    assert link.refused["ward-a", "late"] == 1


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_random_bodies_are_refused_one_by_one(federation: Federation, link: HttpsLink, count: int) -> None:
    rng = random.Random(count)
    site, ask = federation.site("ward-a"), federation.ask()
    link.send("ward-a", ask, {})
    good = b"".join(answer_to(ask, site.identity(), {"list": [1, {"deep": "text"}]}))

    def body() -> bytes:
        if rng.random() < 0.3:
            return rng.randbytes(rng.randrange(1, 3000))
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 3, 30))):
            at = rng.randrange(len(data))
            data[at] = (data[at] + rng.randrange(1, 256)) % 256
        cut = rng.randrange(1, len(data) + 1) if rng.random() < 0.5 else len(data)
        return bytes(data[:cut]) + rng.randbytes(rng.choice((0, 0, 8)))

    async def attacker() -> set[int]:
        return {(await put(federation, site, ask, body()))[0] for _ in range(count)}

    assert within(attacker, 3000) <= {413, 422}
    assert {kind for kind, *_ in federation.notices} == {"address", "refused"}
    assert within(lambda: put(federation, site, ask, good)) == (201, "")


def test_faults_of_a_site_are_counted_and_do_not_fill_the_log(
    federation: Federation, link: HttpsLink
) -> None:
    site, other = federation.site("ward-a"), federation.site("ward-b")
    ask = federation.ask()
    link.send("ward-a", ask, {})
    wrong = b"".join(answer_to(ask, other.identity()))

    async def attacker() -> None:
        for _ in range(30):
            assert (await put(federation, site, ask, wrong))[0] == 422

    within(attacker)
    assert link.refused["ward-a", "signature"] == 30
    assert len([kind for kind, *_ in federation.notices if kind == "refused"]) == 10


def test_another_protocol_is_refused_with_its_name(federation: Federation, link: HttpsLink) -> None:
    context = client_context(federation.site("ward-a").folder)
    answer = within(
        lambda: request(federation, context, "GET", "/next", {"fedlens-protocol": str(PROTOCOL + 1)})
    )
    assert (answer[0], answer[1]["fedlens-reason"], answer[2]) == (426, "protocol", b"")


def test_a_port_that_is_taken_is_named(federation: Federation, link: HttpsLink) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen at port {federation.port} of {HOST}"):
        listen(HOST, federation.port)


def test_a_link_that_stopped_says_so(federation: Federation) -> None:
    sites = federation.registry.folder / "sites"
    with federation.link() as link:
        sites.rename(sites.with_name("moved"))
        with pytest.raises(RunFailed, match="the link to the sites stopped: FileNotFoundError"):
            link.collect(60, [])


def test_a_link_that_is_busy_still_keeps_its_messages(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Future[bool]):
        def result(self, timeout: float | None = None) -> bool:
            raise TimeoutError

    monkeypatch.setattr(https, "Future", Late)
    with federation.link() as link:
        assert link.keeps("ward-a", bytes(32))  # it has not said otherwise
    assert not link.keeps("ward-a", bytes(32))
