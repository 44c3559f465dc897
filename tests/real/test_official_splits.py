"""`dirichlet` on CIFAR-10 against the federated splits that hsu2020 published."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedlens.data.datasets.cifar import cifar10
from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.partition import Partition

pytestmark = pytest.mark.real

OFFICIAL = {0.0: 1.80, 0.05: 1.75, 0.1: 1.74, 0.2: 1.69, 0.5: 1.56, 1.0: 1.44, 10.0: 0.76, 100.0: 0.26}
# `image_id` counts in blocks of 10,000 that are data_batch 2, 4, 3, 1 and 5 of the published files.
BLOCKS = np.array([1, 3, 2, 0, 4])


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    _folder()
    targets: np.ndarray = cifar10(Path(os.environ["FEDLENS_DATA"]), False, 0).train.targets
    return targets


def _folder() -> Path:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    root = Path(os.environ["FEDLENS_DATA"])
    folder = root / "federated_vision_datasets" / "cifar10"
    for needed in (folder, root / "cifar-10-batches-bin"):
        if not needed.is_dir():
            pytest.skip(f"no {needed.relative_to(root)} below FEDLENS_DATA")
    return folder


def official(alpha: float, labels: np.ndarray) -> Partition:
    """The published split, its image numbers translated to the order of the published files."""
    rows = np.loadtxt(
        _folder() / f"federated_train_alpha_{alpha:.2f}.csv", np.int64, delimiter=",", skiprows=1
    )
    user, image, label = rows.T
    original = BLOCKS[image // 10_000] * 10_000 + image % 10_000
    np.testing.assert_array_equal(labels[original], label)
    owners = np.full(len(labels), -1)
    owners[original] = user
    return Partition.of_owners(owners, 100, dataset="cifar10")


@pytest.mark.parametrize("alpha", OFFICIAL)
def test_the_distance_of_dirichlet_is_that_of_the_official_split(alpha: float, labels: np.ndarray) -> None:
    published = official(alpha, labels)
    drawn = [dirichlet(labels, seed, clients=100, alpha=alpha) for seed in range(5)]
    for partition in (published, *drawn):
        assert (partition.sizes() == 500).all()
    assert published.emd(labels) == pytest.approx(OFFICIAL[alpha], abs=0.01)
    assert np.mean([partition.emd(labels) for partition in drawn]) == pytest.approx(
        published.emd(labels), abs=0.05
    )


def test_the_usual_reading_of_alpha_would_not_do(labels: np.ndarray) -> None:
    """alpha for each class, as most libraries have it, is C times our alpha: far off."""
    usual = np.mean([dirichlet(labels, seed, clients=100, alpha=10 * 1.0).emd(labels) for seed in range(5)])
    assert abs(usual - OFFICIAL[1.0]) > 0.5
