"""Who takes part: uniformly, by size, everyone, or as told."""

import json
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest

from fedlens import Experiment
from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import (
    SELECTS,
    BySize,
    Everyone,
    Fixed,
    OnceEach,
    Poisson,
    SecretCohorts,
    Select,
    Uniform,
    by_size,
    fixed,
    repeats,
    uniform,
)
from fedlens.algorithms.fit import refuse_twice
from fedlens.algorithms.registry import default_table
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo, RoundContext
from fedlens.core.random import Rng
from fedlens.local.rules import ClientRule, Traits
from tests.unit.algorithms.goodness import chi_squared, limit

INFO = FederationInfo(np.array([5, 0, 3, 8, 0, 1, 2, 9]), 10, (1, 8, 8))  # six of eight hold data


def context(round: int = 1, seed: int = 0, info: FederationInfo = INFO) -> RoundContext:
    return RoundContext(round, 10, info, Rng((seed, "round", round)))


def test_uniform_draws_without_replacement_from_those_who_hold_data() -> None:
    for round in range(50):
        cohort = Uniform(4).cohort(context(round))
        assert len(cohort) == len(set(cohort)) == 4
        assert set(cohort) <= {0, 2, 3, 5, 6, 7}
        assert all(type(client) is int for client in cohort)


def test_every_client_is_as_likely_in_every_slot_whatever_its_size() -> None:
    rounds, info = 4000, FederationInfo(np.array([1, 1000, 1, 1, 1]), 10, (1,))
    counts = np.zeros((3, 5))
    for round in range(rounds):
        for slot, client in enumerate(Uniform(3).cohort(context(round, info=info))):
            counts[slot, client] += 1
    spread = np.sqrt(rounds * 0.2 * 0.8)
    assert np.abs(counts - rounds / 5).max() < 5 * spread


def test_the_draw_depends_on_seed_and_round_alone() -> None:
    assert Uniform(4).cohort(context(3)) == Uniform(4).cohort(context(3))
    draws = {tuple(Uniform(4).cohort(context(r, s))) for r in range(10) for s in range(3)}
    assert len(draws) > 20


def test_poisson_draws_each_client_by_itself_in_any_slot() -> None:
    info = FederationInfo(np.array([1, 0, *[1] * 9]), 10, (1, 8, 8))
    cohorts = [Poisson(0.3).cohort(context(round, info=info)) for round in range(4000)]
    assert all(len(set(cohort)) == len(cohort) and 1 not in cohort for cohort in cohorts)
    # Of independent draws the number of clients is binomial, and two clients are together in q^2 of the rounds.
    counts = np.bincount([len(cohort) for cohort in cohorts], minlength=11)
    expected = np.array([comb(10, k) * 0.3**k * 0.7 ** (10 - k) for k in range(11)])
    assert chi_squared(counts[:8], 4000 * expected[:8]) < limit(7)
    assert counts[0] > 0
    together = np.mean([{0, 5} <= set(cohort) for cohort in cohorts])
    assert together == pytest.approx(0.09, abs=0.02)
    first = np.bincount([cohort[0] for cohort in cohorts if cohort], minlength=11)[[0, *range(2, 11)]]
    assert chi_squared(first, np.full(10, first.sum() / 10)) < limit(9)
    assert Poisson(0.3).cohort(context(7, info=info)) == cohorts[7]


def test_once_each_asks_all_who_hold_data_once_before_any_returns() -> None:
    for seed in range(5):
        passes = [[OnceEach(4).cohort(context(2 * p + t, seed)) for t in (1, 2)] for p in range(3)]
        assert passes[0] == passes[1] == passes[2]
        assert [len(cohort) for cohort in passes[0]] == [4, 2]
        assert sorted(k for cohort in passes[0] for k in cohort) == [0, 2, 3, 5, 6, 7]
    orders = {tuple(OnceEach(4).order(INFO, seed)) for seed in range(50)}
    assert len(orders) > 40
    assert (OnceEach(4).cohorts(INFO), OnceEach(3).cohorts(INFO), OnceEach().cohorts(INFO)) == (2, 2, 1)
    assert SELECTS.find("once-each")(fraction=0.5) == OnceEach(None, 0.5)


def test_secret_cohorts_come_from_the_entropy_alone() -> None:
    def drawn(entropy: bytes, round: int = 1, seed: int = 0) -> list[int]:
        ctx = replace(context(round, seed), entropy=lambda n: entropy * n)
        return SecretCohorts(Poisson(0.5)).cohort(ctx)

    assert drawn(b"a") == drawn(b"a", round=2) == drawn(b"a", seed=3)
    assert len({tuple(drawn(bytes([k]))) for k in range(50)}) > 20
    assert SecretCohorts(Uniform(4)).size(INFO) == 4


@pytest.mark.parametrize("algorithm", ["scaffold", "splitfed", "split-relay"])
def test_a_round_may_draw_nobody(algorithm: str, tmp_path: Path) -> None:
    cut = {"cut": "1"} if algorithm.startswith("split") else {}
    Experiment(
        rounds=3,
        model="mlp",
        algorithm={"name": algorithm, **cut},
        select={"name": "poisson", "fraction": 0.05},
        local={"lr": 0.1, "steps": 1} if not cut else {"lr": 0.1},
        data={"dataset": "digits", "partition": {"name": "iid", "clients": 12}},
        engine="inline",
    ).run(tmp_path / "run")
    rounds = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["clients"] == 0 for line in rounds[1:]].count(True) in (1, 2)


@pytest.mark.parametrize(("fraction", "size"), [(0.1, 1), (0.5, 4), (0.01, 1), (1.0, 6), (0.74, 6)])
def test_a_fraction_counts_the_population_and_is_at_least_one(fraction: float, size: int) -> None:
    assert Uniform(fraction=fraction).size(INFO) == size
    assert len(Uniform(fraction=fraction).cohort(context())) == size


def test_everyone_by_default_and_by_name() -> None:
    assert sorted(Uniform().cohort(context())) == Everyone().cohort(context()) == [0, 2, 3, 5, 6, 7]
    assert Everyone().size(INFO) == Uniform().size(INFO) == 6


def test_the_named_clients_in_the_named_order() -> None:
    assert Fixed((7, 0, 0, 1)).cohort(context()) == [7, 0, 0, 1]
    assert Fixed((7, 0, 0, 1)).size(INFO) == 4


# -- by size -------------------------------------------------------------------------------------------------


class Told:
    """Randomness that is told what to draw: the order as it is, and one offset after the other."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def numpy(self, purpose: str) -> "Told":
        return self

    def permutation(self, clients: np.ndarray) -> np.ndarray:
        return clients

    def integers(self, n: int, size: int | None = None) -> int:
        assert size is None
        assert n == 28
        return self.offset


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6])
def test_over_all_offsets_a_client_appears_exactly_m_n_k_over_n_times_rounded_down_or_up(m: int) -> None:
    counts = []
    for offset in range(28):
        cohort = BySize(m).cohort(RoundContext(1, 1, INFO, Told(offset)))  # type: ignore[arg-type]
        assert len(cohort) == m
        counts.append(np.bincount(cohort, minlength=8))
    expected = m * INFO.sizes / 28
    np.testing.assert_array_equal(
        np.sum(counts, axis=0), m * INFO.sizes
    )  # to the last one: nothing is rounded
    assert all((count >= np.floor(expected)).all() and (count <= np.ceil(expected)).all() for count in counts)


def test_the_points_lie_where_they_should_by_hand() -> None:
    # Laid end to end: client 0 has 0..4, 2 has 5..7, 3 has 8..15, 5 has 16, 6 has 17..18, 7 has 19..27.
    # Two points 14 apart; the offset counts in halves of an example.
    for offset, cohort in [(0, [0, 3]), (3, [0, 3]), (4, [0, 5]), (10, [2, 7]), (16, [3, 7]), (27, [3, 7])]:
        assert BySize(2).cohort(RoundContext(1, 1, INFO, Told(offset))) == cohort  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["systematic", "replacement"])
def test_by_size_draws_in_proportion_whatever_the_order_of_the_clients(method) -> None:
    rounds, counts, slots = 3000, np.zeros(8), np.zeros((3, 8))
    for round in range(rounds):
        cohort = BySize(3, method=method).cohort(context(round))
        assert all(type(client) is int for client in cohort)
        counts += np.bincount(cohort, minlength=8)
        for slot, client in enumerate(cohort):
            slots[slot, client] += 1
    held = INFO.sizes > 0
    assert not counts[~held].any()
    assert chi_squared(counts[held], rounds * 3 * INFO.sizes[held] / 28) < limit(5)
    assert all(
        chi_squared(slot[held], rounds * INFO.sizes[held] / 28) < limit(5) for slot in slots
    )  # in every slot


def test_draws_with_replacement_are_independent() -> None:
    rounds, pairs = 4000, np.zeros((8, 8))
    for round in range(rounds):
        first, second = BySize(2, method="replacement").cohort(context(round))
        pairs[first, second] += 1
    p = INFO.sizes / 28
    held = np.outer(p, p) > 0
    assert chi_squared(pairs[held], rounds * np.outer(p, p)[held]) < limit(35)

    # Of two clients with one example each, the same one twice in half of the rounds.
    info = FederationInfo(np.array([1, 1]), 10, (1,))
    cohorts = [BySize(2, method="replacement").cohort(context(round, info=info)) for round in range(1000)]
    twice = sum(len(set(cohort)) == 1 for cohort in cohorts)
    assert chi_squared(np.array([twice, 1000 - twice]), np.array([500, 500])) < limit(1)


def test_systematic_cohorts_differ_in_more_than_their_offset() -> None:
    info = FederationInfo(np.full(6, 10), 10, (1,))
    cohorts = {frozenset(BySize(3).cohort(context(round, info=info))) for round in range(400)}
    assert len(cohorts) == 20  # every three of six: the order of the clients is drawn too


@pytest.mark.parametrize("method", ["systematic", "replacement"])
def test_by_size_depends_on_seed_and_round_alone_and_counts_like_uniform(method) -> None:
    select = BySize(4, method=method)
    assert select.cohort(context(3)) == select.cohort(context(3))
    assert len({tuple(select.cohort(context(r, s))) for r in range(10) for s in range(3)}) > 20
    for given in ({"fraction": 0.5}, {"fraction": 0.01}, {"clients_per_round": 2}, {}):
        assert by_size(method=method, **given).size(INFO) == uniform(**given).size(INFO)
        assert len(by_size(method=method, **given).cohort(context())) == uniform(**given).size(INFO)
    with pytest.raises(ConfigError, match="7 clients per round are set, but only 6 of the 8"):
        by_size(clients_per_round=7).size(INFO)
    with pytest.raises(ConfigError, match="both set"):
        by_size(clients_per_round=3, fraction=0.5)


def test_large_sizes_do_not_overflow() -> None:
    info = FederationInfo(np.array([2**31 - 1] * 64, dtype=np.int32), 10, (1,))
    cohort = BySize(64).cohort(context(info=info))
    assert sorted(cohort) == list(range(64))  # each is n / m long, and comes once
    assert not BySize(64).repeats(info)


def test_who_may_appear_twice() -> None:
    info = FederationInfo(np.array([5, 3, 2]), 10, (1,))
    assert [BySize(m).repeats(info) for m in (1, 2, 3)] == [False, False, True]  # 2 * 5 / 10 is once
    assert [BySize(m, method="replacement").repeats(info) for m in (1, 2)] == [False, True]
    assert not any(repeats(select, info) for select in (Uniform(3), Everyone(), Fixed((2, 0))))
    assert Fixed((2, 0, 2)).repeats(info)
    for select in (BySize(2), BySize(3), BySize(2, method="replacement"), Fixed((0, 0)), Uniform(2)):
        cohorts = [select.cohort(context(round, info=info)) for round in range(200)]
        assert any(len(set(cohort)) < len(cohort) for cohort in cohorts) == repeats(select, info), select


def test_a_rule_with_an_invariant_takes_no_selection_that_repeats() -> None:
    rule = ClientRule(name="variate", traits=Traits(invariant=True))
    info = FederationInfo(np.array([5, 3, 2]), 10, (1,))
    for select in (BySize(3), BySize(2, method="replacement"), Fixed((1, 1))):
        with pytest.raises(
            ConfigError, match="a client can appear twice in a round, and 'variate'"
        ) as caught:
            refuse_twice(rule, Mean(), select, info)
        assert caught.value.where == "select"
        refuse_twice(ClientRule(name="other"), Mean(), select, info)
    for select in (BySize(2), Uniform(3), Fixed((1, 2)), Everyone()):
        refuse_twice(rule, Mean(), select, info)


def test_what_a_selection_without_a_name_is() -> None:
    assert (
        default_table("select", "fedvc") == default_table("select", {"name": "fedvc"}) == {"name": "by-size"}
    )
    algorithm_2 = {"name": "by-size", "method": "replacement"}
    assert default_table("select", {"name": "fedprox", "scheme": "algorithm-2"}) == algorithm_2
    for algorithm in (
        "fedavg",
        {"name": "fedprox"},
        None,
        print,
        {"name": "fedavg", "scheme": "algorithm-2"},
    ):
        assert default_table("select", algorithm) == {"name": "uniform"}


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 clients per round are set, but only 6 of the 8") as caught:
        Uniform(7).size(INFO)
    assert caught.value.where == "select.clients_per_round"
    with pytest.raises(ConfigError, match="there is no client 8: the 8 clients"):
        Fixed((0, 8)).size(INFO)
    with pytest.raises(ConfigError, match="both set"):
        uniform(clients_per_round=3, fraction=0.5)


def test_the_table() -> None:
    assert SELECTS.find("uniform")(fraction=0.5) == Uniform(None, 0.5)
    assert SELECTS.find("all")() == Everyone()
    assert SELECTS.find("by-size")(fraction=0.5) == BySize(None, 0.5, "systematic")
    assert SELECTS.find("fixed") is fixed
    assert fixed(clients=[2, 2]) == Fixed((2, 2))


@pytest.mark.parametrize(
    "select", [Uniform(4), Poisson(1.0), BySize(3), Everyone(), Fixed((7, 0, 3)), OnceEach(6)], ids=repr
)
def test_clients_that_are_away_are_not_drawn(select: Select) -> None:
    for round in range(20):
        everybody = replace(context(round), available=range(INFO.clients))
        assert select.cohort(everybody) == select.cohort(context(round))  # the same draws
        cohort = select.cohort(replace(context(round), available=[1, 3, 7]))
        assert cohort
        assert set(cohort) <= {3, 7}
        assert select.cohort(replace(context(round), available=[])) == []
