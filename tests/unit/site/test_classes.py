"""Labels of a site in the classes of an experiment, for each kind of label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles, Paths
from fedlens.site.local_data import in_classes
from fedlens.site.settings import SiteCompute, SiteData, SiteSettings

LOCAL, CLASSES = ("dog", "cat", "blur", "puppy"), ("cat", "dog", "horse")
LABELS = {"puppy": "dog", "blur": ""}


def mapped(targets: Any, names: Paths | None = None) -> Examples:
    images = np.arange(4, dtype=np.uint8).repeat(12).reshape(4, 1, 3, 4)
    examples = Examples(images, targets, {"who": np.array(list("abcd"))}, names)
    data = Dataset("mine", examples, examples, LOCAL, (0.0,), (1.0,), "", "")
    settings = SiteSettings(
        Path("site.toml"), SiteData(dataset={"name": "x"}, labels=LABELS), SiteCompute(), {}
    )
    return in_classes(data, CLASSES, settings)


def test_classes() -> None:
    found = mapped(np.array([0, 2, 1, 3]), Paths.of(["0", "1", "2", "3"]))
    assert found.targets.tolist() == [1, 0, 1]
    assert found.inputs[:, 0, 0, 0].tolist() == [0, 2, 3]
    assert found.columns["who"].tolist() == ["a", "c", "d"]
    assert found.files is not None
    assert [found.files[i] for i in range(3)] == ["0", "2", "3"]


def test_several_classes_an_image() -> None:
    found = mapped(np.array([[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], np.uint8))
    assert found.targets.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert found.inputs[:, 0, 0, 0].tolist() == [0, 2, 3]


def test_boxes() -> None:
    boxes = np.arange(16, dtype=np.float32).reshape(4, 4)
    found = mapped(Boxes(boxes, np.array([3, 1, 2, 0]), np.array([0, 2, 2, 3, 4])))
    assert [found.targets.labels_of(i).tolist() for i in range(3)] == [[1, 0], [], [1]]
    assert found.inputs[:, 0, 0, 0].tolist() == [0, 1, 3]


@pytest.mark.parametrize("ids", [None, {7: 0, 8: 1, 9: 2}])
def test_masks_in_memory_and_in_files(ids: dict[int, int] | None, tmp_path: Path) -> None:
    masks = np.zeros((4, 3, 4), np.uint8)
    masks[0, 0] = [0, 1, 2, 3]
    masks[1, 0] = 255
    expected = np.array([1, 0, 255, 1])
    found = mapped(masks).targets
    assert found[0, 0].tolist() == expected.tolist()
    assert (found[1, 0] == 255).all()
    lookup = None
    stored = masks.copy()
    if ids is not None:
        lookup = np.arange(256).astype(np.uint8)
        for at, number in ids.items():
            lookup[at], stored[masks == number] = number, at
    for i, mask in enumerate(stored):
        Image.fromarray(mask).save(tmp_path / f"{i}.png")
    files = ImageFiles(tmp_path, Paths.of([f"{i}.png" for i in range(4)]), 0, 3, 4, ids=lookup)
    in_files = mapped(files).targets
    assert (in_files.take(np.arange(4)) == found).all()
    assert (replace(files).take(np.arange(1))[0, 0] == masks[0, 0]).all()
