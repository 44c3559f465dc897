import math

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.dirichlet_classwise import dirichlet_classwise
from fedlens.data.partition.lda_multilabel import lda_multilabel
from fedlens.data.table import Table

LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(5), [40, 0, 25, 10, 35]))
PETS = ("background", "cat", "dog")


def scene(seed: int = 0, images: int = 300, classes: int = 6) -> list[list[int]]:
    """Images that show several classes, class 0 in most of them, the last one many times; some show none."""
    rng = np.random.default_rng(seed)
    share = 0.7 / np.arange(1, classes + 1)
    sets = [np.flatnonzero(rng.random(classes) < share).tolist() for _ in range(images)]
    return [marks + [classes - 1] * 20 * (classes - 1 in marks) for marks in sets]


def deciding(sets: list[list[int]], order: str, ignored: set[int]) -> list[int | None]:
    """The class that each image is dealt by, from the walk of the docstring taken literally."""
    classes = range(max(map(max, filter(None, sets))) + 1)
    counts = {c: sum(c in marks for marks in sets) for c in classes}
    walk = sorted(classes, key=lambda c: (counts[c], c)) if order == "rarest" else list(classes)
    found: list[int | None] = [None] * len(sets)
    for c in walk:
        for i, marks in enumerate(sets):
            if c not in ignored and c in marks and found[i] is None:
                found[i] = c
    return found


@pytest.mark.parametrize("settings", [{}, {"balance": True}, {"minimum": 15, "redraws": 0}])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 100.0, math.inf])
def test_on_labels_it_is_dirichlet_classwise(alpha: float, settings: dict[str, int]) -> None:
    for seed in range(5):
        p = lda_multilabel(LABELS, seed, clients=4, alpha=alpha, order="index", **settings)
        q = dirichlet_classwise(LABELS, seed, clients=4, alpha=alpha, **settings)
        assert p.digest == q.digest
        place = np.array([4, 0, 2, 1, 3])  # rarest first: 1, 3, 2, 4, 0
        p = lda_multilabel(LABELS, seed, clients=4, alpha=alpha, order="rarest", **settings)
        q = dirichlet_classwise(place[LABELS], seed, clients=4, alpha=alpha, **settings)
        assert p.digest == q.digest


@pytest.mark.parametrize("order", ["rarest", "index"])
@pytest.mark.parametrize("ignored", [set(), {0}, {2, 5}])
def test_all_images_of_a_class_that_are_left_when_it_comes_go_to_one_client(
    order: str, ignored: set[int]
) -> None:
    """With alpha = 0 a class has one client, so that it is seen which class each image was dealt by."""
    for seed in range(5):
        sets = scene(seed)
        found = deciding(sets, order, ignored)
        p = lda_multilabel(
            Table.of_sets(sets),
            seed,
            clients=3,
            alpha=0,
            order=order,  # type: ignore[arg-type]
            ignore=tuple(ignored),
        )
        owner = dict(zip(p.indices.tolist(), p.owners().tolist(), strict=True))
        owners: dict[int | None, list[int]] = {}
        for i, c in enumerate(found):
            owners.setdefault(c, []).append(owner[i])
        # The classless ones are even; a class is with one client, but for what the minimum of 1 moved.
        none = np.bincount(owners.pop(None), minlength=3)
        assert np.ptp(none) <= 1
        assert sum(len(who) - max(np.bincount(who)) for who in owners.values()) <= 2


def test_proportions_of_a_class_are_those_of_a_dirichlet_distribution() -> None:
    """Mean 1 / K and variance (1/K)(1 - 1/K) / (K alpha + 1), of a class that shares images with another."""
    sets = [[1]] * 100 + [[0, 1]] * 100 + [[0]] * 1000
    table = Table.of_sets(sets)
    shares = np.stack(
        [
            np.bincount(p.owners()[p.indices < 200], minlength=4) / 200
            for p in (lda_multilabel(table, seed, clients=4, alpha=0.5) for seed in range(600))
        ]
    )
    variance = 0.25 * 0.75 / (4 * 0.5 + 1)
    assert np.abs(shares.mean(axis=0) - 0.25).max() < 4 * (variance / 600) ** 0.5
    assert np.abs(shares.var(axis=0) / variance - 1).max() < 0.2


def test_nothing_is_lost_and_images_without_a_class_are_even() -> None:
    sets = scene() + [[]] * 41
    p = lda_multilabel(Table.of_sets(sets), 0, clients=4, alpha=0.1)
    assert sorted(p.indices.tolist()) == list(range(341))
    owner = np.empty(341, int)
    owner[p.indices] = p.owners()
    none = np.bincount(owner[[i for i, marks in enumerate(sets) if not marks]], minlength=4)
    assert np.ptp(none) <= 1
    assert none.sum() > 41


def test_a_background_that_is_ignored_does_not_take_everything() -> None:
    sets = [[0, 1 + i % 2] for i in range(200)]
    table = Table.of_sets(sets, classes=3)
    table = Table(table.marks, table.offsets, PETS, single=False)

    def classes_of_clients(**settings: object) -> list[int]:
        p = lda_multilabel(table, 1, clients=2, alpha=0, order="index", minimum=1, **settings)  # type: ignore
        return np.sort(p.sizes()).tolist()  # type: ignore[no-any-return]

    assert classes_of_clients() == [1, 199]
    assert classes_of_clients(ignore=["background"]) == [100, 100]
    assert classes_of_clients(ignore=[0]) == [100, 100]
    # The cats are even then; of the dogs, which one client has all of, one is moved for the minimum.
    assert classes_of_clients(ignore=["background", "cat"]) == [51, 149]


def test_the_minimum_is_reached() -> None:
    table = Table.of_sets(scene())
    for seed in range(10):
        p = lda_multilabel(table, seed, clients=8, alpha=0.05, minimum=20)
        assert p.sizes().min() >= 20


def test_the_partition_is_pinned_and_everything_is_recorded() -> None:
    p = lda_multilabel(Table.of_sets(scene()), 7, clients=4, alpha=0.5, ignore=[0])  # type: ignore[arg-type]
    assert p.digest[:16] == "2fa5e4993f6d67d9"
    assert p.spec == {
        "name": "lda-multilabel",
        "clients": 4,
        "alpha": 0.5,
        "minimum": 1,
        "redraws": 20,
        "balance": False,
        "order": "rarest",
        "ignore": [0],
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"alpha": -1.0}, r"'alpha' is -1.0.*\(alpha\)"),
        ({"alpha": math.nan}, "'alpha' is nan"),
        ({"clients": 201}, "201 clients are more than the 200 examples"),
        ({"minimum": 51}, r"4 clients of at least 51.*\(minimum\)"),
        ({"minimum": 0}, "'minimum' is 0"),
        ({"ignore": ["bakground"]}, r"no class 'bakground'.*\(ignore\); did you mean 'background'"),
        ({"ignore": [3]}, r"no class 3 to be ignored.*a number in 0 .. 2"),
        ({"ignore": [-1]}, "no class -1"),
        ({"ignore": [0, 1, 2]}, "no example has a class except ignored ones"),
        ({"order": "first"}, "'order' is 'first', but must be 'rarest' or 'index'"),
    ],
)
def test_what_cannot_be_dealt_is_an_error(settings: dict[str, object], what: str) -> None:
    table = Table.of_sets([[0, 1 + i % 2] for i in range(200)])
    table = Table(table.marks, table.offsets, PETS, single=False)
    with pytest.raises(ConfigError, match=what):
        lda_multilabel(table, 0, **{"clients": 4, "alpha": 0.1, **settings})  # type: ignore[arg-type]


def test_a_table_without_any_class_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no example has a class at all.*take iid or quantity"):
        lda_multilabel(Table.of_sets([[], [], []]), 0, clients=2, alpha=1)


def test_settings_are_checked_by_name() -> None:
    read = read_settings(lda_multilabel, {"clients": 4, "alpha": "inf", "ignore": ["sky", 3]}, "p")
    assert (read["alpha"], read["ignore"]) == (math.inf, ("sky", 3))
    for name, value in (("alpha", -1), ("ignore", "sky"), ("order", "last"), ("minimum", 0)):
        with pytest.raises(ConfigError, match=rf"data.partition.{name}"):
            read_settings(lda_multilabel, {"clients": 4, "alpha": 1, name: value}, "data.partition")
