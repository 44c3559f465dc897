"""P-256 key pairs in files, and the check of a signature by a public key."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from fedlens.base.errors import ConfigError, IdentityError
from fedlens.identity.private_files import read_private

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, utils
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError:
    missing = "a federation of sites needs cryptography, which is not installed"
    raise ConfigError(missing, hint="pip install 'fedlens[network]'") from None

_CURVE = "secp256r1"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256 (SEC 2, 2.4.2)
_SALTED = re.compile(rb"salt ([0-9a-f]{32})\n")  # the first line of a file whose key is encrypted


class KeyPair:
    """A P-256 key pair. Its text and its errors never contain the private key.

    Attributes:
        key: the private key, for the library that signs certificates.
        public: the public key as SubjectPublicKeyInfo (DER, 91 bytes).
        fingerprint: the SHA-256 of `public`, 32 bytes.

    >>> pair = KeyPair.make()
    >>> check_signature(pair.public, b"ask", pair.sign(b"ask"))
    >>> len(pair.public), len(pair.sign(b"ask")), len(pair.fingerprint)
    (91, 64, 32)
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self.key = key
        self.public = _spki(key.public_key())
        self.fingerprint = fingerprint_of(self.public)

    def __repr__(self) -> str:
        return f"KeyPair({self.fingerprint.hex()[:16]}...)"

    @classmethod
    def make(cls) -> KeyPair:
        """A new key pair from the operating system's entropy."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def read(cls, path: Path, passphrase: bytes | None = None) -> KeyPair:
        """The key pair in a file that `pem` made. Raises `IdentityError`: missing, damaged, a wrong passphrase."""
        content = read_private(path)
        password = key_password(path, passphrase)
        try:
            key = serialization.load_pem_private_key(_SALTED.sub(b"", content, count=1), password or None)
            if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == _CURVE:
                return cls(key)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            pass
        reason = "the passphrase is wrong, or the file is damaged" if password else "the file is damaged"
        raise IdentityError(f"the key in {path.name} cannot be read: {reason}", where=str(path))

    def pem(self, passphrase: bytes | None = None) -> bytes:
        """The private key as PKCS #8 in PEM, encrypted if there is a passphrase.

        The passphrase is stretched with scrypt (RFC 7914; N = 2^15, r = 8), because PEM's own 2,048 iterations are few.
        """
        salt = secrets.token_bytes(16)
        hidden = serialization.BestAvailableEncryption(_stretched(passphrase, salt)) if passphrase else None
        how = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        text = self.key.private_bytes(*how, hidden or serialization.NoEncryption())
        return b"salt %s\n%s" % (salt.hex().encode(), text) if hidden else text

    def derived(self, purpose: str) -> bytes:
        """A key of 32 bytes for one purpose, which the private key alone gives: HKDF-SHA256 (RFC 5869)."""
        secret = self.key.private_numbers().private_value.to_bytes(32, "big")
        return HKDF(hashes.SHA256(), 32, salt=None, info=b"fedlens-1\0" + purpose.encode()).derive(secret)

    def sign(self, data: bytes) -> bytes:
        """The ECDSA signature (SHA-256) of `data` as r || s, 64 bytes, with s in the lower half of its range."""
        r, s = utils.decode_dss_signature(self.key.sign(data, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32, "big") + min(s, _ORDER - s).to_bytes(32, "big")


def is_encrypted(path: Path) -> bool:
    """Whether the key in a file that `KeyPair.pem` made has a passphrase. Raises `IdentityError` if it is missing."""
    return _SALTED.match(read_private(path)) is not None


def key_password(path: Path, passphrase: bytes | None) -> bytes:
    """The password of the PEM file at `path`, made of its salt and the passphrase; empty if it is not encrypted."""
    salted = _SALTED.match(read_private(path))
    if salted and not passphrase:
        hint = "give the passphrase, or the systemd credential fedlens-passphrase"
        raise IdentityError(f"the key in {path.name} is encrypted", where=str(path), hint=hint)
    return _stretched(passphrase, bytes.fromhex(salted[1].decode())) if salted and passphrase else b""


def public_key(public: bytes) -> ec.EllipticCurvePublicKey:
    """The P-256 key of these bytes, in the one encoding that has a fingerprint. Raises `IdentityError`."""
    try:
        key = serialization.load_der_public_key(public)
        if isinstance(key, ec.EllipticCurvePublicKey) and _spki(key) == public and key.curve.name == _CURVE:
            return key
    except (ValueError, UnsupportedAlgorithm):
        pass
    raise IdentityError("a public key is not a P-256 key in DER")


def fingerprint_of(public: bytes) -> bytes:
    """The SHA-256 of a public key (DER)."""
    return hashlib.sha256(public).digest()


def check_signature(public: bytes, data: bytes, signature: bytes) -> None:
    """Raises `IdentityError` unless `signature` is what `KeyPair.sign` of this key made of `data`.

    The other form of a signature, with n - s in place of s, is refused, so that nobody can alter a signature.
    """
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    try:
        if len(signature) == 64 and s <= _ORDER // 2:
            public_key(public).verify(utils.encode_dss_signature(r, s), data, ec.ECDSA(hashes.SHA256()))
            return
    except InvalidSignature:
        pass
    raise IdentityError(f"a signature is not valid for the key {fingerprint_of(public).hex()[:16]}...")


def _stretched(passphrase: bytes, salt: bytes) -> bytes:
    # In hexadecimal digits, since a password of PEM ends at a zero byte.
    return hashlib.scrypt(passphrase, salt=salt, n=2**15, r=8, p=1, maxmem=2**26, dklen=32).hex().encode()


def _spki(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
