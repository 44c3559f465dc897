"""Which cells and anchors of YOLOv5 learn a box: hand-computed cases, and a slow loop over random boxes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlens.models.yolov5.loss import ANCHORS, assign, fits, unmatched_share
from tests.unit.models.yolov5_kit import STRIDES, random_boxes, slow_places

ONE = torch.tensor([[10.0, 10.0]])


def places(boxes: Tensor, anchors: Tensor, stride: int, rows: int, columns: int) -> list[tuple[int, ...]]:
    found = assign(boxes, anchors, stride, rows, columns)
    return list(zip(*(x.tolist() for x in (found.box, found.anchor, found.row, found.column)), strict=True))


def around(x: float, y: float, w: float = 10, h: float = 10) -> Tensor:
    return torch.tensor([[x - w / 2, y - h / 2, x + w / 2, y + h / 2]])


@pytest.mark.parametrize(
    ("x", "y", "cells"),
    [
        (18, 18, [(2, 2), (2, 1), (1, 2)]),  # a quarter into the cell: left and up
        (22, 22, [(2, 2), (2, 3), (3, 2)]),
        (18, 22, [(2, 2), (2, 1), (3, 2)]),
        (20, 22, [(2, 2), (3, 2)]),  # in the middle across: no nearer neighbour
        (20, 20, [(2, 2)]),
        (16, 18, [(2, 2), (2, 1), (1, 2)]),  # on the border of two cells
        (2, 2, [(0, 0)]),  # in a corner of the image
        (6, 2, [(0, 0), (0, 1)]),
        (30, 30, [(3, 3)]),
        (26, 30, [(3, 3), (3, 2)]),
        (32, 18, [(2, 3)]),  # on the right border: the nearer cell is the last
        (33, 18, [(2, 3)]),  # a centre outside, as near as half a cell
        (37, 18, []),
        (-3, 18, [(2, 0)]),
    ],
)
def test_a_box_goes_to_its_own_cell_and_the_nearer_neighbours_inside_the_grid(x, y, cells) -> None:
    assert places(around(x, y), ONE, 8, 4, 4) == [(0, 0, row, column) for row, column in cells]


@pytest.mark.parametrize(
    ("size", "fit"),
    [
        ((39.9, 39.9), True), ((40.0, 10.0), False), ((10.0, 40.0), False), ((2.5, 10.0), False),
        ((2.51, 2.51), True), ((39.0, 2.6), True), ((0.0, 10.0), False), ((10.0, 0.0), False),
        ((-10.0, 10.0), False), ((float("nan"), 10.0), False), ((float("inf"), 10.0), False),
    ],
)  # fmt: skip
def test_both_sides_differ_by_a_factor_below_4(size, fit: bool) -> None:
    box = torch.tensor([[0.0, 0.0, *size]])
    assert fits(box, ONE).tolist() == [[fit]]
    assert bool(places(box, ONE, 8, 8, 8)) == fit


def test_two_boxes_in_one_cell_are_both_learned_there() -> None:
    boxes = torch.cat([around(20, 20), around(20, 20, 12, 8)])
    assert places(boxes, ONE, 8, 4, 4) == [(0, 0, 2, 2), (1, 0, 2, 2)]


def test_a_box_goes_to_every_anchor_that_fits() -> None:
    anchors = torch.tensor([[10.0, 13], [16, 30], [330, 230]])
    assert places(around(20, 20, 14, 20), anchors, 8, 4, 4) == [(0, 0, 2, 2), (0, 1, 2, 2)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("height", "width"), [(64, 96), (192, 256)])
def test_a_slow_loop_gives_the_same_matches(seed: int, height: int, width: int) -> None:
    boxes = random_boxes(60, height, width, seed)
    for at, stride in enumerate(STRIDES):
        anchors = ANCHORS[3 * at : 3 * at + 3]
        grid = stride, height // stride, width // stride
        expected = slow_places(boxes, anchors, *grid)
        assert sorted(places(boxes, torch.tensor(anchors).double(), *grid)) == sorted(expected)
        assert expected


@pytest.mark.parametrize("axis", [0, 1])
def test_mirrored_boxes_are_matched_to_mirrored_cells(axis: int) -> None:
    height, width = 96, 64
    boxes = random_boxes(80, height, width, seed=7)
    boxes = boxes[(boxes[:, axis] + boxes[:, axis + 2]) / 2 % 8 != 0]  # no centre between two cells
    mirrored = boxes.clone()
    mirrored[:, [axis, axis + 2]] = (width, height)[axis] - boxes[:, [axis + 2, axis]]
    for at, stride in enumerate(STRIDES):
        anchors = torch.tensor(ANCHORS[3 * at : 3 * at + 3]).double()
        rows, columns = height // stride, width // stride
        found = set(places(boxes, anchors, stride, rows, columns))
        flipped = {
            (b, a, *((r, columns - 1 - c) if axis == 0 else (rows - 1 - r, c))) for b, a, r, c in found
        }
        assert found
        assert set(places(mirrored, anchors, stride, rows, columns)) == flipped


def test_no_box_and_boxes_without_area_are_matched_nowhere() -> None:
    empty = torch.zeros(0, 4)
    assert places(empty, ONE, 8, 4, 4) == []
    assert places(torch.tensor([[5.0, 5, 5, 5], [9, 3, 4, 8]]), ONE, 8, 4, 4) == []


def test_the_share_of_boxes_that_fit_no_anchor() -> None:
    anchors = torch.tensor(ANCHORS)
    boxes = torch.cat([around(50, 50, *size) for size in [(20, 20), (100, 2), (2, 2), (1492, 1304)]])
    assert unmatched_share(boxes, anchors) == 0.75  # the last is 4 times the largest anchor
    assert unmatched_share(boxes[:1], anchors) == unmatched_share(boxes[:0], anchors) == 0.0
