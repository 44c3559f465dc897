"""What an active server tries on secure sums of real sites, over TLS: each attack fails, and the site's log says why.

One federation of four sites with a client each, which sign by the keys of their sites; 3 of 4 must last.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fedlens.aggregate.secure.keys import Member, pieces, private_key, public
from fedlens.aggregate.secure.secagg_client import ATTEMPT, OWN, SEALED_BYTES, as_bytes
from fedlens.aggregate.secure.secagg_server import AGREE, KEYS, MASKED, SHARES, UNMASK
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import RoundRefused
from fedlens.base.parse_text import parse_json
from fedlens.core.protocol import Ask, ClientStates, Reply, Request, RoundContext
from fedlens.core.random import Rng, Secrets
from fedlens.core.states import Journal
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.engines.links.link import Link
from fedlens.engines.links.post import Post
from fedlens.identity import signing
from fedlens.identity.keys import KeyPair
from fedlens.run.build import Built
from fedlens.site.client_identity import PURPOSE, client_identity
from tests.agent_kit import DIGEST, SitesOverTls, proposal
from tests.seam.test_secure_sums_over_tls import made
from tests.seam.test_sites_over_tls import over
from tests.unit.engines.test_network import roster_of

Attack = Callable[[Ask, Request], tuple[Ask, Request] | None]
EVERY = (0, 1, 2, 3)
ROUNDS = 20


def as_it_is(ask: Ask, request: Request) -> None:
    """No attack."""


def told(ask: Ask, **changes: Any) -> Ask:
    """An ask with another part of the protocol."""
    return replace(ask, shared={**ask.shared, ATTEMPT: {**ask.shared[ATTEMPT], **changes}})


def listed(ask: Ask, *clients: int) -> list[int]:
    """These clients in the order of the ask."""
    return [client for client in ask.shared[ATTEMPT]["clients"] if client in clients]


@dataclass
class ActiveServer:
    """A server that has the sites' connections, and asks them as it likes."""

    algorithm: Any
    built: Built
    engine: Any
    sites: SitesOverTls
    link: Link
    run: str = "run"
    asked: list[tuple[Ask, list[Any]]] = field(default_factory=list)
    _round: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _exchange: Iterator[int] = field(default_factory=itertools.count)
    _read: dict[int, int] = field(default_factory=dict)

    def begin(self, run: str) -> None:
        """Proposes the same experiment in another run."""
        key, root, heard = self.sites.federation.key, self.sites.federation.root, set()
        self.run = run
        for roster in (None, self.sites.roster):
            for name in self.sites.names:
                message, body = proposal(key, root, roster, name, run)
                self.link.send(name, message, {message.fields.payload: body})
            while roster is None and heard < set(self.sites.names):
                for arrived in self.link.collect(1.0, ()):
                    heard.add(arrived.site)
                    arrived.file.close()
        self.engine.attach(Post(self.link, key, root, run, 1), self.sites.roster)

    def next(self) -> int:
        """The number of a round that no client was asked in."""
        return next(self._round)

    def round(
        self,
        round: int,
        attack: Attack = as_it_is,
        *,
        model: float | None = None,
        journal: Journal | None = None,
        stop: str | None = None,
        among: Any = EVERY,
    ) -> bool:
        """Whether a sum was opened, of a model with its own number in every leaf; stops before an ask of this name."""
        state = copy.deepcopy(self.algorithm.init(self.built.model, self.built.federation))
        for leaf in state["model"].values():
            leaf += (round if model is None else model) / 1000
        context = RoundContext(
            round, ROUNDS, self.built.federation, Rng((0, "round", round)), journal=journal or Journal(self.run),
            available=list(among),
        )  # fmt: skip
        steps, self.asked = self.algorithm.round(state, context), []
        ask = next(steps)
        while ask.op != stop:
            answers = self.answers(ask, attack, round)
            try:
                ask = steps.send(iter(answers))
            except StopIteration:
                return True
            except RoundRefused:
                return False
        steps.close()
        return False

    def answers(self, ask: Ask, attack: Attack, round: int) -> list[Any]:
        """The answers of all, in the order of the requests; each that is attacked is asked on its own."""
        changed = {request.client: attack(ask, request) for request in ask.requests}
        groups = [replace(ask, requests=[r for r in ask.requests if changed[r.client] is None])]
        groups += [replace(given[0], requests=[given[1]]) for given in changed.values() if given is not None]
        found = {}
        for group in filter(lambda each: each.requests, groups):
            found.update({a.client: a for a in self.engine.answer(group, round, next(self._exchange))})
        answers = [found[request.client] for request in ask.requests]
        self.asked.append((ask, answers))
        return answers

    def again(self, op: str, client: int, **changes: Any) -> Any:
        """The answer of a client to an ask of the last round, changed."""
        ask = told(next(ask for ask, _ in self.asked if ask.op == op), **changes)
        only = replace(ask, requests=[r for r in ask.requests if r.client == client])
        return self.answers(only, as_it_is, ask.shared[ATTEMPT]["attempt"]["round"])[0]

    def said(self, client: int) -> list[str]:
        """The failures in the log of a client's site since the last look."""
        log = self.sites.folder / "sites" / f"s{client}" / "log" / "site.jsonl"
        lines = log.read_text().splitlines()
        new = [parse_json(line) for line in lines[self._read.get(client, 0) :]]
        self._read[client] = len(lines)
        texts = [line["text"] for line in new if line["kind"] == "failure"]
        return [text.rpartition("SecureSumRefused: ")[2].removesuffix(" (ask).") for text in texts]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActiveServer]:
    """A server and four sites, whose aggregate is that of an approved experiment."""
    folder, built = tmp_path_factory.mktemp("federation"), made("secagg")
    parts = built.algorithm.parts
    approved = replace(parts, federation=replace(parts.federation, contract=DIGEST), rounds=ROUNDS)
    algorithm = ALGORITHMS.find("fedavg")(approved)
    own: dict[Any, Secrets] = {}
    program = replace(built.program, ops=algorithm.ops, secrets=own.__getitem__)
    sites = SitesOverTls(folder, program, roster_of(built), algorithm.takes)
    keys = {name: sites.keys[name].identity() for name in sites.names}
    terms = ExperimentTerms(peers={name: key.public for name, key in keys.items()})
    for row, (name, key) in enumerate(sorted(keys.items())):
        own[row] = Secrets(identity=client_identity(key, name, terms, {row}, torch.arange(4), 3))
    with ExitStack() as held:
        link, post = held.enter_context(sites.serving())
        held.enter_context(sites.working())
        sites.gather(link)
        with over(built, sites, post, ClientStates()) as driver:
            yield ActiveServer(algorithm, built, driver.engine, sites, link)
            sites.goodbye(link)
            held.pop_all().close()  # the agents end before the link does


@pytest.fixture(autouse=True)
def read(server: ActiveServer) -> None:
    """A test looks at what the sites say from here on."""
    for client in EVERY:
        server.said(client)


def test_a_server_that_restarts_with_one_site_fewer(server: ActiveServer) -> None:
    """It wants the sums of a round with a site and without it."""
    round, journal = server.next(), Journal(server.run)
    assert server.round(round, journal=journal)
    assert not any(server.said(client) for client in EVERY)
    journal.saved(round)  # a server that forgets the round
    journal.note(round, "attempt", {"number": 1})
    assert not server.round(round, journal=journal, among=EVERY[:3])
    late = f"attempt 2 at round {round} comes after attempt 1 at round {round} ('unmasked')"
    assert [server.said(client) for client in EVERY] == [[late], [late], [late], []]


def test_a_server_that_opens_the_later_of_two_masked_sums_and_then_the_first(server: ActiveServer) -> None:
    round, journal = server.next(), Journal(server.run)
    assert not server.round(round, journal=journal, stop=AGREE)
    masked = journal.noted(round, "masked-sum")
    assert masked is not None
    journal.saved(round)
    journal.note(round, "attempt", {"number": 1})
    assert server.round(round, journal=journal, among=EVERY[:3])
    journal.note(round, "masked-sum", masked)
    assert not server.round(round, journal=journal)
    for client in EVERY[:3]:
        (said,) = server.said(client)
        assert "goes on after 'masked', and the client answered 'unmasked'" in said
    assert server.said(3) == []  # it signs its list, and nobody else does


def test_a_new_run_with_the_same_seed(server: ActiveServer) -> None:
    model = server.next()
    assert server.round(model)
    server.begin(f"{server.run} again")
    assert not server.round(server.next(), model=model, among=EVERY[1:])
    for client in EVERY[1:]:
        assert server.said(client) == [
            "the client has been in an opened sum of updates of the same model: the difference of two such sums may be "
            "the update of one client"
        ]
    assert server.round(server.next())  # of another model


def test_one_site_gets_another_model(server: ActiveServer) -> None:
    def other_model(ask: Ask, request: Request) -> Any:
        if ask.op != MASKED or request.client != 2:
            return None
        model = {name: leaf + 1e-3 for name, leaf in ask.shared["model"].items()}
        return replace(ask, shared={**ask.shared, "model": model}), request

    assert server.round(server.next(), other_model)  # of the three others
    assert server.said(2) == ["the model, or what comes with it, is not what the round announced"]
    assert sorted(request.client for request in server.asked[-1][0].requests) == [0, 1, 3]


def test_two_invented_peers(server: ActiveServer) -> None:
    """Their keys are valid, and signed by a key of the server; clients of no site are not even taken."""
    forger = KeyPair.make()

    def invented(ask: Ask, request: Request) -> Any:
        if ask.op != SHARES or request.client > 1:
            return None
        keys, signatures = (
            pieces(ask.shared[ATTEMPT]["keys"], Member.BYTES),
            [*ask.shared[ATTEMPT]["signatures"]],
        )
        for client in (2, 3):
            at = ask.shared[ATTEMPT]["members"].index(client)
            made_up = [public(private_key(bytes([10 * at + part]) * 32)) for part in (1, 2)]
            keys[at] = bytes(Member(*made_up, bytes(16)))
            signatures[at] = signing.sign(forger, PURPOSE, [keys[at]])
        return told(ask, keys=b"".join(keys), signatures=signatures), request

    assert not server.round(server.next(), invented)
    for client in (0, 1):
        (said,) = server.said(client)
        assert re.fullmatch("the signature of client [23] is wrong", said)

    def more(ask: Ask, request: Request) -> Any:
        attempt = {**ask.shared[ATTEMPT]["attempt"], "cohort": [0, 1, 4, 5]}
        return (told(ask, attempt=attempt), request) if ask.op == KEYS and request.client < 2 else None

    assert not server.round(server.next(), more)
    assert "'keys' is asked with what it does not take: secagg.attempt.cohort" in server.said(0)[0]


def test_two_lists_of_survivors(server: ActiveServer) -> None:
    def lists(ask: Ask, request: Request) -> Any:
        if ask.op != AGREE:
            return None
        return told(
            ask, clients=listed(ask, 0, 1, 2) if request.client < 2 else listed(ask, 1, 2, 3)
        ), request

    round = server.next()
    assert not server.round(round, lists)
    for client in EVERY:
        assert server.said(client) == ["the survivors are not the list that the client has signed"]
    # The secrets of this attempt are gone. In another one, the server shows the lists before it asks for shares.
    journal = Journal(server.run)
    journal.note(round, "attempt", {"number": 1})
    assert not server.round(round, lists, journal=journal, stop=UNMASK)
    agree, replies = server.asked[-1]
    signatures = {reply.client: as_bytes(reply.payload["signature"]) for reply in replies}
    server.again(AGREE, 0, clients=listed(agree, 0, 1, 3))
    assert server.said(0) == [f"the server shows a second list of survivors of attempt 2 at round {round}"]
    three = listed(agree, 0, 1, 2)
    shown = {**agree.shared[ATTEMPT], "clients": three, "signers": three}
    shown["signatures"] = [signatures[client] for client in three]
    two = [request for request in agree.requests if request.client < 2]
    server.answers(replace(agree, op=UNMASK, requests=two, shared={ATTEMPT: shown}), as_it_is, round)
    assert server.said(0) == server.said(1) == ["client 2 has not signed this list of survivors"]


def test_unmask_asked_twice_with_other_survivors(server: ActiveServer) -> None:
    round = server.next()
    assert server.round(round)
    assert isinstance(server.again(UNMASK, 1), Reply)  # the same ask, from the log
    other = listed(server.asked[-1][0], 0, 1, 2)
    assert not isinstance(server.again(UNMASK, 0, clients=other), Reply)
    again = f"attempt 1 at round {round} goes on after 'agreed', and the client answered 'unmasked' of round {round}"
    assert server.said(0) == [f"{again} before"]


def test_shares_relabelled_to_another_client(server: ActiveServer) -> None:
    def relabelled(ask: Ask, request: Request) -> Any:
        if ask.op != MASKED or request.client != 0:
            return None
        sealed = request.payload[OWN].reshape(-1, SEALED_BYTES)[[1, 0, 3, 2]].flatten()
        return ask, replace(request, payload={**request.payload, OWN: sealed})

    assert server.round(server.next(), relabelled)
    (said,) = server.said(0)
    assert re.fullmatch("what client [0-3] sealed for client 0 is forged", said)
