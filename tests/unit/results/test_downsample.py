from __future__ import annotations

import numpy as np
import pytest

from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table
from fedlens.results.figures.chart import short
from fedlens.results.figures.partition_figures import PartitionSample, ranked, sample_partition
from tests.unit.results.fake_run import class_counts, make_partition


def shown(p: Partition, clients: int = 10, classes: int = 10) -> PartitionSample:
    assert p.census is not None
    return sample_partition(p, p.census, clients, classes)


def test_all_of_few_clients_in_their_order() -> None:
    counts = class_counts(10, even=False)
    some = shown(make_partition(counts))
    assert some.ids == tuple(map(str, range(10)))
    assert np.array_equal(some.counts, counts)
    assert (some.clients_shown, some.grouping, some.unit) == ("all 10 clients", "", "examples")


def test_some_of_many_are_evenly_spread_over_the_sizes() -> None:
    counts = np.zeros((101, 2), int)
    counts[:, 0] = np.random.default_rng(0).permutation(np.arange(1, 102))
    some = shown(make_partition(counts), clients=6)
    assert some.sizes.tolist() == [101, 81, 61, 41, 21, 1]
    assert [int(counts[int(k), 0]) for k in some.ids] == some.sizes.tolist()
    assert some.counts[:, 0].tolist() == some.sizes.tolist()
    assert some.clients_shown == "6 of 101 clients, evenly spread over the sizes"


def test_some_of_many_of_one_size_are_evenly_spread_over_the_places() -> None:
    some = shown(make_partition(class_counts(21)), clients=5)
    assert some.ids == ("0", "5", "10", "15", "20")
    assert some.clients_shown == "5 of 21 clients, evenly spread"


def test_many_classes_are_added_up_in_groups_of_neighbours() -> None:
    counts = class_counts(4, 7)
    some = shown(make_partition(counts, list("abcdefg")), classes=3)
    assert np.array_equal(some.counts.sum(axis=1), counts.sum(axis=1))
    assert some.labels == ("a to b", "c to e", "f to g")
    assert some.starts == ("a", "c", "f")
    assert some.counts[:, 1].tolist() == counts[:, 2:5].sum(axis=1).tolist()
    assert some.grouping == "7 classes in 3 groups of 2 or 3 neighbours"


def test_a_class_without_a_name_gets_one() -> None:
    assert shown(make_partition(class_counts(2, 3), ["a", " ", ""])).labels == ("a", "class 1", "class 2")


def test_examples_of_several_classes_are_counted_in_marks() -> None:
    p = Partition.of_owners([0, 1], 2).counted(Table.of_sets([[0, 2], [1]]))
    assert shown(p).unit == "marks"


def test_by_main_class_and_the_purest_first() -> None:
    p = make_partition(np.array([[1, 9], [6, 4], [0, 0], [9, 1], [0, 5]]))
    ordered = shown(p).by_main_class()
    assert ordered.ids == ("3", "1", "2", "4", "0")
    assert ordered.sizes.tolist() == [10, 10, 0, 5, 10]
    assert ordered.shares().tolist() == [[0.9, 0.1], [0.6, 0.4], [0, 0], [0, 1], [0.1, 0.9]]


@pytest.mark.parametrize(
    ("marks", "even", "lopsided"),
    [
        ([5, 5, 5], True, False),
        ([5, 5, 20], False, False),
        ([5, 5, 21], False, True),
        ([0, 0, 9], False, True),
    ],
)
def test_when_bars_are_drawn_as_shares(marks: list[int], even: bool, lopsided: bool) -> None:
    some = shown(make_partition(np.array(marks)[:, None]))
    assert (some.even(), some.lopsided()) == (even, lopsided)


def test_ranks_are_thinned_and_exact() -> None:
    values = np.random.default_rng(0).integers(0, 10**6, 50_000)
    rank, value = ranked(values)
    assert (rank[0], rank[-1]) == (1, 50_000)
    assert 250 < len(rank) <= 400
    assert np.array_equal(value, np.sort(values)[::-1][np.array(rank) - 1])


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("plain", 5, "plain"),
        ("plain!", 5, "pl…n!"),
        ("two\nlines\t\x00and  more", 40, "two lines and more"),
        ("", 5, ""),
    ],
)
def test_short(name: str, width: int, expected: str) -> None:
    assert short(name, width) == expected
