"""The census against NumPy by hand, and its way through a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table


def by_hand(counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, float]:
    """EMD of every client, and their mean, from the dense counts: hsu2020, section 6.1, word for word."""
    n = sizes[counts.sum(axis=1) > 0].sum()
    population = np.zeros(counts.shape[1])
    for row, size in zip(counts, sizes, strict=True):
        if row.sum():
            population += size / n * row / row.sum()
    distances = np.array(
        [np.abs(row / row.sum() - population).sum() if row.sum() else np.nan for row in counts]
    )
    return distances, float(np.nansum(distances * sizes) / n)


def test_the_counts_and_distances_of_labels_are_those_by_hand() -> None:
    stream = np.random.RandomState(0)
    labels = stream.randint(0, 7, 300)
    partition = Partition.of_owners(stream.randint(-1, 9, 300), 12)  # three clients stay empty
    census = partition.census_of(labels)
    dense = partition.class_counts(labels, 7)
    assert census.dense().tolist() == dense.tolist()
    assert census.dense(np.array([4, 0])).tolist() == dense[[4, 0]].tolist()
    assert census.totals().tolist() == dense.sum(axis=0).tolist()
    assert census.classes_per_client().tolist() == (dense > 0).sum(axis=1).tolist()
    distances, mean = by_hand(dense, partition.sizes())
    np.testing.assert_allclose(census.client_emds(), distances, rtol=0, atol=1e-12)
    assert np.isnan(census.client_emds()[9:]).all()
    assert census.emd() == pytest.approx(mean, abs=1e-12)


def test_identical_clients_are_at_distance_0_and_disjoint_ones_go_towards_2() -> None:
    same = Partition.of_owners(np.repeat(np.arange(50), 4), 50)
    assert same.census_of(np.tile(np.arange(4), 50)).emd() == pytest.approx(0, abs=1e-12)
    apart = same.census_of(np.repeat(np.arange(50), 4))
    assert apart.client_emds() == pytest.approx(np.full(50, 2 * (1 - 1 / 50)))


def test_of_examples_with_several_classes_each_class_counts_once_an_example() -> None:
    table = Table.of_sets([[0, 1, 2], [2], [1], [], []], classes=3)
    census = Partition.of_owners([0, 0, 1, 1, 2], 4).census_of(table)
    assert census.dense().tolist() == [[1, 1, 2], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert census.sizes.tolist() == [2, 2, 1, 0]
    distances, mean = by_hand(census.dense(), census.sizes)
    np.testing.assert_allclose(census.client_emds(), distances)
    assert census.emd() == pytest.approx(mean)
    assert np.isnan(Partition.of_owners([-1, -1, -1, 0, 1], 2).census_of(table).emd())


def test_labels_that_are_too_few_are_an_error() -> None:
    with pytest.raises(DataError, match="points to example 3 of 3"):
        Partition.of_owners([0, 0, 1, 1], 2).census_of([0, 1, 0])


def test_a_saved_partition_knows_its_census_and_its_features(tmp_path: Path) -> None:
    table = Table.of([0, 1, 1, 2, 0])
    plain = Partition.of_owners([0, 1, 1, -1, 0], 2)
    seen = Partition(plain.ids, plain.indices, plain.offsets, features={"noise": np.array([0.0, 0.5])})
    seen.counted(table).save(tmp_path / "p.npz")
    read = Partition.load(tmp_path / "p.npz")
    assert read.census is not None
    assert read.census.dense().tolist() == [[2, 0, 0], [0, 2, 0]]
    assert read.census.classes == ("0", "1", "2")
    assert {name: values.tolist() for name, values in read.features.items()} == {"noise": [0.0, 0.5]}
    assert read.digest == seen.digest == seen.counted(table).digest
    assert seen.digest != plain.digest
    plain.save(tmp_path / "q.npz")
    assert Partition.load(tmp_path / "q.npz").census is None


def test_features_are_one_finite_number_a_client() -> None:
    for values in ([0.0], [0.0, np.nan], [[0.0, 1.0]]):
        with pytest.raises(DataError, match="the feature 'blur' is not one finite number a client"):
            Partition(("a", "b"), np.array([0, 1]), np.array([0, 1, 2]), features={"blur": np.array(values)})


def test_a_census_that_contradicts_itself_is_refused() -> None:
    column, count, offsets, sizes = np.array([2], np.int32), np.array([5]), np.array([0, 1]), np.array([5])
    Census(("a", "b", "c"), column, count, offsets, sizes)
    with pytest.raises(DataError, match=r"not in 0 \.\. 1"):
        Census(("a", "b"), column, count, offsets, sizes)
    with pytest.raises(DataError, match="contradict"):
        Census(("a", "b", "c"), column, count, offsets, np.array([5, 5]))
