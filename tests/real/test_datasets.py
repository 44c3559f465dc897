"""Every reader against the published data, where FEDLENS_DATA names a folder that has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset, channel_moments
from fedlens.data.datasets.registry import DATASETS

pytestmark = pytest.mark.real

ROOT = Path(os.environ.get("FEDLENS_DATA", ""))
PLACES = {
    "fashion-mnist": "FashionMNIST/raw",
    "mnist": "MNIST/raw",
    "cifar10": "cifar-10-batches-bin",
    "cifar100": "cifar-100-binary",
}
# Of the published files, read with NumPy alone: a byte at an offset, record by record.
FIRST_LABELS = {
    "fashion-mnist": ([9, 0, 0, 3, 0, 2, 7, 2], [9, 2, 1, 1, 6, 1, 4, 6]),
    "mnist": ([5, 0, 4, 1, 9, 2, 1, 3], [7, 2, 1, 0, 4, 1, 4, 9]),
    "cifar10": ([6, 9, 9, 4, 1, 1, 2, 7], None),
    "cifar100": ([19, 29, 0, 11, 1, 86, 90, 28], None),
}


def load(name: str) -> Dataset:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    if not (ROOT / PLACES[name]).is_dir():
        pytest.skip(f"no {PLACES[name]} below FEDLENS_DATA")
    dataset: Dataset = DATASETS.find(name)(ROOT, False, 0)
    return dataset


@pytest.mark.parametrize(
    ("name", "counts", "shape", "classes"),
    [
        ("fashion-mnist", (60_000, 10_000), (1, 28, 28), 10),
        ("mnist", (60_000, 10_000), (1, 28, 28), 10),
        ("cifar10", (50_000, 10_000), (3, 32, 32), 10),
        ("cifar100", (50_000, 10_000), (3, 32, 32), 100),
    ],
)
def test_a_published_dataset_is_read_as_it_is(
    name: str, counts: tuple[int, int], shape: tuple[int, int, int], classes: int
) -> None:
    data = load(name)
    assert (len(data.train), len(data.test)) == counts
    assert data.input_shape == shape
    assert len(set(data.classes)) == classes
    for split, first in zip((data.train, data.test), FIRST_LABELS[name], strict=True):
        if first is not None:
            assert split.targets[:8].tolist() == first
    assert np.bincount(data.test.targets).tolist() == [10_000 // classes] * classes or name == "mnist"
    # The stated numbers have four or five digits.
    np.testing.assert_allclose([data.mean, data.std], channel_moments(data.train.inputs), atol=6e-5)


def test_cifar_pixels_are_in_the_order_of_the_file() -> None:
    data = load("cifar10")
    record = np.fromfile(ROOT / "cifar-10-batches-bin" / "data_batch_2.bin", np.uint8, count=2 * 3073)[3073:]
    assert data.train.targets[10_001] == record[0]
    np.testing.assert_array_equal(data.train.inputs[10_001, 1, 2], record[1 + 1024 + 64 : 1 + 1024 + 96])


def test_the_class_names_are_those_of_the_files() -> None:
    load("cifar10")
    load("cifar100")
    assert (ROOT / "cifar-10-batches-bin" / "batches.meta.txt").read_text().split() == list(
        CATALOGUE["cifar10"].labels
    )
    assert (ROOT / "cifar-100-binary" / "fine_label_names.txt").read_text().split() == list(
        CATALOGUE["cifar100"].labels
    )
