"""Examples of every kind: what fits, what does not, and the marks that a partitioner gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles, Paths

IMAGES = np.zeros((3, 3, 4, 5), np.uint8)
MASKS = np.array([[[0, 0, 1, 1, 255]] * 4, [[255] * 5] * 4, [[2, 2, 2, 0, 0]] * 4], np.uint8)
BOXES = Boxes(np.zeros((4, 4), np.float32), np.array([2, 2, 0, 1]), np.array([0, 3, 3, 4]))
LABELS = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], np.uint8)
TOKENS = np.arange(12).reshape(3, 4)


def dataset(examples: Examples, classes: int = 3) -> Dataset:
    names = tuple(f"c{k}" for k in range(classes))
    moments = () if examples.kind == "language" else (0.5,) * 3
    return Dataset("toy", examples, examples, names, moments, moments, "none", "made up")


def mask_files(folder: Path) -> ImageFiles:
    for k, mask in enumerate(MASKS):
        Image.fromarray(mask).save(folder / f"{k}.png")
    return ImageFiles(folder, Paths.of([f"{k}.png" for k in range(3)]), 0, 4, 5)


@pytest.mark.parametrize(
    ("inputs", "targets", "kind", "marks", "offsets"),
    [
        (IMAGES, np.array([2, 0, 1]), "classification", [2, 0, 1], [0, 1, 2, 3]),
        (IMAGES, LABELS, "multi-label", [0, 2, 1], [0, 2, 2, 3]),
        (IMAGES, MASKS, "segmentation", [0, 1, 0, 2], [0, 2, 2, 4]),
        (IMAGES, BOXES, "detection", [0, 2, 1], [0, 2, 2, 3]),
        (TOKENS, np.array([2, 0, 1]), "language", [2, 0, 1], [0, 1, 2, 3]),
        (TOKENS, np.array([[1, 1], [-1, 2], [-1, -1]]), "language", [1, 1, 2], [0, 2, 3, 3]),
    ],
)
def test_the_kind_and_the_marks_follow_from_the_form(
    inputs: Any, targets: Any, kind: str, marks: list[int], offsets: list[int]
) -> None:
    examples = Examples(inputs, targets, {"client": np.array(["a", "b", "a"])})
    assert examples.kind == kind
    table = dataset(examples).table()
    assert table.marks.tolist() == marks
    assert table.offsets.tolist() == offsets
    assert table.single == (kind == "classification" or (kind == "language" and targets.ndim == 1))
    assert table.column("client").tolist() == ["a", "b", "a"]
    taken = examples.take(np.array([2, 1]))
    assert taken.kind == kind
    assert len(taken) == 2
    assert taken.columns["client"].tolist() == ["a", "b"]
    assert dataset(taken).table().marks.tolist() == table.take(np.array([2, 1])).marks.tolist()


def test_masks_in_files_have_the_marks_of_masks_in_memory(tmp_path: Path) -> None:
    examples = Examples(IMAGES, mask_files(tmp_path))
    assert examples.kind == "segmentation"
    assert dataset(examples).table().marks.tolist() == [0, 1, 0, 2]
    assert examples.take(np.array([2])).targets.take(np.array([0])).tolist() == MASKS[2:].tolist()


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (IMAGES.astype(np.float32), np.zeros(3, np.int64), "must be uint8"),
        (IMAGES[0], np.zeros(3, np.int64), "must be uint8"),
        (IMAGES, np.zeros(3, np.int32), "must be int64"),
        (IMAGES, np.zeros(2, np.int64), "there are 3 images and 2 labels"),
        (IMAGES, LABELS.astype(np.int64), r"must be int64 \[n\], or uint8 \[n, classes\] of 0 and 1"),
        (IMAGES, LABELS[:2], "there are 3 images and 2 labels"),
        (IMAGES, MASKS[:, :3], "the masks are"),
        (IMAGES[:2], MASKS, "there are 2 images and 3 targets"),
        (IMAGES[:1], BOXES, "there are 1 images and 3 targets"),
        (TOKENS.astype(np.uint32), np.zeros(3, np.int64), "the tokens are uint32"),
    ],
)
def test_what_does_not_fit_is_refused(inputs: Any, targets: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Examples(inputs, targets)


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(DataError, match="the column 'city' has 1 values for 3 examples"):
        Examples(IMAGES, np.zeros(3, np.int64), {"city": np.array(["a"])})


def test_a_dataset_has_one_kind_and_its_boxes_have_classes() -> None:
    pictures, streets = Examples(IMAGES, np.zeros(3, np.int64)), Examples(IMAGES, MASKS)
    with pytest.raises(
        DataError, match="training split is for classification, the test split for segmentation"
    ):
        Dataset("toy", pictures, streets, ("a",), (0.5,) * 3, (0.5,) * 3, "", "")
    with pytest.raises(DataError, match=r"label 2 of record 0 is not in 0 \.\. 1"):
        dataset(Examples(IMAGES, BOXES), classes=2)


def test_multi_label_targets_are_0_or_1_for_each_class() -> None:
    with pytest.raises(DataError, match="the labels have 3 columns for 2 classes"):
        dataset(Examples(IMAGES, LABELS), classes=2)
    with pytest.raises(DataError, match="label 0 of record 0 is 5, but must be 0 or 1"):
        dataset(Examples(IMAGES, LABELS * 5))


def test_images_with_labels_may_be_turned_and_images_with_masks_may_not() -> None:
    assert dataset(Examples(IMAGES, LABELS)).table().turnable
    assert dataset(Examples(IMAGES, LABELS)).table().take(np.array([1])).turnable
    for targets in (MASKS, BOXES):
        assert not dataset(Examples(IMAGES, targets)).table().turnable


def test_a_mask_that_shows_a_class_which_there_is_not_is_an_error() -> None:
    with pytest.raises(DataError, match=r"mask 2 has the id 2 in 12 pixels, but ids must be 0 to 1"):
        dataset(Examples(IMAGES, MASKS), classes=2)
