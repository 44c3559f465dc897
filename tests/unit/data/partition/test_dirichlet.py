"""`dirichlet` against the recipe written down literally, one example at a time."""

import math

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.by_class import draw_classes
from fedlens.data.partition.dirichlet import dirichlet, distribution_function, log_weights
from fedlens.data.partition.drawing import streams

CIFAR = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
UNEVEN = np.random.default_rng(1).permutation(np.repeat(np.arange(5), [40, 0, 25, 10, 35]))


def one_by_one(labels: np.ndarray, seed: int, clients: int, alpha: float, size: int) -> np.ndarray:
    """The class counts of every client, each example drawn by itself with the same random numbers."""
    _, concentration, drawing = streams(seed, 3)
    left = np.bincount(labels)
    p = np.full(len(left), 1 / len(left))
    counts = np.zeros((clients, len(left)), int)
    for client in range(clients):
        weights = log_weights(p, alpha, concentration)
        for u in drawing.random_sample(size):
            alive = [c for c in range(len(left)) if left[c] > 0]
            cumulative = distribution_function(weights[alive])
            drawn = next(c for c, upto in zip(alive, cumulative, strict=True) if u < upto)
            left[drawn] -= 1
            counts[client, drawn] += 1
    return counts


def literal(
    labels: np.ndarray, rng: np.random.Generator, clients: int, alpha: float, size: int
) -> np.ndarray:
    """Appendix B.1 word for word, with NumPy's own Dirichlet: Eq. 5, and a new q where no mass is left."""
    left = np.bincount(labels)
    p = np.full(len(left), 1 / len(left))

    def draw(alive: np.ndarray) -> np.ndarray:
        q = np.zeros(len(left))
        if alpha == 0:
            q[rng.choice(alive, p=p[alive] / p[alive].sum())] = 1
        elif math.isinf(alpha):
            q[alive] = p[alive] / p[alive].sum()
        else:
            q[alive] = rng.dirichlet(alpha * p[alive])
        return q

    counts = np.zeros((clients, len(left)), int)
    for client in range(clients):
        q = draw(np.arange(len(left)))
        for _ in range(size):
            alive = np.flatnonzero(left)
            if q[alive].sum() <= 0:
                q = draw(alive)
            shares = np.cumsum(q[alive])  # as rng.choice(alive, p=...) draws, in a fifth of its time
            drawn = alive[np.searchsorted(shares, shares[-1] * rng.random(), side="right")]
            left[drawn] -= 1
            counts[client, drawn] += 1
    return counts


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.1, 1.0, 30.0, math.inf])
@pytest.mark.parametrize("labels", [UNEVEN, np.arange(110) % 7])
def test_drawing_in_blocks_is_drawing_one_by_one(labels: np.ndarray, alpha: float) -> None:
    for seed in range(20):
        p = dirichlet(labels, seed, clients=10, alpha=alpha)
        np.testing.assert_array_equal(
            p.class_counts(labels), one_by_one(labels, seed, clients=10, alpha=alpha, size=11)
        )


@pytest.mark.parametrize(
    "alpha", [0.3, *(pytest.param(alpha, marks=pytest.mark.nightly) for alpha in (0.0, 3.0, math.inf))]
)
def test_the_distribution_is_that_of_the_recipe_word_for_word(alpha: float) -> None:
    """Means and second moments of the class counts of each client, the first and the last ones too."""
    rng = np.random.default_rng(2)
    n = 800
    ours = np.stack(
        [dirichlet(UNEVEN, seed, clients=5, alpha=alpha).class_counts(UNEVEN) for seed in range(n)]
    )
    theirs = np.stack([literal(UNEVEN, rng, clients=5, alpha=alpha, size=22) for _ in range(n)])
    for power in (1, 2):
        a, b = ours.astype(float) ** power, theirs.astype(float) ** power
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / n)
        score = np.abs(a.mean(axis=0) - b.mean(axis=0)) / np.maximum(error, 1e-9)
        assert score[error > 0].max() < 4.5
        np.testing.assert_array_equal(a.mean(axis=0)[error == 0], b.mean(axis=0)[error == 0])


@pytest.mark.parametrize("alpha", [0.05, 1.0, 50.0])
def test_weights_are_a_draw_from_the_dirichlet_distribution_of_alpha_times_p(alpha: float) -> None:
    """Its mean is p and its variance p (1 - p) / (alpha + 1)."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    stream = np.random.RandomState(0)
    logs = np.stack([log_weights(p, alpha, stream) for _ in range(20_000)])
    q = np.exp(logs - logs.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    variance = p * (1 - p) / (alpha + 1)
    assert np.abs(q.mean(axis=0) - p).max() < 5 * np.sqrt(variance.max() / 20_000)
    np.testing.assert_allclose(q.var(axis=0), variance, rtol=0.08)


def test_alpha_zero_is_one_class_a_client_chosen_by_the_prior() -> None:
    labels = np.arange(400_000) % 4
    p = dirichlet(labels, 0, clients=2000, alpha=0.0, prior=[0.4, 0.3, 0.2, 0.1], size=10)
    counts = p.class_counts(labels)
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert np.abs((counts > 0).mean(axis=0) - [0.4, 0.3, 0.2, 0.1]).max() < 0.05


@pytest.mark.parametrize("alpha", [1e-6, 1e-150, 1e-250, 5e-324])
def test_a_tiny_alpha_is_close_to_zero_and_no_nan(alpha: float) -> None:
    counts = dirichlet(CIFAR, 0, clients=100, alpha=alpha).class_counts(CIFAR)
    assert ((counts > 0).sum(axis=1) == 1).all()


@pytest.mark.parametrize("alpha", [1e12, 1e300, 1.7e308, math.inf])
def test_a_huge_alpha_is_the_prior(alpha: float) -> None:
    p = dirichlet(CIFAR, 0, clients=10, alpha=alpha)
    assert p.emd(CIFAR) < 0.06
    assert (p.sizes() == 5000).all()


def test_a_class_without_mass_is_not_drawn_even_at_the_edge() -> None:
    """The smallest random number is exactly 0, where the distribution function of an empty class is 0 too."""
    for seed in range(8):
        q = log_weights(np.array([0.5, 0.5]), 0.0, np.random.RandomState(seed))
        drawn = draw_classes(
            np.array([5, 5]), np.zeros(3), lambda alive, q=q: distribution_function(q[alive])
        )
        assert drawn.tolist() == [q.argmax()] * 3


def test_the_prior_can_be_given_or_be_that_of_the_data() -> None:
    labels = np.repeat([0, 1, 2], [6000, 3000, 1000])
    uniform = (
        dirichlet(labels, 0, clients=10, alpha=math.inf, size=100).class_counts(labels).sum(axis=0) / 1000
    )
    data = (
        dirichlet(labels, 0, clients=10, alpha=math.inf, size=100, prior="data")
        .class_counts(labels)
        .sum(axis=0)
        / 1000
    )
    given = (
        dirichlet(labels, 0, clients=10, alpha=math.inf, size=100, prior=[0, 1, 4])
        .class_counts(labels)
        .sum(axis=0)
    )
    np.testing.assert_allclose(uniform, [1 / 3] * 3, atol=0.06)
    np.testing.assert_allclose(data, [0.6, 0.3, 0.1], atol=0.06)
    np.testing.assert_allclose(given / 1000, [0, 0.2, 0.8], atol=0.06)


def test_a_class_without_prior_is_never_drawn_and_does_not_count_towards_the_size() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 50])
    p = dirichlet(labels, 0, clients=10, alpha=0.1, prior=[0, 1, 1])
    assert p.class_counts(labels).sum(axis=0).tolist() == [0, 50, 50]


def test_which_examples_a_client_gets_is_random() -> None:
    labels = np.zeros(1000, int)
    rows = [dirichlet(labels, seed, clients=2, alpha=1.0)[0] for seed in range(2)]
    assert 200 < len(np.intersect1d(*rows)) < 300


def test_the_recipe_is_in_the_spec() -> None:
    p = dirichlet(CIFAR, 3, clients=100, alpha=0.1, prior=[1] * 10)
    expected = {
        "name": "dirichlet",
        "clients": 100,
        "alpha": 0.1,
        "prior": [1.0] * 10,
        "size": 500,
        "seed": 3,
    }
    assert p.spec == expected


def test_the_partition_is_pinned() -> None:
    found = [
        dirichlet(np.arange(1000) % 10, 7, clients=30, alpha=alpha).digest[:16]
        for alpha in (0, 0.1, math.inf)
    ]
    assert found == ["1f7927c965a7a9a0", "826f1fead741fc7e", "f1202bd96906f4d2"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"alpha": -0.1}, "'alpha' is -0.1, but must be at least 0"),
        ({"alpha": math.nan}, "'alpha' is nan"),
        ({"clients": 111}, "111 clients are more than the 110 examples.*at most 110"),
        ({"clients": 0}, "'clients' is 0"),
        ({"size": 12}, "10 clients of 12 need 120 examples, but there are only 110.*at most 11"),
        ({"size": 0}, "'size' is 0"),
        ({"prior": "even"}, "'prior' is 'even', but must be 'uniform' or 'data'"),
        ({"prior": [1.0] * 4}, "has 4 numbers, but there are 5 classes"),
        ({"prior": [1.0, 1.0, 1.0, 1.0, -1.0]}, "at least 0"),
        ({"prior": [0.0] * 5}, "not all 0"),
        ({"prior": [0.0, 1.0, 0.0, 0.0, 0.0]}, "10 clients are more than the 0 examples"),
        ({"prior": [math.nan] * 5}, "finite"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        dirichlet(UNEVEN, 0, **{"clients": 10, "alpha": 0.1, **settings})


def test_settings_are_checked_by_name_and_inf_may_be_a_word() -> None:
    for alpha in (-1, math.nan, "many"):
        with pytest.raises(ConfigError, match=r"data.partition.alpha"):
            read_settings(dirichlet, {"clients": 4, "alpha": alpha}, "data.partition")
    assert read_settings(dirichlet, {"clients": 4, "alpha": "inf"}, "p")["alpha"] == math.inf
    assert read_settings(dirichlet, {"clients": 4, "alpha": 1, "prior": [1, 2]}, "p")["prior"] == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"data.partition.prior"):
        read_settings(dirichlet, {"clients": 4, "alpha": 1, "prior": "even"}, "data.partition")


def test_labels_and_seed_may_be_given_by_keyword() -> None:
    labels = np.repeat([0, 1], 20)
    partition = dirichlet(labels, seed=3, clients=4, alpha=1.0)
    assert partition.digest == dirichlet(labels=labels, seed=3, clients=4, alpha=1.0).digest
    assert partition.digest == dirichlet(labels, 3, clients=4, alpha=1.0).digest
    assert partition.spec["seed"] == 3
