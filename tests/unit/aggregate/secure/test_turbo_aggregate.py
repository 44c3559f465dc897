"""Turbo-Aggregate without a run: its equations, drop-outs, kills, attacks, and what the server and members see."""

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

from fedlens.aggregate.secure import turbo_steps
from fedlens.aggregate.secure.field import Q, add, negative, residues, uniform
from fedlens.aggregate.secure.keys import SecureSumRefused, Transcript
from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, UNMASK
from fedlens.aggregate.secure.turbo_server import PASS
from fedlens.aggregate.secure.turbo_steps import half, mean, spread
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Ask, Reply, Request
from fedlens.core.random import Secrets
from tests.unit.aggregate.secure.secagg_kit import CircleFederation, Killed, in_hex, layout_of
from tests.unit.aggregate.secure.test_secagg_settings import built

STEPS = (KEYS, MASKED, PASS, UNMASK)
FATES = range(len(STEPS) + 1)  # how many asks a client answers before it is lost
MANY: dict[str, Any] = {
    "data": {
        "dataset": {"name": "synthetic", "shape": [1, 4, 4], "train": 400, "test": 20},
        "partition": {"name": "iid", "clients": 40},
    }
}


def columns(*of: range) -> np.ndarray:
    """All combinations, one a column."""
    return np.array(list(product(*of)), np.uint32).T


@pytest.mark.parametrize(("q", "size"), [(Q, 5), (Q, 6), (11, 5), (7, 3)])
def test_words_and_their_copies_are_those_of_equations_9_and_10(q: int, size: int) -> None:
    """The copy of j is sum over k of f(k) times prod over l != k of (N + j - l) / (k - l)."""
    words, noise = uniform(bytes(32), 3, q), uniform(bytes(31) + b"1", 3 * (size - 1), q).reshape(-1, 3)
    plain, coded = spread(words, noise, q)
    assert np.array_equal(plain[:-1], add(noise, words, q))
    assert (plain.astype(object).sum(axis=0) % q).tolist() == (size * words.astype(object) % q).tolist()
    for j in range(1, size + 1):
        expected = np.zeros(3, object)
        for k in range(1, size + 1):
            factor = 1
            for other in range(1, size + 1):
                if other != k:
                    factor = factor * (size + j - other) * pow(k - other, -1, q) % q
            expected += factor * plain[k - 1].astype(object)
        assert coded[j - 1].tolist() == (expected % q).tolist()


@pytest.mark.parametrize("size", [3, 5, 6])
def test_half_of_a_group_gives_the_mean_of_its_sums_and_fewer_do_not(size: int) -> None:
    words, noise = uniform(bytes(32), 3), uniform(bytes(31) + b"1", 3 * (size - 1)).reshape(-1, 3)
    plain, coded = (dict(enumerate(rows, 1)) for rows in spread(words, noise))
    for count in range(1, size + 1):
        for chosen in combinations(range(1, size + 1), count):
            given = [{member: rows[member] for member in chosen} for rows in (plain, coded)]
            if 2 * count >= size:
                assert np.array_equal(mean(given[0], given[1], size), words)
            else:
                with pytest.raises(SecureSumRefused, match="half of them must last"):
                    mean(given[0], given[1], size)


def check_outcome(fates: tuple[int, ...], size: int = 2) -> bool:
    """Checks a round in which each client is lost after so many answers; whether its sum opens."""
    federation = CircleFederation(len(fates), size=size)
    terms, clients = federation.terms, range(len(fates))
    lasting = [[k for k in clients if fates[k] > step] for step in range(len(STEPS))]
    groups, needed = terms.groups(clients), terms.needed(len(fates))
    enough = len(lasting[0]) >= needed and len(lasting[1]) >= needed and len(lasting[3]) >= needed
    enough &= all(len(set(group) & set(lasting[step])) >= half(group) for group in groups for step in (1, 2))
    enough &= len(set(groups[0]) & set(lasting[3])) >= half(groups[0])

    def lost(op: str, client: int) -> bool:
        return fates[client] <= STEPS.index(op)

    if not enough:
        with pytest.raises(SecureSumRefused):
            federation.drive(federation.asked(), lost)
        if any(len(set(group) & set(lasting[step])) < half(group) for group in groups for step in (1, 2)):
            assert all(ask.op != UNMASK for ask, _ in federation.view)  # nothing is unmasked
        return False
    total, n = federation.drive(federation.asked(), lost)
    assert n == len(lasting[1])
    assert np.array_equal(total, federation.plain(lasting[1]))
    return True


def in_groups(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """The fates of all clients, from those of each group."""
    return tuple(fate for row in zip(*groups, strict=True) for fate in row)


def test_the_sum_is_that_of_those_who_are_in_for_each_number_of_each_fate() -> None:
    """Of one group of three at a time: that which starts and ends the circle, the next, and the last."""
    patterns, opened = list(combinations_with_replacement(FATES, 2)), 0
    for at in range(3):
        for fates in patterns:
            groups = [(4, 4)] * 3
            groups[at] = fates
            opened += check_outcome(in_groups(*groups))
    assert opened == 5 + 9 + 9


@pytest.mark.nightly
def test_the_sum_is_that_of_those_who_are_in_for_each_number_of_each_fate_of_three_groups() -> None:
    patterns = list(combinations_with_replacement(FATES, 2))
    for fates in product(patterns, repeat=3):
        check_outcome(in_groups(*fates))
    for both in product(combinations_with_replacement(FATES, 3), repeat=2):
        check_outcome(in_groups(*both), size=3)


@pytest.mark.nightly
def test_the_sum_of_one_group_of_five_for_all_fates() -> None:
    for fates in product(FATES, repeat=5):
        check_outcome(fates, size=5)


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 300))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_sum_is_that_of_those_who_are_in_for_random_fates_of_twenty(seed: int) -> None:
    draw = random.Random(seed)
    check_outcome(tuple(draw.choice([0, 1, 2, 3, *[4] * (4 + seed % 3 * 16)]) for _ in range(20)), size=5)


def test_a_sum_without_the_former_sums_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that FedML leaves out: with the mean of the former group's sums at 0, one group is summed."""
    monkeypatch.setattr(
        turbo_steps, "mean", lambda plain, coded, size: np.zeros_like(plain[next(iter(plain))])
    )
    federation = CircleFederation(15, size=5)
    with pytest.raises(SecureSumRefused, match="is no sum of 15 vectors"):
        federation.drive(federation.asked())


@pytest.mark.parametrize("kill", list(product(["before", "after"], STEPS)))
def test_a_killed_server_goes_on_without_isolating_a_client(kill: tuple[str, str]) -> None:
    federation = CircleFederation(6, wire=True)
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=kill)
    total, n = federation.drive(federation.asked())
    assert n == 6
    assert np.array_equal(total, federation.plain(range(6)))


def test_a_round_whose_sum_is_open_is_not_repeated() -> None:
    federation = CircleFederation(15, size=5)
    federation.drive(federation.asked())
    federation.journal = type(federation.journal)("run")  # a server that forgot
    with pytest.raises(SecureSumRefused, match="senders of keys"):
        federation.drive(federation.asked(cohort=range(14)))
    assert "comes after attempt 1 at round 1" in federation.failures()[-1]


def changed(op: str, what: Callable[[Any, Request], Any]) -> Callable[[Ask, Request], tuple[Ask, Request]]:
    """A server that sends clients 1 and 4, both of the second group of three, another part of the protocol."""

    def change(ask: Ask, request: Request) -> tuple[Ask, Request]:
        if ask.op != op or request.client not in (1, 4):
            return ask, request
        own, asked = dict(request.payload), dict(ask.shared["secagg"])
        what(asked, own)
        return replace(ask, shared={**ask.shared, "secagg": asked}), Request(request.client, own)

    return change


def forge(asked: Any, own: Any) -> None:
    own["sealed"] = own["sealed"].clone()
    own["sealed"][40] ^= 1


def swap(asked: Any, own: Any) -> None:
    own["sealed"] = own["sealed"].flip(0)


def leave_out(asked: Any, own: Any) -> None:
    size = len(own["sealed"]) // len(asked["clients"])
    own["sealed"] = own["sealed"][size:]
    asked["clients"] = asked["clients"][1:]


ATTACKS: list[tuple[str, Callable[[Any, Any], None], str]] = [
    (PASS, forge, "forged"),
    (PASS, swap, "forged"),
    (
        PASS,
        lambda asked, own: asked.update(clients=asked["clients"][:2]),
        "there are 2 members of a group in a sum",
    ),
    (PASS, lambda asked, own: asked.update(clients=[]), "there are 0 clients in a sum"),
    (PASS, lambda asked, own: asked.update(passed=[0, 99]), "not a subset"),
]


@pytest.mark.parametrize(("op", "what", "reason"), ATTACKS)
def test_a_client_refuses(op: str, what: Callable[[Any, Any], None], reason: str) -> None:
    """Two of five members refuse, and the sum is that of all."""
    federation = CircleFederation(15, size=5)
    total, n = federation.drive(federation.asked(), change=changed(op, what))
    assert len(federation.failures()) == 2
    assert re.search(reason, federation.failures()[0])
    assert n == 15
    assert np.array_equal(total, federation.plain(range(15)))


def test_members_of_a_group_add_one_set_of_clients() -> None:
    """Two of the second group are told that client 0 is not in; the next group refuses what they pass on."""
    federation = CircleFederation(15, size=5)
    with pytest.raises(SecureSumRefused, match="there are 0 members who have passed a sum on of 5"):
        federation.drive(federation.asked(), change=changed(PASS, leave_out))
    assert set(federation.failures()) == {"a sum that was passed on is of other clients"}


def test_another_list_of_survivors_is_not_opened() -> None:
    federation = CircleFederation(15, size=5)

    def without_14(ask: Ask, request: Request) -> tuple[Ask, Request]:
        if ask.op != UNMASK:
            return ask, request
        shared = {**ask.shared["secagg"], "clients": list(range(14))}
        return replace(ask, shared={**ask.shared, "secagg": shared}), request

    with pytest.raises(SecureSumRefused):
        federation.drive(federation.asked(), change=without_14)
    assert federation.failures().count("the survivors are not the clients in the sum") == 5


def test_a_client_passes_one_sum_on() -> None:
    federation = CircleFederation(15, size=5)
    twice: list[Any] = []

    def change(ask: Ask, request: Request) -> tuple[Ask, Request]:
        if ask.op == PASS and request.client == 1:
            twice.append(federation.answer(ask, request))
        return ask, request

    federation.drive(federation.asked(), change=change)
    assert isinstance(twice[0], Reply)
    assert federation.failures() == ["the client has passed a sum on in this attempt before"]


@pytest.mark.parametrize("op", [MASKED, UNMASK])
def test_wrong_words_give_no_sum(op: str) -> None:
    """A client whose words are under no mask of the server, and one that holds another sum in the end."""
    federation = CircleFederation(15, size=5)

    def change(ask: Ask, request: Request) -> tuple[Ask, Request]:
        if ask.op == op == MASKED and request.client == 0:
            request = Request(0, {**request.payload, "sealed": torch.zeros(32, dtype=torch.uint8)})
        return ask, request

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op == op == UNMASK and answer.client == 0:
            answer.payload["shares"] = torch.zeros_like(answer.payload["shares"])
        return answer

    with pytest.raises(SecureSumRefused, match="is no sum of 15 vectors"):
        federation.drive(federation.asked(), change=change, replied=replied)


def test_a_sum_at_the_limit_of_a_word_is_exact() -> None:
    most = 1 << 26
    federation = CircleFederation(15, size=5, layout=layout_of(size=2, bits=26, cohort=15))
    for site in federation.sites:
        site.words = np.array([most, -most, most, most], np.int32)
    total, _ = federation.drive(federation.asked())
    assert total.view(np.int32).tolist() == [15 * most, -15 * most, 15 * most, 15 * most]


def test_masked_words_are_uniform() -> None:
    """Chi-square of all that the server gets, the inputs being 0."""
    stats = pytest.importorskip("scipy.stats")
    federation = CircleFederation(6, layout=layout_of(size=20_000), entropy=random.Random(0).randbytes)
    for site in federation.sites:
        site.secrets = Secrets((0, site.id))  # the same in every run of the test
        site.words[:-1] = 0
    federation.drive(federation.asked())
    sent = [
        payload.get("sealed", payload.get("shares"))
        for ask, answers in federation.view
        for payload in (answer.payload for answer in answers)
        if ask.op != KEYS
    ]
    sent = [data.numpy()[::4] for data in sent if len(data)]  # one byte of each word
    assert len(sent) == 6 + 4 + 2
    for data in sent:
        assert stats.chisquare(np.bincount(data, minlength=256)).pvalue > 0.01


def seen_by_the_server(inputs: tuple[int, ...], q: int = 7, size: int = 3) -> Counter[bytes]:
    """What the last group holds and the server opens, over a tiny field: two clients, and all noises of both."""
    drawn = columns(*[range(q)] * 2 * (size - 1))
    rows = [np.zeros_like(drawn[:1])] * 2 * size
    for at, x in enumerate(inputs):
        words = np.broadcast_to(residues(np.array([x + 5 * at], np.int32), q), drawn.shape[1])  # u = 5 at
        parts = np.concatenate(spread(words, drawn[at * (size - 1) : (at + 1) * (size - 1)], q))
        rows = [add(total, part, q) for total, part in zip(rows, parts, strict=True)]
    return Counter(map(bytes, np.concatenate([row.reshape(1, -1) for row in rows]).astype(np.uint8).T.copy()))


def test_inputs_of_equal_sum_give_the_server_one_distribution() -> None:
    one = seen_by_the_server((1, 2))
    assert one == seen_by_the_server((4, 6))  # 3 mod 7
    assert one.keys().isdisjoint(seen_by_the_server((4, 5)))


@pytest.mark.parametrize(("size", "q", "needed"), [(3, 11, 2), (4, 11, 2), (5, 11, 3)])
def test_fewer_members_than_half_learn_nothing_of_the_words_and_half_do(
    size: int, q: int, needed: int
) -> None:
    """All noises: what chosen members of the next group get of x + u, whose u the server knows."""
    noises = columns(*[range(q)] * (size - 1))

    made = {x: spread(np.full(noises.shape[1], x, np.uint32), noises, q) for x in (0, 1, q - 1)}

    def views(x: int, chosen: tuple[int, ...]) -> Counter[bytes]:
        plain, coded = made[x]
        seen = np.concatenate([plain[list(chosen)], coded[list(chosen)]])
        return Counter(map(bytes, seen.astype(np.uint8).T.copy()))

    assert needed == half(range(size))
    for chosen in combinations(range(size), needed - 1):
        # Uniform: each of the q^(2m) views equally often, whatever x is.
        found = views(0, chosen)
        assert len(found) == q ** (2 * (needed - 1))
        assert found == views(1, chosen) == views(q - 1, chosen)
    for chosen in combinations(range(size), needed):
        found = views(0, chosen)
        assert found.keys().isdisjoint(views(1, chosen))


def read_by(size: int, chosen: tuple[int, ...], q: int = Q) -> bool:
    """Whether these members of a group of this size read x + u: whether the mean of f follows from their values.

    It does if the mean is 0 for each f that is 0 where they have values: f = V h, V = prod (t - k)(t - N - k), for h
    of fewer than N - 2m terms.
    """
    others = [t for t in range(1, size + 1) if t not in chosen]
    values = []
    for t in others:
        value = 1
        for k in chosen:
            value = value * (t - k) * (t - size - k) % q
        values.append(value)
    moments = range(size - 2 * len(chosen))
    return not any(sum(v * pow(t, d, q) for v, t in zip(values, others, strict=True)) % q for d in moments)


@pytest.mark.parametrize(
    "size", [5, 6, 7, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(8, 14))]
)
def test_no_members_fewer_than_half_read_words_in_the_field_of_a_run(size: int) -> None:
    """All sizes of a group that a run can have: at most 13, of 39 clients in groups of at least 10."""
    members = range(1, size + 1)
    assert not any(read_by(size, chosen) for chosen in combinations(members, half(members) - 1))
    assert read_by(size, tuple(members)[: half(members)])


def test_the_server_with_one_member_of_a_group_reads_the_sum_of_the_groups_before() -> None:
    """What the page says: the members of the third group hold the mean of the second group's sums."""
    federation = CircleFederation(15, size=5)
    masks: dict[int, Any] = {}
    held: list[Any] = []
    whole = turbo_steps.mean

    def noted(*given: Any) -> Any:
        held.append(whole(*given))
        return held[-1]

    def change(ask: Ask, request: Request) -> tuple[Ask, Request]:
        if ask.op == MASKED:
            masks[request.client] = federation.terms.mask(bytes(request.payload["sealed"].numpy()))
        return ask, request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turbo_steps, "mean", noted)
        federation.drive(federation.asked(), change=change)
    first = federation.terms.groups(range(15))[0]
    found = held[0]
    for client in first:
        found = add(found, negative(masks[client]))
    plain = residues(federation.plain(first).view(np.int32))
    assert np.array_equal(found, plain)


def test_masks_depend_on_all_that_clients_train_with() -> None:
    federation = CircleFederation(6)
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    terms, entry = federation.terms, federation.sites[0].log["runs"]["run"]
    seen = set()
    for changes in ({}, {"round": 2}, {"number": 2}, {"model": b"m" * 32}, {"shared": b"s" * 32}):
        transcript = Transcript.of(terms, {**entry, "attempt": {**entry["attempt"], **changes}})
        seen |= {transcript.derive(bytes(32), of, 0) for of in ("noise of a group", "mask of the server")}
    assert len(seen) == 10


def test_no_secret_of_a_client_is_in_what_it_keeps_or_sends() -> None:
    federation = CircleFederation(6)
    federation.drive(federation.asked())
    assert not any(site.secrets._known for site in federation.sites)
    assert not any(site.log["runs"]["run"]["sealed"] for site in federation.sites)
    with pytest.raises(Killed):
        federation.drive(federation.asked(round=2, model=1.0), kill=("before", UNMASK))
    answers = [a.payload for _, answers in federation.view for a in answers if isinstance(a, Reply)]
    kept = in_hex([answers, [site.log for site in federation.sites], list(vars(federation.journal).values())])
    for site in federation.sites:
        names = {name.rpartition("/")[2]: secret for (name, _), secret in site.secrets._known.items()}
        assert names["nonce"].hex() in kept  # so a secret in it would be seen
        assert {"sealing", "masking", "seed"} <= names.keys()
        assert not any(names[name].hex() in kept for name in ("sealing", "masking", "seed"))


@pytest.mark.parametrize(
    ("cohort", "more", "where", "said"),
    [
        (14, {}, "select", "needs 3 groups of 5 clients, and a round asks 14"),
        (29, {"group": 10}, "select", "needs 3 groups of 10"),
        (40, {"bits": 25}, "aggregate.bits", "set aggregate.bits = 24 or less"),
        (40, {"group": 4}, "aggregate.group", "at least 5"),
        (40, {"group": 11}, "aggregate.group", "at most 10"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    cohort: int, more: dict[str, Any], where: str, said: str
) -> None:
    table = {"name": "turbo-aggregate", **more}
    with pytest.raises(ConfigError, match=said) as refused:
        built(aggregate=table, select={"clients_per_round": cohort}, **MANY)
    assert refused.value.where == where


def test_the_start_says_what_it_allows_and_costs() -> None:
    made = built(aggregate={"name": "turbo-aggregate"}, select={"clients_per_round": 17}, **MANY).algorithm
    (note,) = made.notes
    assert "17 clients pass 3 groups of 5 or 6, and half of each group may drop out" in note
    assert "with 3 members of a group reads an update, and with one it reads sums over groups" in note
    assert "up to 24 times its update" in note


def test_real_sites_are_refused() -> None:
    made = built(aggregate={"name": "turbo-aggregate"}, select={"clients_per_round": 15}, **MANY).algorithm
    fits = partial(made.aggregate.fitted, made.train)
    with pytest.raises(ConfigError, match="in simulations alone"):
        fits(15, replace(made.parts.federation, contract="ab" * 32))
