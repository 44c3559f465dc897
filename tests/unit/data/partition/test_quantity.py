"""`quantity`: sizes by a law, classes in proportion."""

import math

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.iid import iid
from fedlens.data.partition.quantity import _kinds, _proportional, _settle, quantity
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
        assert ((counts == np.floor(wanted)) | (counts == np.ceil(wanted))).all()
        assert counts.sum(axis=0).tolist() == [400, 0, 250, 103, 247]
        assert np.ptp(p.sizes()) > 100


def rounded(totals: np.ndarray, sizes: np.ndarray, seed: int) -> np.ndarray:
    """int64 [clients, classes], after it was checked: sums as given, every cell rounded down or up."""
    drawn = _proportional(totals, sizes, np.random.RandomState(seed))
    counts = np.zeros((len(sizes), len(totals)), int)
    np.add.at(counts, (np.repeat(np.arange(len(sizes)), sizes), drawn), 1)
    wanted, n = np.outer(sizes, totals), totals.sum()
    assert counts.sum(axis=0).tolist() == totals.tolist()
    assert counts.sum(axis=1).tolist() == sizes.tolist()
    assert ((counts == wanted // n) | (counts == -(-wanted // n))).all(), (totals, sizes)
    return counts


def test_a_share_that_is_a_whole_number_is_met() -> None:
    """Of 12, 7 and 5 examples a client of 6 has 3 of the first class, whatever the others have."""
    labels = np.repeat([0, 1, 2], [12, 7, 5])
    for seed in range(30):
        p = quantity(labels, seed, clients=3, sizes="log-normal", sigma=0.5)
        wanted = ideal(labels, p.sizes())
        whole = wanted == np.floor(wanted)
        np.testing.assert_array_equal(p.class_counts(labels)[whole], wanted[whole])
    assert rounded(np.array([12, 7, 5]), np.array([6, 7, 11]), 0)[0, 0] == 3


def test_any_sums_are_met_with_whole_shares_too() -> None:
    """Classes that divide each other, so that many shares are whole and others are not."""
    rng = np.random.default_rng(0)
    for seed in range(400):
        totals = 2 ** rng.integers(0, 6, rng.integers(1, 8))
        clients = min(int(rng.integers(1, 15)), totals.sum())
        cuts = np.sort(rng.permutation(np.arange(1, totals.sum()))[: clients - 1])
        rounded(totals, np.diff(np.concatenate([[0], cuts, [totals.sum()]])), seed)


def test_a_class_that_is_one_short_in_the_end_gets_it() -> None:
    """Rare: two of 170,000 drawn tables; the sums are off by one after the last client."""
    rounded(np.array([8, 8, 1, 1, 8, 4, 8]), np.array([4, 6, 1, 3, 3, 2, 19]), 109944)
    rounded(np.array([15, 15, 10, 15, 10, 10, 10]), np.array([9, 45, 17, 14]), 58685)


def test_ones_are_moved_by_way_of_another_class_where_that_is_the_only_way() -> None:
    """Classes of 4, 3 and 1 examples: half of a client of 2 are of class 0, exactly, so nothing is added there.

    Clients of 2, 2, 1 and 3 hold their ones in the classes 2, 2, 1, 1, and 0, 1, 1, 2 would be right.
    """
    totals, sizes = np.array([4, 3, 1]), np.array([2, 2, 1, 3])
    more = np.eye(3, dtype=bool)[[2, 2, 1, 1]]
    _settle(more, np.array([1, 0, -1]), totals, sizes)
    assert more.sum(axis=0).tolist() == [1, 2, 1]
    assert more.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert not more[:2, 0].any()


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
        ({"sizes": "equal"}, "unknown distribution of sizes 'equal'"),
        ({"alpha": 1.0}, "'alpha' has no effect if sizes are log-normal.*'dirichlet'"),
        ({"sizes": "dirichlet", "sigma": 1.0}, "'sigma' has no effect"),
        ({"clients": 1001}, "1001 clients are more than the 1000 examples"),
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
