"""`dirichlet_classwise` against the recipe written down literally, and its repair against a slow one."""

import inspect
import math

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.dirichlet import log_weights
from fedlens.data.partition.dirichlet_classwise import _repair, dirichlet_classwise
from fedlens.data.partition.drawing import streams

CIFAR = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
UNEVEN = np.random.default_rng(1).permutation(np.repeat(np.arange(5), [40, 0, 25, 10, 35]))


def literal(labels: np.ndarray, seed: int, clients: int, alpha: float, balance: bool) -> np.ndarray:
    """The class counts of one draw, with proportions that are no logarithms, one class after another."""
    _, stream = streams(seed, 2)
    totals = np.bincount(labels)
    counts = np.zeros((clients, len(totals)), int)
    for c in np.flatnonzero(totals):
        logs = log_weights(np.full(clients, 1 / clients), alpha * clients, stream)
        if balance:
            logs[counts.sum(axis=1) >= len(labels) / clients] = -math.inf
        p = np.exp(logs - logs.max())
        p /= p.sum()
        u, last = stream.random_sample(), 0
        for k in range(clients):
            upto = min(math.floor(totals[c] * p[: k + 1].sum() + u + 1e-12), totals[c])
            counts[k, c], last = upto - last, upto
        assert last == totals[c]
    return counts


def one_by_one(counts: np.ndarray, minimum: int) -> np.ndarray:
    """The repair, an example at a time, with the whole table looked through each time."""
    counts = counts.copy()
    while counts.sum(axis=1).min() < minimum:
        taker = counts.sum(axis=1).argmin()
        giver = counts.sum(axis=1).argmax()
        kind = counts[giver].argmax()
        counts[giver, kind] -= 1
        counts[taker, kind] += 1
    return counts


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.1, 1.0, 30.0, math.inf])
def test_classes_are_cut_in_their_proportions_and_short_clients_are_helped(
    alpha: float, balance: bool
) -> None:
    for seed in range(15):
        p = dirichlet_classwise(UNEVEN, seed, clients=7, alpha=alpha, minimum=3, redraws=0, balance=balance)
        drawn = literal(UNEVEN, seed, 7, alpha, balance)
        np.testing.assert_array_equal(p.class_counts(UNEVEN), one_by_one(drawn, 3))


def test_a_repair_worked_out_by_hand() -> None:
    """Client 0 has three of class 0 and two of class 1; 1 has two of class 1; 2 has none; all need two."""
    owners = np.array([0, 0, 0, 0, 0, 1, 1])
    classes = np.array([0, 0, 0, 1, 1, 1, 1])
    # The largest of client 0 is class 0, and its last example goes; then both have two, and class 0 goes again.
    assert _repair(owners, classes, 3, 2).tolist() == [0, 2, 2, 0, 0, 1, 1]
    assert owners.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_a_repair_moves_only_what_is_missing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        classes = np.sort(rng.integers(0, 4, 60))
        owners = np.minimum(rng.geometric(0.4, 60) - 1, 9)
        repaired = _repair(owners, classes, 10, 4)
        before, after = (np.bincount(who, minlength=10) for who in (owners, repaired))
        assert after.min() >= 4
        assert (owners != repaired).sum() == np.maximum(4 - before, 0).sum()
        table = np.zeros((10, 4), int)
        np.add.at(table, (owners, classes), 1)
        found = np.zeros((10, 4), int)
        np.add.at(found, (repaired, classes), 1)
        np.testing.assert_array_equal(found, one_by_one(table, 4))


def drawn_again(seed: int, minimum: int, redraws: int) -> tuple[np.ndarray, int]:
    """(the class counts of six clients of three classes of 40, the number of draws), by the rule of the docstring."""
    _, stream = streams(seed, 2)
    draws = []
    for _ in range(redraws + 1):
        counts = np.zeros((6, 3), int)
        for c in range(3):
            logs = log_weights(np.full(6, 1 / 6), 1.8, stream)
            cumulative = np.cumsum(np.exp(logs)) / np.exp(logs).sum()
            counts[:, c] = np.diff(np.floor(cumulative * 40 + stream.random_sample()).clip(max=40), prepend=0)
        draws.append((np.maximum(minimum - counts.sum(axis=1), 0).sum(), counts))
        if draws[-1][0] == 0:
            break
    return one_by_one(min(draws, key=lambda draw: draw[0])[1], minimum), len(draws)


@pytest.mark.parametrize(("minimum", "redraws"), [(5, 20), (9, 3), (3, 0)])
def test_it_draws_again_before_it_repairs_the_best_draw(minimum: int, redraws: int) -> None:
    labels, draws = np.repeat([0, 1, 2], 40), set()
    for seed in range(40):
        expected, made = drawn_again(seed, minimum, redraws)
        draws.add(made)
        p = dirichlet_classwise(labels, seed, clients=6, alpha=0.3, minimum=minimum, redraws=redraws)
        np.testing.assert_array_equal(p.class_counts(labels), expected)
    assert 1 in draws
    assert max(draws) >= min(redraws + 1, 4)


def test_more_than_ten_short_clients_are_repaired_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "fedlens.data.partition.dirichlet_classwise"
    cut, made = inspect.unwrap(dirichlet_classwise).__globals__["_cut"], []
    monkeypatch.setattr(f"{module}._cut", lambda *given: made.append(1) or cut(*given))
    dirichlet_classwise(np.zeros(100, int), 0, clients=11, alpha=0.0, minimum=2)
    assert len(made) == 21  # ten clients are short each time
    dirichlet_classwise(np.zeros(100, int), 0, clients=12, alpha=0.0, minimum=2)
    assert len(made) == 22


def test_a_client_with_exactly_its_even_share_has_enough() -> None:
    labels = np.repeat(np.arange(4), 10)
    for seed in range(5):
        p = dirichlet_classwise(labels, seed, clients=4, alpha=0.0, balance=True)
        assert p.sizes().tolist() == [10] * 4


def test_where_a_minimum_is_out_of_reach_it_ends_all_the_same() -> None:
    """Every client has to have exactly two: no draw will ever do that."""
    p = dirichlet_classwise(UNEVEN, 0, clients=55, alpha=0.01, minimum=2, redraws=10**9)
    assert p.sizes().tolist() == [2] * 55
    few = dirichlet_classwise(UNEVEN, 0, clients=10, alpha=0.01, minimum=11)
    assert few.sizes().tolist() == [11] * 10


def test_proportions_are_those_of_the_dirichlet_distribution() -> None:
    """Mean 1 / K and variance (1 / K)(1 - 1 / K) / (K alpha + 1): alpha counts for each client."""
    labels = np.zeros(4000, int)
    drawn = [
        dirichlet_classwise(labels, seed, clients=4, alpha=0.5, redraws=0).sizes() / 4000
        for seed in range(1500)
    ]
    np.testing.assert_allclose(np.mean(drawn, axis=0), 0.25, atol=0.025)
    np.testing.assert_allclose(np.var(drawn, axis=0), 0.25 * 0.75 / 3, rtol=0.12)


def test_rounding_favours_no_client() -> None:
    """Three examples of a class over seven clients of equal proportions: each gets 3 / 7 on average."""
    labels = np.concatenate([np.repeat(0, 3), np.repeat(1, 700)])
    counts = sum(
        dirichlet_classwise(labels, seed, clients=7, alpha=math.inf).class_counts(labels)
        for seed in range(3000)
    )
    np.testing.assert_allclose(counts[:, 0] / 3000, 3 / 7, atol=0.045)
    np.testing.assert_allclose(counts[:, 1] / 3000, 100, atol=0.01)


def test_alpha_zero_is_one_client_a_class_and_inf_is_even() -> None:
    counts = dirichlet_classwise(CIFAR, 0, clients=3, alpha=0.0).class_counts(CIFAR)
    assert ((counts > 0).sum(axis=0) == 1).all()
    even = dirichlet_classwise(CIFAR, 0, clients=10, alpha=math.inf)
    assert np.abs(even.class_counts(CIFAR) - 500).max() <= 1


@pytest.mark.parametrize("alpha", [1e-6, 1e-150, 1e-250, 5e-324])
@pytest.mark.parametrize("balance", [False, True])
def test_a_tiny_alpha_is_close_to_zero_and_no_nan(alpha: float, balance: bool) -> None:
    p = dirichlet_classwise(CIFAR, 0, clients=100, alpha=alpha, balance=balance)
    assert p.sizes().sum() == 50_000
    assert ((p.class_counts(CIFAR) > 1).sum(axis=0) == 1).all()


@pytest.mark.parametrize("alpha", [1e12, 1e300, 1.7e308])
def test_a_huge_alpha_is_even_shares(alpha: float) -> None:
    assert dirichlet_classwise(CIFAR, 0, clients=10, alpha=alpha).emd(CIFAR) < 0.01


def test_balance_makes_sizes_closer() -> None:
    for seed in range(5):
        plain, balanced = (
            dirichlet_classwise(CIFAR, seed, clients=20, alpha=0.3, balance=balance).sizes()
            for balance in (False, True)
        )
        assert balanced.std() < plain.std()
        assert balanced.max() <= 2500 + 5000


def test_sizes_are_unequal_and_nothing_is_lost() -> None:
    p = dirichlet_classwise(CIFAR, 0, clients=10, alpha=0.1)
    assert sorted(p.indices.tolist()) == list(range(50_000))
    assert p.sizes().std() > 1000
    assert p.emd(CIFAR) > 0.8


def test_which_examples_a_client_gets_is_random() -> None:
    labels = np.zeros(1000, int)
    rows = [dirichlet_classwise(labels, seed, clients=2, alpha=math.inf)[0] for seed in range(2)]
    assert 200 < len(np.intersect1d(*rows)) < 300


def test_the_recipe_is_in_the_spec() -> None:
    expected = {
        "name": "dirichlet-classwise",
        "clients": 10,
        "alpha": 0.1,
        "minimum": 1,
        "redraws": 20,
        "balance": False,
        "seed": 3,
    }
    assert dirichlet_classwise(CIFAR, 3, clients=10, alpha=0.1).spec == expected


def test_the_partitions_are_pinned() -> None:
    labels = np.arange(1000) % 10
    found = [
        dirichlet_classwise(labels, 7, clients=30, alpha=0.1, minimum=5, balance=balance).digest[:16]
        for balance in (False, True)
    ]
    assert found == ["c48a8070b15edd74", "6ac211870caa8ca6"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"alpha": -0.1}, "'alpha' is -0.1, but must be at least 0"),
        ({"alpha": math.nan}, "'alpha' is nan"),
        ({"clients": 111}, "111 clients are more than the 110 examples.*at most 110"),
        ({"clients": 0}, "'clients' is 0"),
        ({"minimum": 12}, "10 clients of at least 12 need 120 examples, but there are only 110.*at most 11"),
        ({"minimum": 0}, "'minimum' is 0"),
        ({"redraws": -1}, "'redraws' is -1"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        dirichlet_classwise(UNEVEN, 0, **{"clients": 10, "alpha": 0.1, **settings})


def test_settings_are_checked_by_name() -> None:
    assert read_settings(dirichlet_classwise, {"clients": 4, "alpha": "inf"}, "p")["alpha"] == math.inf
    for wrong in ({"alpha": -1}, {"minimum": 0}, {"redraws": -1}, {"balance": "much"}):
        with pytest.raises(ConfigError, match=rf"data\.partition\.{next(iter(wrong))}"):
            read_settings(dirichlet_classwise, {"clients": 4, "alpha": 1.0, **wrong}, "data.partition")
