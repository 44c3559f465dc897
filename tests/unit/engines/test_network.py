"""The engine `network` over sites in this process: the bits of `inline`, and what happens where sites fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedlens.algorithms.averaging import Averaging
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, ClientStates, Id, Reply, Request, RoundContext
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TensorField, tensors_in
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.data.partition.quorum import Quorum
from fedlens.data.partition.roster import Roster
from fedlens.engines.devices import Computing
from fedlens.engines.inline import inline
from fedlens.engines.links.post import Post
from fedlens.engines.network import NetworkEngine, Waits
from fedlens.files.chained_log import ChainedLog, read_chained
from fedlens.identity.keys import KeyPair
from fedlens.run.build import Built, build
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from tests.contract.contract_kit import nightly_but
from tests.unit.engines.loopback import Clock, Fault, LoopbackLink

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "fedbn": {"model": {"name": "small-cnn", "norm": "batch"}},
    "moon": {},
    "feddyn": {},
    "feddane": {},  # two exchanges
    "mime": {},
}


@cache
def built(algorithm: str) -> Built:
    settings = {
        "rounds": 3,
        "algorithm": algorithm,
        "model": "mlp",
        "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
        "data": {
            "dataset": "digits",
            "partition": {"name": "dirichlet-classwise", "clients": 4, "alpha": 1.0},
            "validation": 0.2,
            "validation_from": "client",
        },
        "engine": {"name": "inline", "device": "cpu"},
        **ALGORITHMS[algorithm],
    }
    return build(plan_of(Source(settings)), Path(), download=False)


def roster_of(made: Built) -> Roster:
    sizes = made.partition.sizes()
    return Roster.of(SiteCensus(f"s{k}", [CountedClient(f"s{k}", int(n))]) for k, n in enumerate(sizes))


class Federation:
    """An engine, its sites and its driver."""

    def __init__(
        self,
        made: Built,
        fault: Fault = lambda ask: None,
        computing: Computing = Computing("cpu"),  # noqa: B008
        **waits: Any,
    ) -> None:
        self.made, self.clock, self.roster = made, Clock(), roster_of(made)
        self.link = LoopbackLink(made.program, self.roster, self.clock, fault, made.algorithm.takes)
        self.engine = NetworkEngine(Waits(**{"deadline": 100.0, **waits}), max_share=1.0, computing=computing)
        self.post = Post(self.link, KeyPair.make(), bytes(32), "run")
        self.engine.attach(self.post, self.roster, self.clock)
        self.states = ClientStates()
        self.engine.open(made.program, self.states)
        self.driver = Driver(self.engine, self.states)

    def ask(self, order: Literal["request", "arrival"] = "request", clients: Sequence[int] = range(4)) -> Ask:
        """An ask for training."""
        algorithm, federation = self.made.algorithm, self.made.federation
        assert isinstance(algorithm, Averaging)
        expect = algorithm.train.expect(algorithm.parts.spec, most=federation.largest)
        shared = {"model": algorithm.init(self.made.model, federation)["model"], "lr": 0.1}
        return Ask("train", [Request(k) for k in clients], shared, expect, order=order)

    def train(self) -> list[Any]:
        """The answers to one ask for training."""
        return list(self.driver.exchange(self.ask(), 1, self.driver.number(1)))


def trained(made: Built, driver: Driver, rounds: int = 3) -> tuple[Any, list[Any]]:
    """The state after so many rounds, and the metrics of each."""
    state, metrics = made.algorithm.init(made.model, made.federation), []
    for round in range(1, rounds + 1):
        context = RoundContext(round, rounds, made.federation, Rng((0, "round", round)))
        state = driver.drive(made.algorithm.round(state, context), round)
        metrics.append(driver.drive(made.algorithm.evaluate(state, context), round))
    return state, metrics


def same(one: Any, other: Any) -> bool:
    left, right = tensors_in(one), tensors_in(other)
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("algorithm", nightly_but({"scaffold", "fedbn", "feddane"}, ALGORITHMS))
def test_the_bits_are_those_of_a_simulation(algorithm: str) -> None:
    made = built(algorithm)
    engine, states = inline(device="cpu"), ClientStates()
    engine.open(made.program, states)
    driver = Driver(engine, states)
    expected, metrics = trained(made, driver)
    engine.close()

    network = Federation(made)
    found, measured = trained(made, network.driver)
    assert same(found, expected)
    assert measured == metrics
    assert network.driver.tally.sums == driver.tally.sums
    assert not network.driver.tally.failures
    assert network.driver.tally.bytes_up == driver.tally.bytes_up
    for client, handle in network.states.snapshot().items():
        site = network.link.sites[f"s{client}"]
        assert same(site.states[handle["at-site"]], states.get(client))
    assert network.states.snapshot().keys() == states.snapshot().keys()
    network.engine.close()
    assert network.link.closed


def of(site: str, what: str) -> Fault:
    """A fault at one site."""
    return lambda ask: what if ask.fields.client == site else None


@pytest.mark.parametrize(
    ("what", "reason", "dropped"),
    [
        ("lost", "the deadline passed", {}),
        ("late", "the deadline passed", {"late": 1}),
        ("twice", None, {"again": 1}),
        ("stale", "the deadline passed", {"other": 1}),
        ("another's", "the deadline passed", {"other": 1}),
        ("forged", "the answer is not readable", {}),
        ("heavy", "weight", {}),
    ],
)
def test_one_bad_answer_fails_alone(what: str, reason: str | None, dropped: Mapping[str, int]) -> None:
    network = Federation(built("fedavg"), of("s1", what))
    assert network.roster.sizes()[1] < network.roster.sizes().max()  # whose weight "heavy" claims
    answers = network.train()
    assert [isinstance(answer, Reply) for answer in answers] == [True, reason is None, True, True]
    if reason is not None:
        assert reason in answers[1].reason
    network.link.release()
    network.link.fault = lambda ask: None
    assert all(isinstance(answer, Reply) for answer in network.train())
    assert network.engine.dropped == {"late": 0, "again": 0, "other": 0, **dropped}
    network.engine.close()


def test_only_the_last_asks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.engines.network._REMEMBERED", 6)
    network = Federation(built("fedavg"), of("s1", "late"))
    for _ in range(3):  # of 4 asks each
        network.train()
    network.link.release()
    network.train()
    assert network.engine.dropped == {"late": 1, "again": 0, "other": 2}
    assert len(network.engine._once) == 6
    network.engine.close()


def test_a_site_that_is_away_fails_before_the_deadline() -> None:
    network = Federation(built("fedavg"))
    network.link.away = {"s2"}
    began = network.clock.now
    reasons = [getattr(answer, "reason", None) for answer in network.train()]
    assert reasons == [None, None, "no contact with the site", None]
    assert network.clock.now - began < 50
    network.engine.close()


def test_an_exchange_closes_after_enough_replies_and_some_grace() -> None:
    network = Federation(built("fedavg"), of("s0", "lost"), enough=0.75, grace=5.0)
    began = network.clock.now
    assert [isinstance(answer, Reply) for answer in network.train()] == [False, True, True, True]
    assert 5 <= network.clock.now - began < 10
    network.engine.close()


def test_a_run_waits_for_its_sites_and_then_stops() -> None:
    network = Federation(built("fedavg"), min_sites=3, patience=20.0)
    assert network.engine.online() == [0, 1, 2, 3]
    network.link.away = {"s1"}
    assert network.engine.online() == [0, 2, 3]
    network.link.away = {"s1", "s3"}
    began = network.clock.now
    with pytest.raises(RunFailed, match="2 of 4 sites are there, and a round needs 3"):
        network.engine.online()
    assert 20 <= network.clock.now - began < 25
    assert network.engine.too_few({0, 2}, failed=2) is not None
    assert network.engine.too_few({0, 2}, failed=0) is None  # so few were selected
    assert network.engine.too_few({0, 2, 3}, failed=1) is None
    network.engine.close()


def test_no_site_has_more_of_the_weights_than_it_may() -> None:
    network = Federation(built("fedavg"))
    sizes = network.roster.sizes()
    heaviest, lightest = f"s{sizes.argmax()}", f"s{sizes.argmin()}"
    share = sizes.max() / sizes.sum()
    network.engine.max_share = share
    network.engine.attach(network.post, network.roster, network.clock)
    every, others = range(4), {row for row in range(4) if f"s{row}" != lightest}
    network.train()
    assert network.engine.too_few(every, failed=0) is None
    network.link.away = {lightest}
    network.train()
    found = network.engine.too_few(others, failed=1)
    assert found is not None
    assert found.startswith(
        f"'{heaviest}' has {sizes.max() / (sizes.sum() - sizes.min()):.1%} of all weights"
    )
    network.engine.online()
    assert network.engine.too_few(others, failed=1) is None
    list(network.driver.exchange(Ask("evaluate-own", [Request(int(sizes.argmax()))], {}), 2, 0))
    assert network.engine.too_few(others, failed=1) is None  # a measurement weighs nothing
    network.engine.close()


def test_in_a_secure_sum_a_client_weighs_its_examples() -> None:
    roster = Roster.of(
        SiteCensus(name, [CountedClient(name, size)]) for name, size in (("a", 10), ("b", 10), ("c", 30))
    )
    quorum, masked = Quorum(roster, 2, 0.6), Schema({"vector": TensorField((2,), torch.int32)})
    for rows, fault in (
        (range(3), None),
        (range(1, 3), "'c' has 75.0% of all weights, and at most 60.0% is allowed"),
    ):
        quorum.begin()
        for row in rows:
            quorum.counted(Reply(Id(1, 2, row), row, {"vector": torch.ones(2, dtype=torch.int32)}), masked)
        assert quorum.fault(rows, 0) == fault


def test_each_ask_has_a_line_in_the_log_of_answers(tmp_path: Path) -> None:
    ways = iter([None, "lost", "forged", "heavy"])
    network = Federation(built("fedavg"), fault=lambda ask: next(ways, None))
    network.post.log = log = ChainedLog(tmp_path / "answers.jsonl")
    network.train()
    network.engine.close()
    lines = [values for values, _, _ in read_chained(log.path)]
    asked = {ask.digest.hex() for site in network.link.sites.values() for ask in site.asked}
    decided = [line for line in lines if "kind" not in line]
    assert asked < {line["ask"] for line in decided}
    assert Counter(line["decision"] for line in decided).keys() == {"taken", "late", "refused"}
    (names,) = (line["fields"] for line in lines if line.get("kind") == "fields")
    assert "weight number" in names
    assert all(line["answer"] is None for line in decided if line["decision"] == "late")
    again = Post(network.link, KeyPair.make(), bytes(32), "run", 2, log=ChainedLog(log.path))
    assert again.tell("a", "goodbye", {}, {}).fields.head == log.head


def test_an_ask_carries_the_last_committed_state_and_those_of_checkpoints() -> None:
    network = Federation(built("scaffold"))
    made = network.made
    state = made.algorithm.init(made.model, made.federation)
    for round in (1, 2):
        context = RoundContext(round, 3, made.federation, Rng((0, round)))
        network.engine.keep({0: ["abc"]})
        before = dict(network.states.snapshot())
        state = network.driver.drive(made.algorithm.round(state, context), round)
        for k, site in enumerate(network.link.sites.values()):
            handle = before.get(k, {}).get("at-site")
            assert site.asked[-1].details["state"] == handle
            assert (handle is None) == (round == 1)
            assert site.asked[-1].details["keep"] == (["abc"] if k == 0 else [])
    network.engine.close()


def test_answers_in_arrival_order_may_come_in_a_later_exchange() -> None:
    network = Federation(built("fedavg"), of("s0", "late"))
    ask = network.ask("arrival", [0, 1])
    first = network.driver.exchange(ask, 1, 0)
    assert next(first).client == 1
    first.close()
    network.link.release()
    second = network.driver.exchange(network.ask("arrival", [2]), 2, 0)
    assert sorted(answer.client for answer in second) == [0, 2]
    network.engine.close()


def test_a_simulation_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="fedlens serve"):
        NetworkEngine().check({})
    made = built("fedavg")
    alone = NetworkEngine(Waits(min_sites=5))
    alone.attach(
        Post(LoopbackLink(made.program, roster_of(made), Clock()), KeyPair.make(), b"", "run"),
        roster_of(made),
    )
    with pytest.raises(ConfigError, match="has 4 sites, and a round needs 5"):
        alone.check({})
    alone.waits, alone.max_share = (
        Waits(),
        float(np.max(made.partition.sizes()) / made.partition.sizes().sum()) / 2,
    )
    with pytest.raises(ConfigError, match="of all examples"):
        alone.check({})
