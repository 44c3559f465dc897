"""Targets that are tensors and targets that are objects, through the same operations."""

from __future__ import annotations

import pytest
import torch

from fedlens.data.targets import Targets, cat, take
from fedlens.vision.box_batch import BoxBatch

BOXES = torch.tensor([[0.0, 0, 4, 4], [1, 1, 2, 2], [0, 0, 1, 1]])
THREE = BoxBatch(BOXES, torch.tensor([3, 5, 7]), torch.tensor([0, 0, 2]), 4)  # images 1 and 3 show nothing


def test_a_batch_of_boxes_is_an_object_of_the_protocol() -> None:
    assert isinstance(THREE, Targets)
    assert len(THREE) == 4
    assert len(THREE.of(3)[1]) == 0


def test_taking_and_joining_keep_each_image_with_its_objects() -> None:
    at = torch.tensor([2, 1, 0, 2, 3])
    taken = take(THREE, at)
    for row, image in enumerate(at.tolist()):
        for mine, theirs in zip(taken.of(row), THREE.of(image), strict=True):
            assert torch.equal(mine, theirs)
    joined = cat([taken, THREE, take(THREE, torch.tensor([], dtype=torch.int64))])
    assert len(joined) == 9
    for row in range(4):
        for mine, theirs in zip(joined.of(5 + row), THREE.of(row), strict=True):
            assert torch.equal(mine, theirs)
    assert bool((joined.image.diff() >= 0).all())


def test_what_is_sent_comes_back_and_is_of_plain_values() -> None:
    payload = THREE.to_payload()
    assert all(isinstance(value, torch.Tensor | int) for value in payload.values())
    again = BoxBatch.from_payload(payload)
    assert torch.equal(again.boxes, THREE.boxes)
    assert len(again) == 4
    assert THREE.to("meta").labels.device.type == "meta"


def test_tensors_are_targets_by_their_first_dimension() -> None:
    masks = torch.arange(12).view(3, 2, 2)
    assert torch.equal(cat([take(masks, torch.tensor([2])), masks[:1]]), masks[[2, 0]])
    with pytest.raises(ValueError, match="no targets to concatenate"):
        cat([])


def test_shapes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have the shapes \[\[3, 4\], \[2\], \[3\]\]"):
        BoxBatch(BOXES, torch.tensor([3, 5]), torch.tensor([0, 0, 2]), 4)
