"""Masks and boxes that follow the pixels of a client's batches, as tasks move them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.core.dataset_info import VOID
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import AUGMENTS, Augmented
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.boxes import Boxes
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples
from fedlens.vision import moved_targets
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.moved_targets import moved_boxes, moved_masks

HEIGHT, WIDTH = 12, 16
EXACT = [("pad-crop-flip",), ("crop",), ("flip",), ("upended",), ("crop", "flip", "upended", "pad-crop-flip")]
UPENDED = {"p": 0.0, "vertical": 0.5}


@pytest.fixture(autouse=True)
def no_object_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps every object of which a pixel remains."""
    monkeypatch.setattr(moved_targets, "LEAST_SIDE", 0.25)
    monkeypatch.setattr(moved_targets, "LEAST_SHARE", 0.0)


def step(name: str) -> Any:
    shape = (3, HEIGHT, WIDTH)
    return AUGMENTS.find("flip")(shape, **UPENDED) if name == "upended" else AUGMENTS.find(name)(shape)


def chain(names: tuple[str, ...], move: Any) -> Chain:
    return Chain(tuple(step(name) for name in names), move)


def segments(n: int = 24) -> Examples:
    """The first channel of each image is its mask plus one."""
    draw = torch.Generator().manual_seed(3)
    masks = torch.randint(0, 21, (n, HEIGHT, WIDTH), generator=draw, dtype=torch.uint8)
    return Examples((masks + 1).unsqueeze(1).expand(-1, 3, -1, -1).contiguous(), masks)


@pytest.mark.parametrize("names", EXACT)
def test_a_mask_stays_on_its_pixels(names: tuple[str, ...]) -> None:
    data = ClientDataset(segments(), torch.arange(24), (0.0,) * 3, (1 / 255,) * 3, chain(names, moved_masks))
    outside = 0
    for images, masks in islice(data.batches(8, Rng((0,))), 6):
        pixels = images[:, 0].round().long()
        assert torch.equal(torch.where(pixels == 0, VOID, pixels - 1), masks.long())
        outside += int((masks == VOID).sum())
    assert (outside > 0) == (names not in (("flip",), ("upended",)))


def test_the_masks_of_a_resized_window_are_those_of_its_nearest_pixels() -> None:
    ramp = torch.arange(WIDTH, dtype=torch.uint8).expand(8, 1, HEIGHT, WIDTH) * 15
    down = torch.arange(HEIGHT, dtype=torch.uint8).view(1, 1, -1, 1).expand(8, 1, HEIGHT, WIDTH) * 20
    images = torch.cat([ramp, down, ramp], 1)
    made = AUGMENTS.find("random-resized-crop")((3, HEIGHT, WIDTH))
    found, _, change = made(images, None, torch.Generator().manual_seed(0))
    for channel, step in ((0, 15), (1, 20)):
        masks = moved_masks(images[:, channel] // step, change)
        assert int(masks.max()) < VOID
        # Interpolation is at most half a pixel from the nearest one; rounding adds half a grey value.
        far = (found[:, channel].float() - masks.float() * step).abs().max()
        assert float(far) <= step / 2 + 0.5


def boxed(n: int = 24) -> tuple[Examples, Boxes]:
    """Each image shows up to three bright boxes, one in each channel."""
    draw = np.random.RandomState(4)
    images, boxes, labels, offsets = np.zeros((n, 3, HEIGHT, WIDTH), np.uint8), [], [], [0]
    for k in range(n):
        for label in draw.permutation(3)[: draw.randint(0, 4)]:
            left, top = draw.randint(0, WIDTH - 3), draw.randint(0, HEIGHT - 3)
            right, bottom = draw.randint(left + 2, WIDTH + 1), draw.randint(top + 2, HEIGHT + 1)
            images[k, label, top:bottom, left:right] = 255
            boxes.append([left, top, right, bottom])
            labels.append(label)
        offsets.append(len(boxes))
    found = Boxes(np.array(boxes, np.float32), np.array(labels), np.array(offsets))
    return Examples(images, found).tensors(), found


def painted(targets: BoxBatch, margin: float = 0.0) -> Tensor:
    """bool [n, 3, H, W]: the pixels whose centres lie in the boxes, made larger by `margin`."""
    shown = torch.zeros(len(targets), 3, HEIGHT, WIDTH, dtype=torch.bool)
    x, y = torch.arange(WIDTH) + 0.5, torch.arange(HEIGHT)[:, None] + 0.5
    for box, label, image in zip(targets.boxes.tolist(), targets.labels, targets.image, strict=True):
        left, top, right, bottom = box
        inside = (x > left - margin) & (x < right + margin) & (y > top - margin) & (y < bottom + margin)
        shown[image, label] |= inside
    return shown


@pytest.mark.parametrize("names", EXACT)
def test_boxes_stay_around_their_objects(names: tuple[str, ...]) -> None:
    examples, _ = boxed()
    data = ClientDataset(examples, torch.arange(24), (0.0,) * 3, (1.0,) * 3, chain(names, moved_boxes))
    for images, targets in islice(data.batches(8, Rng((0,))), 6):
        assert len(targets) == len(images) == 8
        assert torch.equal(images > 0.5, painted(targets))


def test_boxes_of_a_resized_window_stay_around_their_objects() -> None:
    examples, _ = boxed()
    data = ClientDataset(
        examples, torch.arange(24), (0.0,) * 3, (1.0,) * 3, chain(("random-resized-crop",), moved_boxes)
    )
    seen = 0
    for images, targets in islice(data.batches(8, Rng((0,))), 6):
        # Interpolation between a bright and a dark pixel is half bright in the middle: the edge of the box.
        bright = images > 0.5
        assert not bool((bright & ~painted(targets, margin=0.51)).any())
        assert not bool((~bright & painted(targets, margin=-0.51)).any())
        seen += int(bright.any())
    assert seen


def test_all_examples_are_read_as_a_batch_of_boxes_whatever_the_order() -> None:
    examples, found = boxed()
    data = ClientDataset(examples, torch.arange(24), (0.0,) * 3, (1.0,) * 3)
    (_, whole), (_, batch) = data.stretch(0, 24), next(data.batches(24, Rng((0,))))
    for k in range(24):
        for targets in (whole, batch, data.read_targets()):
            boxes, labels = targets.of(k)
            assert torch.equal(boxes, torch.from_numpy(found.boxes_of(k)))
            assert torch.equal(labels, torch.from_numpy(found.labels_of(k)))
    for images, targets in islice(data.batches(5, Rng((0,))), 12):  # from memory, and in another order
        assert torch.equal(images > 0.5, painted(targets))


def test_a_later_step_gets_targets_that_the_earlier_one_moved() -> None:
    seen = []

    def look(images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        seen.append(targets)
        return images, targets

    examples = segments(4)
    both = Chain((AUGMENTS.find("flip")((3, HEIGHT, WIDTH), p=1.0), look), moved_masks)
    _, masks = both(examples.inputs, examples.targets, torch.Generator())
    assert torch.equal(seen[0], examples.targets.flip(2))
    assert masks is seen[0]


def test_two_views_are_two_augmentations_drawn_one_after_the_other() -> None:
    augment = chain(("crop", "flip", "colour-jitter"), moved_masks)
    one = ClientDataset(segments(), torch.arange(24), (0.4,) * 3, (0.2,) * 3, augment)
    generator, order = Rng((7,)).torch("augment"), torch.randperm(24, generator=Rng((7,)).torch("batches"))
    expected = []
    for at in order.split(8):
        images, masks = one.examples.batch(at)
        views = [augment(images, masks, generator)[0] for _ in range(2)]
        expected.append((torch.stack(views, 1), masks))
    two = replace(one, views=2)
    for (images, masks), (wanted, unmoved) in zip(
        islice(two.batches(8, Rng((7,))), 3), expected, strict=True
    ):
        assert images.shape == (8, 2, 3, HEIGHT, WIDTH)
        pixels = ((images * 0.2 + 0.4) * 255).round().to(torch.uint8)
        assert torch.equal(pixels, wanted)
        assert not torch.equal(images[:, 0], images[:, 1])
        assert torch.equal(masks, unmoved)  # they belong to the image before augmentation


def test_views_without_augmentation_and_in_evaluation_are_the_same_image_twice() -> None:
    plain = ClientDataset(segments(), torch.arange(24), (0.4,) * 3, (0.2,) * 3)
    two = replace(plain, views=2)
    assert two.group([]) is None
    for a, b in [
        (two.stretch(3, 9), plain.stretch(3, 9)),
        (next(two.batches(8, Rng((0,)))), next(plain.batches(8, Rng((0,))))),
        (next(two.stretches(0, 24, 5)), plain.stretch(0, 5)),
    ]:
        assert torch.equal(a[0], torch.stack([b[0], b[0]], 1))
        assert torch.equal(a[1], b[1])
    assert isinstance(
        AUGMENTS.find("flip")((3, 4, 4))(torch.zeros(1, 3, 4, 4), None, torch.Generator()), Augmented
    )
