"""The signed bytes of a message, to the byte, and signatures that nobody can alter; the words of a fingerprint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlens.base.errors import IdentityError
from fedlens.identity.fingerprint import fingerprint_words, word_list
from fedlens.identity.keys import _ORDER, KeyPair, check_signature, fingerprint_of
from fedlens.identity.signing import SignedFields, sign, signed_bytes, verify

PAGE = Path(__file__).parents[3] / "docs" / "api" / "signed-bytes.md"
FIELDS = SignedFields(
    root=bytes(range(32)),
    run="2026-11-27-digits",
    attempt=1,
    round=7,
    exchange=0,
    slot=2,
    client="ward-a",
    operation="train",
    direction="ask",
    nonce=bytes(range(16)),
    payload=32 * b"\x01",
    shared=32 * b"\x02",
    report=b"",
    ask=b"",
    head=32 * b"\x03",
    signer=32 * b"\x04",
)


def vector(name: str) -> bytes:
    """A block of hexadecimal digits of the page."""
    (found,) = re.findall(rf"{name}:\n\n```text\n([0-9a-f\n]+)```", PAGE.read_text("utf-8"))
    return bytes.fromhex(found)


def test_the_signed_bytes_are_those_of_the_page() -> None:
    assert signed_bytes("ask", FIELDS) == vector("The signed bytes")
    verify(vector("The public key"), "ask", FIELDS, vector("The signature"))


def test_every_field_is_signed() -> None:
    pair = KeyPair.make()
    signature = sign(pair, "ask", FIELDS)
    verify(pair.public, "ask", FIELDS, signature)
    for name, value in FIELDS._asdict().items():
        other = FIELDS._replace(
            **{name: value + 1 if isinstance(value, int) else value + value[:1] + type(value)()}
        )
        if other == FIELDS:
            other = FIELDS._replace(**{name: b"\0"})
        with pytest.raises(IdentityError, match="a signature is not valid"):
            verify(pair.public, "ask", other, signature)
    for purpose, public in (("answer", pair.public), ("ask", KeyPair.make().public)):
        with pytest.raises(IdentityError, match="a signature is not valid"):
            verify(public, purpose, FIELDS, signature)


def test_bytes_do_not_move_from_one_field_to_the_next() -> None:
    made = {
        signed_bytes("p", fields) for fields in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["", "abc"])
    }
    assert len(made) == 5
    with pytest.raises(OverflowError):
        signed_bytes("p", [-1])


def test_a_signature_has_one_form() -> None:
    pair = KeyPair.make()
    signature = pair.sign(b"data")
    s = int.from_bytes(signature[32:], "big")
    assert s <= _ORDER // 2
    check_signature(pair.public, b"data", signature)
    wrong = [
        signature[:32] + (_ORDER - s).to_bytes(32, "big"),
        signature + b"\0",
        signature[:32] + b"\0" + signature[32:],
        signature[:-1],
        b"",
        bytes(64),
        signature[32:] + signature[:32],
    ]
    for each in wrong:
        with pytest.raises(IdentityError, match="a signature is not valid"):
            check_signature(pair.public, b"data", each)
    compressed = b"\x30\x39\x30\x13" + pair.public[4:23] + b"\x03\x22\x00\x02" + pair.public[27:59]
    with pytest.raises(IdentityError, match="not a P-256 key"):
        verify(compressed, "ask", [], sign(pair, "ask", []))


def test_the_words_are_2048_and_differ_in_their_first_four_letters() -> None:
    words = word_list()
    assert len(words) == len({word[:4] for word in words}) == 2048
    assert all(re.fullmatch("[a-z]{4,8}", word) for word in words)
    assert list(words) == sorted(words)


def test_every_bit_of_root_and_key_changes_the_words() -> None:
    keys = [fingerprint_of(bytes([k])) for k in range(50)]
    assert len({fingerprint_words(b"root", key) for key in keys}) == 50
    assert fingerprint_words(b"root", keys[0]) != fingerprint_words(b"roof", keys[0])
