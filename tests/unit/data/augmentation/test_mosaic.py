"""`mosaic`: images whose pixels name their image, row and column show where each part comes from."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.augmentation.mosaic import Mosaic, make_mosaic
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.federated import federate
from fedlens.data.partition.partition import Partition
from fedlens.vision import moved_targets
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.moved_targets import moved_boxes, moved_masks

SEEDS = st.integers(0, 2**31)
SIDES = st.integers(1, 15)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def named(n: int, height: int, width: int) -> Tensor:
    """Pixel (i, j) of image k is (k, i, j)."""
    k, i, j = torch.meshgrid(torch.arange(n), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([k, i, j], 1).byte()


def centre(image: Tensor) -> tuple[int, int]:
    """The row and column at which the parts of a mosaic of `named` images meet; the size where only one shows."""
    height, width = image.shape[1:]
    # Down a column the rows go up by one, but from the last to the first at the centre; across likewise.
    down = [i for i in range(height) if image[1, i, 0] == 0]
    across = [j for j in range(width) if image[2, 0, j] == 0]
    assert len(down) <= 1
    assert len(across) <= 1
    return (down or [height])[0], (across or [width])[0]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 5), SIDES, SIDES, st.sampled_from([(0.25, 0.75), (0.0, 1.0), (0.5, 0.5)]))
def test_each_quadrant_shows_an_image_of_the_batch_whose_corner_lies_at_the_centre(
    seed: int, n: int, height: int, width: int, places: tuple[float, float]
) -> None:
    images = named(n, height, width)
    found, _, change = Mosaic(1.0, places)(images, None, generator(seed))
    assert found.shape == images.shape
    assert found.is_contiguous()
    assert change is not None
    # What the change says of masks is what the pixels say: each plane is a mask here.
    for plane in range(3):
        assert torch.equal(moved_masks(images[:, plane], change), found[:, plane])
    for k in range(n):
        y, x = centre(found[k])
        shown = []
        for rows, first in ((range(y), height - y), (range(y, height), -y)):
            for columns, left in ((range(x), width - x), (range(x, width), -x)):
                for i in rows:
                    for j in columns:
                        source, row, column = found[k, :, i, j].tolist()
                        shown.append(source)
                        assert (row, column) == (i + first, j + left)
        assert max(shown) < n
        if 0 < y < height and 0 < x < width:
            quadrants = [int(found[k, 0, i, j]) for i in (0, height - 1) for j in (0, width - 1)]
            assert k in quadrants
            assert set(shown) == set(quadrants)


def test_centres_images_and_quadrants_are_drawn_uniformly() -> None:
    n, side = 60, 40
    images, step = named(n, side, side), Mosaic(1.0, (0.25, 0.75))
    rows, columns, turns, others = [], [], [], []
    draw = generator()
    for _ in range(10):
        for k, image in enumerate(step(images, None, draw).images):
            y, x = centre(image)
            rows.append(y)
            columns.append(x)
            quadrants = [int(image[0, i, j]) for i in (0, -1) for j in (0, -1)]
            if quadrants.count(k) == 1:
                turns.append(quadrants.index(k))
                others += [q for q in quadrants if q != k]
    for places in (rows, columns):
        assert min(places) == 10
        assert max(places) == 30
        assert abs(np.mean(places) - 20) < 0.7
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.15
    shares = np.bincount(turns, minlength=4) / len(turns)
    assert shares.min() > 0.19
    assert len(set(others)) == n


def rectangles(n: int, height: int, width: int) -> tuple[Tensor, BoxBatch]:
    """Images with up to three bright boxes, one in each channel, and their boxes; some images show none."""
    draw = np.random.RandomState(4)
    images, boxes, labels, image = torch.zeros(n, 3, height, width, dtype=torch.uint8), [], [], []
    for k in range(n):
        for label in draw.permutation(3)[: draw.randint(0, 4)]:
            left, top = draw.randint(0, width - 3), draw.randint(0, height - 3)
            right, bottom = draw.randint(left + 2, width + 1), draw.randint(top + 2, height + 1)
            images[k, label, top:bottom, left:right] = 255
            boxes.append([left, top, right, bottom])
            labels.append(label)
            image.append(k)
    return images, BoxBatch(torch.tensor(boxes).float(), torch.tensor(labels), torch.tensor(image), n)


def test_boxes_stay_around_their_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_targets, "LEAST_SHARE", 0.0)  # no object is dropped that shows a pixel
    monkeypatch.setattr(moved_targets, "LEAST_SIDE", 1.0)
    height, width = 14, 17
    images, given = rectangles(24, height, width)
    mixed, _, change = Mosaic(1.0, (0.25, 0.75))(images, None, generator())
    assert change is not None
    moved = moved_boxes(given, change)
    painted = torch.zeros_like(images)
    for box, label, image in zip(moved.boxes.int().tolist(), moved.labels, moved.image, strict=True):
        left, top, right, bottom = box
        painted[image, label, top:bottom, left:right] = 255
    assert torch.equal(painted, mixed)
    assert bool((moved.image.diff() >= 0).all())
    assert len(moved.boxes) > len(given.boxes)


def test_what_a_quadrant_cuts_down_to_a_sliver_is_dropped() -> None:
    images = torch.zeros(1, 1, 20, 20, dtype=torch.uint8)
    # The centre is (10, 10): the image shows its four quarters, the last one first.
    given = torch.tensor([[9.0, 0, 20, 10], [2, 2, 8, 8], [10, 10, 19, 19]])
    boxes = BoxBatch(given, torch.arange(3), torch.zeros(3).long(), 1)
    change = Mosaic(1.0, (0.5, 0.5))(images, None, generator())[2]
    assert change is not None
    moved = moved_boxes(boxes, change)
    # Of box 0, one column remains in a quarter, which is too narrow, and ten in the other.
    assert moved.labels.tolist() == [2, 0, 1]
    assert moved.boxes.tolist() == [[0, 0, 9, 9], [0, 10, 10, 20], [12, 12, 18, 18]]


def test_a_batch_of_one_image_shows_it_four_times() -> None:
    images = named(1, 6, 9)
    found, _, change = Mosaic(1.0, (0.5, 0.5))(images, None, generator())
    assert torch.equal(found[0, 1:], images[0, 1:].roll((3, 4), (1, 2)))
    assert change is not None
    assert change.pieces is not None
    assert change.pieces.source.tolist() == [0] * 4


def test_images_that_are_not_drawn_stay_as_they_are_with_their_targets() -> None:
    images, given = rectangles(400, 9, 10)
    found, _, change = Mosaic(0.25, (0.25, 0.75))(images, None, generator())
    assert change is not None
    assert change.pieces is not None
    whole = torch.bincount(change.pieces.result) == 1
    assert abs(float(whole.float().mean()) - 0.75) < 0.06
    assert torch.equal(found[whole], images[whole])
    at = whole.nonzero().flatten()
    assert torch.equal(moved_boxes(given, change).take(at).boxes, given.take(at).boxes)


def test_a_mosaic_is_made_of_images_of_one_client_and_of_one_batch() -> None:
    owners = np.arange(40) % 4
    images = np.repeat(owners.astype(np.uint8), 3 * 8 * 8).reshape(40, 3, 8, 8)
    train = Examples(images, np.zeros((40, 8, 8), np.uint8))
    data = Dataset("made", train, train, ("a",), (0.0,) * 3, (1 / 255,) * 3, "", "")
    chain = Chain((make_mosaic((3, 8, 8)),), moved_masks)
    drawn: Any = lambda table: Partition.of_owners(owners, 4, spec={})  # noqa: E731
    holders = replace(federate(data, drawn)[0], augment=chain)
    for client in range(4):
        for pixels, _ in islice(holders.data_of(client).batches(4, Rng((0,))), 6):
            assert pixels.round().unique().tolist() == [client]


def test_augmentations_one_after_the_other_keep_masks_on_their_pixels() -> None:
    images = torch.randint(1, 22, (9, 1, 12, 15), generator=generator(), dtype=torch.uint8).expand(
        -1, 3, -1, -1
    )
    steps = tuple(
        AUGMENTS.find(name)((3, 12, 15), **table)
        for name, table in [
            ("mosaic", {}),
            ("flip", {"vertical": True}),
            ("crop", {"pad": 3}),
            ("scale-crop", {"crop": [10, 17], "scale": [1.0, 1.0]}),
        ]
    )
    pixels, masks = Chain(steps, moved_masks)(images, images[:, 0], generator())
    assert pixels.shape == (9, 3, 10, 17)
    assert torch.equal(pixels[:, 0], torch.where(masks == 255, 0, masks))
    assert bool((masks == 255).any())


@pytest.mark.parametrize("places", [(0.75, 0.25), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_bounds_of_the_centre_that_are_not_in_order_are_refused(places: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"the centre is \[.*\], but needs 0 <= smallest <= largest <= 1"):
        make_mosaic((3, 8, 8), centre=places)


def test_inputs_are_not_changed_and_nothing_is_drawn_from_the_global_generator(tmp_path: Path) -> None:
    images = named(4, 7, 6)
    before, state = images.clone(), torch.get_rng_state()
    Mosaic(1.0, (0.25, 0.75))(images, None, generator())
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
