"""`scale-crop` against Pillow's resizing and a slow placement, and masks and boxes on the pixels that it returns."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.data.augmentation import scale_crop
from fedlens.data.augmentation.scale_crop import ScaleCrop, fixed_point_scaled, make_scale_crop
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.change import Change
from fedlens.vision.moved_targets import moved_boxes, moved_masks

COLOUR = (3, 20, 26)
SIDES = st.integers(1, 24)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, height: int, width: int, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (n, channels, height, width), generator=generator(9), dtype=torch.uint8)


def placements(
    step: ScaleCrop, n: int, height: int, width: int, seed: int
) -> Iterator[tuple[int, int, int, int]]:
    """The rows and columns of each scaled image, and where the crop begins in it, from the documented draws."""
    size = step.crop or (height, width)
    for factor, down, across in torch.rand(3, n, generator=generator(seed)).double().t().tolist():
        factor = step.scale[0] + (step.scale[1] - step.scale[0]) * factor
        sides = max(1, round(height * factor)), max(1, round(width * factor))
        edges = []
        for side, crop, share in ((sides[0], size[0], down), (sides[1], size[1], across)):
            places = abs(side - crop) + 1
            place = min(math.floor(share * places), places - 1)
            edges.append(place if side >= crop else -place)
        yield (*sides, *edges)  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), SIDES, SIDES, SIDES, SIDES, st.sampled_from([1, 3]))
def test_each_image_is_scaled_as_by_pillow_and_each_mask_by_its_nearest_pixels(
    seed: int, n: int, height: int, width: int, tall: int, wide: int, channels: int
) -> None:
    step, images = ScaleCrop((tall, wide), (0.4, 2.5)), noise(n, height, width, channels)
    masks = images[:, 0] // 12
    found, targets, change = step(images, masks, generator(seed))
    assert targets is masks
    assert change is not None
    assert (found.shape, found.dtype) == ((n, channels, tall, wide), torch.uint8)
    moved = moved_masks(masks, change)
    for k, (rows, columns, top, left) in enumerate(placements(step, n, height, width, seed)):
        scaled = [
            np.array(Image.fromarray(plane.numpy()).resize((columns, rows), Image.Resampling.BILINEAR))
            for plane in images[k]
        ]
        for i in range(tall):
            for j in range(wide):
                y, x = i + top, j + left
                if not (0 <= y < rows and 0 <= x < columns):
                    assert not bool(found[k, :, i, j].any())
                    assert int(moved[k, i, j]) == 255
                    continue
                assert all(abs(int(found[k, c, i, j]) - int(scaled[c][y, x])) <= 1 for c in range(channels))
                # The pixel that contains the centre; at an edge between two, either.
                y, x = (y + 0.5) * height / rows, (x + 0.5) * width / columns
                near = {
                    int(masks[k, min(math.floor(y + a), height - 1), min(math.floor(x + b), width - 1)])
                    for a in (-1e-4, 1e-4)
                    for b in (-1e-4, 1e-4)
                }
                assert int(moved[k, i, j]) in near


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), SIDES, SIDES, SIDES, SIDES, st.sampled_from([1, 3]), st.booleans())
def test_fixed_point_numbers_have_the_bits_of_pytorch_on_a_processor(
    seed: int, height: int, width: int, tall: int, wide: int, channels: int, extreme: bool
) -> None:
    images = noise(3, height + 1, width + 1, channels)
    images = (images > 127).to(torch.uint8) * 255 if extreme else images
    step = ScaleCrop((tall, wide), (0.3, 4.0))
    expected = step(images, None, generator(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_crop, "_scaled_by_pytorch", fixed_point_scaled)
        found = step(images, None, generator(seed))
    assert torch.equal(found.images, expected.images)


def test_boxes_stay_around_their_objects() -> None:
    draw = np.random.RandomState(4)
    n, (height, width) = 24, COLOUR[1:]
    images, boxes = torch.zeros(n, 3, height, width, dtype=torch.uint8), []
    for k in range(n):
        left, top = draw.randint(0, width - 6), draw.randint(0, height - 6)
        right, bottom = draw.randint(left + 4, width + 1), draw.randint(top + 4, height + 1)
        images[k, :, top:bottom, left:right] = 255
        boxes.append([left, top, right, bottom])
    given = BoxBatch(torch.tensor(boxes).float(), torch.zeros(n).long(), torch.arange(n), n)
    found, _, change = ScaleCrop((16, 24), (0.6, 1.8))(images, None, generator())
    assert change is not None
    moved, seen = moved_boxes(given, change), 0
    x, y = torch.arange(24) + 0.5, torch.arange(16)[:, None] + 0.5
    for k in range(n):
        bright = found[k, 0] > 127
        for left, top, right, bottom in moved.of(k)[0].tolist():
            seen += 1
            # Interpolation between a bright and a dark pixel is half bright in the middle: the edge of the box.
            for margin, inside in ((0.51, False), (-0.51, True)):
                a, b = (x > left - margin) & (x < right + margin), (y > top - margin) & (y < bottom + margin)
                assert not bool(((bright ^ inside) & ((a & b) ^ (not inside))).any())
    assert 15 < seen < n  # some are cut off


def test_factors_and_places_are_uniform() -> None:
    step = ScaleCrop((10, 10), (0.5, 2.0))
    change = step(noise(3000, 20, 20, 1), None, generator())[2]
    assert change is not None
    factors = (10 / change.height).sort().values
    assert float((factors - torch.linspace(0.5, 2, 3000)).abs().max()) < 0.07
    room = 20 * 10 / change.height - 10
    share = (change.top * 10 / change.height / room)[room > 5]
    assert float(share.min()) >= 0
    assert float(share.max()) <= 1 + 1e-6
    assert abs(float(share.mean()) - 0.5) < 0.03
    padded = ScaleCrop((40, 40), (1.0, 1.0))(noise(3000, 20, 20, 1), None, generator())[2]
    assert padded is not None
    assert sorted(set(padded.left.tolist())) == list(range(-20, 1))


def test_an_image_of_the_crops_size_and_factor_one_comes_back_as_it_is() -> None:
    images = noise(3, 20, 26)
    found, _, change = ScaleCrop(None, (1.0, 1.0))(images, None, generator())
    assert torch.equal(found, images)
    assert change is not None
    assert change.boxes(torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([2])).tolist() == [[1, 2, 3, 4]]


def test_an_image_smaller_than_the_crop_is_padded_and_said_once_in_advance() -> None:
    step = make_scale_crop(COLOUR, crop=[30, 26], scale=(1.0, 1.0))
    images, void = torch.full((2, *COLOUR), 7, dtype=torch.uint8), torch.full((2, 20, 26), 255).byte()
    found, _, change = step(images, void, generator())
    assert change is not None
    assert found.shape == (2, 3, 30, 26)
    assert int((found == 0).sum()) == 2 * 3 * 10 * 26
    assert bool((moved_masks(void, change) == 255).all())
    note = step.note(COLOUR)
    assert note is not None
    assert "20x26 pixels are smaller than the crop of 30x26" in note
    assert step.output_shape(COLOUR) == (3, 30, 26)
    for fits in (make_scale_crop(COLOUR, crop=20), make_scale_crop(COLOUR)):
        assert fits.note(COLOUR) is None
    assert make_scale_crop(COLOUR).output_shape(COLOUR) == COLOUR
    assert make_scale_crop(COLOUR, crop=[20, 27]).note(COLOUR) is not None


def test_an_object_may_leave_the_crop_and_an_image_may_show_none() -> None:
    one = BoxBatch(torch.tensor([[0.0, 0, 4, 4]]), torch.zeros(1).long(), torch.tensor([1]), 2)
    corner = moved_boxes(one, Change.windows(torch.tensor([[10.0, 10, 8, 8]] * 2), (8, 8)))
    assert (len(corner), len(corner.boxes)) == (2, 0)


@pytest.mark.parametrize("scale", [(2.0, 0.5), (0.0, 1.0), (-1.0, 1.0), (0.5, 17.0), (float("nan"), 1.0)])
def test_bounds_of_the_scale_that_are_not_in_order_are_refused(scale: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"the scale is \[.*\], but needs 0 < smallest <= largest <= 16"):
        make_scale_crop(COLOUR, scale=scale)


def test_inputs_are_not_changed_and_nothing_is_drawn_from_the_global_generator() -> None:
    images = noise(4, 20, 26)
    before, state = images.clone(), torch.get_rng_state()
    ScaleCrop((12, 12), (0.5, 2.0))(images, None, generator())
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
