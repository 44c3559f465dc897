"""`pachinko` against the recipe written down literally, one example at a time."""

import math

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.partition.dirichlet import log_weights
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.pachinko import pachinko, two_levels
from fedlens.data.table import Table

COARSE = np.array([7, 3, 7, 3, 5, 7, 5])  # groups in no order, and with gaps
COUNTS = [30, 22, 4, 0, 17, 9, 38]
UNEVEN = Table.of(np.random.default_rng(1).permutation(np.repeat(np.arange(7), COUNTS)), coarse=COARSE)
CIFAR100 = Table.of(np.arange(50_000) % 100, coarse=np.random.default_rng(0).permutation(np.arange(100) // 5))


def one_by_one(table: Table, seed: int, clients: int, alpha: float, beta: float, size: int) -> np.ndarray:
    """The class counts of every client, each example drawn by itself with the same random numbers.

    The number u falls on a group, and what it lies above that group's lower end falls on a class.
    """
    _, of_groups, of_classes, drawing = streams(seed, 4)
    names = sorted(set(COARSE.tolist()))
    left = np.bincount(table.labels, minlength=len(COARSE))
    by_group = [c for name in names for c in np.flatnonzero(name == COARSE)]
    counts = np.zeros((clients, len(COARSE)), int)
    for client in range(clients):
        theta = log_weights(np.full(len(names), 1 / len(names)), alpha * len(names), of_groups)
        drawn = log_weights(np.full(len(COARSE), 1 / len(COARSE)), beta * len(COARSE), of_classes)
        phi = dict(zip(by_group, drawn, strict=True))
        for u in drawing.random_sample(size):
            members = {
                g: [c for c in np.flatnonzero(name == COARSE) if left[c]] for g, name in enumerate(names)
            }
            groups = [g for g in members if members[g]]
            p = np.exp(theta[groups] - theta[groups].max())
            p /= p.sum()
            which = next(i for i in range(len(groups)) if u < p[: i + 1].sum() + 1e-15)
            within = members[groups[which]]
            logs = np.array([phi[c] for c in within])
            q = np.exp(logs - logs.max())
            q = q / q.sum() * p[which]
            low = p[:which].sum()
            fine = next(c for i, c in enumerate(within) if u < low + q[: i + 1].sum() + 1e-15)
            left[fine] -= 1
            counts[client, fine] += 1
    return counts


def literal(table: Table, rng: np.random.Generator, clients: int, size: int) -> np.ndarray:
    """Word for word with NumPy's own Dirichlet (alpha = 0.4, beta = 2): first a group, then a class of it."""
    names = np.unique(COARSE)
    left = np.bincount(table.labels, minlength=len(COARSE))
    counts = np.zeros((clients, len(COARSE)), int)
    for client in range(clients):
        theta = rng.dirichlet(np.full(len(names), 0.4))
        phi = [rng.dirichlet(np.full((name == COARSE).sum(), 2.0)) for name in names]
        for _ in range(size):
            alive = np.array([left[name == COARSE].sum() > 0 for name in names])
            group = rng.choice(len(names), p=theta * alive / (theta * alive).sum())
            members = np.flatnonzero(names[group] == COARSE)
            q = phi[group] * (left[members] > 0)
            fine = rng.choice(members, p=q / q.sum())
            left[fine] -= 1
            counts[client, fine] += 1
    return counts


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.1, 1.0, math.inf])
@pytest.mark.parametrize("beta", [0.0, 0.5, 10.0, math.inf])
def test_drawing_in_blocks_is_drawing_one_by_one(alpha: float, beta: float) -> None:
    for seed in range(4):
        p = pachinko(UNEVEN, seed, clients=10, alpha=alpha, beta=beta)
        found = p.class_counts(UNEVEN.labels)
        np.testing.assert_array_equal(found, one_by_one(UNEVEN, seed, 10, alpha, beta, 12))
        assert found.sum(axis=0).tolist() == COUNTS


def test_the_distribution_is_that_of_the_recipe_word_for_word() -> None:
    """Means and second moments of the class counts of each client, the first and the last ones too."""
    rng, n = np.random.default_rng(2), 350
    ours = np.stack(
        [
            pachinko(UNEVEN, seed, clients=4, alpha=0.4, beta=2.0, size=25).class_counts(UNEVEN.labels, 7)
            for seed in range(n)
        ]
    )
    theirs = np.stack([literal(UNEVEN, rng, clients=4, size=25) for _ in range(n)])
    for power in (1, 2):
        a, b = ours.astype(float) ** power, theirs.astype(float) ** power
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / n)
        score = np.abs(a.mean(axis=0) - b.mean(axis=0)) / np.maximum(error, 1e-9)
        assert score[error > 0].max() < 4.5
        np.testing.assert_array_equal(a.mean(axis=0)[error == 0], b.mean(axis=0)[error == 0])


def test_alpha_counts_for_each_group_and_beta_for_each_class() -> None:
    """Variances of symmetric Dirichlet distributions: (1 / G)(1 - 1 / G) / (G alpha + 1)."""
    labels = np.arange(1_200_000) % 6
    table = Table.of(labels, coarse=np.array([0, 1, 0, 1, 0, 1]))
    counts = pachinko(table, 0, clients=600, alpha=0.3, beta=2.0, size=400).class_counts(labels)
    groups = counts[:, ::2].sum(axis=1) / 400
    assert groups.mean() == pytest.approx(0.5, abs=0.07)
    assert groups.var() == pytest.approx(0.25 / 1.6, rel=0.12)
    filled = counts[counts[:, ::2].sum(axis=1) > 200][:, ::2]
    shares = filled / filled.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares.mean(axis=0), 1 / 3, atol=0.03)
    np.testing.assert_allclose(shares.var(axis=0), (2 / 9) / 7, rtol=0.25)


def test_an_exhausted_class_is_taken_over_by_its_own_group() -> None:
    """With one group a client, a client has one group, however few examples a class of it has."""
    labels = np.repeat([0, 1, 2, 3], [1, 99, 50, 50])
    table = Table.of(labels, coarse=np.array([0, 0, 1, 1]))
    for seed in range(10):
        counts = pachinko(table, seed, clients=2, alpha=0.0, beta=1.0, size=90).class_counts(labels)
        groups = counts[:, :2].sum(axis=1)
        assert set(groups.tolist()) <= {0, 90, 80, 10, 100}
        assert groups[0] in (0, 90)
        assert counts[:, 0].sum() <= 1


def test_an_exhausted_group_gives_way_to_the_others() -> None:
    theta, phi = np.log([0.2, 0.3, 0.5]), np.log([1.0, 4.0, 7.0, 2.0, 2.0])
    groups = np.array([0, 0, 1, 2, 2])
    np.testing.assert_allclose(
        two_levels(theta, phi, groups, np.arange(5)), np.cumsum([0.04, 0.16, 0.3, 0.25, 0.25])
    )
    np.testing.assert_allclose(two_levels(theta, phi, groups, np.array([1, 3])), [2 / 7, 1])
    np.testing.assert_allclose(two_levels(theta, phi, groups, np.array([2])), [1])


def test_clients_of_cifar_100_are_those_of_the_recipe() -> None:
    p = pachinko(CIFAR100, 0, clients=500)
    assert p.sizes().tolist() == [100] * 500
    assert len(np.unique(p.indices)) == 50_000
    groups = p.class_counts(CIFAR100.coarse[CIFAR100.labels])
    classes = p.class_counts(CIFAR100.labels)
    # Few groups a client, and of these nearly all classes.
    assert 2 < (groups > 10).sum(axis=1).mean() < 4
    assert (classes > 0).sum(axis=1).mean() > 2.5 * (groups > 0).sum(axis=1).mean()
    assert 1.4 < p.emd(CIFAR100.labels) < 1.8


@pytest.mark.parametrize("extreme", [1e-6, 1e-150, 1e-250, 5e-324, 0.0])
def test_a_tiny_concentration_is_one_class_a_client_and_no_nan(extreme: float) -> None:
    counts = pachinko(CIFAR100, 0, clients=50, alpha=extreme, beta=extreme, size=500).class_counts(
        CIFAR100.labels
    )
    assert ((counts > 0).sum(axis=1) <= 2).mean() > 0.6
    assert counts.sum() == 25_000


@pytest.mark.parametrize("extreme", [1e300, 1.7e308, math.inf])
def test_a_huge_concentration_is_even(extreme: float) -> None:
    assert pachinko(CIFAR100, 0, clients=5, alpha=extreme, beta=extreme).emd(CIFAR100) < 0.1


def test_which_examples_a_client_gets_is_random() -> None:
    table = Table.of(np.zeros(1000, int), coarse=np.array([0]))
    rows = [pachinko(table, seed, clients=2)[0] for seed in range(2)]
    assert 200 < len(np.intersect1d(*rows)) < 300


def test_the_recipe_is_in_the_spec_and_the_partition_pinned() -> None:
    p = pachinko(CIFAR100, 7, clients=300)
    assert p.spec == {"name": "pachinko", "clients": 300, "alpha": 0.1, "beta": 10.0, "size": 166, "seed": 7}
    assert p.digest[:16] == "2f5b5c31ac5874ad"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"alpha": -0.1}, "'alpha' is -0.1"),
        ({"beta": math.nan}, "'beta' is nan"),
        ({"clients": 121}, "121 clients are more than the 120 examples"),
        ({"size": 13}, "10 clients of 13 need 130 examples, but there are only 120.*at most 12"),
        ({"size": 0}, "'size' is 0"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        pachinko(UNEVEN, 0, **{"clients": 10, **settings})


def test_classes_without_groups_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"classes of mnist have no coarse classes.*such as cifar100"):
        pachinko(Table.of(np.arange(10), dataset="mnist"), 0, clients=2)
    with pytest.raises(DataError, match="3 coarse classes are given for 10 classes"):
        pachinko(Table.of(np.arange(10), coarse=np.zeros(3, int)), 0, clients=2)


def test_settings_are_checked_by_name() -> None:
    assert read_settings(pachinko, {"clients": 4, "alpha": "inf"}, "p")["alpha"] == math.inf
    for wrong in ({"alpha": -1}, {"beta": "x"}, {"size": 0}):
        with pytest.raises(ConfigError, match=rf"data\.partition\.{next(iter(wrong))}"):
            read_settings(pachinko, {"clients": 4, **wrong}, "data.partition")
