from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.loading import loaded
from tests.unit.data.pictures import pixels, write

IMAGE = 3 * 8 * 8
_ONCE = "which do not all fit in data.cache; done once until a file changes"


def files(root: Path, kind: str, count: int, channels: int = 3) -> ImageFiles:
    names = [f"{kind}/{at}.png" for at in range(count)]
    for at, name in enumerate(names):
        write(root / name, pixels(at) if channels else pixels(at, channels=1) % 3)
    return ImageFiles(root, Paths.of(names), channels, 8, 8)


def dataset(train: Examples, test: Examples, **more: object) -> Dataset:
    moments = (0.0,) * 3, (1.0,) * 3
    return Dataset("x", train, test, ("a", "b", "c"), *moments, licence="", source="", **more)  # type: ignore[arg-type]


@pytest.fixture
def classified(tmp_path: Path) -> Dataset:
    """Six images to train on, two to test with."""
    who = {"client": np.array(list("aabbcc"))}
    train = Examples(files(tmp_path, "train", 6), np.arange(6) % 3, who)
    test = Examples(files(tmp_path, "test", 2), np.arange(2), {"client": np.array(["a", "b"])})
    return dataset(train, test, notes=("read",))


def expected(rows: list[int]) -> np.ndarray:
    return np.stack([pixels(row).transpose(2, 0, 1) for row in rows])


def test_what_fits_is_decoded_once(classified: Dataset) -> None:
    said: list[str] = []
    found = loaded(classified, 8 * IMAGE, said.append)
    np.testing.assert_array_equal(found.train.inputs, expected(list(range(6))))
    np.testing.assert_array_equal(found.test.inputs, expected([0, 1]))
    assert isinstance(found.train.inputs, np.ndarray)
    assert found.train.targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.train.columns["client"].tolist() == list("aabbcc")
    assert found.notes == ("read",)
    assert said == ["decoding 8 images"]


def test_what_does_not_fit_stays_in_its_files_with_a_store_in_proportion(classified: Dataset) -> None:
    said: list[str] = []
    found = loaded(classified, 8 * IMAGE - 1, said.append)
    assert isinstance(found.train.inputs, ImageFiles)
    stores = [split.inputs.store for split in (found.train, found.test)]
    # 1,535 bytes: 6/8 of them hold 5 images of 193 bytes, 2/8 of them one.
    assert [store.slots for store in stores] == [5, 1]
    np.testing.assert_array_equal(found.train.inputs.take(np.arange(6)), expected(list(range(6))))
    assert said == [f"checking {n} images, {_ONCE}" for n in (6, 2)]
    again = loaded(classified, 8 * IMAGE - 1, said.append)
    assert len(said) == 2
    for one, other in ((found.train, again.train), (found.test, again.test)):
        assert one.inputs.fingerprint() == other.inputs.fingerprint()
        assert one.inputs.contents == other.inputs.contents is not None


@pytest.mark.parametrize("nbytes", [10**6, 4 * IMAGE, 0])
def test_what_is_at_fault_is_so_however_much_memory_there_is(classified: Dataset, nbytes: int) -> None:
    for path in (classified.train.inputs.path(1), classified.test.inputs.path(0)):
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError) as caught:
        loaded(classified, nbytes)
    assert str(caught.value).splitlines()[0] == "2 problems in the data"
    found = loaded(replace(classified, on_error="skip"), nbytes)
    rows = np.arange(5)
    pixels_left = found.train.inputs.take(rows) if nbytes < 10**6 else found.train.inputs
    np.testing.assert_array_equal(pixels_left, expected([0, 2, 3, 4, 5]))
    assert found.train.targets.tolist() == [0, 2, 0, 1, 2]
    assert (len(found.test), len(found.notes)) == (1, 4)


def test_a_partitioner_is_told_the_same_whatever_is_in_memory(classified: Dataset) -> None:
    tables = [classified.table(), *(loaded(classified, nbytes).table() for nbytes in (10**6, 4 * IMAGE, 0))]
    assert len({table.identity for table in tables}) == 1
    inputs = classified.train.inputs
    other = replace(inputs, files=inputs.files.take(np.array([1, 0, 2, 3, 4, 5])))
    swapped = replace(classified, train=replace(classified.train, inputs=other))
    assert swapped.table().identity != classified.table().identity
    assert loaded(swapped, 10**6).table().identity == swapped.table().identity
    classified.train.inputs.path(4).write_bytes(b"")
    skipping = replace(classified, on_error="skip")
    left = [loaded(skipping, nbytes).table().identity for nbytes in (10**6, 0)]
    assert left[0] == left[1] != classified.table().identity


def test_nothing_is_kept_where_nothing_may_be(classified: Dataset) -> None:
    found = loaded(classified, 0)
    assert found.train.inputs.store is None
    np.testing.assert_array_equal(found.test.inputs.take(np.array([1])), expected([1]))


def test_arrays_are_left_alone() -> None:
    images = np.zeros((2, 3, 8, 8), np.uint8)
    whole = dataset(Examples(images, np.array([0, 1])), Examples(images, np.array([0, 1])))
    assert loaded(whole, 0) is whole


def test_all_bad_files_are_in_one_error(classified: Dataset) -> None:
    for path in (
        classified.train.inputs.path(4),
        classified.train.inputs.path(1),
        classified.test.inputs.path(0),
    ):
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError) as caught:
        loaded(replace(classified, on_error="stop"), 10**6)
    text = str(caught.value)
    assert text.startswith("3 problems in the data")
    places = [text.index(f"{name}: ") for name in ("train/1.png", "train/4.png", "test/0.png")]
    assert places == sorted(places)
    assert 'on_error = "skip"' in text
    with pytest.raises(DataError) as caught:
        loaded(classified, 10**6)
    assert str(caught.value) == text.rpartition("\n")[0]  # a reader without the setting does not name it


def test_bad_files_are_left_out_and_counted_where_that_is_asked_for(classified: Dataset) -> None:
    classified.train.inputs.path(4).write_bytes(b"")
    classified.test.inputs.path(0).unlink()
    found = loaded(replace(classified, on_error="skip"), 10**6)
    np.testing.assert_array_equal(found.train.inputs, expected([0, 1, 2, 3, 5]))
    assert found.train.targets.tolist() == [0, 1, 2, 0, 2]
    assert found.train.columns["client"].tolist() == list("aabbc")
    assert (len(found.test), found.test.targets.tolist()) == (1, [1])
    count, read, *skipped = found.notes
    assert (count, read) == ("left out 2 of 8 images, which cannot be decoded", "read")
    assert len(skipped) == 2
    assert skipped[0].startswith(f"skipped {classified.train.inputs.path(4)}: ")


def test_images_and_masks_are_left_out_together(tmp_path: Path) -> None:
    train = Examples(files(tmp_path, "i", 5), files(tmp_path, "m", 5, 0), {"client": np.array(list("abcde"))})
    test = Examples(files(tmp_path, "ti", 1), files(tmp_path, "tm", 1, 0))
    (tmp_path / "i/1.png").write_bytes(b"")
    (tmp_path / "m/3.png").write_bytes(b"")
    whole = dataset(train, test, on_error="skip")
    assert sum(part.nbytes for part in (train.inputs, train.targets)) == 5 * 4 * 64
    found = loaded(whole, 6 * 4 * 64)
    np.testing.assert_array_equal(found.train.inputs, expected([0, 2, 4]))
    masks = [pixels(row, channels=1) % 3 for row in (0, 2, 4)]
    np.testing.assert_array_equal(found.train.targets, masks)
    assert found.train.columns["client"].tolist() == ["a", "c", "e"]
    assert len(found.notes) == 3
    with pytest.raises(DataError, match=r"2 problems in the data[^$]*i/1\.png[^$]*m/3\.png"):
        loaded(replace(whole, on_error="stop"), 6 * 4 * 64)
    stored = loaded(whole, 6 * 4 * 64 - 1)
    assert isinstance(stored.train.targets, ImageFiles)
    assert stored.train.targets.store is not None


def test_boxes_go_with_their_images(tmp_path: Path) -> None:
    boxes = np.arange(12, dtype=np.float32).reshape(3, 4)
    train = Examples(files(tmp_path, "i", 3), Boxes(boxes, np.array([0, 1, 2]), np.array([0, 1, 3, 3])))
    test = Examples(files(tmp_path, "t", 1), Boxes(boxes[:1], np.array([0]), np.array([0, 1])))
    (tmp_path / "i/0.png").write_bytes(b"")
    found = loaded(dataset(train, test, on_error="skip"), 10**6)
    assert found.train.targets.boxes.tolist() == boxes[1:].tolist()
    assert found.train.targets.offsets.tolist() == [0, 2, 2]
