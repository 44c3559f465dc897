"""What a client refuses of an active server, and what the server refuses of clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.aggregate.secure.encoding import VECTOR
from fedlens.aggregate.secure.keys import (
    Attempt,
    Member,
    SecureSumRefused,
    Transcript,
    pieces,
    private_key,
    public,
)
from fedlens.aggregate.secure.secagg_client import ATTEMPT, OWN, as_tensor
from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, SHARES, UNMASK
from fedlens.core.protocol import Ask, Reply, Request
from fedlens.core.random import Secrets
from fedlens.core.states import Journal
from tests.unit.aggregate.secure.secagg_kit import Killed, Site, SumFederation, altered

Change = Callable[[Ask, Request], tuple[Ask, Request]]
SMALL_ORDER = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")


def attacked(op: str, what: Callable[[Ask, Request], Any]) -> Change:
    """An attack on client 0 in one ask: `what` gives the changed part of the protocol."""

    def change(ask: Ask, request: Request) -> tuple[Ask, Request]:
        if ask.op != op or request.client != 0:
            return ask, request
        changed = what(ask, request)
        return (altered(ask, **changed), request) if isinstance(changed, dict) else changed

    return change


def other_keys(**rows: bytes) -> Callable[[Ask, Request], Any]:
    """Other keys in the list: of member K, as `kK`."""

    def changed(ask: Ask, request: Request) -> Any:
        keys = pieces(ask.shared[ATTEMPT]["keys"], Member.BYTES)
        for name, row in rows.items():
            at = int(name[1:])
            keys[at] = row + keys[at][len(row) :]
        return {"keys": b"".join(keys)}

    return changed


def own_key_back(ask: Ask, request: Request) -> Any:
    keys = pieces(ask.shared[ATTEMPT]["keys"], Member.BYTES)
    return {"keys": b"".join([keys[0], keys[0], *keys[2:]])}


def without(name: str, *left_out: int, added: tuple[int, ...] = ()) -> Callable[[Ask, Request], Any]:
    """Fewer or more clients in the list of an ask, with what belongs to them."""

    def changed(ask: Ask, request: Request) -> Any:
        asked = ask.shared[ATTEMPT]
        keep = [at for at, client in enumerate(asked[name]) if client not in left_out]
        new = altered(ask, **{name: [asked[name][at] for at in keep] + list(added)})
        if OWN in request.payload:
            sealed = request.payload[OWN].reshape(len(asked[name]), -1)[keep].flatten()
            request = replace(request, payload={**request.payload, OWN: sealed})
        if "keys" in asked:
            keys = pieces(asked["keys"], Member.BYTES)
            new = altered(new, keys=b"".join(keys[at] for at in keep), signatures=[b""] * len(keep))
        return new, request

    return changed


def flipped(ask: Ask, request: Request) -> Any:
    sealed = request.payload[OWN].reshape(5, -1).clone()
    sealed[2, 30] ^= 1
    return ask, replace(request, payload={**request.payload, OWN: sealed.flatten()})


def swapped(ask: Ask, request: Request) -> Any:
    sealed = request.payload[OWN].reshape(5, -1)[[1, 0, 2, 3, 4]]
    return ask, replace(request, payload={**request.payload, OWN: sealed.flatten()})


def other_model(ask: Ask, request: Request) -> Any:
    return replace(ask, shared={**ask.shared, "model": {"w": torch.tensor([9.0])}}), request


def other_rate(ask: Ask, request: Request) -> Any:
    return replace(ask, shared={**ask.shared, "lr": 0.2}), request


def own_model(ask: Ask, request: Request) -> Any:
    """A model in the client's own part of the payload, which hides that of all."""
    return ask, replace(request, payload={**request.payload, "model": {"w": torch.tensor([9.0])}})


def next_attempt(ask: Ask, request: Request) -> Any:
    attempt = ask.shared[ATTEMPT]["attempt"]
    return {"attempt": {**attempt, "number": attempt["number"] + 1}}


ATTACKS: list[tuple[str, str, Callable[[Ask, Request], Any], str]] = [
    ("another model", MASKED, other_model, "not what the round announced"),
    ("another rate", MASKED, other_rate, "not what the round announced"),
    ("a model of its own", MASKED, own_model, "not what the round announced"),
    ("its key as another's", SHARES, own_key_back, "two public keys of the round are equal"),
    ("another key as its own", SHARES, other_keys(k0=bytes(range(32))), "not those that the client sent"),
    ("a point of small order", SHARES, other_keys(k2=SMALL_ORDER), "point of small order"),
    ("zero as a key", SHARES, other_keys(k2=bytes(32)), "point of small order"),
    ("a list without it", SHARES, without("members", 0), "not those that the client sent"),
    (
        "too few members",
        SHARES,
        without("members", 2, 3, 4),
        "2 senders of keys of 5 clients, and 3 must last",
    ),
    ("a forged text", MASKED, flipped, "client 2 sealed for client 0 is forged"),
    ("texts of others", MASKED, swapped, "client 0 sealed for client 0 is forged"),
    ("too few senders", MASKED, without("clients", 2, 3, 4), "2 senders of shares of 5 clients, and 3"),
    ("senders without it", MASKED, without("clients", 0), "leave out the client"),
    ("too few survivors", UNMASK, without("clients", 2, 3, 4), "2 survivors of 5 clients, and 3 must last"),
    ("survivors without it", UNMASK, without("clients", 0), "leave out the client"),
    ("a survivor twice", UNMASK, without("clients", added=(4,)), "not a subset"),
    ("a survivor that did not send", UNMASK, without("clients", added=(7,)), "not a subset"),
    ("another attempt", MASKED, next_attempt, "attempt 2 at round 1 goes on after 'shares'"),
]


@pytest.mark.parametrize(
    ("op", "what", "reason"), [case[1:] for case in ATTACKS], ids=[c[0] for c in ATTACKS]
)
def test_a_client_refuses(op: str, what: Callable[[Ask, Request], Any], reason: str) -> None:
    federation = SumFederation()
    total, n = federation.drive(federation.asked(), change=attacked(op, what))
    assert len(federation.failures()) in (1, 2)
    assert reason in federation.failures()[0]
    survivors = range(5) if op == UNMASK else range(1, 5)  # whom the others do not isolate
    assert n == len(survivors)
    assert np.array_equal(total, federation.plain(survivors))
    if op != MASKED or "attempt" not in reason:
        assert not federation.sites[0].secrets._known  # it takes no further part


def test_a_model_that_one_client_alone_is_told_of_opens_no_sum() -> None:
    federation = SumFederation()

    def lie(ask: Ask, request: Request) -> Any:
        attempt = ask.shared[ATTEMPT]["attempt"]
        ask = altered(ask, attempt={**attempt, "model": b"m" * 32, "shared": b"s" * 32})
        return ask, request

    def change(ask: Ask, request: Request) -> tuple[Ask, Request]:
        return lie(ask, request) if request.client == 0 else (ask, request)

    with pytest.raises(SecureSumRefused, match="0 survivors of 5 clients"):
        federation.drive(federation.asked(), change=change)
    assert all("forged" in reason or "announced" in reason for reason in federation.failures())


def test_masks_depend_on_all_that_clients_train_with() -> None:
    keys = [private_key(bytes([k]) * 32) for k in range(1, 4)]
    members = {
        k: Member(public(key), public(private_key(bytes([k + 9]) * 32)), bytes(16))
        for k, key in enumerate(keys)
    }
    attempt = Attempt("run", 1, 1, bytes(16), (0, 1, 2), b"m" * 32, b"s" * 32)
    terms = SumFederation().terms
    seen = set()
    for changes in (
        {}, {"run": "other"}, {"round": 2}, {"number": 2}, {"nonce": b"n" * 16}, {"model": b"n" * 32},
        {"shared": b"t" * 32},
    ):  # fmt: skip
        transcript = Transcript(terms, replace(attempt, **changes), members)
        own = private_key(bytes([9]) * 32)
        key, sign = transcript.common_mask(own, 0, 1)
        other, sign_of_other = transcript.common_mask(private_key(bytes([10]) * 32), 1, 0)
        assert key == other
        assert (sign, sign_of_other) == (1, -1)
        seen |= {key, transcript.common_mask(own, 0, 2)[0], transcript.own_mask(0, bytes(32))}
    for other_terms in (
        replace(terms, threshold=0.9),
        replace(terms, operation="x"),
        replace(terms, layout="x"),
    ):
        seen.add(Transcript(other_terms, attempt, members).common_mask(own, 0, 1)[0])
    assert len(seen) == 7 * 3 + 3


@pytest.mark.parametrize("lost", [(), (4,)], ids=["a seed", "a masking key"])
def test_one_wrong_share_opens_no_sum(lost: tuple[int, ...]) -> None:
    federation = SumFederation()

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op == UNMASK and answer.client == 1:
            answer.payload["shares"] = answer.payload["shares"].clone()
            answer.payload["shares"][4 * 33 + 5] ^= 1
        return answer

    with pytest.raises(SecureSumRefused, match="client 4 do not give what it announced"):
        federation.drive(federation.asked(), lambda op, k: op == MASKED and k in lost, replied=replied)


def test_a_word_that_no_client_can_have_sent_opens_no_sum() -> None:
    federation = SumFederation()

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op == MASKED and answer.client == 1:
            answer.payload[VECTOR][0] += 1 << 20
        return answer

    with pytest.raises(SecureSumRefused, match="a word of the sum lies beyond"):
        federation.drive(federation.asked(), replied=replied)


def test_clients_hold_the_server_to_their_own_threshold() -> None:
    federation = SumFederation(threshold=1.0)
    terms = replace(federation.terms, threshold=0.51)
    with pytest.raises(SecureSumRefused, match="0 senders of shares of 4 clients, and 3"):
        federation.drive(federation.asked(terms=terms), lambda op, k: k == 4)
    assert "there are 4 senders of keys of 5 clients, and 5 must last" in federation.failures()


@pytest.mark.parametrize("op", [KEYS, MASKED])
def test_a_forged_metric_is_refused(op: str) -> None:
    federation = SumFederation()

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op == op and answer.client == 1:
            answer.metrics = {"loss": 0.0, "examples": 1e9}
        return answer

    total, n = federation.drive(federation.asked(), replied=replied)
    assert n == 4
    assert np.array_equal(total, federation.plain([0, 2, 3, 4]))
    (refused,) = [a.refused for ask, answers in federation.view if ask.op == op for a in answers if a.refused]
    assert "metrics" in refused


def test_the_server_refuses_keys_of_small_order() -> None:
    federation = SumFederation()

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op == KEYS and answer.client == 1:
            answer.payload["keys"][32:64] = as_tensor(SMALL_ORDER)
        return answer

    _, n = federation.drive(federation.asked(), replied=replied)
    assert n == 4
    assert federation.view[0][1][1].refused == "a public key is a point of small order"


def test_an_attempt_with_one_client_fewer_is_refused_once_the_sum_is_open() -> None:
    federation = SumFederation()
    federation.drive(federation.asked())
    federation.journal.saved(1)  # a server that forgets the round
    federation.journal.note(1, "attempt", {"number": 1})
    with pytest.raises(SecureSumRefused, match="0 senders of keys of 4 clients"):
        federation.drive(federation.asked(cohort=range(4)))
    assert set(federation.failures()) == {
        "attempt 2 at round 1 comes after attempt 1 at round 1 ('unmasked')"
    }


def test_a_later_attempt_deletes_the_secrets_of_the_one_before() -> None:
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    masked = federation.journal.noted(1, "masked-sum")
    assert masked is not None
    federation.journal.saved(1)
    federation.journal.note(1, "attempt", {"number": 1})
    with pytest.raises(Killed):
        federation.drive(federation.asked(cohort=range(4)), kill=("before", UNMASK))
    assert {name.split("/")[2] for name, _ in federation.sites[0].secrets._known} == {"2"}
    assert {name.split("/")[2] for name, _ in federation.sites[4].secrets._known} == {"1"}
    federation.journal.note(
        1, "masked-sum", masked
    )  # the sums of both attempts, to subtract one from the other
    with pytest.raises(SecureSumRefused, match="1 senders of shares that open the sum of 5 clients, and 3"):
        federation.drive(federation.asked())
    assert "goes on after 'masked'" in federation.failures()[0]


def asked_again(federation: SumFederation, op: str, change: Change, client: int = 0) -> Any:
    """The answer of a client to an ask that it has answered."""
    ask = next(ask for ask, _ in federation.view if ask.op == op)
    request = next(request for request in ask.requests if request.client == client)
    return federation.answer(*change(ask, request))


@pytest.mark.parametrize("op", [KEYS, SHARES, MASKED, UNMASK])
def test_no_step_is_answered_twice_but_the_same_unmask(op: str) -> None:
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("after", op))
    again = asked_again(federation, op, lambda ask, request: (ask, request))
    assert isinstance(again, Reply) == (op == UNMASK)
    other = asked_again(federation, op, attacked(UNMASK, without("clients", 4)))
    assert not isinstance(other, Reply)  # it would give both kinds of share for client 4


def test_asks_of_an_opened_round_and_of_earlier_ones_are_refused() -> None:
    federation = SumFederation()
    federation.drive(federation.asked(round=2))
    for op in (KEYS, SHARES, MASKED):
        assert not isinstance(asked_again(federation, op, lambda ask, request: (ask, request)), Reply)
    with pytest.raises(SecureSumRefused, match="0 senders of keys"):
        federation.drive(federation.asked(round=1, model=1.0))
    assert "at round 1 comes after attempt 1 at round 2 ('unmasked')" in federation.failures()[-1]
    _, n = federation.drive(federation.asked(round=3, model=1.0))
    assert n == 5


def test_a_model_is_in_one_opened_sum_only_whatever_the_run() -> None:
    """A new run with the same model and one client fewer would give the difference of the two sums."""
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    federation.journal = Journal("a second run")
    federation.drive(federation.asked())  # nothing was opened before
    federation.journal = Journal("a third run")
    with pytest.raises(SecureSumRefused, match="0 senders of keys of 4 clients"):
        federation.drive(federation.asked(cohort=range(4)))
    assert "in an opened sum of updates of the same model" in federation.failures()[-1]
    _, n = federation.drive(federation.asked(model=1.0))
    assert n == 5
    assert federation.sums == {}


def test_two_runs_at_once_open_one_sum_of_a_model() -> None:
    federation, journals = SumFederation(), {5: Journal("one"), 4: Journal("other")}
    for cohort, federation.journal in journals.items():
        with pytest.raises(Killed):
            federation.drive(federation.asked(cohort=range(cohort)), kill=("before", UNMASK))
    federation.drive(federation.asked(cohort=range(4)))
    federation.journal = journals[5]
    with pytest.raises(SecureSumRefused, match="1 senders of shares that open the sum of 5"):
        federation.drive(federation.asked())
    assert "in an opened sum of updates of the same model" in federation.failures()[-1]
    assert not federation.sites[0].secrets._known


@pytest.mark.parametrize(
    "changes",
    [
        {"round": float("nan")},
        {"round": 1.5},
        {"number": True},
        {"run": "a/b"},
        {"nonce": "n"},
        {"cohort": [0, 1, 1]},
    ],
)
def test_an_attempt_of_other_types_is_refused(changes: dict[str, Any]) -> None:
    """NaN is neither before nor after another round."""
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("after", KEYS))
    federation.sites[0].log = {}

    def announced(ask: Ask, request: Request) -> Any:
        return {"attempt": {**ask.shared[ATTEMPT]["attempt"], **changes}}

    assert not isinstance(asked_again(federation, KEYS, attacked(KEYS, announced)), Reply)
    assert not federation.sites[0].log


def test_a_masked_sum_is_opened_for_the_same_training_only() -> None:
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("before", UNMASK))
    for other in (federation.asked(model=1.0), federation.asked(cohort=range(4))):
        with pytest.raises(SecureSumRefused, match="masked with other settings"):
            federation.drive(other)
    assert federation.drive(federation.asked())[1] == 5


def test_a_simulation_says_which_models_it_has_seen() -> None:
    federation = SumFederation()
    for site in federation.sites:
        site.secrets = Secrets((0, site.id))
    federation.drive(federation.asked())
    assert federation.sums == {}
    federation.drive(federation.asked(round=2, cohort=range(4)))
    assert federation.sums == {"models_seen": 4}


def test_texts_of_another_attempt_are_refused() -> None:
    federation = SumFederation()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=("after", MASKED))
    old = next(ask for ask, _ in federation.view if ask.op == MASKED).requests[0].payload[OWN]

    def replay(ask: Ask, request: Request) -> Any:
        return ask, replace(request, payload={**request.payload, OWN: old})

    federation.drive(federation.asked(), change=attacked(MASKED, replay))
    assert federation.failures() == ["what client 0 sealed for client 0 is forged"]


def test_invented_peers_are_refused_where_keys_are_signed() -> None:
    federation = SumFederation().signed_by({k: f"site {k}" for k in range(5)})
    _, n = federation.drive(federation.asked())
    assert n == 5

    mine = Member(public(private_key(b"a" * 32)), public(private_key(b"b" * 32)), bytes(16))
    change = attacked(SHARES, other_keys(k3=bytes(mine)))
    federation.drive(federation.asked(round=2, model=1.0), change=change)
    assert "the signature of client 3 is wrong" in federation.failures()
    federation.sites.append(Site(5, federation.sites[0].words))
    with pytest.raises(SecureSumRefused, match="1 senders of keys"):
        federation.drive(federation.asked(round=3, model=2.0, cohort=range(6)))
    said = "clients of no approved site are among the clients of the cohort: [5]"
    assert said in federation.failures()
