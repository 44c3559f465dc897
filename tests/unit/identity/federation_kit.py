"""A federation on disk with sites, and TLS connections between two threads of this process."""

from __future__ import annotations

import atexit
import shutil
import socket
import ssl
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from fedlens.identity.authority import Issuer, certificates, der, issue, read_chain
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.keys import KeyPair
from fedlens.identity.site_keys import SiteKeys
from fedlens.identity.tls import FederationContext, Peer, peer_name, peer_of

HOST = "127.0.0.1"
ROOT = b"correct horse battery"
NOW = float(int(time.time()))  # TLS looks at the real clock


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp()) / "hospitals"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    FederationFolder.create(folder, (HOST, 443), ROOT, clock=lambda: NOW)
    return folder


def at(now: float, federation: FederationFolder) -> FederationFolder:
    """The federation at another time."""
    return FederationFolder(federation.folder, clock=lambda: now)


def federation_in(folder: Path) -> FederationFolder:
    """A new federation in `folder`: a copy of one, since a root takes a while."""
    return FederationFolder(Path(shutil.copytree(_template(), folder / "hospitals")), clock=lambda: NOW)


def joined(federation: FederationFolder, name: str, folder: Path) -> SiteKeys:
    """A site that has joined, and was accepted."""
    invitation = federation.invite(name)
    site = SiteKeys.join(folder / name, invitation)
    site.install(federation.enrol(site.enrolment(invitation), HOST), NOW)
    federation.accept(name, site.identity().fingerprint)
    return site


def issuer_of(federation: FederationFolder) -> Issuer:
    """The issuer's key and certificate: what a thief of the server's folder has."""
    path = federation.folder / "issuer.pem"
    return KeyPair.read(path), certificates(path)[0]


def forged(
    folder: Path, issuer: Issuer, name: str, now: float = NOW, host: str = "", identity: bytes = b""
) -> tuple[Path, Peer]:
    """A file with a TLS key and a certificate that `issuer` signed without the server's knowledge, and its owner."""
    tls, path = KeyPair.make(), folder / "forged.pem"
    chain = issue(issuer, name, (identity or KeyPair.make().public, tls.public), now, host)
    path.write_bytes(tls.pem() + chain)
    path.chmod(0o600)
    return path, peer_of(der(read_chain(chain, "the forged chain")[0]))


def connect(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = HOST
) -> tuple[Peer | Exception | None, Peer | Exception | None]:
    """Who the server sees and who the client sees after a handshake and one byte each way, or the error."""
    listener, seen = socket.create_server((HOST, 0)), []

    def answer() -> None:
        try:
            with listener.accept()[0] as raw:
                raw.settimeout(60)
                with server.wrap_socket(raw, server_side=True) as end:
                    seen.append(peer_name(end))
                    end.sendall(end.recv(1))
        except (OSError, ssl.SSLError) as error:
            seen.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    seen_by_client: Peer | Exception | None
    try:
        with (
            socket.create_connection(listener.getsockname(), timeout=60) as raw,
            client.wrap_socket(raw, server_hostname=host) as end,
        ):
            end.sendall(b"x")
            if end.recv(1) != b"x":  # some errors of the server end the connection without an alert
                raise ConnectionError("the server has closed")
            assert end.version() == "TLSv1.3"
            assert end.session is None or not end.session.has_ticket
            seen_by_client = peer_name(end)
    except (OSError, ssl.SSLError) as error:
        seen_by_client = error
    thread.join()
    listener.close()
    return seen[0], seen_by_client


def context_with(path: Path, root: bytes) -> FederationContext:
    """A client's context with this file of key and certificates, and without checks of its own."""
    context = FederationContext.trusting(root, ssl.PROTOCOL_TLS_CLIENT)
    context.load_chain(path, None)
    return context
