"""The published test list of Landmarks-User-160k against what hsu2020 says of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from fedlens.data.datasets.federated_csv import Listing, read_list

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def published() -> Listing:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    name = "federated_vision_datasets/landmarks-user-160k/test.csv"
    path = Path(os.environ["FEDLENS_DATA"]) / name
    if not path.is_file():
        pytest.skip(f"no {name} below FEDLENS_DATA")
    return read_list(path, None)


def test_it_has_as_many_images_as_the_paper_says(published: Listing) -> None:
    assert len(published) == 19_526
    assert len(set(published.images.tolist())) == 19_526
    assert all(re.fullmatch("[0-9a-f]{16}", image) for image in published.images.tolist())


def test_1835_of_the_landmarks_have_exactly_ten_and_none_has_more(published: Listing) -> None:
    counts = np.bincount(published.classes, minlength=2_028)
    assert len(counts) == 2_028
    assert published.classes.min() == 0
    assert (counts == 10).sum() == 1_835
    assert counts.max() == 10
    # The short tail of figure 3: three landmarks have no image left to test on.
    assert ((counts > 0) & (counts < 10)).sum() == 190
    assert (counts == 0).sum() == 3


def test_it_has_no_users_and_comes_in_the_order_of_the_file(published: Listing) -> None:
    assert (published.users, published.labels) == (None, None)
    assert published.images[0] == "3e0a3dd44b426720"
    assert published.classes[:2].tolist() == [0, 0]
    assert published.lines[[0, -1]].tolist() == [2, 19_527]
