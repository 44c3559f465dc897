"""SecAgg without a run: every pattern of drop-outs, kills of the server, and what clients and the server refuse."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlens.aggregate.secure.keys import SecureSumRefused, Terms
from fedlens.aggregate.secure.masks import add_masks
from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, SHARES, UNMASK
from fedlens.core.protocol import Reply
from fedlens.core.random import Secrets, derive
from fedlens.core.states import Journal
from tests.unit.aggregate.secure.secagg_kit import STEPS, Killed, SumFederation, in_hex, layout_of

FATES = range(len(STEPS) + 1)  # how many asks a client answers before it is lost


def check_outcome(fates: tuple[int, ...], made: Callable[[int], SumFederation] = SumFederation) -> None:
    """Checks a round in which each client is lost after so many answers."""
    federation = made(len(fates))
    needed = federation.terms.needed(len(fates))
    lasting = [sum(fate > step for fate in fates) for step in range(len(STEPS))]

    def lost(op: str, client: int) -> bool:
        return fates[client] <= STEPS.index(op)

    if min(lasting) >= needed:
        total, n = federation.drive(federation.asked(), lost)
        survivors = [k for k, fate in enumerate(fates) if fate > STEPS.index(MASKED)]
        assert n == len(survivors)
        assert np.array_equal(total, federation.plain(survivors))
        return
    with pytest.raises(SecureSumRefused, match=f"and {needed} must last"):
        federation.drive(federation.asked(), lost)
    unmasked = [a for ask, answers in federation.view if ask.op == UNMASK for a in answers]
    assert sum(isinstance(answer, Reply) for answer in unmasked) < needed  # nothing can be opened


def test_the_sum_is_that_of_those_who_are_in_for_each_number_of_each_fate() -> None:
    patterns = list(combinations_with_replacement(FATES, 5))
    assert len(patterns) == 126
    for fates in patterns:
        check_outcome(fates)


@pytest.mark.nightly
def test_the_sum_is_that_of_those_who_are_in_for_all_fates() -> None:
    for fates in product(FATES, repeat=5):
        check_outcome(fates)


@pytest.mark.parametrize("kill", list(product(["before", "after"], STEPS)))
def test_a_killed_server_goes_on_without_isolating_a_client(kill: tuple[str, str]) -> None:
    federation = SumFederation(wire=True)
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=kill)
    total, n = federation.drive(federation.asked())
    assert n == 5
    assert np.array_equal(total, federation.plain(range(5)))


def test_an_opened_round_is_asked_again_of_the_same_clients_only() -> None:
    """Client 3 is lost when the sum is opened; the server is killed, and client 3 comes back."""
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), lambda op, k: op == UNMASK and k > 2, kill=("after", UNMASK))
    logs = [site.log for site in federation.sites[:3]]
    total, n = federation.drive(federation.asked())
    assert n == 5
    assert np.array_equal(total, federation.plain(range(5)))
    assert [site.log for site in federation.sites[:3]] == logs  # answered from them
    first, second = [answers for ask, answers in federation.view if ask.op == UNMASK]
    assert all(
        torch.equal(a.payload["shares"], b.payload["shares"])
        for a, b in zip(first[:3], second[:3], strict=True)
    )


def test_a_sum_at_the_limit_of_a_word_is_exact() -> None:
    layout = layout_of(size=2, bits=28, cohort=7)  # 7 x 2^28 = 1,879,048,192 of at most 2^31 - 1
    assert layout.modulus_bits == 32
    federation = SumFederation(7, layout=layout)
    most = 1 << 28
    for site in federation.sites:
        site.words = np.array([most, -most, most, most], np.int32)
    total, n = federation.drive(federation.asked())
    assert n == 7
    assert total.view(np.int32).tolist() == [7 * most, -7 * most, 7 * most, 7 * most]


def test_words_of_64_bits_are_summed_too() -> None:
    federation = SumFederation(layout=layout_of(bits=40, cohort=5))
    total, _ = federation.drive(federation.asked())
    assert total.dtype == np.uint64
    assert np.array_equal(total, federation.plain(range(5)))


@pytest.mark.parametrize(
    ("threshold", "cohort", "needed"),
    [
        (0.67, 10, 7),
        (0.55, 100, 55),
        (0.67, 100, 67),
        (0.51, 5, 3),
        (0.6, 5, 3),
        (0.51, 3, 3),
        (1.0, 10, 10),
        (0.7, 10, 7),
    ],
)
def test_the_threshold_is_computed_in_integers(threshold: float, cohort: int, needed: int) -> None:
    assert Terms(threshold, "", "").needed(cohort) == needed


def test_a_cohort_of_two_is_refused() -> None:
    federation = SumFederation(2)
    with pytest.raises(SecureSumRefused, match="3 or more different clients"):
        federation.drive(federation.asked())
    federation = SumFederation(4)
    with pytest.raises(SecureSumRefused, match="3 or more different clients"):
        federation.drive(federation.asked(cohort=[0, 1, 2, 2]))


def test_masked_words_are_uniform() -> None:
    """Chi-square of the bytes of what the server gets, the inputs being 0."""
    stats = pytest.importorskip("scipy.stats")
    federation = SumFederation(4, layout=layout_of(size=20_000), entropy=random.Random(0).randbytes)
    for site in federation.sites:
        site.secrets = Secrets((0, site.id))  # the same in every run of the test
        site.words[:-1] = 0
    federation.drive(federation.asked())
    for ask, answers in federation.view:
        if ask.op == MASKED:
            data = np.concatenate([a.payload["vector"].numpy().view(np.uint8) for a in answers])
            counts = np.bincount(data, minlength=256)
            assert stats.chisquare(counts).pvalue > 0.01


def test_inputs_of_equal_sum_look_the_same() -> None:
    """Modulo 4, the joint view of three clients' words depends on their sum alone."""
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(2)

    def views(inputs: tuple[int, ...]) -> Counter[tuple[int, ...]]:
        seen = Counter[tuple[int, ...]]()
        for _ in range(4000):
            common = {pair: draw.randbytes(32) for pair in combinations(range(3), 2)}
            view = []
            for k, word in enumerate(inputs):
                words = np.array([word], np.uint8)
                masks = [(key, 1 if k == pair[0] else -1) for pair, key in common.items() if k in pair]
                add_masks(words, masks)
                view.append(int(words[0]) % 4)
            seen[tuple(view)] += 1
        return seen

    one, other = views((1, 2, 0)), views((3, 3, 1))
    assert one.keys() == other.keys()
    assert len(one) == 16
    table = [[counts[view] for view in sorted(one)] for counts in (one, other)]
    assert stats.chi2_contingency(table).pvalue > 0.01
    assert stats.chisquare(table[0]).pvalue > 0.01


def test_no_secret_of_a_client_is_in_what_it_keeps_or_sends() -> None:
    federation = SumFederation()
    federation.drive(federation.asked())
    assert not any(site.secrets._known for site in federation.sites)  # forgotten once the sum is opened
    with pytest.raises(Killed):
        federation.drive(federation.asked(round=2, model=1.0), kill=("before", UNMASK))
    answers = [a.payload for _, answers in federation.view for a in answers if isinstance(a, Reply)]
    kept = in_hex([answers, [site.log for site in federation.sites], list(vars(federation.journal).values())])
    shown = repr([site.client() for site in federation.sites])
    for site in federation.sites:
        names = {name.rpartition("/")[2]: secret for (name, _), secret in site.secrets._known.items()}
        assert {"sealing", "masking", "seed", "shares of masking", "shares of seed"} < names.keys()
        assert names["nonce"].hex() in kept  # so a secret in it would be seen
        for name in names.keys() - {"nonce", "gcm"}:
            assert names[name].hex() not in kept
            assert repr(names[name])[2:-1] not in shown


def test_seeds_of_63_bits_make_no_real_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = SumFederation()

    def refuse(*parts: Any) -> int:
        if "op" in parts:  # what a client trains with
            return derive(*parts)
        raise AssertionError(f"derive{parts}")

    monkeypatch.setattr("fedlens.core.random.derive", refuse)
    federation.drive(federation.asked())
    with pytest.raises(AssertionError, match="derive"):
        Secrets((0, 1)).token("seed")


def test_the_same_federation_never_sends_the_same_words_twice() -> None:
    """Not even with secrets that derive from a seed: the server's nonce differs."""
    views = []
    for _ in range(2):
        federation = SumFederation()
        for site in federation.sites:
            site.secrets = Secrets((0, site.id))
        federation.drive(federation.asked())
        views.append(
            [a.payload["vector"] for ask, answers in federation.view if ask.op == MASKED for a in answers]
        )
    assert not any(torch.equal(a, b) for a, b in zip(*views, strict=True))


def test_secrets_that_were_not_used_for_an_hour_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("after", SHARES))
    federation.journal = Journal("another run")
    now[0] = 3599.0
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("after", KEYS))
    runs = {name.split("/")[1] for name, _ in federation.sites[0].secrets._known}
    assert runs == {"run", "another run"}
    now[0] = 3601.0
    federation.drive(federation.asked())
    assert not federation.sites[0].secrets._known


def test_secrets_of_an_hour_ago_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    now[0] = 3601.0
    with pytest.raises(SecureSumRefused, match="0 senders of shares that open the sum"):
        federation.drive(federation.asked())
    assert set(federation.failures()) == {
        "the client has no secrets of this attempt any more, as after a restart"
    }


def test_masks_are_those_of_a_counter_mode_of_a_whole_key() -> None:
    """Not of a seed that is cut to 32 bits, as in Flower's secure aggregation."""
    key = bytes(range(32))
    words = np.zeros(70_000, np.uint32)
    add_masks(words, [(key, 1)])
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    assert words.tobytes() == encryptor.update(bytes(words.nbytes))
    for bit in range(0, 256, 51):
        other = bytearray(key)
        other[bit // 8] ^= 1 << bit % 8
        less = words.copy()
        add_masks(less, [(bytes(other), -1)])
        assert np.count_nonzero(less) > 69_900


def test_all_masks_of_many_are_added() -> None:
    signed = [(bytes([k]) * 32, 1 if k % 3 else -1) for k in range(150)]
    words = one_by_one = np.arange(3, dtype=np.uint32)
    words = words.copy()
    add_masks(words, signed)
    for key, sign in signed:
        mask = np.zeros(3, np.uint32)
        add_masks(mask, [(key, 1)])
        one_by_one = one_by_one + mask if sign > 0 else one_by_one - mask
    assert np.array_equal(words, one_by_one)
