"""Drawn places: finer cells differ more in their classes, as in hsu2020."""

import numpy as np
import pytest

from fedlens.data.datasets.cifar import drawn_places
from fedlens.data.partition.s2 import s2
from fedlens.data.table import Table

LABELS = np.tile(np.arange(100), 60)
GROUPS = np.arange(100) // 5


def population(labels: np.ndarray, n_max: int, lat: np.ndarray, lon: np.ndarray) -> tuple[float, int]:
    """(mean EMD, clients) of the cells."""
    table = Table.of(labels, {"lat": lat, "lon": lon})
    partition = s2(table, 0, n_max=n_max)
    return partition.census_of(table).emd(), len(partition.ids)


@pytest.mark.parametrize("seed", [0, 1])
def test_finer_cells_differ_more_and_classes_cluster(seed: int) -> None:
    pytest.importorskip("s2cell")
    lat, lon = drawn_places(LABELS, GROUPS, seed)
    found = [population(LABELS, n_max, lat, lon) for n_max in (1500, 150, 50)]
    emds, clients = zip(*found, strict=True)
    assert emds == tuple(sorted(emds))
    assert clients == tuple(sorted(clients))
    mixed, _ = population(np.random.default_rng(0).permutation(LABELS), 150, lat, lon)
    assert emds[1] > 1.5 * mixed  # small cells differ by chance alone, these by their classes


def test_classes_of_a_group_are_closer_than_others() -> None:
    lat, lon = (np.radians(one) for one in drawn_places(LABELS, GROUPS, 0))
    points = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)])
    means = points.reshape(3, 60, 100).mean(axis=1).T  # of each class
    near = np.linalg.norm(means[:, None] - means[None], axis=2)
    same = GROUPS[:, None] == GROUPS[None]
    assert near[same & ~np.eye(100, dtype=bool)].mean() < 0.8 * near[~same].mean()


def test_places_depend_on_the_seed_alone() -> None:
    first, again, other = (np.stack(drawn_places(LABELS, GROUPS, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not (first == other).any()
    assert (np.abs(first[0]) <= 90).all()
    assert (np.abs(first[1]) <= 180).all()
