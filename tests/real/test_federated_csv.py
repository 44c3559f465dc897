"""hsu2020's CIFAR-10 lists: the classes agree, and the populations are those that were worked out independently."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.cifar import cifar10
from fedlens.data.datasets.federated_csv import federated_csv, read_list
from tests.contract.contract_kit import nightly_but

pytestmark = pytest.mark.real

ALPHAS = ("0.00", "0.05", "0.10", "0.20", "0.50", "1.00", "10.00", "100.00")


@pytest.fixture(scope="module")
def folder() -> Path:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    root = Path(os.environ["FEDLENS_DATA"])
    for name in ("federated_vision_datasets/cifar10", "cifar-10-batches-bin"):
        if not (root / name).is_dir():
            pytest.skip(f"no {name} below FEDLENS_DATA")
    return root / "federated_vision_datasets" / "cifar10"


@pytest.fixture(scope="module")
def labels(folder: Path) -> np.ndarray:
    targets: np.ndarray = cifar10(folder.parents[1], False, 0).train.targets
    return targets


@pytest.mark.parametrize("alpha", nightly_but({"0.10", "100.00"}, ALPHAS))
def test_a_published_population_is_read(folder: Path, labels: np.ndarray, alpha: str) -> None:
    path = folder / f"federated_train_alpha_{alpha}.csv"
    found = federated_csv(
        labels, 0, path=str(path), id_order="cifar10-blocks"
    )  # it compares every class with the label
    assert found.ids == tuple(map(str, range(100)))
    assert found.sizes().tolist() == [500] * 100
    owner = np.full(50_000, -1)
    owner[found.indices] = found.owners()
    with np.load(folder / "user_of_train_index.npz") as worked_out:
        np.testing.assert_array_equal(owner, worked_out[f"alpha_{alpha}"])
    # What was compared: as positions, two of the five blocks agree, and one in ten of the others.
    listing = read_list(path)
    assert np.bincount(listing.classes).tolist() == [5_000] * 10
    assert (labels[listing.images.astype(int)] == listing.classes).mean() < 0.5


def test_ids_in_blocks_are_not_taken_for_positions(folder: Path, labels: np.ndarray) -> None:
    path = folder / f"federated_train_alpha_{ALPHAS[0]}.csv"
    with pytest.raises(DataError, match="have another class in the list than in the dataset"):
        federated_csv(labels, 0, path=str(path), id_order="as-is")
