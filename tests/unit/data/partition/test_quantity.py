"""`quantity`: sizes by a law, classes in proportion."""

import math

import numpy as np
import pytest

from fedlens.core.errors import ConfigError
from fedlens.core.registry import read_settings
from fedlens.data.partition.iid import iid
from fedlens.data.partition.quantity import _kinds, _proportional, quantity
from fedlens.data.table import Table

UNEVEN = np.random.default_rng(1).permutation(np.repeat(np.arange(5), [400, 0, 250, 103, 247]))


def ideal(labels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return sizes[:, None] * np.bincount(labels) / len(labels)


def test_a_case_worked_out_by_hand() -> None:
    """Sizes 6, 3, 3 of 8 and 4 examples: each has exactly two thirds of class 0."""
    drawn = _proportional(np.array([8, 4]), np.array([6, 3, 3]), np.random.RandomState(0))
    assert drawn.tolist() == [0, 0, 0, 0, 1, 1] + [0, 0, 1] * 2


@pytest.mark.parametrize("law", ["log-normal", "power-law", "dirichlet"])
def test_classes_are_in_proportion_as_far_as_whole_numbers_allow(law: str) -> None:
    for seed in range(10):
        p = quantity(UNEVEN, seed, clients=17, sizes=law)
        counts = p.class_counts(UNEVEN)
        wanted = ideal(UNEVEN, p.sizes())
        assert ((counts == np.floor(wanted)) | (counts == np.floor(wanted) + 1)).all()
        assert counts.sum(axis=0).tolist() == [400, 0, 250, 103, 247]
        assert np.ptp(p.sizes()) > 100


def test_sizes_alone_differ_and_a_random_draw_is_another_thing() -> None:
    labels = np.arange(20_000) % 10
    p = quantity(labels, 0, clients=100, sizes="log-normal", sigma=1.5)
    random = iid(labels, 0, clients=100, sizes="log-normal", sigma=1.5)
    assert sorted(p.sizes().tolist())[-1] > 1000
    # At most one of each class off, with C classes and size n_k: EMD <= C / n_k.
    assert (p.client_emds(labels) <= 10 / p.sizes()).all()
    assert p.emd(labels) < 0.03
    assert random.emd(labels) > 4 * p.emd(labels)


def test_a_client_of_one_example_has_any_class() -> None:
    """Classes are left over evenly, and clients come in no order."""
    labels = np.repeat([0, 1], [900, 100])
    counts = np.zeros((1000, 2))
    for seed in range(40):
        counts += quantity(labels, seed, clients=1000, sizes="power-law", exponent=0).class_counts(labels)
    assert counts[:, 1].sum() == 4000
    halves = counts[:500, 1].sum(), counts[500:, 1].sum()
    assert abs(halves[0] - halves[1]) < 5 * math.sqrt(4000)


def test_which_examples_a_client_gets_is_random() -> None:
    labels = np.zeros(1000, int)
    rows = [quantity(labels, seed, clients=2, sizes="power-law", exponent=0)[0] for seed in range(2)]
    assert 200 < len(np.intersect1d(*rows)) < 300


def test_an_example_of_several_classes_stands_for_the_rarest() -> None:
    sets = [[0, 1], [0], [0, 2], [], [1, 2, 0], [0, 1]]  # 0 five times, 1 three times, 2 twice
    assert _kinds(Table.of_sets(sets)).tolist() == [1, 0, 2, 3, 2, 1]
    assert _kinds(Table.of_sets([[], []], classes=3)).tolist() == [3, 3]
    table = Table.of_sets(sets * 40)
    p = quantity(table, 0, clients=3, sizes="power-law")
    kinds = _kinds(table)
    assert np.abs(p.class_counts(kinds) - ideal(kinds, p.sizes())).max() <= 1
    assert p.emd(table) < 0.03


def test_the_recipe_is_in_the_spec() -> None:
    expected = {
        "name": "quantity",
        "clients": 4,
        "sizes": "dirichlet",
        "alpha": 0.5,
        "minimum": 2,
        "seed": 1,
    }
    assert quantity(UNEVEN, 1, clients=4, sizes="dirichlet", alpha=0.5, minimum=2).spec == expected


def test_the_partitions_are_pinned() -> None:
    labels = np.arange(1000) % 10
    found = [
        quantity(labels, 7, clients=30, sizes=law).digest[:16]
        for law in ("log-normal", "power-law", "dirichlet")
    ]
    assert found == ["2de8b7e2cf54cf73", "d2b0ea90256cd3fe", "418a668a8839536b"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"sizes": "equal"}, "no law of sizes 'equal'"),
        ({"alpha": 1.0}, "'alpha' has no use with sizes that are log-normal.*'dirichlet'"),
        ({"sizes": "dirichlet", "sigma": 1.0}, "'sigma' has no use"),
        ({"clients": 1001}, "1001 clients cannot share 1000 examples"),
        ({"minimum": 101}, "10 clients of at least 101 need 1010"),
        ({"minimum": 0}, "minimum is 0"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        quantity(UNEVEN, 0, **{"clients": 10, **settings})


def test_settings_are_checked_by_name() -> None:
    given = {"clients": 2, "sizes": "dirichlet", "alpha": "inf"}
    assert read_settings(quantity, given, "p")["alpha"] == math.inf
    for wrong in ({"sizes": "equal"}, {"alpha": -1}, {"sigma": math.inf}, {"minimum": 0}):
        with pytest.raises(ConfigError, match=rf"data\.partition\.{next(iter(wrong))}"):
            read_settings(quantity, {"clients": 2, **wrong}, "data.partition")
