"""Sizes by a law, against shares worked out in fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.data.partition.sizes import LAWS, draw_sizes, law_setting, refuse_unused, rounded


def literal(n: int, weights: list[int], minimum: int) -> list[int]:
    """Lift whoever is below the minimum, share the rest again, until nobody is; then largest remainders."""
    lifted: set[int] = set()
    while True:
        free = [k for k in range(len(weights)) if k not in lifted]
        rest, total = n - len(lifted) * minimum, sum(weights[k] for k in free)
        shares = {k: Fraction(rest * weights[k], total) for k in free}
        below = {k for k in free if shares[k] < minimum}
        if not below:
            break
        lifted |= below
    sizes = [minimum if k in lifted else math.floor(shares[k]) for k in range(len(weights))]
    by_remainder = sorted(free, key=lambda k: (math.floor(shares[k]) - shares[k], k))
    for k in by_remainder[: n - sum(sizes)]:
        sizes[k] += 1
    return sizes


def shares(n: int, weights: list[int], minimum: int = 1) -> list[int]:
    return rounded(n, np.log(np.array(weights, float)), minimum).tolist()


@pytest.mark.parametrize(
    ("n", "weights", "minimum", "sizes"),
    [
        (10, [5, 3, 2], 1, [5, 3, 2]),
        (10, [1, 1, 1], 1, [4, 3, 3]),
        (10, [10, 15, 15], 1, [2, 4, 4]),  # 2.5, 3.75, 3.75
        (6, [3, 1], 1, [5, 1]),  # 4.5, 1.5: equal remainders, and the first client gets it
        (10, [100, 1, 1], 2, [6, 2, 2]),
        (22, [6, 4, 1], 7, [8, 7, 7]),  # 12, 8, 2; then 9, 6, 7
        (6, [1, 100, 10_000], 2, [2, 2, 2]),
    ],
)
def test_shares_worked_out_by_hand(n: int, weights: list[int], minimum: int, sizes: list[int]) -> None:
    assert shares(n, weights, minimum) == sizes
    assert literal(n, weights, minimum) == sizes


def test_shares_are_those_in_fractions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        weights = (rng.integers(0, 10, rng.integers(1, 12)) ** rng.integers(1, 6) * 7 + 1).tolist()
        minimum = int(rng.integers(1, 4))
        n = len(weights) * minimum + int(rng.integers(0, 60))
        expected = literal(n, weights, minimum)
        found = shares(n, weights, minimum)
        assert sum(found) == n
        # Where two remainders are equal in fractions, rounding may tell them apart.
        assert np.abs(np.subtract(found, expected)).max() <= 1
        assert sorted(found) == sorted(expected)


def test_a_power_law_is_a_line_of_size_over_rank() -> None:
    sizes = draw_sizes(1_000_000, 100, "power-law", np.random.RandomState(0), parameter=1.5)
    ranked = np.sort(sizes)[::-1]
    slope = np.polyfit(np.log(np.arange(1, 101)), np.log(ranked), 1)[0]
    assert slope == pytest.approx(-1.5, abs=0.01)
    assert (sizes != ranked).any()


def test_log_normal_sizes_have_the_spread_asked_for() -> None:
    sizes = draw_sizes(10**9, 20_000, "log-normal", np.random.RandomState(0), parameter=0.7)
    logs = np.log(sizes)
    assert logs.std() == pytest.approx(0.7, rel=0.02)
    assert ((logs - logs.mean()) ** 3).mean() == pytest.approx(0, abs=0.02)


def test_dirichlet_sizes_have_the_variance_of_the_distribution() -> None:
    drawn = [
        draw_sizes(10**6, 5, "dirichlet", np.random.RandomState(i), parameter=2.0) / 10**6
        for i in range(2000)
    ]
    np.testing.assert_allclose(np.mean(drawn, axis=0), 0.2, atol=0.01)
    np.testing.assert_allclose(np.var(drawn, axis=0), 0.2 * 0.8 / (5 * 2 + 1), rtol=0.1)


@pytest.mark.parametrize(("law", "even"), [("log-normal", 0.0), ("power-law", 0.0), ("dirichlet", math.inf)])
def test_a_law_without_spread_is_equal_sizes(law: str, even: float) -> None:
    sizes = draw_sizes(103, 10, law, np.random.RandomState(0), parameter=even)
    assert sorted(sizes.tolist()) == [10] * 7 + [11] * 3


@pytest.mark.parametrize(
    ("law", "extreme"),
    [
        ("log-normal", 1e308),
        ("power-law", 1e308),
        ("dirichlet", 0.0),
        ("dirichlet", 1e-300),
        ("dirichlet", 1e-9),
    ],
)
def test_extremes_give_one_client_all_but_the_minimum(law: str, extreme: float) -> None:
    sizes = draw_sizes(1000, 50, law, np.random.RandomState(3), parameter=extreme, minimum=4)
    assert sorted(sizes.tolist()) == [4] * 49 + [804]


def test_the_default_of_each_law_is_one() -> None:
    for law, (name, default) in LAWS.items():
        a, b = (
            draw_sizes(999, 9, law, np.random.RandomState(1), parameter=value).tolist()
            for value in (None, default)
        )
        assert (a, default) == (b, 1.0)
        assert law_setting(law, {name: None}) == {name: 1.0}
        assert law_setting(law, {name: 0.5}) == {name: 0.5}


def test_the_sizes_are_pinned() -> None:
    found = {law: draw_sizes(100, 4, law, np.random.RandomState(7), minimum=3).tolist() for law in LAWS}
    assert found == {
        "log-normal": [63, 7, 12, 18],
        "power-law": [16, 24, 48, 12],
        "dirichlet": [51, 16, 30, 3],
    }


@pytest.mark.parametrize(
    ("law", "settings", "what"),
    [
        ("log-normal", {"parameter": -1.0}, "sigma is -1.0"),
        ("log-normal", {"parameter": math.inf}, "sigma is inf"),
        ("power-law", {"parameter": math.nan}, "exponent is nan"),
        ("power-law", {"parameter": math.inf}, "exponent is inf"),
        ("dirichlet", {"parameter": -0.1}, "alpha is -0.1"),
        ("zipf", {}, "unknown distribution of sizes 'zipf'.*known: dirichlet, log-normal, power-law"),
        ("power-law", {"minimum": 0}, "minimum is 0"),
        (
            "power-law",
            {"minimum": 4},
            "3 clients of at least 4 need 12 examples, but there are only 10.*at most 3",
        ),
    ],
)
def test_what_cannot_be_drawn_is_an_error(law: str, settings: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        draw_sizes(10, 3, law, np.random.RandomState(0), **settings)


def test_a_setting_of_another_law_is_refused() -> None:
    what = "'sigma' has no effect if sizes are power-law.*sizes = 'log-normal'"
    with pytest.raises(ConfigError, match=what):
        law_setting("power-law", {"sigma": 0.5, "exponent": 1.0})
    with pytest.raises(ConfigError, match=r"'minimum' has no effect if sizes are equal.*remove it"):
        refuse_unused("equal", {"sigma": None, "minimum": 2})
    refuse_unused("equal", {"sigma": None})
