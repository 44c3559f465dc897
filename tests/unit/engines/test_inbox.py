"""What a link keeps for an engine that computes."""

from __future__ import annotations

import io
import queue

import pytest

from fedlens.core.wire.message import seal
from fedlens.engines.links.link import Arrived
from fedlens.engines.links.outbox import Inbox
from fedlens.identity.keys import KeyPair
from fedlens.identity.signing import SignedFields

FIELDS = SignedFields(
    root=bytes(32), run="run", attempt=1, round=0, exchange=0, slot=0, client="", operation="", direction="answer",
    nonce=bytes(16), payload=b"", shared=b"", report=b"", ask=b"", head=b"", signer=b"",
)  # fmt: skip


def test_of_many_censuses_of_a_site_the_last_one_is_kept() -> None:
    inbox, key = Inbox(), KeyPair.make()
    sent = [
        Arrived(site, seal(key, "census", FIELDS, {"number": number}, b""), io.BytesIO())
        for number in range(50)
        for site in ("a", "b")
    ]
    answer = Arrived("a", seal(key, "answer", FIELDS, {}, b""), io.BytesIO())
    for census in sent:
        inbox.put_census(census)
    inbox.put(answer)
    assert [inbox.get(0) for _ in range(3)] == [sent[-2], sent[-1], answer]
    with pytest.raises(queue.Empty):
        inbox.get(0)
    inbox.put_census(sent[0])
    assert inbox.get(1) is sent[0]
