"""The terms of an experiment: what a site takes of a server that is not trusted."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from fedlens.base.errors import DecodingError
from fedlens.core.wire.terms import MOST_PEERS, ExperimentTerms
from fedlens.identity.keys import KeyPair

A, B = KeyPair.make().public, KeyPair.make().public
TERMS = ExperimentTerms("2027-01-31", "0f" * 32, {"ward-b": B, "ward-a": A}, 90)


def text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def test_terms_come_back() -> None:
    assert ExperimentTerms.from_plain(TERMS.to_plain()) == TERMS
    assert ExperimentTerms.from_plain(ExperimentTerms().to_plain()) == ExperimentTerms()
    assert list(TERMS.fingerprints) == ["ward-a", "ward-b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"until": "31.1.2027"}, "no date"),
        ({"until": "20270131"}, "no date"),
        ({"until": "2027-02-30"}, "no date"),
        ({"until": 20270131}, "no date"),
        ({"until": "\x1b[31m" + 10**6 * "9"}, "no date"),
        ({"agreement": "0F" * 32}, "no SHA-256"),
        ({"agreement": 7}, "no SHA-256"),
        ({"keep_days": 0}, "no number of days: 0"),
        ({"keep_days": 36_501}, "no number of days"),
        ({"keep_days": True}, "no number of days"),
        ({"peers": [["ward-a", text(A)]]}, "until, agreement, peers and keep_days"),
        ({"peers": {"../ward": text(A)}}, "no site"),
        ({"peers": {"WARD": text(A)}}, "no site"),
        ({"peers": {"server": text(A)}}, "no site"),
        ({"peers": {"ward-a": text(A[:-1])}}, "no site"),
        ({"peers": {"ward-a": text(A) + "\n"}}, "no site"),
        ({"peers": {"ward-a": None}}, "no site"),
        ({"peers": {"ward-a": text(A), "ward-b": text(A)}}, "two sites have one key"),
        ({"peers": dict.fromkeys(map(str, range(10**6)), "")}, f"at most {MOST_PEERS:,}"),
        ({"more": 1}, "until, agreement, peers and keep_days"),
    ],
)
def test_hostile_terms_are_a_short_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DecodingError, match=said) as caught:
        ExperimentTerms.from_plain({**TERMS.to_plain(), **changes})
    assert len(str(caught.value)) < 400
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("told", [None, [], "terms", 7, {}])
def test_what_is_no_terms_is_refused(told: Any) -> None:
    with pytest.raises(DecodingError, match="until, agreement, peers and keep_days"):
        ExperimentTerms.from_plain(told)
