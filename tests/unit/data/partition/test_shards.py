import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.partition.shards import shards

FASHION = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))


def test_ten_clients_of_fashion_mnist_have_3000_of_two_classes_each() -> None:
    p = shards(FASHION, 0, clients=10)
    counts = p.class_counts(FASHION)
    assert ((counts == 3000).sum(axis=1) == 2).all()
    assert (p.sizes() == 6000).all()
    assert len(p.indices) == 60_000


def test_a_hundred_clients_of_two_classes_use_everything() -> None:
    p = shards(FASHION, 5, clients=100)
    counts = p.class_counts(FASHION)
    assert sorted(set(counts.ravel().tolist())) == [0, 300]
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert len(p.indices) == 60_000


def test_pairs_of_classes_vary_and_do_not_depend_on_the_place_of_the_client() -> None:
    labels = np.repeat(np.arange(10), 40)
    pairs, first, last = set(), np.zeros(10), np.zeros(10)
    for seed in range(300):
        has = shards(labels, seed, clients=20).class_counts(labels) > 0
        pairs |= {tuple(np.flatnonzero(row)) for row in has}
        first += has[0]
        last += has[-1]
    assert len(pairs) == 45
    for counted in (first, last):  # 600 choices over 10 classes: 60 each, standard deviation below 7
        assert np.abs(counted - 60).max() < 30


def test_what_cannot_be_used_is_discarded_and_shards_are_as_large_as_they_can_be() -> None:
    labels = np.repeat([0, 1, 2], [10, 7, 5])
    p = shards(labels, 0, clients=3)
    counts = p.class_counts(labels)
    # 6 shards: of size 3 there are min(3, 3) + 2 + 1 = 6; of size 4 only 2 + 1 + 1.
    assert counts.sum(axis=0).tolist() == [9, 6, 3]
    assert ((counts == 3).sum(axis=1) == 2).all()


def test_superfluous_shards_are_discarded_at_random() -> None:
    labels = np.repeat(np.arange(10), 60)
    used = [shards(labels, seed, clients=7).class_counts(labels).sum(axis=0) // 30 for seed in range(50)]
    assert all(count.sum() == 14 and count.max() <= 2 for count in used)
    assert len({tuple(count) for count in used}) > 40


def test_a_class_serves_a_client_once_even_where_it_has_more() -> None:
    labels = np.repeat([0, 1, 2], [1000, 10, 10])
    counts = shards(labels, 0, clients=5).class_counts(labels)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert (
        counts[:, 0] > 0
    ).all()  # the two small classes have five shards only if each has 10 // 4 = 2 or 3


def test_all_classes_for_every_client_is_possible() -> None:
    labels = np.repeat(np.arange(4), 8)
    assert (shards(labels, 0, clients=8, classes_per_client=4).class_counts(labels) == 1).all()


def test_mcmahan_sorts_cuts_and_deals() -> None:
    p = shards(FASHION, 0, clients=100, scheme="mcmahan")
    counts = p.class_counts(FASHION)
    assert (p.sizes() == 600).all()
    assert set(counts.ravel().tolist()) == {0, 300, 600}  # 600: both shards of one class, which happens here


def test_mcmahan_keeps_shards_equal_and_discards_at_random() -> None:
    labels = np.repeat(np.arange(3), [11, 11, 11])
    left_over = set()
    for seed in range(60):
        p = shards(labels, seed, clients=5, scheme="mcmahan")
        assert p.sizes().tolist() == [6] * 5
        left_over |= set(range(33)) - set(p.indices.tolist())
    assert len(left_over) == 33


def test_mcmahan_deals_as_many_shards_as_asked() -> None:
    counts = shards(FASHION, 0, clients=60, classes_per_client=1, scheme="mcmahan").class_counts(FASHION)
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert (counts.sum(axis=1) == 1000).all()


def test_the_partitions_are_pinned() -> None:
    assert shards(np.arange(1000) % 10, 7, clients=30).digest[:16] == "c3c63d2a8b44719e"
    assert shards(np.arange(1000) % 10, 7, clients=30, scheme="mcmahan").digest[:16] == "7cd602081ed7cc8c"


def test_the_recipe_is_in_the_spec() -> None:
    expected = {"name": "shards", "clients": 4, "classes_per_client": 2, "scheme": "distinct", "seed": 1}
    assert shards(np.arange(40) % 10, 1, clients=4).spec == expected


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"clients": 101}, "101 clients are more than the 100 examples"),
        ({"clients": 2, "classes_per_client": 11}, "11 different classes: the dataset has 10.*at most 10"),
        ({"clients": 60}, "100 examples are not enough for 60 clients with 2 shards each"),
        ({"clients": 60, "scheme": "mcmahan"}, "not enough"),
        ({"clients": 5, "classes_per_client": 0}, "'classes_per_client' is 0"),
        ({"clients": 5, "scheme": "other"}, "'scheme' is 'other', but must be 'distinct' or 'mcmahan'"),
    ],
)
def test_what_cannot_be_dealt_is_an_error(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        shards(np.arange(100) % 10, 0, **settings)


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"data.partition.classes_per_client"):
        read_settings(shards, {"clients": 4, "classes_per_client": 0}, "data.partition")
    with pytest.raises(ConfigError, match=r"data.partition.scheme"):
        read_settings(shards, {"clients": 4, "scheme": "x"}, "data.partition")


@pytest.mark.parametrize("labels", [np.zeros((4, 2), int), np.zeros(8), np.array([0, -1, 2, 3])])
def test_labels_that_are_no_classes_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(DataError, match="integers"):
        shards(labels, 0, clients=2)
