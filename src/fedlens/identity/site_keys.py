"""A site's folder of keys: the identity that lasts, the TLS key that is renewed, and the newest issuer it has seen."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509

from fedlens.base.errors import IdentityError
from fedlens.base.shell_command import shell_command
from fedlens.identity import authority
from fedlens.identity.authority import certificates, day, der, pem
from fedlens.identity.federation_folder import RENEWS_WITHIN
from fedlens.identity.fingerprint import fingerprint_words
from fedlens.identity.invitation import Invitation
from fedlens.identity.keys import KeyPair
from fedlens.identity.plain_message import read_message, write_message
from fedlens.identity.private_files import one_writer, private_folder, read_private, write_private
from fedlens.identity.signing import LEFT, key_request, sign
from fedlens.identity.tls import FederationContext, Peer, peer_of

_SITE: dict[str, type] = {
    **dict.fromkeys(("federation", "host", "name", "server"), str),
    **dict.fromkeys(("port", "issuer"), int),
}


class NotYetValid(IdentityError):
    """By the clock of this machine, a certificate begins later."""


class SiteKeys:
    """The keys of one site: `identity.pem`, `tls.pem` with its certificate, `root.pem`, and `site.json`.

    Args:
        folder: made by `join`.
        passphrase: of the keys, if they are encrypted.

    Attributes:
        name, federation, host, port: those of the invitation.

    Raises `IdentityError` if it is not such a folder, or open to other users.
    """

    def __init__(self, folder: Path, passphrase: bytes | None = None) -> None:
        self.folder, self._passphrase = private_folder(folder), passphrase
        about = self._about()
        self.name, self.federation = str(about["name"]), str(about["federation"])
        self.host, self.port = str(about["host"]), int(about["port"])

    @classmethod
    def join(cls, folder: Path, invitation: Invitation, passphrase: bytes | None = None) -> SiteKeys:
        """Makes a site's keys for an invitation; a second call for the same site keeps the keys.

        Raises `IdentityError` if the folder is of another site or another federation.
        """
        with one_writer(private_folder(folder)):
            if not (folder / "site.json").exists():  # written last, so all is there once it is
                write_private(folder / "root.pem", pem([authority.read_root(invitation.root)]))
                write_private(folder / "identity.pem", KeyPair.make().pem(passphrase))
                about = {key: vars(invitation)[key] for key in ("federation", "host", "port", "name")}
                write_private(folder / "site.json", write_message({**about, "issuer": 0, "server": ""}))
        keys = cls(folder, passphrase)
        if (keys.name, keys.root) != (invitation.name, invitation.root):
            what = f"{folder} has the keys of {keys.name} in the federation {keys.federation}"
            raise IdentityError(what, hint="take another folder")
        return keys

    @property
    def root(self) -> bytes:
        """The root certificate in DER."""
        return der(certificates(self.folder / "root.pem")[0])

    def identity(self) -> KeyPair:
        """The key that lasts and signs messages, read from its file: keep it."""
        return KeyPair.read(self.folder / "identity.pem", self._passphrase)

    def words(self) -> str:
        """The eight words to read to the operator on the telephone. Raises `IdentityError` before `install`."""
        return fingerprint_words(self.root, self.certificate().fingerprint)

    def enrolment(self, invitation: Invitation) -> bytes:
        """The body of a request to /enrol."""
        return write_message({**self._request(), "secret": invitation.secret})

    def renewal(self) -> bytes:
        """The body of a request to /renew. Until `install` it asks for a certificate of the same new TLS key."""
        return write_message(self._request())

    def leaving(self, now: float) -> bytes:
        """The body of a request to /left: a notice that this site has left, signed by its identity key."""
        fields: list[str | int | bytes] = [hashlib.sha256(self.root).digest(), self.name, int(now)]
        return write_message({"time": int(now), "signature": sign(self.identity(), LEFT, fields)})

    def install(self, answer: bytes, now: float) -> str:
        """Installs the certificate that the server answered with, and returns the site's state there.

        Raises `IdentityError` unless it is for the last requested key, this site, and an issuer that is not outdated.
        """
        values = read_message(answer, {"chain": bytes, "state": str}, "the server's answer")
        chain = authority.read_chain(values["chain"], "the server's answer")
        path, newest = self.folder / "tls.next.pem", self._about()["issuer"]
        number = authority.check_issuer(chain[-1], certificates(self.folder / "root.pem")[0], now)
        authority.check_signed_by(chain[0], chain[-1])
        own, tls = peer_of(der(chain[0])), KeyPair.read(path, self._passphrase)
        if number < newest:
            raise IdentityError(f"the certificate is of issuer {number}, but issuer {newest} was seen before")
        wanted = (self.name, self.identity().public, tls.key.public_key())
        if (own.name, own.identity, chain[0].public_key()) != wanted:
            raise IdentityError("the certificate is not for the key and the name of this site")
        with one_writer(self.folder):
            write_private(path, tls.pem(self._passphrase) + pem([chain[0], chain[-1]]))
            path.replace(self.folder / "tls.pem")
        return str(values["state"])

    def certificate(self) -> Peer:
        """The site's own certificate. Raises `IdentityError` before it has one."""
        if not (self.folder / "tls.pem").exists():
            raise IdentityError(f"{self.name} has no certificate yet", hint="run 'fedlens site join'")
        return peer_of(der(certificates(self.folder / "tls.pem")[0]))

    def check_certificate(self, now: float) -> None:
        """Raises `IdentityError` if the site's own certificate is not valid: a sentence before connecting.

        It is `NotYetValid` where the clock of the machine is behind.
        """
        own = self.certificate()
        if now > own.not_after.timestamp():
            command = shell_command(
                "federation",
                "invite",
                self.federation,
                self.name,
                same_key=True,
                out=f"{self.name}.invitation",
            )
            hint = f"ask the operator of the server for: {command}"
            raise IdentityError(f"the certificate of {self.name} expired on {day(own.not_after)}", hint=hint)
        if now < own.not_before.timestamp():
            what = f"the certificate of {self.name} is valid from {day(own.not_before)}, and it is {day(now)} here"
            raise NotYetValid(what, hint="set the clock of this machine")

    def renewal_due(self, now: float) -> bool:
        """Whether to renew: in the last 30 days, and when the server has a newer issuer."""
        own = self.certificate()
        return own.not_after.timestamp() - now <= RENEWS_WITHIN or own.issuer < self._about()["issuer"]

    def see_server(self, peer: Peer) -> None:
        """Checks the server at the end of a handshake, and keeps the highest number of an issuer.

        Raises `IdentityError` for an issuer with a lower number, whose key may be stolen, and for another identity key
        of the server under the same issuer: a rotation replaces both.
        """
        with one_writer(self.folder):
            about = self._about()
            newest, seen = int(about["issuer"]), {"issuer": peer.issuer, "server": peer.identity.hex()}
            if peer.issuer < newest:
                what = f"the server has issuer {peer.issuer}, but issuer {newest} was seen before"
                raise IdentityError(what, hint="tell the operator: the key of an old issuer is in use")
            if peer.issuer == newest and about["server"] != seen["server"]:
                hint = "tell the operator: only a rotation replaces it"
                raise IdentityError("the server has another identity key than before", hint=hint)
            if peer.issuer > newest:
                write_private(self.folder / "site.json", write_message(about | seen))
            path, last = self.folder / "server.der", peer.der
            if not path.exists() or read_private(path) != last:
                write_private(path, last)

    def chains(self) -> dict[str, bytes]:
        """The certificates of this site and of the server that was last connected (PEM), by whose they are."""
        server = self.folder / "server.der"
        seen = [x509.load_der_x509_certificate(read_private(server))] if server.exists() else []
        return {self.name: pem(certificates(self.folder / "tls.pem")), "server": pem(seen)}

    def server_identity(self) -> bytes:
        """The public identity key (DER) of the server that was last connected, which verifies its messages."""
        return bytes.fromhex(self._about()["server"])

    def _request(self) -> dict[str, bytes]:
        path = self.folder / "tls.next.pem"
        with one_writer(self.folder):
            if not path.exists():
                write_private(path, KeyPair.make().pem(self._passphrase))
        return key_request(self.identity(), KeyPair.read(path, self._passphrase), self.root, self.name)

    def _about(self) -> dict[str, Any]:
        return read_message(read_private(self.folder / "site.json"), _SITE, "site.json")


def client_context(
    folder: Path, passphrase: bytes | None = None, anonymous: bool = False
) -> FederationContext:
    """The TLS context of a site: TLS 1.3, the federation's root alone, the server's name, and the newest issuer.

    It has the site's certificate, if there is one and the connection is not `anonymous`, as that of a request to
    enrol is; make a new context after `SiteKeys.install`.
    """
    keys = SiteKeys(folder, passphrase)
    context = FederationContext.trusting(keys.root, ssl.PROTOCOL_TLS_CLIENT)
    context.check = keys.see_server
    if not anonymous and (folder / "tls.pem").exists():
        context.load_chain(folder / "tls.pem", passphrase)
    return context
