"""LightSecAgg without a run: its code by the paper's equation, drop-outs, kills, attacks, and what the server sees."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.aggregate.secure.encoding import VECTOR
from fedlens.aggregate.secure.field import Q, add, lagrange, residues, uniform
from fedlens.aggregate.secure.keys import SecureSumRefused, Transcript
from fedlens.aggregate.secure.lightsecagg_steps import CodedMasked, CodedTerms, coded, decoded
from fedlens.aggregate.secure.secagg_client import _opened, as_bytes, step_after
from fedlens.aggregate.secure.secagg_server import MASKED, SHARES, UNMASK
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Ask, Reply, Request
from fedlens.core.random import Secrets
from tests.unit.aggregate.secure.secagg_kit import (
    STEPS,
    CodedFederation,
    Killed,
    in_hex,
    layout_of,
)
from tests.unit.aggregate.secure.test_secagg import FATES, check_outcome
from tests.unit.aggregate.secure.test_secagg_attacks import ATTACKS, attacked
from tests.unit.aggregate.secure.test_secagg_settings import built


def columns(*of: range) -> np.ndarray:
    """All combinations, one a column."""
    return np.array(list(product(*of)), np.uint32).T


@pytest.mark.parametrize(("q", "members", "parts", "noise"), [(Q, 10, 4, 3), (Q, 5, 1, 2), (13, 5, 2, 2)])
def test_a_coded_part_is_that_of_equation_5(q: int, members: int, parts: int, noise: int) -> None:
    """[z]_j = sum over k of z_k times prod over l != k of (beta_j - alpha_l) / (alpha_k - alpha_l)."""
    values = uniform(bytes(32), (parts + noise) * 3, q).reshape(parts + noise, 3)
    alpha, beta = range(members + 1, members + parts + noise + 1), range(1, members + 1)
    made = coded(values[:parts], values[parts:], members, q)
    for j, b in enumerate(beta):
        expected = np.zeros(3, object)
        for k, a in enumerate(alpha):
            factor = 1
            for other in alpha:
                if other != a:
                    factor = factor * (b - other) * pow(a - other, -1, q) % q
            expected += factor * values[k].astype(object)
        assert made[j].tolist() == (expected % q).tolist()
    for chosen in combinations(beta, parts + noise):  # any U give it
        rows = {point: made[point - 1] for point in chosen}
        assert np.array_equal(decoded(rows, parts, members, q), values[:parts])


def test_the_sum_is_that_of_those_who_are_in_for_each_number_of_each_fate() -> None:
    for fates in combinations_with_replacement(FATES, 5):
        check_outcome(fates, CodedFederation)


@pytest.mark.nightly
def test_the_sum_is_that_of_those_who_are_in_for_all_fates() -> None:
    for fates in product(FATES, repeat=5):
        check_outcome(fates, CodedFederation)


@pytest.mark.parametrize("kill", list(product(["before", "after"], STEPS)))
def test_a_killed_server_goes_on_without_isolating_a_client(kill: tuple[str, str]) -> None:
    federation = CodedFederation(wire=True)
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=kill)
    total, n = federation.drive(federation.asked())
    assert n == 5
    assert np.array_equal(total, federation.plain(range(5)))


def test_a_second_set_of_survivors_is_not_opened() -> None:
    """The server is killed once four have answered, and asks again for the sum without client 4."""
    federation = CodedFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), lambda op, k: op == UNMASK and k == 4, kill=("after", UNMASK))

    def without_4(ask: Ask, request: Request) -> tuple[Ask, Request]:
        shared = {**ask.shared["secagg"], "clients": [0, 1, 2, 3]}
        return replace(ask, shared={**ask.shared, "secagg": shared}), request

    with pytest.raises(SecureSumRefused, match="and 4 must last"):
        federation.drive(federation.asked(), change=without_4)
    assert len(federation.failures()) >= 4


@pytest.mark.parametrize(
    ("op", "what", "reason"), [case[1:] for case in ATTACKS], ids=[case[0] for case in ATTACKS]
)
def test_a_client_refuses(op: str, what: Callable[[Ask, Request], Any], reason: str) -> None:
    federation = CodedFederation()
    total, n = federation.drive(federation.asked(), change=attacked(op, what))
    assert reason.replace("and 3", "and 4") in federation.failures()[0]
    survivors = range(5) if op == UNMASK else range(1, 5)
    assert n == len(survivors)
    assert np.array_equal(total, federation.plain(survivors))


@pytest.mark.parametrize("op", [MASKED, UNMASK])
def test_wrong_words_give_no_sum(op: str) -> None:
    """A client whose words are not under its mask, and one whose sum of coded parts is another."""
    federation = CodedFederation()

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op == op and answer.client == 1:
            name = VECTOR if op == MASKED else "shares"
            answer.payload[name] = torch.zeros_like(answer.payload[name])
        return answer

    with pytest.raises(SecureSumRefused, match="is no sum of 5 vectors"):
        federation.drive(federation.asked(), replied=replied)


def test_a_sum_at_the_limit_of_a_word_is_exact() -> None:
    layout = layout_of(size=2, bits=27, cohort=7)  # 7 x 2^27 = 939,524,096 of at most 2^30 - 1
    federation = CodedFederation(7, layout=layout)
    most = 1 << 27
    for site in federation.sites:
        site.words = np.array([most, -most, most, most], np.int32)
    total, n = federation.drive(federation.asked())
    assert n == 7
    assert total.view(np.int32).tolist() == [7 * most, -7 * most, 7 * most, 7 * most]


def test_masked_words_are_uniform() -> None:
    """Chi-square of the words and coded parts that the server gets, the inputs being 0."""
    stats = pytest.importorskip("scipy.stats")
    federation = CodedFederation(5, layout=layout_of(size=20_000), entropy=random.Random(0).randbytes)
    for site in federation.sites:
        site.secrets = Secrets((0, site.id))  # the same in every run of the test
        site.words[:-1] = 0
    federation.drive(federation.asked())
    words = {ask.op: [a.payload for a in answers] for ask, answers in federation.view}
    for payload in words[MASKED]:
        high = payload[VECTOR].numpy()[:-1] >> 23
        assert stats.chisquare(np.bincount(high, minlength=256)).pvalue > 0.01
    for op, name in ((SHARES, "sealed"), (UNMASK, "shares")):
        for payload in words[op]:
            data = payload[name].numpy()
            data = data[data.size % 4 :: 4]  # one byte of each word, all 256 of which are equally likely
            assert stats.chisquare(np.bincount(data, minlength=256)).pvalue > 0.01


def seen_by_the_server(inputs: tuple[int, ...], colluding: tuple[int, ...]) -> Counter[bytes]:
    """All views of the server and some clients over the field of 5: three clients, U = 2, T = 1, and no drop-out.

    It has one column for each choice of all masks and noises: masked words, sums of coded parts, and the inputs, masks
    and received parts of colluding clients.
    """
    q, n = 5, 3
    drawn = columns(*[range(q)] * 6)  # the masks, then the noises
    parts = [coded(drawn[k : k + 1], drawn[n + k : n + k + 1], n, q) for k in range(n)]
    masked = [add(residues(np.array([x], np.int32), q), z, q) for x, z in zip(inputs, drawn, strict=False)]
    sums = add(add(parts[0], parts[1], q), parts[2], q)
    rows = [*masked, *sums]
    for k in colluding:
        rows += [drawn[k], drawn[n + k], *(part[k] for part in parts)]
    return Counter(map(bytes, np.stack(rows).astype(np.uint8).T.copy()))


def test_inputs_of_equal_sum_give_the_server_one_distribution() -> None:
    one = seen_by_the_server((1, 2, 0), ())
    assert one == seen_by_the_server((3, 3, 2), ())  # 3 mod 5
    assert one != seen_by_the_server((3, 3, 1), ())


def test_the_server_with_t_clients_learns_the_sum_of_the_others_alone() -> None:
    one = seen_by_the_server((1, 2, 0), (0,))
    assert one == seen_by_the_server((1, 4, 3), (0,))
    assert one.keys().isdisjoint(seen_by_the_server((1, 4, 2), (0,)))


@pytest.mark.parametrize(("q", "members", "parts", "noise"), [(5, 3, 1, 1), (11, 4, 2, 1), (7, 3, 1, 2)])
def test_t_coded_parts_say_nothing_of_a_mask_and_one_more_does(
    q: int, members: int, parts: int, noise: int
) -> None:
    noises = columns(*[range(q)] * noise)

    def views(mask: tuple[int, ...], chosen: tuple[int, ...], hidden: bool = True) -> Counter[bytes]:
        given = np.repeat(np.array([mask], np.uint32).T, noises.shape[1], axis=1)
        made = coded(given, noises if hidden else np.zeros_like(noises), members, q)
        return Counter(map(bytes, made[list(chosen)].astype(np.uint8).T.copy()))

    masks = list(product(range(q), repeat=parts))
    for count in range(1, noise + 2):
        for chosen in combinations(range(members), count):
            found = [views(mask, chosen) for mask in masks]
            assert all(one == found[0] for one in found) == (count <= noise)
            if count <= noise:
                assert len(found[0]) == q**count  # uniform
    # Padded with zeros, as in FedML, a single member learns of the mask.
    assert views(masks[0], (0,), hidden=False) != views(masks[1], (0,), hidden=False)


def test_where_points_overlap_a_member_would_read_a_part() -> None:
    alpha, beta = (3, 4), (1, 2, 3)  # member 3 and the first part
    with pytest.raises(ValueError, match="must all differ"):
        lagrange(beta, alpha, 7)
    for members in range(3, 12):
        parts = uniform(bytes([members]) * 32, 6 * 8).reshape(6, 8)
        made = coded(parts[:4], parts[4:], members)
        assert not any(np.array_equal(row, part) for row in made for part in parts)


def test_the_parts_that_clients_send_are_not_padded_with_zeros() -> None:
    """Of FedML's parts, whose noise is 0, U - T clients compute the mask."""
    federation = CodedFederation(colluding=2)
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    members, terms = range(5), federation.terms
    received = {}
    for site in federation.sites:
        entry = site.log["runs"]["run"]
        step = step_after({"secagg": {"attempt": entry["attempt"]}, "log": site.log}, site.client(), "masked")
        transcript = Transcript.of(terms, entry)
        received[site.id] = {k: np.frombuffer(t, "<u4") for k, t in _opened(step, transcript).items()}
        seed = step.secret("seed")
        if site.id == 0:
            mask = terms.mask(transcript, 0, seed)
    for pair in combinations(members, terms.parts):
        # The polynomial that is 0 at the points of the noise, 8 and 9, from the parts of two members.
        rows = {k + 1: received[k][0] for k in pair} | dict.fromkeys((8, 9), np.zeros_like(mask[0]))
        points, wanted = tuple(rows), (6, 7)
        guess = np.array(lagrange(wanted, points), object) @ np.stack(list(rows.values())).astype(object) % Q
        assert not np.array_equal(guess, mask.astype(object))
    every = {k + 1: received[k][0] for k in (0, 2, 3, 4)}
    assert np.array_equal(decoded(every, terms.parts, 5), mask)


def test_masks_depend_on_all_that_clients_train_with() -> None:
    federation = CodedFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    terms, entry = federation.terms, federation.sites[0].log["runs"]["run"]
    seen = set()
    for changes in ({}, {"round": 2}, {"number": 2}, {"model": b"m" * 32}, {"shared": b"s" * 32}):
        transcript = Transcript.of(terms, {**entry, "attempt": {**entry["attempt"], **changes}})
        seen |= {made(transcript, 0, bytes(32)).tobytes() for made in (terms.mask, terms.noise)}
    assert len(seen) == 10


def test_no_secret_of_a_client_is_in_what_it_keeps_or_sends() -> None:
    federation = CodedFederation()
    federation.drive(federation.asked())
    assert not any(site.secrets._known for site in federation.sites)
    with pytest.raises(Killed):
        federation.drive(federation.asked(round=2, model=1.0), kill=("before", UNMASK))
    answers = [a.payload for _, answers in federation.view for a in answers if isinstance(a, Reply)]
    kept = in_hex([answers, [site.log for site in federation.sites], list(vars(federation.journal).values())])
    for site in federation.sites:
        names = {name.rpartition("/")[2]: secret for (name, _), secret in site.secrets._known.items()}
        assert names["nonce"].hex() in kept  # so a secret in it would be seen
        assert {"sealing", "masking", "seed"} == names.keys() - {"nonce", "gcm"}
        assert not any(names[name].hex() in kept for name in ("sealing", "masking", "seed"))


def test_survivors_send_a_part_of_a_vector_and_any_u_open_the_sum() -> None:
    federation = CodedFederation(layout=layout_of(size=998))
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("after", UNMASK))
    kept = federation.journal.noted(1, "masked-sum")
    assert kept is not None
    masked = CodedMasked.of(federation.terms, kept)
    answers = {a.client: as_bytes(a.payload["shares"]) for a in federation.view[-1][1]}
    assert {len(answer) for answer in answers.values()} == {4 * 500}  # of 1,000 words in U - T = 2 parts
    for chosen in combinations(range(5), 4):
        total = masked.unmasked({k: answers[k] for k in chosen})
        assert np.array_equal(total, federation.plain(range(5)))


def test_terms_of_a_smaller_cohort_are_those_of_the_largest() -> None:
    terms = CodedTerms(0.67, "", "", cohort=10, colluding=3, words=100)
    assert (terms.needed(10), terms.needed(8), terms.parts, terms.length) == (7, 7, 4, 25)


@pytest.mark.parametrize(
    ("cohort", "more", "where", "said"),
    [
        (5, {"threshold": 0.51}, "aggregate.colluding", "U = 3 of N = 5 .* T = 0 cannot collude.* 6 > 6"),
        (10, {"colluding": 4}, "aggregate.colluding", "U = 7 of N = 10 .* T = 4 cannot collude.* 14 > 14"),
        (10, {"threshold": 0.6, "colluding": 3}, "aggregate.colluding", "U = 6 of N = 10 .* 12 > 13"),
        (10, {"colluding": 0}, "aggregate.colluding", "at least 1"),
        (10, {"bits": 27}, "aggregate.bits", "set aggregate.bits = 26 or less"),
        (2, {}, "select", "needs 3 clients"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    cohort: int, more: dict[str, Any], where: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        built(aggregate={"name": "lightsecagg", **more}, select={"clients_per_round": cohort})
    assert refused.value.where == where


def test_16_383_clients_fit_at_16_bits() -> None:
    made = built(aggregate={"name": "lightsecagg"}).algorithm
    fits = partial(made.aggregate.fitted, made.train)
    info = made.parts.federation
    assert fits(16_383, info).vectors.cohort == 16_383
    with pytest.raises(ConfigError, match=r"set aggregate\.bits = 15 or less"):
        fits(16_384, info)


@pytest.mark.parametrize(
    ("cohort", "more", "said"),
    [
        (10, {}, "10 clients need U = 7 .* 3 may drop out.* T = 3 .* 2.5 times its update: .* = 10 / 4"),
        (10, {"threshold": 0.6}, "U = 6 .* 4 may drop out.* T = 1 .* 2.0 times"),
        (4, {}, "U = 3 .* 1 may drop out.* T = 1 .* 2.0 times"),
        (3, {}, "U = 3 .* none may drop out.* T = 2 .* 3.0 times"),
        (10, {"colluding": 1}, "U = 7 .* T = 1 .* 1.7 times"),
    ],
)
def test_the_start_says_what_it_allows_and_costs(cohort: int, more: dict[str, Any], said: str) -> None:
    table = {"name": "lightsecagg", **more}
    (note,) = built(select={"clients_per_round": cohort}, aggregate=table).algorithm.notes
    assert re.search(said, note)


def test_real_sites_are_refused() -> None:
    made = built(aggregate={"name": "lightsecagg"}).algorithm
    info = replace(made.parts.federation, contract="ab" * 32)
    with pytest.raises(ConfigError, match="in simulations alone"):
        made.aggregate.fitted(made.train, 4, info)
