"""TLS between a server and sites on 127.0.0.1, with right certificates and with each kind of wrong one."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from datetime import timedelta
from pathlib import Path
from time import time

import pytest
from cryptography import x509

from fedlens.base.errors import IdentityError
from fedlens.identity import authority
from fedlens.identity.authority import DAY, HOUR, server_context
from fedlens.identity.federation_folder import FederationFolder, NotAdmitted
from fedlens.identity.keys import KeyPair
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.identity.tls import Peer
from tests.unit.identity.federation_kit import (
    HOST,
    NOW,
    ROOT,
    at,
    connect,
    context_with,
    federation_in,
    forged,
    issuer_of,
    joined,
)


@pytest.fixture
def federation(tmp_path: Path) -> FederationFolder:
    return federation_in(tmp_path)


@pytest.fixture
def site(federation: FederationFolder, tmp_path: Path) -> SiteKeys:
    return joined(federation, "ward-a", tmp_path)


def test_both_ends_know_the_other(federation: FederationFolder, site: SiteKeys) -> None:
    at_server, at_site = connect(server_context(federation.folder), client_context(site.folder))
    assert at_server == site.certificate()
    assert (at_server.name, at_server.fingerprint) == ("ward-a", site.identity().fingerprint)
    assert at_server.not_after.timestamp() == NOW + 90 * DAY
    assert isinstance(at_site, Peer)
    assert (at_site.name, at_site.fingerprint) == ("server", federation.identity().fingerprint)
    assert federation.admit(at_server).name == "ward-a"


def test_without_a_certificate_the_server_knows_nobody(federation: FederationFolder, tmp_path: Path) -> None:
    keys = SiteKeys.join(tmp_path / "ward-b", federation.invite("ward-b"))
    at_server, at_site = connect(server_context(federation.folder), client_context(keys.folder))
    assert at_server is None
    assert isinstance(at_site, Peer)
    with pytest.raises(IdentityError, match="ward-b has no certificate yet"):
        keys.check_certificate(NOW)


def test_a_site_of_another_federation_is_refused(federation: FederationFolder, tmp_path: Path) -> None:
    other = FederationFolder.create(tmp_path / "others", (HOST, 443), ROOT, clock=lambda: NOW)
    stranger = joined(other, "ward-a", tmp_path)
    ours = context_with(stranger.folder / "tls.pem", federation.root)
    assert all(isinstance(end, ssl.SSLError) for end in connect(server_context(federation.folder), ours))
    at_site = connect(server_context(federation.folder), client_context(stranger.folder))[1]
    assert isinstance(at_site, ssl.SSLCertVerificationError)  # its root is another one


@pytest.mark.parametrize(
    ("made", "good"),
    [(-90 * DAY - HOUR, False), (-89 * DAY, True), (HOUR - 60, True), (HOUR + DAY, False)],
    ids=["expired", "old", "an hour early", "too early"],
)
def test_a_certificate_counts_from_an_hour_before_it_was_made_for_90_days(
    federation: FederationFolder, tmp_path: Path, made: float, good: bool
) -> None:
    path, peer = forged(tmp_path, issuer_of(federation), "ward-a", time() + made)
    at_server, _ = connect(server_context(federation.folder), context_with(path, federation.root))
    assert (at_server == peer) is good
    assert good or isinstance(at_server, ssl.SSLCertVerificationError)


def test_a_revoked_site_is_refused_by_name_with_all_its_keys(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    federation.revoke("ward-a")
    at_server, _ = connect(server_context(federation.folder), client_context(site.folder))
    assert isinstance(at_server, Peer)
    assert refusal(federation, at_server) == "revoked"
    _, newer = forged(tmp_path, issuer_of(federation), "ward-a", identity=at_server.identity)
    assert refusal(federation, newer) == "revoked"


def test_a_certificate_that_expires_while_connected_is_refused_at_the_next_request(
    federation: FederationFolder, site: SiteKeys
) -> None:
    peer = site.certificate()
    assert at(peer.not_after.timestamp(), federation).admit(peer).state == "accepted"
    assert refusal(at(peer.not_after.timestamp() + 1, federation), peer) == "expired"
    assert refusal(at(peer.not_before.timestamp() - 1, federation), peer) == "expired"


def test_a_certificate_of_a_stolen_issuer_is_not_one_of_the_server(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    for name in ("ward-a", "ward-z", "../hospitals/sites/ward-a"):
        public = site.identity().public
        path, _ = forged(tmp_path, issuer_of(federation), name, identity=public)
        at_server, _ = connect(server_context(federation.folder), context_with(path, federation.root))
        assert isinstance(at_server, Peer)
        assert (at_server.name, refusal(federation, at_server)) == (name, "unknown")


def test_sites_refuse_the_issuer_before_a_rotation(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    stolen = Path(shutil.copytree(federation.folder, tmp_path / "stolen"))
    connect(server_context(federation.folder), client_context(site.folder))
    federation.rotate(ROOT)
    before = client_context(site.folder)
    assert isinstance(connect(server_context(stolen), before)[1], Peer)  # the site has not seen the rotation
    assert not site.renewal_due(NOW)
    assert isinstance(connect(server_context(federation.folder), before)[1], Peer)
    at_server, at_site = connect(server_context(stolen), before)
    assert isinstance(at_site, ssl.SSLCertVerificationError)
    assert "issuer 1, but issuer 2 was seen before" in str(at_site)
    assert site.renewal_due(NOW)
    answer = FederationFolder(stolen).renew(site.certificate(), site.renewal())
    with pytest.raises(IdentityError, match="of issuer 1, but issuer 2 was seen"):
        site.install(answer, NOW)
    at_server, _ = connect(server_context(federation.folder), before)
    assert isinstance(at_server, Peer)
    assert federation.admit(at_server).name == "ward-a"  # its certificate is the server's own, so it stays


def test_asyncio_checks_the_issuer_too(federation: FederationFolder, site: SiteKeys, tmp_path: Path) -> None:
    stolen = Path(shutil.copytree(federation.folder, tmp_path / "stolen"))
    federation.rotate(ROOT)
    context = client_context(site.folder)
    connect(server_context(federation.folder), context)
    received = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.close()

    async def meet() -> None:
        server = await asyncio.start_server(answer, HOST, 0, ssl=server_context(stolen))
        async with server:
            with pytest.raises(ssl.SSLCertVerificationError, match="issuer 2 was seen"):
                await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=context)

    asyncio.run(meet())
    assert received in ([], [b""])


def test_one_issuer_has_one_identity_of_the_server(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    context = client_context(site.folder)
    connect(server_context(federation.folder), context)
    path, _ = forged(tmp_path, issuer_of(federation), "server", host=HOST)
    shutil.copy(path, federation.folder / "server.pem")
    at_site = connect(server_context(federation.folder), context)[1]
    assert "another identity key" in str(at_site)


def test_names_and_purposes_of_certificates_are_checked(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    server, client = server_context(federation.folder), client_context(site.folder)
    assert "Hostname mismatch" in str(connect(server, client, "localhost")[1])
    assert "IP address mismatch" in str(connect(server, client, "127.0.0.2")[1])
    as_server = server_context(federation.folder)
    as_server.load_chain(site.folder / "tls.pem", None)
    client.check_hostname = False
    assert "unsuitable certificate purpose" in str(connect(as_server, client)[1])
    as_client = context_with(federation.folder / "server.pem", federation.root)
    assert "unsuitable certificate purpose" in str(connect(server, as_client)[0])


def test_an_issuer_makes_no_other_issuer(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    (key, first), second = issuer_of(federation), KeyPair.make()
    extensions = [*authority._authority(second.public, 0), (authority._signed_by(first), False)]
    made = authority._signed(("issuer-9", "issuer-1"), second.public, key, (NOW, NOW + DAY), extensions)
    path, _ = forged(tmp_path, (second, made), "server", host=HOST)
    path.write_bytes(path.read_bytes() + authority.pem([first]))
    server = server_context(federation.folder)
    server.load_chain(path, None)
    assert "path length constraint exceeded" in str(connect(server, client_context(site.folder))[1])
    with pytest.raises(IdentityError, match="not signed by the authority"):
        authority.check_issuer(made, x509.load_der_x509_certificate(federation.root), NOW)


def test_nothing_older_than_tls_1_3(federation: FederationFolder, site: SiteKeys) -> None:
    for old in ("server", "site"):
        contexts = {"server": server_context(federation.folder), "site": client_context(site.folder)}
        contexts[old].minimum_version = ssl.TLSVersion.TLSv1_2
        contexts[old].maximum_version = ssl.TLSVersion.TLSv1_2
        assert all(isinstance(end, OSError) for end in connect(contexts["server"], contexts["site"]))


def test_a_context_needs_the_passphrase_and_never_asks_for_it(tmp_path: Path) -> None:
    federation = FederationFolder.create(
        tmp_path / "clinics", (HOST, 443), ROOT, b"of the server", clock=lambda: NOW
    )
    invitation = federation.invite("ward-a")
    site = SiteKeys.join(tmp_path / "ward-a", invitation, b"of the site")
    site.install(federation.enrol(site.enrolment(invitation), HOST), NOW)
    server = server_context(federation.folder, b"of the server")
    assert connect(server, client_context(site.folder, b"of the site"))[0] == site.certificate()
    for wrong, text in ((b"another", "the passphrase is wrong"), (None, "is encrypted")):
        with pytest.raises(IdentityError, match=text):
            server_context(federation.folder, wrong)
        with pytest.raises(IdentityError, match=text):
            client_context(site.folder, wrong)
        with pytest.raises(IdentityError, match=text):
            FederationFolder(federation.folder, wrong).identity()


def test_a_renewed_server_serves_new_connections(tmp_path: Path) -> None:
    made = NOW - 61 * DAY
    federation = FederationFolder.create(tmp_path / "clinics", (HOST, 443), ROOT, clock=lambda: made)
    client = client_context(joined(federation, "ward-a", tmp_path).folder)
    server = server_context(federation.folder)
    first = connect(server, client)[1]
    assert not at(made + 59 * DAY, federation).renew_server()
    now = at(NOW, federation)
    assert now.renew_server()
    assert not now.renew_server()
    server.load_chain(federation.folder / "server.pem", None)
    second = connect(server, client)[1]
    assert isinstance(first, Peer)
    assert isinstance(second, Peer)
    assert (first.fingerprint, first.not_after + timedelta(61)) == (second.fingerprint, second.not_after)


def refusal(federation: FederationFolder, peer: Peer) -> str | None:
    """The reason, by both ways of asking."""
    with pytest.raises(NotAdmitted) as caught:
        federation.admit(peer)
    assert federation.refusal(peer) == caught.value.reason
    return federation.refusal(peer)
