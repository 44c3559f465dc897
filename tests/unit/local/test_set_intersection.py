"""Private set intersection: points, masks, and who learns what."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Client, Outcome
from fedlens.core.random import Rng, Secrets
from fedlens.local.set_intersection import Align, masked, on_curve, points_of, require_x25519

PRIME = 2**255 - 19
IDS = [("a", "b", "c", "d"), ("d", "x", "b", "y", "a"), ("b", "q", "d")]
RNG = Rng.of_operation(0, 1, 0, 0, 0)


def numbers(points: Tensor) -> list[int]:
    return [int.from_bytes(bytes(point), "little") for point in points.tolist()]


def test_every_id_is_a_point_of_the_curve_and_not_of_its_twist() -> None:
    found = numbers(points_of([f"id-{k}" for k in range(200)]))
    assert all(pow(u**3 + 486662 * u**2 + u, (PRIME - 1) // 2, PRIME) == 1 for u in found)
    assert len(set(found)) == 200


def test_a_point_is_the_hash_of_the_id_hashed_on() -> None:
    import hashlib

    digest, tries = hashlib.sha256(b"patient 7").digest(), 0
    while not on_curve(int.from_bytes(digest, "little") % 2**255):
        digest, tries = hashlib.sha256(digest).digest(), tries + 1
    assert numbers(points_of(["patient 7"])) == [int.from_bytes(digest, "little") % 2**255]


def test_a_mask_is_x25519_of_rfc_7748() -> None:
    secret = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    expected = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    found = masked(torch.tensor([list(point)], dtype=torch.uint8), secret)
    assert bytes(found[0].tolist()).hex() == expected


def client(party: int, state: Any = None) -> Client:
    data = SimpleNamespace(ids=IDS[party])
    return Client(party, data, state or {}, Secrets((0, party)), {}, torch.device("cpu"))


def letters(outcomes: dict[int, Outcome], to: int) -> list[Any]:
    found = []
    for sender, outcome in outcomes.items():
        for letter in outcome.letters:
            if to in (letter.to if isinstance(letter.to, tuple) else (letter.to,)):
                found.append((sender, letter.content))
    return found


def asked(
    op: Any, parties: list[int], before: dict[int, Outcome], states: dict[int, Any]
) -> dict[int, Outcome]:
    found = {k: op({"letters": letters(before, k)}, client(k, states.get(k)), RNG) for k in parties}
    states.update({k: outcome.state for k, outcome in found.items() if outcome.state is not None})
    return found


@pytest.mark.parametrize("private", [True, False])
def test_parties_learn_their_rows_of_the_common_examples_in_the_order_of_ids(private: bool) -> None:
    align, states = Align(0, (1, 2), private), dict[int, Any]()
    sent = asked(align.mask, [0, 1, 2], {}, states)
    if private:
        sent = asked(align.remask, [0, 1, 2], sent, states)
    matched = asked(align.match, [0], sent, states)
    assert matched[0].payload == {"shared": 2}
    asked(align.keep, [1, 2], matched, states)
    assert [[IDS[k][at] for at in states[k]["positions"]] for k in range(3)] == [["b", "d"]] * 3
    assert all(state.keys() == {"positions"} for state in states.values())


def test_lists_travel_masked_and_those_of_the_others_shuffled() -> None:
    align, secrets = Align(0, (1, 2), True), [Secrets((0, k)).token("set-intersection") for k in range(3)]
    sent = asked(align.mask, [0, 1, 2], {}, {})
    lists = {k: numbers(outcome.letters[0].content["points"]) for k, outcome in sent.items()}
    own = {k: numbers(masked(points_of(IDS[k]), secrets[k])) for k in range(3)}
    assert lists[0] == own[0]  # the label party finds its rows by their place
    assert lists[1] != own[1]
    assert sorted(lists[1]) == sorted(own[1])
    hashes = {number for k in range(3) for number in numbers(points_of(IDS[k]))}
    assert not hashes & {number for points in lists.values() for number in points}


def test_in_the_open_hashes_travel() -> None:
    sent = asked(Align(0, (1, 2), False).mask, [0, 1], {}, {})
    assert not sent[0].letters
    assert set(numbers(sent[1].letters[0].content["points"])) == set(numbers(points_of(IDS[1])))


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_x25519()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(ConfigError, match="needs cryptography") as caught:
        require_x25519()
    assert "pip install 'fedlens[secure]'" in str(caught.value)
