"""Who takes part: uniformly, everyone, or as told."""

import numpy as np
import pytest

from fedlens.algorithms.selecting import SELECTS, Everyone, Fixed, Uniform, fixed, uniform
from fedlens.core.errors import ConfigError
from fedlens.core.protocol import FederationInfo, RoundContext
from fedlens.core.seeding import Rng

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


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 clients a round are asked for, and 6 of the 8") as caught:
        Uniform(7).size(INFO)
    assert caught.value.where == "select.clients_per_round"
    with pytest.raises(ConfigError, match="client 8 is asked for, and there are 8"):
        Fixed((0, 8)).size(INFO)
    with pytest.raises(ConfigError, match="both set"):
        uniform(clients_per_round=3, fraction=0.5)


def test_the_table() -> None:
    assert SELECTS.find("uniform")(fraction=0.5) == Uniform(None, 0.5)
    assert SELECTS.find("all")() == Everyone()
    assert SELECTS.find("fixed") is fixed
    assert fixed(clients=[2, 2]) == Fixed((2, 2))
