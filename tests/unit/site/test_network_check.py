"""`fedlens site check --network`: each step that can fail between a site and its server is named."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import pytest

from fedlens.engines.links.https import HttpsLink
from fedlens.identity.authority import DAY, HOUR, issue, server_context
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.keys import KeyPair
from fedlens.identity.site_keys import SiteKeys
from fedlens.site import network_check
from fedlens.site.network_check import Step, check_network
from tests.link_kit import Federation, Proxy
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, at, issuer_of


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Federation(tmp_path)


@pytest.fixture
def link(kit: Federation) -> Iterator[HttpsLink]:
    with kit.link() as link:
        yield link


def failed(keys: SiteKeys, clock: Callable[[], float] = time) -> Step:
    """The step that fails, after others that did not."""
    *before, last = check_network(keys, clock=clock)
    assert all(step.ok and not step.hint for step in before)
    assert not last.ok
    assert last.hint
    return last


@contextmanager
def answering(reply: bytes | None) -> Iterator[int]:
    """The port of a server that answers what is not TLS, or closes each connection at once."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if reply is not None:
                    connection.recv(65_536)
                    connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_every_step_of_an_accepted_site_works(kit: Federation, link: HttpsLink) -> None:
    steps = list(check_network(kit.site("ward-a"), clock=time))
    assert [step.name for step in steps] == ["name", "port", "TLS", "clock", "certificate", "acceptance"]
    assert all(step.ok for step in steps)


def test_a_name_without_an_address(kit: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    keys = kit.site("ward-a")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    step = failed(keys)
    assert (step.name, step.what) == (
        "name", f"{HOST}, the name of the server, has no address: Name or service not known",
    )  # fmt: skip


def test_a_closed_port(kit: Federation) -> None:
    with kit.link():
        pass
    step = failed(kit.site("ward-a"))
    assert (step.name, step.what) == (
        "port",
        f"port {kit.port} of {HOST} refuses connections: Connection refused",
    )


def test_a_network_without_a_way(kit: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    keys = kit.site("ward-a")
    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert "cannot be reached: Network is unreachable" in (step := failed(keys)).what
    assert "operator" not in step.hint


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS 1.3"),
        (None, "the connection ends in the handshake"),
    ],
)
def test_a_port_that_speaks_something_else(kit: Federation, reply: bytes | None, what: str) -> None:
    keys = kit.site("ward-a")
    with answering(reply) as keys.port:
        step = failed(keys)
    assert step.name == "TLS"
    assert what in step.what


def test_a_certificate_of_another_authority_as_of_a_proxy_that_opens_tls(
    kit: Federation, tmp_path: Path
) -> None:
    keys = kit.site("ward-a")
    other = Federation.__new__(Federation)
    other.__dict__.update(vars(kit))
    other.registry = FederationFolder.create(tmp_path / "inspection", (HOST, 443), ROOT, clock=lambda: NOW)
    with other.link():
        keys.port = other.port
        step = failed(keys)
    assert step.name == "TLS"
    assert "is not one of this federation" in step.what
    assert "it is signed by 'CN=issuer-1'" in step.hint
    assert "inspection of TLS" in step.hint


def test_a_server_with_an_old_issuer(kit: Federation, tmp_path: Path) -> None:
    keys, stolen = kit.site("ward-a"), server_context(kit.registry.folder)
    kit.registry.rotate(ROOT)
    with kit.link():
        keys.port = kit.port
        assert all(step.ok for step in check_network(keys, clock=time))
    listener = socket.create_server((HOST, 0))
    keys.port = listener.getsockname()[1]

    def serve() -> None:
        for _ in range(3):  # name and port connect too
            connection, _ = listener.accept()
            try:
                stolen.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    step = failed(keys)
    assert (step.name, step.what) == ("TLS", "the server has issuer 1, but issuer 2 was seen before")
    connection = socket.create_connection((HOST, keys.port))
    connection.close()
    thread.join()
    listener.close()


@pytest.mark.parametrize(("ahead", "said"), [(HOUR, "60 min ahead of"), (-HOUR, "60 min behind")])
def test_a_clock_that_is_wrong(kit: Federation, link: HttpsLink, ahead: float, said: str) -> None:
    step = failed(kit.site("ward-a"), lambda: time() + ahead)
    assert step.name == "clock"
    assert f"the clock of this machine is {said} that of the server" in step.what


def test_a_server_whose_certificate_has_expired_is_no_stranger(kit: Federation) -> None:
    keys, folder = kit.site("ward-a"), kit.registry.folder
    issuer, tls = issuer_of(kit.registry), KeyPair.make()
    pair = kit.registry.identity().public, tls.public
    (folder / "server.pem").write_bytes(tls.pem() + issue(issuer, "server", pair, NOW - 100 * DAY, HOST))
    with kit.link():
        keys.port = kit.port
        step = failed(keys)
    assert step.name == "clock"
    assert "the certificate of the server is valid from" in step.what
    assert "compare the clocks of both machines" in step.hint


def test_a_certificate_that_has_expired(kit: Federation, link: HttpsLink, tmp_path: Path) -> None:
    past = at(NOW - 100 * DAY, kit.registry)
    keys = SiteKeys.join(tmp_path / "late", invitation := past.invite("late"))
    keys.install(past.enrol(keys.enrolment(invitation), HOST), NOW)
    keys.port = kit.port
    step = failed(keys)
    assert step.name == "certificate"
    assert "the certificate of late expired on" in step.what
    assert "--same-key" in step.hint


def test_who_is_not_accepted(kit: Federation, link: HttpsLink, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = kit.site("ward-a", accepted=False)
    assert "has not accepted this site yet" in failed(pending).what
    kit.registry.accept("ward-a", pending.identity().fingerprint)
    kit.registry.suspend("ward-a", "two addresses")
    assert "this site is suspended" in failed(pending).what
    kit.registry.revoke("ward-a")
    assert "this site was revoked" in failed(pending).what
    (kit.registry.folder / "sites" / "ward-a.json").unlink()
    assert "does not know this site" in failed(pending).what
    good = kit.site("ward-b")
    monkeypatch.setattr(network_check, "PROTOCOL", 99)
    assert "speaks another protocol" in failed(good).what


def test_a_proxy(kit: Federation, link: HttpsLink, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = kit.site("ward-a")
    monkeypatch.setattr(network_check, "proxy_bypass", lambda host: False)
    with Proxy(kit.port, "ward:secret word") as proxy:
        monkeypatch.setenv("https_proxy", f"http://{HOST}:{proxy.port}")
        step = failed(keys)
        assert (step.name, step.hint) == ("proxy", "set https_proxy=http://NAME:PASSWORD@HOST:PORT")
        monkeypatch.setenv("https_proxy", f"http://ward:secret%20word@{HOST}:{proxy.port}")
        steps = list(check_network(keys, clock=time))
        assert [step.name for step in steps[:3]] == ["name", "port", "proxy"]
        assert all(step.ok for step in steps)
    monkeypatch.setenv("https_proxy", f"ftp://ward:secret%20word@{HOST}:1")
    step = failed(keys)
    assert (step.name, step.what) == ("proxy", "https_proxy is not the URL of a proxy")
    assert "secret" not in f"{step}"


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (
            b"HTTP/1.1 407 No\r\nProxy-Authenticate: Negotiate\r\nProxy-Authenticate: NTLM\r\n\r\n",
            "asks for negotiate or ntlm",
        ),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "it answers 403"),
        (b"HTTP/1.1 503 No\r\n\r\n", f"the proxy answers 503; it cannot reach {HOST}:"),
        (b"\r\n\r\n", "it answers nothing"),
    ],
)  # fmt: skip
def test_a_proxy_that_refuses(
    kit: Federation, monkeypatch: pytest.MonkeyPatch, reply: bytes, what: str
) -> None:
    keys = kit.site("ward-a")
    monkeypatch.setattr(network_check, "proxy_bypass", lambda host: False)
    with answering(reply) as port:
        monkeypatch.setenv("https_proxy", f"http://{HOST}:{port}")
        step = failed(keys)
    assert step.name == "proxy"
    assert what in step.what
    assert ("the server is off, as between two runs" in step.what) == ("503" in what)
    step = failed(keys)  # it is closed now
    assert (step.name, f"the proxy {HOST}:{port} refuses connections" in step.what) == ("port", True)
    assert "ask IT whether the proxy runs" in step.hint


def test_no_proxy_is_heeded(kit: Federation, link: HttpsLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://{HOST}:1")
    monkeypatch.setenv("no_proxy", HOST)
    assert all(step.ok for step in check_network(kit.site("ward-a"), clock=time))
