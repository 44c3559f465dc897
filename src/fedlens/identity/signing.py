r"""The bytes of a message that are signed, the signature, and its check.

The signed bytes are `b"fedlens-1\0"`, then each field with its length in 8 bytes (big endian): first the purpose, then
the others. A text is UTF-8, an integer 8 bytes (big endian), a digest its 32 bytes, and a missing value has no byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedlens.base.errors import IdentityError

if TYPE_CHECKING:
    from fedlens.identity.keys import KeyPair

KEY_REQUEST: dict[str, type] = {"identity": bytes, "tls": bytes, "signature": bytes, "proof": bytes}
"""The values of a request for the certificate of a TLS key: of enrolment, with a secret beside, and of renewal."""

NOTICE: dict[str, type] = {"time": int, "signature": bytes}
"""The values of a notice that a site has left."""
LEFT = "left"
"""The purpose of its signature, over root, name of the site, and seconds since 1970."""

VERSION = b"fedlens-1\0"


class SignedFields(NamedTuple):
    """The fields of an ask, of an answer or of a control message, in the order in which they are signed.

    Attributes:
        root: SHA-256 of the root certificate: a message of another federation is refused.
        run, attempt, round, exchange, slot, client, operation: which ask it is.
        direction: "ask" or "answer".
        nonce: 16 random bytes of the ask.
        payload, shared: SHA-256 of the body, and of the blob that the ask names.
        report: SHA-256 of the details, such as metrics and state handle.
        ask: SHA-256 of the ask, in an answer.
        head: the head of the sender's log.
        signer: the fingerprint of the sender's identity key, 32 bytes.
    """

    root: bytes
    run: str
    attempt: int
    round: int
    exchange: int
    slot: int
    client: str
    operation: str
    direction: str
    nonce: bytes
    payload: bytes
    shared: bytes
    report: bytes
    ask: bytes
    head: bytes
    signer: bytes


def signed_bytes(purpose: str, fields: Iterable[str | int | bytes]) -> bytes:
    r"""The bytes to sign. Two messages with different fields never have the same bytes.

    Raises `OverflowError` for an integer below 0 or above 2^64 - 1.

    >>> signed_bytes("ask", ["run", 3, b""])[10:]
    b'\x00...\x03ask\x00...\x03run\x00...\x08\x00...\x03\x00...\x00'
    """
    parts = [_encoded(field) for field in (purpose, *fields)]
    return VERSION + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def sign(key: KeyPair, purpose: str, fields: Iterable[str | int | bytes]) -> bytes:
    """The signature of a message, 64 bytes (r || s of ECDSA with P-256 and SHA-256)."""
    return key.sign(signed_bytes(purpose, fields))


def verify(public: bytes, purpose: str, fields: Iterable[str | int | bytes], signature: bytes) -> None:
    """Raises `IdentityError` unless the message is signed by this identity key (DER)."""
    from fedlens.identity.keys import check_signature  # needs the extra `network`; the bytes alone do not

    check_signature(public, signed_bytes(purpose, fields), signature)


def key_request(identity: KeyPair, tls: KeyPair, root: bytes, name: str) -> dict[str, bytes]:
    """The values of `KEY_REQUEST`: both public keys, and a signature by each over root, name and keys.

    Args:
        identity: the key that lasts; its signature says that the TLS key is the site's.
        tls: the new TLS key; its signature proves that the site has it.
        root: the root certificate in DER.
        name: the site's name. It is signed, but not part of the request: the server knows it.
    """
    fields: list[str | int | bytes] = [hashlib.sha256(root).digest(), name, identity.public, tls.public]
    signature, proof = (sign(key, "tls-key", fields) for key in (identity, tls))
    return {"identity": identity.public, "tls": tls.public, "signature": signature, "proof": proof}


def check_key_request(values: Mapping[str, Any], root: bytes, name: str) -> None:
    """Raises `IdentityError` unless both keys of a request signed it for this root and this name."""
    fields = [hashlib.sha256(root).digest(), name, values["identity"], values["tls"]]
    if values["identity"] == values["tls"]:
        raise IdentityError("the identity key is used for TLS", hint="make a key for each")
    for key, signature in (("identity", "signature"), ("tls", "proof")):
        verify(values[key], "tls-key", fields, values[signature])


def _encoded(field: str | int | bytes) -> bytes:
    if isinstance(field, bytes):
        return field
    return field.encode() if isinstance(field, str) else field.to_bytes(8, "big")
