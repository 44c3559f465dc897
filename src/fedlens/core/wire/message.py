"""Messages between a server and its sites, both ways, without a transport: what is signed, and what a reader checks.

A message is a **head** and a **body**. The head is one frame:

    8 bytes    the length of the signed bytes, big endian
    ...        the signed bytes: see `fedlens.identity.signing`
    64 bytes   the signature of the sender's identity key over them
    8 bytes    the length of the details
    ...        the details: a JSON object with sorted keys, whose SHA-256 is signed

The body is a safetensors file with the payload; its SHA-256 is signed too. A reader checks in this order, so that
nothing is parsed that its sender did not sign: lengths, signature, fields, digests, JSON, tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

from fedlens.base.errors import DecodingError, IdentityError
from fedlens.base.parse_text import parse_json
from fedlens.core import payload as payloads
from fedlens.core import tensorfile
from fedlens.core.types import Payload
from fedlens.identity.keys import KeyPair, check_signature, fingerprint_of
from fedlens.identity.signing import VERSION, SignedFields, signed_bytes

PROTOCOL = 2
"""Raised when messages change. Sites and servers of one number work together."""
SIGNATURE = 64  # bytes: r and s of P-256
_MOST_SIGNED, _MOST_DETAILS, _MOST_FIELD = 8_192, 2**20, 256
_MOST_REPORT = (
    2**16
)  # bytes of the details of an answer; an ask describes each tensor of a model, 70 bytes a tensor
_DEEPEST = 40  # levels of JSON in the details; a level of plain values takes up to two
MOST_HEAD = 8 + _MOST_SIGNED + SIGNATURE + 8 + _MOST_DETAILS
"""Bytes of the longest head."""


class MessageError(DecodingError):
    """A message that is refused. `reason` is one word of a fixed list, which the other side may see."""

    def __init__(
        self, reason: str, what: str, *, where: str = "message", hint: str = "send it again"
    ) -> None:
        self.reason = reason
        super().__init__(what, where=where, hint=hint)


@dataclass(frozen=True)
class Caps:
    """Limits of a body, which are checked before memory is taken.

    Attributes:
        size: bytes of the body. The tensors take the same amount again.
        header: bytes of the header of its safetensors file, and `entries` the values in it.
        tensors: the number of tensors.
        name: characters of a tensor's name.
        depth: levels of mappings; lists may have twice as many.
    """

    size: int
    header: int = 2**22
    entries: int = 200_000
    tensors: int = 20_000
    name: int = 512
    depth: int = 20


def _parse(signed: bytes) -> tuple[str, SignedFields]:
    """The purpose and the fields in signed bytes; raises `MessageError` if `signed_bytes` did not make them."""
    if not signed.startswith(VERSION):
        raise MessageError(
            "protocol", "its first bytes name another version", hint="install the same fedlens"
        )
    stream, values = io.BytesIO(signed[len(VERSION) :]), list[Any]()
    try:
        for kind in ("str", *SignedFields.__annotations__.values()):
            length = int.from_bytes(stream.read(8), "big")
            raw = stream.read(min(length, _MOST_FIELD))
            if len(raw) != length or (length != 8 and "int" in str(kind)):
                raise ValueError
            whole = int.from_bytes(raw, "big")
            values.append(whole if "int" in str(kind) else raw.decode() if "str" in str(kind) else raw)
        if stream.read(1):
            raise ValueError
    except ValueError:
        raise MessageError("unreadable", "its signed fields are cut, too long or of another type") from None
    return values[0], SignedFields(*values[1:])


@dataclass(frozen=True)
class Message:
    """The head of a message; its body travels behind it, or as a blob.

    Attributes:
        purpose: "ask", "answer", "census", "experiment" or "goodbye".
        fields: what is signed besides; `report` is the digest of the details.
        details: plain values: texts, numbers, booleans, None, lists and mappings. `size` is that of the body,
            `shared_size` that of the blob that all clients get.
        signature, head: the bytes of the signature, and those of the whole head.
    """

    purpose: str
    fields: SignedFields
    details: Mapping[str, Any]
    signature: bytes
    head: bytes

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the signed bytes. It names the message, with its details and its body."""
        return _sha256(signed_bytes(self.purpose, self.fields))

    def __repr__(self) -> str:
        return f"<Message {self.purpose} {self.digest.hex()[:12]}>"

    def fault_as_answer_to(self, ask: Message) -> str | None:
        """The first field in which this is no answer to `ask`; None if it is one."""
        own = {"purpose": self.purpose, **self.fields._asdict()}
        wanted = {"purpose": "answer", **ask.fields._asdict(), "direction": "answer", "ask": ask.digest}
        senders = ("payload", "report", "head", "signer")
        return next((name for name in wanted if name not in senders and own[name] != wanted[name]), None)


def seal(
    key: KeyPair, purpose: str, fields: SignedFields, details: Mapping[str, Any], body: bytes
) -> Message:
    """A signed message.

    Args:
        key: the identity key of the sender.
        purpose: "ask", "answer", "census", "experiment" or "goodbye".
        fields: the fields to sign; `payload`, `report` and `signer` are computed.
        details: plain values; `size` is added.
        body: the bytes of `write_payload`, or none.

    Raises `RunFailed` for details that are not plain values, and `MessageError` for a head beyond the limits.
    """
    details = {**details, "size": len(body)}
    text = json.dumps(payloads.encode(details)[0], sort_keys=True, separators=(",", ":")).encode()
    if len(text) > (most := _most_details(purpose)):
        what = f"it has details of {len(text):,} bytes, and at most {most:,} are accepted"
        raise MessageError("too large", what, hint="send less")
    fields = fields._replace(payload=_sha256(body), report=_sha256(text), signer=key.fingerprint)
    signed = signed_bytes(purpose, fields)
    _parse(signed)  # else no reader could
    return _message(purpose, fields, details, signed, key.sign(signed), text)


def _message(
    purpose: str,
    fields: SignedFields,
    details: Mapping[str, Any],
    signed: bytes,
    signature: bytes,
    text: bytes,
) -> Message:
    head = b"".join([len(signed).to_bytes(8, "big"), signed, signature, len(text).to_bytes(8, "big"), text])
    return Message(purpose, fields, details, signature, head)


def read(stream: IO[bytes], identity: bytes) -> Message:
    """The message whose head is next in a stream, which is left at the first byte of the body.

    `identity` is the public identity key (DER) of the sender: the server, or the site of the connection.

    Raises `MessageError` if the head is cut, beyond a limit, not signed by that key, or not what `seal` makes.
    """
    signed, signature = _part(stream, _MOST_SIGNED), stream.read(SIGNATURE)
    try:
        check_signature(identity, signed, signature)
    except IdentityError:
        raise MessageError("signature", "its signature is not of the sender's identity key") from None
    purpose, fields = _parse(signed)
    if fields.signer != fingerprint_of(identity):
        raise MessageError("signature", "it names another signer")
    text = _part(stream, _most_details(purpose))
    if _sha256(text) != fields.report:
        raise MessageError("damaged", "its details are not those that were signed")
    try:
        details = payloads.decode(parse_json(text, deepest=_DEEPEST), {})
    except (ValueError, DecodingError) as error:
        raise MessageError("unreadable", f"its details are not plain values: {error}") from None
    sizes = [details.get(name, 0) for name in ("size", "shared_size", "most")]
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise MessageError("unreadable", "its details name a size that is not a whole number")
    return _message(purpose, fields, details, signed, signature, text)


def _most_details(purpose: str) -> int:
    return _MOST_REPORT if purpose == "answer" else _MOST_DETAILS


def _part(stream: IO[bytes], most: int) -> bytes:
    length = int.from_bytes(stream.read(8), "big")
    if length > most:
        raise MessageError(
            "too large", f"a part of its head has {length:,} bytes, and at most {most:,} are accepted"
        )
    part = stream.read(length)
    if len(part) != length:
        raise MessageError("damaged", "its head is cut")
    return part


def check_body(message: Message, sha256: bytes, size: int) -> None:
    """Raises `MessageError` if a body with this digest and size is not the one that was signed."""
    if sha256 != message.fields.payload or size != message.details.get("size"):
        raise MessageError("damaged", "its body is not the one that was signed")


def write_payload(payload: Payload) -> bytes:
    """A payload as a body: a safetensors file with the structure in its metadata.

    Raises `RunFailed` with the place of a value that cannot be sent.

    >>> import torch
    >>> read_payload(write_payload({"w": torch.ones(2), "lr": 0.1}), Caps(1000))
    {'w': tensor([1., 1.]), 'lr': 0.1}
    """
    return tensorfile.to_bytes(*payloads.pack(payload))


def read_payload(body: bytes, caps: Caps, where: str = "message") -> dict[str, Any]:
    """The payload of a body. Raises `DecodingError` if it is not one, or beyond a cap."""
    bounds = tensorfile.Bounds(caps.size, caps.header, caps.entries)
    tensors, metadata = tensorfile.parse(body, bounds, where)
    longest = max(map(len, tensors), default=0)
    if len(tensors) > caps.tensors or longest > caps.name:
        raise MessageError(
            "too large",
            f"it has {len(tensors):,} tensors with names of up to {longest:,} characters, and at most "
            f"{caps.tensors:,} and {caps.name:,} are accepted",
            where=where,
        )
    return payloads.unpack(tensors, metadata, 2 * caps.depth)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
