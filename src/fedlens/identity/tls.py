"""TLS 1.3 between sites and server, always with the federation's own root, and who is at the other end."""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.x509.oid import NameOID

from fedlens.base.errors import IdentityError
from fedlens.identity.keys import fingerprint_of, key_password

IDENTITY = "urn:fedlens:identity:"
"""A certificate has its owner's identity key in a URI that begins so and ends with the key (DER) in hexadecimal."""
_ISSUER = re.compile(r"issuer-([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Peer:
    """The owner of a certificate that TLS has verified.

    Attributes:
        name: the site's name, "server" for the server.
        identity: the public identity key (DER), which verifies the owner's messages.
        not_before, not_after: when the certificate is valid.
        issuer: the number of the issuer that signed it.
        certificate: SHA-256 of the certificate, 64 hexadecimal digits.
        der: the certificate.
    """

    name: str
    identity: bytes
    not_before: datetime
    not_after: datetime
    issuer: int
    certificate: str
    der: bytes

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of the identity key, 32 bytes."""
        return fingerprint_of(self.identity)


def peer_of(certificate: bytes) -> Peer:
    """The owner of a certificate (DER). Raises `IdentityError` if it is not a leaf of a federation."""
    try:
        read = x509.load_der_x509_certificate(certificate)
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (identity,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        if not re.fullmatch(f"{IDENTITY}[0-9a-f]{{182}}", identity):
            raise ValueError("it names no identity key")
        key, name, number = identity[len(IDENTITY) :], common_name(read.subject), issuer_number(read.issuer)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise IdentityError(f"a certificate is not one of a federation: {error}") from None
    valid = read.not_valid_before_utc, read.not_valid_after_utc
    return Peer(
        name, bytes.fromhex(key), *valid, number, hashlib.sha256(certificate).hexdigest(), certificate
    )


def peer_name(ssl_object: ssl.SSLObject | ssl.SSLSocket) -> Peer | None:
    """Who is at the other end of a connection; None without a certificate.

    With aiohttp `ssl_object` is `request.transport.get_extra_info("ssl_object")`. Raises what `peer_of` raises.
    """
    certificate = ssl_object.getpeercert(binary_form=True)
    return peer_of(certificate) if certificate else None


def issuer_number(name: x509.Name) -> int:
    """The number in the name of an issuer, which the root has signed. Raises `IdentityError` for any other name."""
    found = _ISSUER.fullmatch(common_name(name))
    if found is None:
        raise IdentityError("the issuer of a certificate has no number")
    return int(found[1])


def common_name(name: x509.Name) -> str:
    """The one attribute of a name. Raises `IdentityError` if it has another, or several."""
    if [attribute.oid for attribute in name] != [NameOID.COMMON_NAME]:
        raise IdentityError("the name in a certificate is not a common name alone")
    return str(next(iter(name)).value)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self)


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self)


class FederationContext(ssl.SSLContext):
    """A TLS context that checks the peer at the end of each handshake, before a byte of a message is sent.

    Attributes:
        check: called with the peer; an `IdentityError` becomes `ssl.SSLCertVerificationError`, so that connections of
            sockets, asyncio and aiohttp fail as they do for any other wrong certificate.
    """

    sslsocket_class = _CheckedSocket
    sslobject_class = _CheckedObject
    check: Callable[[Peer], None] | None = None

    @classmethod
    def trusting(cls, root: bytes, protocol: int) -> Self:
        """A context for TLS 1.3 alone, which trusts this root (DER) alone."""
        context = cls(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=root)
        return context

    def load_chain(self, path: Path, passphrase: bytes | None) -> None:
        """Loads a file with key and certificates; connections that begin later use them.

        Raises `IdentityError` if the file cannot be read.
        """
        try:
            # With a password, even an empty one, OpenSSL never asks for one on the terminal.
            self.load_cert_chain(path, password=key_password(path, passphrase))
        except ssl.SSLError as error:
            reason = "the passphrase is wrong, or the file is damaged"
            raise IdentityError(f"{path.name} cannot be used: {reason}", where=str(path)) from error


def _check(end: ssl.SSLObject | ssl.SSLSocket) -> None:
    context = end.context
    if not isinstance(context, FederationContext) or context.check is None:
        return
    try:
        context.check(peer_of(end.getpeercert(binary_form=True) or b""))
    except IdentityError as error:
        raise ssl.SSLCertVerificationError(1, str(error)) from error
