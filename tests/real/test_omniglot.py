"""Omniglot's two small background sets as they are published."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.data.dataset import Dataset
from fedlens.data.datasets.omniglot import omniglot

pytestmark = pytest.mark.real

ROOT = Path(os.environ.get("FEDLENS_DATA", ""))
FOLDER = ROOT / "omniglot-py" / "images_background"
ALPHABETS = [
    "Balinese", "Early_Aramaic", "Greek", "Japanese_(katakana)", "Korean", "Latin", "Sanskrit", "Tagalog",
]  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Dataset:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    if not FOLDER.is_dir():
        pytest.skip("no omniglot-py/images_background below FEDLENS_DATA")
    if sorted(path.name for path in FOLDER.iterdir()) != ALPHABETS:
        pytest.skip("below FEDLENS_DATA are other alphabets than those of the two small background sets")
    return omniglot(ROOT, False, 0)


def test_the_two_small_background_sets(data: Dataset) -> None:
    assert len(data.classes) == len(set(data.classes)) == 242
    assert len(data.train) + len(data.test) == 4840
    assert data.coarse is not None
    assert np.bincount(data.coarse).tolist() == [24, 22, 24, 47, 40, 26, 42, 17]
    clients, counts = np.unique(
        np.concatenate([data.train.columns["client"], data.test.columns["client"]]), return_counts=True
    )
    assert (len(clients), counts.min(), counts.max()) == (160, 17, 47)
    assert clients[0] == "Balinese/drawer01"


def test_a_fifth_of_each_character_tests_and_every_drawer_trains(data: Dataset) -> None:
    assert np.bincount(data.test.targets).tolist() == [4] * 242
    assert np.bincount(data.train.targets).tolist() == [16] * 242
    assert len(set(data.train.columns["client"])) == len(set(data.test.columns["client"])) == 160


def test_drawers_held_out_are_32_of_the_160(data: Dataset) -> None:
    apart = omniglot(ROOT, False, 0, test="drawers")
    assert len(set(apart.test.columns["client"])) == 32
    assert len(set(apart.train.columns["client"])) == 128
    assert len(apart.test) == 968


def test_pixels_are_those_of_the_file_inverted(data: Dataset) -> None:
    whole = omniglot(ROOT, False, 0, size=105)
    row = int(np.flatnonzero(whole.train.columns["client"] == "Greek/drawer07")[0])
    assert whole.classes[whole.train.targets[row]] == "Greek/character01"
    place = FOLDER / "Greek" / "character01"
    with Image.open(next(place.glob("*_07.png"))) as image:
        ink = ~np.asarray(image)
    np.testing.assert_array_equal(whole.train.inputs[row, 0], 255 * ink)
    assert 0.05 < whole.mean[0] < 0.12  # most of a page is empty
    np.testing.assert_allclose(data.mean, whole.mean, rtol=0.02)
