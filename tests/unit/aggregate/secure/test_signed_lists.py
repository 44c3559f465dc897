"""Clients that sign lists of survivors: what an active server can open with so many clients on its side."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from fedlens.aggregate.secure.keys import SecureSumRefused, Terms
from fedlens.aggregate.secure.secagg_client import ATTEMPT, as_bytes
from fedlens.aggregate.secure.secagg_server import AGREE, MASKED, UNMASK
from fedlens.core.protocol import Ask, Reply, Request
from fedlens.core.random import Secrets
from tests.unit.aggregate.secure.secagg_kit import Killed, SumFederation

List = tuple[int, ...]
CONTRACT = "an approved experiment"


def real_sites(n: int = 5, threshold: float = 0.51, per_site: int = 1, min_cohort: int = 3) -> SumFederation:
    """A federation of sites with `per_site` clients each, which sign."""
    owners = {k: f"site {k // per_site}" for k in range(n)}
    return SumFederation(n, threshold, contract=CONTRACT).signed_by(owners, min_cohort)


@pytest.mark.parametrize("lost", [None, AGREE, UNMASK])
def test_those_who_sign_the_list_open_the_sum(lost: str | None) -> None:
    federation = real_sites()
    federation.wire = True
    total, n = federation.drive(federation.asked(), lambda op, k: k > 2 and op == lost)
    assert n == 5
    assert np.array_equal(total, federation.plain(range(5)))
    asked = [[request.client for request in ask.requests] for ask, _ in federation.view if ask.op == UNMASK]
    assert asked == [[0, 1, 2] if lost == AGREE else [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("kill", list(product(["before", "after"], [AGREE, UNMASK])))
def test_a_killed_server_asks_for_the_same_signatures_again(kill: tuple[str, str]) -> None:
    federation = real_sites()
    with pytest.raises(Killed):
        federation.drive(federation.asked(), kill=kill)
    total, n = federation.drive(federation.asked())
    assert n == 5
    assert np.array_equal(total, federation.plain(range(5)))


def test_fewer_signatures_than_must_last_open_nothing() -> None:
    federation = real_sites()
    with pytest.raises(SecureSumRefused, match="2 signatures of the list of survivors of 5 clients, and 3"):
        federation.drive(federation.asked(), lambda op, k: k > 1 and op == AGREE)
    assert UNMASK not in {ask.op for ask, _ in federation.view}


def test_a_client_with_another_contract_opens_nothing() -> None:
    """What it seals for others, and what they seal for it, opens with the same contract alone."""
    federation = real_sites(4)
    ops = federation.ops

    def apart(site: Any) -> Mapping[str, Any]:
        federation.contract = "another" if site.id == 0 else CONTRACT
        made = ops(site)
        federation.contract = CONTRACT
        return made

    federation.ops = apart  # type: ignore[method-assign]
    with pytest.raises(SecureSumRefused, match="0 survivors of 4 clients"):
        federation.drive(federation.asked())
    assert all("is forged" in reason for reason in federation.failures())


def test_sites_are_counted_and_not_clients() -> None:
    """Eight clients of four sites: the sum must have clients of all four."""
    for per_site, op, lost in [(4, None, ()), (2, MASKED, (6, 7)), (2, MASKED, (7,))]:
        federation = real_sites(8, 0.67, per_site, min_cohort=4)

        def missing(at: str, k: int, op: Any = op, lost: Any = lost) -> bool:
            return at == op and k in lost

        if lost == (7,):
            assert federation.drive(federation.asked(), missing)[1] == 7
            continue
        with pytest.raises(SecureSumRefused, match=r"0 (senders of keys|signatures)"):
            federation.drive(federation.asked(), missing)
        what = "clients of the cohort are of 2" if op is None else "survivors are of 3"
        assert f"the {what} sites, fewer than min_cohort = 4" in federation.failures()


@pytest.mark.parametrize(("n", "threshold"), [(4, 0.51), (5, 0.8), (8, 0.67)])
def test_a_site_with_more_clients_than_may_help_is_refused_by_the_others(n: int, threshold: float) -> None:
    """With so many, lists open two sums: `test_with_one_helper_more_some_lists_do`. With t, its shares are enough."""
    may, needed = bound(n, threshold), Terms(threshold, "", "").needed(n)
    for clients in (may, may + 1, needed):
        owners = {k: "large" if k < clients else f"site {k}" for k in range(n)}
        federation = SumFederation(n, threshold, contract=CONTRACT).signed_by(owners, min_cohort=2)
        if clients == may:
            assert federation.drive(federation.asked())[1] == n
            continue
        with pytest.raises(SecureSumRefused, match=r"(senders of keys|survivors) of"):
            federation.drive(federation.asked())
        others = [reason for reason in federation.failures() if "another site has" in reason]
        assert others == [
            f"another site has {clients} of the {n} clients of the cohort, and from 2 x {needed} - {n} on they can "
            "open the update of one client with the server"
        ] * (n - clients)


# -- an active server ---------------------------------------------------------------------------------------------


class Masked:
    """A federation whose clients have sent their masked words, and an active server that asks as it likes.

    Attributes:
        helpers: the clients on the server's side, whose keys and shares it has.
    """

    def __init__(self, n: int, threshold: float, colluding: int, signed: bool = True) -> None:
        self.federation = real_sites(n, threshold) if signed else SumFederation(n, threshold)
        with pytest.raises(Killed):
            self.federation.drive(self.federation.asked(), kill=("after", MASKED))
        self.signed, self.needed = signed, self.federation.terms.needed(n)
        self.honest, self.helpers = range(n - colluding), range(n - colluding, n)
        ask, _ = self.federation.view[-1]
        self.attempt = ask.shared[ATTEMPT]["attempt"]
        self.before = [(copy.deepcopy(site.log), dict(site.secrets._known)) for site in self.federation.sites]
        self.signatures: dict[tuple[int, List], Any] = {}

    def forgotten(self, client: int) -> None:
        """Sets a client back to where it has sent its masked words."""
        site, (log, known) = self.federation.sites[client], self.before[client]
        site.log, site.secrets = copy.deepcopy(log), Secrets(identity=site.secrets.identity)
        site.secrets._known.update(known)
        site.secrets._used.update({name: np.inf for name, _ in known})

    def asked(self, op: str, client: int, shown: List, **more: Any) -> Any:
        shared = {ATTEMPT: {"attempt": self.attempt, "clients": list(shown), **more}}
        return self.federation.answer(Ask(op, [Request(client)], shared), Request(client))

    def signature(self, client: int, shown: List) -> Any:
        """That of a client for a list; a helper signs any number of them."""
        if (client, shown) not in self.signatures:
            self.forgotten(client)
            self.signatures[client, shown] = self.asked(AGREE, client, shown)
            self.forgotten(client)
        return self.signatures[client, shown]

    def openers(self, shown: Mapping[int, List]) -> set[int]:
        """The honest clients that open the list that they are shown."""
        replied = set()
        for client, list_ in shown.items():
            more: dict[str, Any] = {}
            if self.signed:
                others = [k for k in list_ if k in self.helpers or shown.get(k) == list_]
                more = signed(self, list_, others)
            self.forgotten(client)
            if self.signed:
                assert isinstance(self.asked(AGREE, client, list_), Reply)
            if isinstance(self.asked(UNMASK, client, list_, **more), Reply):
                replied.add(client)
        return replied

    def readable(self, shown: Mapping[int, List]) -> list[List]:
        """The sets of honest clients whose sums the server can read: their seeds, and a key of each pair across."""
        openers, helping = self.openers(shown), len(self.helpers)
        seed = {u: helping + sum(u in shown[k] for k in openers) >= self.needed for u in self.honest}
        key = {u: helping + sum(u not in shown[k] for k in openers) >= self.needed for u in self.honest}
        sets = [s for size in range(1, len(self.honest) + 1) for s in combinations(self.honest, size)]
        return [
            s
            for s in sets
            if all(seed[u] for u in s) and all(key[a] or key[b] for a in s for b in self.honest if b not in s)
        ]

    def lists(self, client: int) -> Iterator[List]:
        """The lists that a client does not refuse."""
        others = [k for k in range(len(self.before)) if k != client]
        for size in range(self.needed - 1, len(others) + 1):
            for chosen in combinations(others, size):
                yield tuple(sorted((client, *chosen)))

    def all_shown(self) -> Iterator[dict[int, List]]:
        """Every way to show each honest client a list, or to ask it nothing."""
        for choice in product(*([None, *self.lists(k)] for k in self.honest)):
            yield {k: list_ for k, list_ in zip(self.honest, choice, strict=True) if list_ is not None}

    def sound(self, shown: Mapping[int, List]) -> bool:
        """Whether at most one sum can be read: of all honest clients in a list of as many as must last."""
        sums = self.readable(shown)
        lists = {tuple(k for k in list_ if k in self.honest) for list_ in shown.values()}
        return len(sums) <= 1 and set(sums) <= lists


def bound(n: int, threshold: float) -> int:
    """How many clients may work with the server, as the start of a run says: 2t > n + c."""
    return 2 * Terms(threshold, "", "").needed(n) - n - 1


@pytest.mark.parametrize(("n", "threshold"), [(4, 0.51), (5, 0.8)])
def test_no_lists_open_a_second_sum_with_as_many_helpers_as_are_allowed(n: int, threshold: float) -> None:
    masked = Masked(n, threshold, bound(n, threshold))
    ways = list(masked.all_shown())
    assert len(ways) in (125, 216)
    assert all(masked.sound(shown) for shown in ways)
    assert any(masked.readable(shown) for shown in ways)


@pytest.mark.parametrize(("n", "threshold"), [(4, 0.51), (5, 0.8)])
def test_with_one_helper_more_some_lists_do(n: int, threshold: float) -> None:
    masked = Masked(n, threshold, bound(n, threshold) + 1)
    assert not all(masked.sound(shown) for shown in masked.all_shown())


def two_of_five() -> dict[int, List]:
    """The lists of three by which a server without helpers opens the sum of clients 0 and 1 alone."""
    return {0: (0, 1, 2), 1: (0, 1, 3), 2: (0, 1, 2), 3: (0, 1, 3), 4: (0, 1, 4)}


def test_lists_that_differ_open_a_sum_of_two_where_nothing_is_signed() -> None:
    assert Masked(5, 0.51, 0, signed=False).readable(two_of_five()) == [(0, 1)]


def test_signed_lists_that_differ_open_nothing() -> None:
    masked = Masked(5, 0.51, 0)
    assert masked.openers(two_of_five()) == set()
    two = {0: (0, 1, 4), 1: (0, 1, 4), 2: (2, 3, 4), 3: (2, 3, 4)}
    assert not Masked(5, 0.51, 1).sound(two)  # client 4 helps, one more than may


@pytest.mark.nightly
def test_no_two_lists_of_five_clients_open_two_sums() -> None:
    masked = Masked(5, 0.51, bound(5, 0.51))
    every = {list_ for k in masked.honest for list_ in masked.lists(k)}
    for one, other in combinations(sorted(every), 2):
        for turn in product([one, other], repeat=5):
            assert masked.sound({k: list_ for k, list_ in enumerate(turn) if k in list_})


# -- each refusal -------------------------------------------------------------------------------------------------


def signed(masked: Masked, shown: List, signers: Sequence[int]) -> dict[str, Any]:
    texts = [as_bytes(masked.signature(k, shown).payload["signature"]) for k in signers]
    return {"signers": list(signers), "signatures": texts}


def test_a_client_signs_one_list_of_an_attempt() -> None:
    masked = Masked(5, 0.51, 0)
    first = masked.asked(AGREE, 0, (0, 1, 2, 3))
    assert as_bytes(masked.asked(AGREE, 0, (0, 1, 2, 3)).payload["signature"]) == as_bytes(
        first.payload["signature"]
    )
    second = masked.asked(AGREE, 0, (0, 1, 2))
    assert second.reason == "the server shows a second list of survivors of attempt 1 at round 1"


def test_what_opens_the_sum_is_the_signed_list_with_signatures_of_its_clients() -> None:
    masked, whole, part = Masked(5, 0.51, 0), (0, 1, 2, 3, 4), (0, 1, 2, 3)
    good = signed(masked, whole, (0, 1, 2))
    cases = {
        "goes on after 'agreed'": (whole, good, False),
        "not the list that the client has signed": (part, signed(masked, part, (0, 1, 2)), True),
        "client 1 has not signed this list": (
            whole,
            {**good, "signatures": [good["signatures"][0], good["signatures"][2], good["signatures"][1]]},
            True,
        ),
        "are not a subset": (whole, {**good, "signers": [0, 1, 1]}, True),
        "there are 2 signatures": (whole, signed(masked, whole, (0, 1)), True),
    }
    for said, (shown, more, agrees) in cases.items():
        masked.forgotten(0)
        if agrees:
            masked.asked(AGREE, 0, whole)
        assert said in masked.asked(UNMASK, 0, shown, **more).reason
    masked.forgotten(0)
    masked.asked(AGREE, 0, whole)
    assert isinstance(masked.asked(UNMASK, 0, whole, **good), Reply)
