from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.femnist import femnist
from tests.unit.data.datasets.small_files import leaf, write_leaf

BYTES = np.random.default_rng(3).integers(0, 256, (5, 784))


def images(rows: slice) -> list[list[float]]:
    return (BYTES[rows] / 255).tolist()


def write(root: Path, train: Any, test: Any) -> Path:
    write_leaf(root / "femnist" / "test", test, "all_data_0_niid_0_keep_0_test_9.json")
    return write_leaf(root / "femnist" / "train", train)


def good() -> dict[str, Any]:
    return leaf({"f0000_14": (images(slice(0, 2)), [0, 61]), "f0001_41": (images(slice(2, 3)), [10])})


@pytest.mark.parametrize("tester", ["f0000_14", "f0999_00"])  # split by sample, split by user
def test_images_and_writers_are_what_was_written(tmp_path: Path, tester: str) -> None:
    write(tmp_path, good(), leaf({tester: (images(slice(3, 5)), [1, 2])}))
    data = femnist(tmp_path, False, 0)
    assert (data.kind, data.input_shape, len(data.classes)) == ("classification", (1, 28, 28), 62)
    np.testing.assert_array_equal(data.train.inputs.reshape(3, 784), BYTES[:3])
    np.testing.assert_array_equal(data.test.inputs[:, 0], BYTES[3:].reshape(2, 28, 28))
    assert data.train.targets.tolist() == [0, 61, 10]
    assert [data.classes[label] for label in data.train.targets] == ["0", "z", "A"]
    assert data.train.columns["client"].tolist() == ["f0000_14", "f0000_14", "f0001_41"]
    assert data.train.columns["writer"].tolist() == data.train.columns["client"].tolist()
    assert data.test.columns["client"].tolist() == [tester] * 2
    np.testing.assert_allclose(data.mean[0], BYTES[:3].mean() / 255, rtol=1e-9)
    assert data.table().column("writer").tolist() == data.train.columns["writer"].tolist()


def test_paper_stays_white_and_grey_is_rounded(tmp_path: Path) -> None:
    write(tmp_path, leaf({"w": ([[1.0] * 781 + [0, 0.3, 0.999]], [1])}), good())
    image = femnist(tmp_path, False, 0).train.inputs[0].ravel()
    assert image[:781].tolist() == [255] * 781
    assert image[781:].tolist() == [0, 76, 255]  # 76.5 is rounded to even


@pytest.mark.parametrize(
    ("image", "what"),
    [
        ([0.5] * 783, "example 1 is 783 numbers, and 784 numbers are expected"),
        ("white", "example 1 is a str, and 784 numbers are expected"),
        ([0.5] * 700 + [1.5] + [0.5] * 83, "example 1 has 1.5 at pixel 700, and 0 .. 1 is expected"),
        ([0.5] * 700 + [-0.1] + [0.5] * 83, "example 1 has -0.1 at pixel 700"),
        ([255] * 784, "example 1 has 255.0 at pixel 0"),
        ([float("nan")] * 784, "example 1 has nan at pixel 0"),
        ([0.5] * 783 + ["0.5"], "is not made of numbers alone"),
    ],
)
def test_an_image_that_is_none_is_refused_with_its_writer(tmp_path: Path, image: Any, what: str) -> None:
    content = good()
    content["user_data"]["f0000_14"]["x"][1] = image
    path = write(tmp_path, content, good())
    with pytest.raises(DataError) as caught:
        femnist(tmp_path, False, 0)
    assert what in caught.value.what
    assert caught.value.where == f"{path}, user 'f0000_14'"


def test_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    write(tmp_path, good(), leaf({"w": (images(slice(0, 1)), [62])}))
    with pytest.raises(DataError, match=r"label 62, and a whole number in 0 \.\. 61"):
        femnist(tmp_path, False, 0)


def test_nothing_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--download does not fetch it"):
        femnist(tmp_path, True, 0)
