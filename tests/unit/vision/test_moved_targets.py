"""Moved masks and boxes against a slow reference that follows the equations pixel by pixel and corner by corner."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.change import Change, Pieces
from fedlens.vision.moved_targets import moved_boxes, moved_masks

SEEDS = st.integers(0, 2**31)
SIDES = st.integers(1, 9)


def drawn_masks(n: int, height: int, width: int, draw: torch.Generator) -> Tensor:
    """Masks with every class from 0 to 21, and void."""
    masks = torch.randint(0, 23, (n, height, width), generator=draw, dtype=torch.uint8)
    return torch.where(masks == 22, 255, masks)


def drawn_boxes(n: int, height: int, width: int, draw: torch.Generator) -> BoxBatch:
    """Up to four objects an image, some images without any."""
    image = torch.arange(n).repeat_interleave(torch.randint(0, 5, (n,), generator=draw))
    ends = torch.rand(2, len(image), 2, generator=draw) * torch.tensor([width, height])
    boxes = torch.cat([ends.amin(0), ends.amax(0)], 1)
    return BoxBatch(boxes, torch.randint(0, 3, (len(image),), generator=draw), image, n)


def drawn_change(n: int, height: int, width: int, draw: torch.Generator) -> Change:
    """Windows that reach outside, of any scale, or only shifted, to a result of another size; some mirrored."""
    size = tuple(torch.randint(1, 10, (2,), generator=draw).tolist())
    scale = torch.tensor([height, width, height, width])
    low = torch.tensor([-0.5, -0.5, 0.2, 0.2])
    windows = (low + torch.rand(n, 4, generator=draw)) * scale
    shifts = torch.randint(-4, 5, (n, 2), generator=draw)
    shifted = torch.cat([shifts, torch.tensor([size]).expand(n, 2)], 1)
    windows = torch.where(torch.rand(n, 1, generator=draw) < 0.5, windows, shifted.float())
    flips = torch.rand(2, n, generator=draw) < 0.3
    return Change.windows(windows, (size[0], size[1]), *flips)


def drawn_mosaic(n: int, height: int, width: int, draw: torch.Generator) -> Change:
    """Two pieces side by side, or one above the other; the second may be missing."""
    plain = drawn_change(2 * n, height, width, draw)
    (rows, columns), regions, kept = plain.size, [], []
    for k in range(n):
        across = bool(torch.rand(1, generator=draw) < 0.5)
        cut = int(torch.randint(1, (columns if across else rows) + 1, (1,), generator=draw))
        whole = [0, 0, columns, rows]
        first, second = list(whole), list(whole)
        first[2 if across else 3] = second[0 if across else 1] = cut
        for j, region in enumerate((first, second)):
            if region[0] < region[2] and region[1] < region[3]:
                regions.append(region)
                kept.append(2 * k + j)
    at = torch.tensor(kept)
    source = torch.randint(0, n, (len(at),), generator=draw)
    assert plain.mirrored is not None
    assert plain.upended is not None
    return Change(
        *(part[at] for part in (plain.top, plain.left, plain.height, plain.width)),
        plain.size,
        plain.mirrored[at],
        plain.upended[at],
        Pieces(source, at // 2, torch.tensor(regions), n),
    )


def parts(change: Change) -> list[tuple[int, int, int, tuple[int, int, int, int]]]:
    """(window, source, result, region) of each piece of a change, or of each image."""
    height, width = change.size
    if change.pieces is None:
        return [(k, k, k, (0, 0, width, height)) for k in range(len(change))]
    pieces = change.pieces
    return [
        (j, int(pieces.source[j]), int(pieces.result[j]), tuple(pieces.regions[j].tolist()))  # type: ignore[misc]
        for j in range(len(pieces.source))
    ]


def slow_masks(masks: Tensor, change: Change) -> Tensor:
    """Each pixel of the result on its own: its centre, back through the flips and the scaling."""
    height, width = change.size
    moved = torch.full((len(change), height, width), 255, dtype=torch.uint8)
    for j, source, result, (left, top, right, bottom) in parts(change):
        for i in range(top, bottom):
            for k in range(left, right):
                y, x = i + 0.5, k + 0.5
                y = height - y if change.upended is not None and change.upended[j] else y
                x = width - x if change.mirrored is not None and change.mirrored[j] else x
                row = math.floor(float(change.top[j]) + y * (float(change.height[j]) / height))
                column = math.floor(float(change.left[j]) + x * (float(change.width[j]) / width))
                if 0 <= row < masks.shape[1] and 0 <= column < masks.shape[2]:
                    moved[result, i, k] = masks[source, row, column]
    return moved


def slow_boxes(boxes: BoxBatch, change: Change) -> list[tuple[int, int, list[float]]]:
    """(image, label, box) of each remaining object, corner by corner in Python's numbers."""
    height, width = change.size
    remaining = []
    for j, source, result, (left, top, right, bottom) in parts(change):
        found, labels = boxes.of(source)
        for box, label in zip(found.tolist(), labels.tolist(), strict=True):
            x = [(v - float(change.left[j])) * width / float(change.width[j]) for v in box[::2]]
            y = [(v - float(change.top[j])) * height / float(change.height[j]) for v in box[1::2]]
            x = [width - v for v in x] if change.mirrored is not None and change.mirrored[j] else x
            y = [height - v for v in y] if change.upended is not None and change.upended[j] else y
            area = (max(x) - min(x)) * (max(y) - min(y))
            clipped = [max(min(x), left), max(min(y), top), min(max(x), right), min(max(y), bottom)]
            across, down = clipped[2] - clipped[0], clipped[3] - clipped[1]
            if across >= 2 and down >= 2 and across * down >= 0.1 * area:
                remaining.append((result, label, clipped))
    return remaining


def check(masks: Tensor, boxes: BoxBatch, change: Change) -> None:
    before = masks.clone()
    assert torch.equal(moved_masks(masks, change), slow_masks(masks, change))
    assert torch.equal(masks, before)
    moved, expected = moved_boxes(boxes, change), slow_boxes(boxes, change)
    assert len(moved) == len(change)
    assert moved.boxes.dtype == torch.float32
    assert list(zip(moved.image.tolist(), moved.labels.tolist(), strict=True)) == [e[:2] for e in expected]
    assert bool((moved.image.diff() >= 0).all())
    wanted = torch.tensor([e[2] for e in expected]).reshape(-1, 4)
    torch.testing.assert_close(moved.boxes, wanted, rtol=1e-5, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 3), SIDES, SIDES, st.booleans())
def test_every_pixel_and_every_corner_is_where_the_equations_put_it(
    seed: int, n: int, height: int, width: int, joined: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    change = (drawn_mosaic if joined else drawn_change)(n, height, width, draw)
    masks, boxes = drawn_masks(n, height, width, draw), drawn_boxes(n, height, width, draw)
    check(masks, boxes, change)


def one(boxes: list[list[float]]) -> BoxBatch:
    return BoxBatch(
        torch.tensor(boxes).reshape(-1, 4), torch.arange(len(boxes)), torch.zeros(len(boxes)).long(), 1
    )


def kept(boxes: list[list[float]], window: list[float], size: tuple[int, int]) -> list[int]:
    return moved_boxes(one(boxes), Change.windows(torch.tensor([window]), size)).labels.tolist()


def test_an_object_below_two_pixels_a_side_is_dropped() -> None:
    whole = [0.0, 0.0, 40.0, 40.0]
    assert kept([[5, 5, 7, 20], [5, 5, 6.9, 20], [5, 5, 20, 6.9]], whole, (40, 40)) == [0]
    assert kept([[5, 5, 9, 20], [5, 5, 8.9, 20]], whole, (20, 20)) == [0]  # by the size in the result


def test_an_object_of_which_less_than_a_tenth_remains_is_dropped() -> None:
    # The window shows the columns from 20 on. Of a box of 30 columns remain 3, or 2.9.
    window = [0.0, 20.0, 40.0, 20.0]
    assert kept([[-7, 0, 23, 30], [-7.1, 0, 22.9, 30]], window, (40, 20)) == [0]
    # Scaled down to a quarter of its area, all of a box remains.
    assert kept([[4, 4, 12, 12]], [0.0, 0.0, 40.0, 40.0], (20, 20)) == [0]


@pytest.mark.parametrize(
    "box",
    [
        [5.0, 5.0, 5.0, 20.0],
        [50.0, 5.0, 60.0, 20.0],
        [-20.0, 5.0, -1.0, 20.0],
        [float("nan"), 5.0, 9.0, 20.0],
        [5.0, 5.0, float("inf"), 20.0],
    ],
)
def test_objects_without_area_outside_or_not_finite_are_dropped(box: list[float]) -> None:
    assert kept([box, [5, 5, 20, 20]], [0.0, 0.0, 40.0, 40.0], (40, 40)) == [1]


def test_images_without_objects_and_with_very_many_are_moved_alike() -> None:
    change = Change.flips(torch.tensor([True]), (40, 40))
    none = moved_boxes(one([]), change)
    assert (len(none), none.boxes.shape, none.labels.dtype) == (1, (0, 4), torch.int64)
    many = [[float(k % 30), float(k // 30), float(k % 30) + 4, float(k // 30) + 4] for k in range(900)]
    moved = moved_boxes(one(many), change)
    assert moved.labels.tolist() == list(range(900))
    assert moved.boxes[31].tolist() == [35, 1, 39, 5]


def test_a_mask_that_is_all_void_stays_so() -> None:
    void = torch.full((1, 6, 5), 255, dtype=torch.uint8)
    moved = moved_masks(void, Change.windows(torch.tensor([[-1.0, 1.0, 5.0, 3.0]]), (8, 7)))
    assert torch.equal(moved, torch.full((1, 8, 7), 255, dtype=torch.uint8))


def test_a_change_of_pieces_counts_results_and_moves_to_a_device() -> None:
    pieces = Pieces(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), torch.zeros(3, 4).long(), 2)
    change = Change(*torch.ones(4, 3).unbind(), (4, 4), pieces=pieces)
    assert len(change) == 2
    moved = change.to("meta")
    assert moved.pieces is not None
    assert {part.device.type for part in (moved.top, moved.pieces.regions)} == {"meta"}
    with pytest.raises(ValueError, match="have the shapes"):
        Change(*torch.ones(4, 2).unbind(), (4, 4), pieces=pieces)
