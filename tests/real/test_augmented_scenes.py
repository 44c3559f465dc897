"""Augmented frames of CamVid and BCCD: each pixel keeps its class, and each whole object its pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.datasets.bccd import bccd
from fedlens.data.datasets.camvid import camvid
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.moved_targets import moved_boxes, moved_masks

pytestmark = pytest.mark.real

STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "crop": [("crop", {"pad": 20})],
    "pad-crop-flip": [("pad-crop-flip", {"pad": 20})],
    "flip": [("flip", {"vertical": True})],
    "mosaic": [("mosaic", {})],
    "all": [
        ("mosaic", {"p": 0.7}),
        ("flip", {"vertical": 0.5}),
        ("scale-crop", {"crop": [301, 401], "scale": [1.0, 1.0]}),
    ],
}


def frames(root: Path, name: str, reader: Any) -> tuple[Tensor, Any]:
    """Eight images of the training split, and their targets."""
    if not (root / name).is_dir():
        pytest.skip(f"no {name} below FEDLENS_DATA")
    split = reader(root, False, 0).train.tensors()
    images, targets = split.batch(torch.arange(0, 80, 10))
    return images, targets


def augmented(images: Tensor, targets: Any, name: str, move: Any) -> tuple[Tensor, Any]:
    steps = (AUGMENTS.find(step)(tuple(images.shape[1:]), **settings) for step, settings in STEPS[name])
    return Chain(tuple(steps), move)(images, targets, torch.Generator().manual_seed(1))


def colours_with_classes(images: Tensor, masks: Tensor) -> set[int]:
    """The combinations of colour and class that pixels have, as numbers."""
    red, green, blue = images.long().unbind(1)
    combined = ((red * 256 + green) * 256 + blue) * 256 + masks
    return set(combined.unique().tolist())


@pytest.mark.parametrize("name", STEPS)
def test_a_pixel_of_camvid_keeps_its_class(name: str, real_data: Path) -> None:
    images, masks = frames(real_data, "CamVid", camvid)
    pixels, moved = augmented(images, masks, name, moved_masks)
    outside = 255  # black, and no class
    found, known = colours_with_classes(pixels, moved), colours_with_classes(images, masks)
    assert found <= known | {outside}
    assert len(found) > 0.5 * len(known)
    # Were masks one pixel off, there would be other combinations.
    assert not colours_with_classes(pixels, moved.roll(1, 2)) <= known | {outside}


def patches(images: Tensor, boxes: BoxBatch) -> list[tuple[int, Tensor]]:
    """The class and the pixels of each object."""
    cut = []
    for box, label, image in zip(boxes.boxes.int().tolist(), boxes.labels.tolist(), boxes.image, strict=True):
        left, top, right, bottom = box
        cut.append((label, images[image, :, top:bottom, left:right]))
    return cut


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_object_of_bccd_keeps_its_pixels(name: str, real_data: Path) -> None:
    images, boxes = frames(real_data, "BCCD", bccd)
    known = set()
    for label, patch in patches(images, boxes):
        for flips in ((), (1,), (2,), (1, 2)):
            turned = patch.flip(flips)
            known.add((label, tuple(turned.shape), turned.numpy().tobytes()))
    shapes = {(label, shape) for label, shape, _ in known}
    pixels, moved = augmented(images, boxes, name, moved_boxes)
    whole = [
        (label, patch) for label, patch in patches(pixels, moved) if (label, tuple(patch.shape)) in shapes
    ]
    same = [
        (label, tuple(patch.shape), patch.contiguous().numpy().tobytes()) in known for label, patch in whole
    ]
    assert len(whole) > 10
    # An object that is cut off may happen to have the size of another.
    assert sum(same) > 0.9 * len(same)
    height, width = pixels.shape[2:]
    assert bool((moved.boxes >= 0).all())
    assert bool((moved.boxes <= torch.tensor([width, height, width, height])).all())
