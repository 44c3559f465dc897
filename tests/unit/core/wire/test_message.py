"""Messages of the network: what is signed, and what a reader refuses before it parses."""

from __future__ import annotations

import io
import random

import pytest
import torch

from fedlens.base.errors import DecodingError, FedlensError
from fedlens.core.wire.message import (
    MOST_HEAD,
    Caps,
    Message,
    MessageError,
    check_body,
    read,
    read_payload,
    seal,
    write_payload,
)
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields, signed_bytes

KEY = KeyPair.make()
FIELDS = SignedFields(
    root=bytes(32), run="run", attempt=1, round=2, exchange=0, slot=3, client="ward-a", operation="train",
    direction="ask", nonce=bytes(16), payload=b"", shared=b"", report=b"", ask=b"", head=b"", signer=b"",
)  # fmt: skip
BODY = write_payload({"w": torch.arange(4), "lr": 0.1})


def message(details: dict[str, object] | None = None, **changes: object) -> Message:
    return seal(KEY, "ask", FIELDS._replace(**changes), details or {"seconds": float("inf")}, BODY)


def refusal(data: bytes, identity: bytes = KEY.public) -> str:
    with pytest.raises(MessageError) as caught:
        read(io.BytesIO(data), identity)
    return caught.value.reason


def test_a_message_comes_back_as_it_was_sealed() -> None:
    sealed = message()
    stream = io.BytesIO(sealed.head + BODY)
    received = read(stream, KEY.public)
    assert received == sealed
    assert received.details == {"seconds": float("inf"), "size": len(BODY)}
    body = stream.read()
    check_body(received, received.fields.payload, len(body))
    assert read_payload(body, Caps(10_000))["w"].tolist() == [0, 1, 2, 3]


def test_every_changed_bit_of_a_head_is_refused() -> None:
    head = message().head
    for at in range(len(head)):
        changed = head[:at] + bytes([head[at] ^ 1]) + head[at + 1 :]
        assert refusal(changed) in {"signature", "damaged", "too large"}, at
    for end in range(0, len(head), 7):
        assert refusal(head[:end]) in {"signature", "damaged"}


def test_nothing_is_parsed_that_another_key_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.core.wire.message._parse", lambda signed: pytest.fail("it was parsed"))
    monkeypatch.setattr("fedlens.core.wire.message.parse_json", lambda text: pytest.fail("it was parsed"))
    sealed = Message("ask", FIELDS, {}, bytes(64), b"")  # `message` itself parses what it signs
    assert refusal(len(sealed.head).to_bytes(8, "big") + sealed.head + bytes(64)) == "signature"


def test_a_message_names_its_signer() -> None:
    other = KeyPair.make()
    assert refusal(message().head, other.public) == "signature"
    assert message(signer=other.fingerprint).fields.signer == KEY.fingerprint  # `seal` sets it
    signed = signed_bytes("ask", message().fields._replace(signer=other.fingerprint))
    assert refusal(len(signed).to_bytes(8, "big") + signed + KEY.sign(signed)) == "signature"


def test_the_details_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MessageError, match="details of"):
        message({"list": ["x" * 2**20]})
    report = {"metrics": "x" * 2**16}
    message(report)  # an ask describes the tensors of a model
    with pytest.raises(MessageError, match="at most 65,536"):
        seal(KEY, "answer", FIELDS, report, BODY)
    with monkeypatch.context() as patch:  # a site that does not count
        patch.setattr("fedlens.core.wire.message._MOST_REPORT", 2**20)
        large = seal(KEY, "answer", FIELDS, report, BODY)
    assert refusal(large.head) == "too large"
    deep: object = 1
    for _ in range(60):
        deep = [deep]
    assert refusal(message({"deep": deep}).head) == "unreadable"
    assert refusal(message({"most": -1}).head) == "unreadable"
    assert refusal(message({"shared_size": 2**60}).head) == "unreadable"
    with pytest.raises(MessageError, match="too long"):
        message(client="x" * 300)
    assert refusal((2**40).to_bytes(8, "big") + bytes(100)) == "too large"
    assert len(message().head) < MOST_HEAD


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None), ({"run": "other"}, "run"), ({"attempt": 2}, "attempt"), ({"round": 3}, "round"),
        ({"exchange": 1}, "exchange"), ({"slot": 0}, "slot"), ({"client": "ward-b"}, "client"),
        ({"operation": "evaluate"}, "operation"), ({"nonce": bytes(15)}, "nonce"), ({"root": b""}, "root"),
        ({"shared": bytes(32)}, "shared"), ({"ask": bytes(32)}, "ask"), ({"direction": "ask"}, "direction"),
    ],
)  # fmt: skip
def test_an_answer_repeats_the_fields_of_its_ask(changes: dict[str, object], field: str | None) -> None:
    ask = message()
    fields = ask.fields._replace(direction="answer", ask=ask.digest)._replace(**changes)
    assert seal(KEY, "answer", fields, {}, b"").fault_as_answer_to(ask) == field
    assert seal(KEY, "ask", fields, {}, b"").fault_as_answer_to(ask) == "purpose"


def test_a_body_is_bounded_before_it_is_read() -> None:
    nested: object = torch.ones(1)
    for _ in range(45):
        nested = [nested]
    for payload, caps in (
        ({"w": torch.ones(1000)}, Caps(100)),
        ({"w": torch.ones(1)}, Caps(10_000, header=10)),
        ({str(number): torch.ones(1) for number in range(20)}, Caps(100_000, tensors=10)),
        ({"x" * 200: torch.ones(1)}, Caps(100_000, name=100)),
        ({"deep": nested}, Caps(100_000)),
        ({"many": [[] for _ in range(300)]}, Caps(100_000, entries=100)),
    ):
        with pytest.raises(DecodingError):
            read_payload(write_payload(payload), caps)
        assert read_payload(write_payload(payload), Caps(2**20, depth=100)).keys() == payload.keys()


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_random_bytes_raise_only_errors_of_fedlens(count: int) -> None:
    rng = random.Random(count)
    good = message().head + BODY
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.choice((1, 2, 50))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for parse in (
            lambda data: read(io.BytesIO(data), KEY.public),
            lambda data: read_payload(data, Caps(10_000)),
        ):
            try:
                parse(bytes(data))
                parse(bytes(data[-len(BODY) :]))
            except FedlensError:
                pass
