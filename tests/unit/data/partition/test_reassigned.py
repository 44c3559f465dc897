"""The IID twin of a partition."""

from __future__ import annotations

import numpy as np

from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.feature import feature
from fedlens.data.partition.iid import reassigned

LABELS = np.arange(2000) % 10


def test_names_sizes_and_the_pool_stay_and_the_classes_are_mixed() -> None:
    ours = dirichlet(LABELS, 0, clients=8, alpha=0.1)
    twin = reassigned(ours, 3)
    assert twin.ids == ours.ids
    assert twin.sizes().tolist() == ours.sizes().tolist()
    assert sorted(twin.indices) == sorted(ours.indices)
    assert all((np.diff(row) > 0).all() for row in twin)
    assert twin.emd(LABELS) < 0.4 < 1.0 < ours.emd(LABELS)
    assert twin.spec["reassigned"] is True


def test_the_same_seed_gives_the_same_twin() -> None:
    ours = dirichlet(LABELS, 0, clients=8, alpha=0.1)
    assert reassigned(ours, 3).digest == reassigned(ours, 3).digest != reassigned(ours, 4).digest


def test_all_clients_of_the_twin_see_images_alike() -> None:
    assert feature(LABELS, 0, clients=4, brightness=0.5).features
    assert not reassigned(feature(LABELS, 0, clients=4, brightness=0.5), 0).features
