"""The certificate authority of a federation: a root that is kept away, and issuers that it numbers."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlens.base.errors import IdentityError
from fedlens.identity.fingerprint import fingerprint_words
from fedlens.identity.keys import KeyPair, public_key
from fedlens.identity.plain_message import read_message
from fedlens.identity.private_files import one_writer, private_folder, read_private, write_private
from fedlens.identity.tls import IDENTITY, FederationContext, common_name, issuer_number

HOUR, DAY = 3600.0, 86400.0
ROOT_LASTS, ISSUER_LASTS, LEAF_LASTS = 7300 * DAY, 730 * DAY, 90 * DAY
ISSUER_REQUEST: dict[str, type] = {"federation": str, "public": bytes, "above": int}
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]*(\.[a-zA-Z0-9-]+)*")
Issuer = tuple[KeyPair, x509.Certificate]
Extensions = list[tuple[x509.ExtensionType, bool]]  # each with whether it is critical
SHORTEST = 12
"""The fewest characters of the root's passphrase."""


def make_root(folder: Path, federation: str, passphrase: bytes, now: float) -> bytes:
    """Makes the root of a federation in a folder of its own, and returns its certificate (DER).

    Args:
        folder: a new folder, best on a machine without a network.
        federation: the federation's name.
        passphrase: encrypts the key, at least 12 characters.
        now: seconds since 1970.

    Raises `IdentityError` if the folder has a root already, or the passphrase is too short.
    """
    private_folder(folder)
    if len(passphrase) < SHORTEST:
        raise IdentityError(f"the passphrase has fewer than {SHORTEST} characters", hint="take a longer one")
    with one_writer(folder):
        if (folder / "root.pem").exists():
            raise IdentityError(f"{folder} has a root already", hint="take another folder")
        key = KeyPair.make()
        authority = _authority(key.public, 1)
        made = _signed((federation, federation), key.public, key, (now, now + ROOT_LASTS), authority)
        write_private(folder / "issuer", b"0")
        write_private(folder / "root.pem", key.pem(passphrase) + pem([made]))
    return der(made)


def sign_issuer(folder: Path, request: bytes, passphrase: bytes, now: float) -> bytes:
    """Signs a server's request for an issuer with the root, and returns issuer and root in PEM.

    Each issuer gets the next number, which sites use to refuse earlier ones. Raises `IdentityError` for a request of
    another federation, a wrong passphrase, and a copy of the root that is older than the server's issuer.
    """
    values = read_message(request, ISSUER_REQUEST, "the request for an issuer")
    with one_writer(folder):
        key, (root,) = KeyPair.read(folder / "root.pem", passphrase), certificates(folder / "root.pem")
        federation, last = common_name(root.subject), int(read_private(folder / "issuer"))
        if values["federation"] != federation:
            raise IdentityError(f"the request is not one of the federation {federation}")
        if values["above"] > last:
            what = f"the server has issuer {values['above']}, but this root signed only {last}"
            raise IdentityError(what, hint="use the newest copy of the root's folder")
        write_private(folder / "issuer", b"%d" % (last + 1))
        names, ends = (f"issuer-{last + 1}", federation), min(now + ISSUER_LASTS, not_after(root))
        extensions = [*_authority(values["public"], 0), (_signed_by(root), False)]
        return pem([_signed(names, values["public"], key, (now, ends), extensions), root])


def request_words(request: bytes) -> str:
    """Eight words of a server's request for an issuer, which people compare before the root signs it."""
    return fingerprint_words(b"request for an issuer", hashlib.sha256(request).digest())


def issue(issuer: Issuer, name: str, keys: tuple[bytes, bytes], now: float, host: str = "") -> bytes:
    """A certificate for a TLS key and the issuer's own, in PEM; of a server if `host` is given, else of a site.

    It lasts 90 days, but not longer than the issuer, and is valid from an hour ago, since clocks differ.

    Args:
        issuer: the issuer's key and certificate.
        name: the site's name.
        keys: the identity key and the TLS key, both public (DER).
        now: seconds since 1970.
        host: the host name or address of the server.
    """
    (key, signer), (identity, public) = issuer, keys
    names = [x509.UniformResourceIdentifier(IDENTITY + identity.hex()), *([host_name(host)] if host else [])]
    usage = ExtendedKeyUsageOID.SERVER_AUTH if host else ExtendedKeyUsageOID.CLIENT_AUTH
    extensions: Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(ca=False), True),
        (x509.ExtendedKeyUsage([usage]), True),
        (x509.SubjectAlternativeName(names), False),
        (_signed_by(signer), False),
    ]
    ends = min(now + LEAF_LASTS, not_after(signer))
    made = _signed((name, common_name(signer.subject)), public, key, (now, ends), extensions)
    return pem([made, signer])


def check_issuer(issuer: x509.Certificate, root: x509.Certificate, now: float) -> int:
    """The number of an issuer. Raises `IdentityError` unless this root signed it and it is valid."""
    check_signed_by(issuer, root)
    number = issuer_number(issuer.subject)
    if not issuer.not_valid_before_utc.timestamp() <= now <= not_after(issuer):
        raise IdentityError(f"issuer {number} is not valid now: until {day(not_after(issuer))}")
    return number


def check_signed_by(certificate: x509.Certificate, signer: x509.Certificate) -> None:
    """Raises `IdentityError` unless the certificate names this signer and has its signature."""
    try:
        certificate.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        raise IdentityError("a certificate is not signed by the authority of this federation") from None


def read_root(content: bytes) -> x509.Certificate:
    """The root certificate in an invitation (DER). Raises `IdentityError`."""
    try:
        return x509.load_der_x509_certificate(content)
    except ValueError:
        raise IdentityError("the invitation is damaged: its root is no certificate") from None


def server_context(folder: Path, passphrase: bytes | None = None) -> FederationContext:
    """The TLS context of a server. Certificates of clients are optional: without one only /enrol may answer.

    A resumed session would be accepted after its certificate expired, so the server gives out no tickets. After a
    renewal call `load_chain(folder / "server.pem", passphrase)` of the same context.
    """
    (root,) = certificates(folder / "root.pem")
    context = FederationContext.trusting(der(root), ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0
    context.load_chain(folder / "server.pem", passphrase)
    return context


def certificates(path: Path) -> list[x509.Certificate]:
    """The certificates in a private file in PEM, without those of keys. Raises `IdentityError`."""
    return read_chain(read_private(path), path.name)


def read_chain(content: bytes, thing: str) -> list[x509.Certificate]:
    """The certificates in a PEM text. Raises `IdentityError` that names `thing`."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise IdentityError(f"{thing} is damaged: it contains no certificates") from None


def pem(chain: Sequence[x509.Certificate]) -> bytes:
    """Certificates as PEM."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain)


def der(certificate: x509.Certificate) -> bytes:
    """A certificate as DER."""
    return certificate.public_bytes(serialization.Encoding.DER)


def not_after(certificate: x509.Certificate) -> float:
    """When a certificate ends, in seconds since 1970."""
    return certificate.not_valid_after_utc.timestamp()


def day(moment: datetime | float) -> str:
    """The date and time of a moment, or of seconds since 1970, in UTC.

    >>> day(0)
    '1970-01-01 00:00 UTC'
    """
    when = moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)
    return f"{when:%Y-%m-%d %H:%M} UTC"


def _signed(
    names: tuple[str, str], public: bytes, signer: KeyPair, valid: tuple[float, float], more: Extensions
) -> x509.Certificate:
    """A certificate of (owner, signer) that is valid from an hour before the first moment to the second."""
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in names)
    begins, ends = (datetime.fromtimestamp(int(moment), UTC) for moment in (valid[0] - HOUR, valid[1]))
    builder = x509.CertificateBuilder(issuer, subject, public_key(public), x509.random_serial_number())
    builder = builder.not_valid_before(begins).not_valid_after(ends)
    for extension, critical in more:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer.key, hashes.SHA256())


def _authority(public: bytes, depth: int) -> Extensions:
    """The extensions of a certificate that signs others, over chains of `depth` more authorities."""
    identifier = x509.SubjectKeyIdentifier.from_public_key(public_key(public))
    constraints = x509.BasicConstraints(ca=True, path_length=depth)
    return [(constraints, True), (_usage(ca=True), True), (identifier, False)]


def _signed_by(signer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    identifier = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _usage(ca: bool) -> x509.KeyUsage:
    """The key usage of RFC 5280, 4.2.1.3: of its nine bits digitalSignature, the first, or keyCertSign, the sixth."""
    return x509.KeyUsage(not ca, False, False, False, False, ca, False, False, False)


def check_name(name: str) -> None:
    """Raises `IdentityError` unless a name of a site or a federation can stand in paths, logs and certificates.

    >>> check_name("../ward")
    Traceback (most recent call last):
    fedlens.base.errors.IdentityError: '../ward' is not a name; take 1 to 63 of a to z, 0 to 9 and hyphens.
    """
    if not NAME.fullmatch(name) or name == "server" or name.startswith("issuer-"):
        raise IdentityError(f"{name!r} is not a name", hint="take 1 to 63 of a to z, 0 to 9 and hyphens")


def host_name(host: str) -> x509.GeneralName:
    """The host name or address of a server as it stands in its certificate. Raises `IdentityError`."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or len(host) > 253:
            raise IdentityError(f"{host!r} is not a host name or an address") from None
        return x509.DNSName(host)
