"""The rules of YOLOv5 written down as slow loops, as the tests compare with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, floor, pi

import torch
from torch import Tensor

STRIDES = (8, 16, 32)


def slow_places(
    boxes: Tensor, anchors: Sequence[Sequence[float]], stride: int, rows: int, columns: int
) -> list[tuple[int, int, int, int]]:
    """(box, anchor, row, column) of each match, from the table of the network."""
    places = []
    for b, (left, top, right, bottom) in enumerate(boxes.tolist()):
        w, h = right - left, bottom - top
        for a, (aw, ah) in enumerate(anchors):
            if w <= 0 or h <= 0 or max(w / aw, aw / w, h / ah, ah / h) >= 4:
                continue
            x, y = (left + right) / 2 / stride, (top + bottom) / 2 / stride
            column, row = floor(x), floor(y)
            cells = [(row, column)]
            if x - column != 0.5:
                cells.append((row, column - 1 if x - column < 0.5 else column + 1))
            if y - row != 0.5:
                cells.append((row - 1 if y - row < 0.5 else row + 1, column))
            places += [(b, a, r, c) for r, c in cells if 0 <= r < rows and 0 <= c < columns]
    return places


def slow_ciou(box: Sequence[float], other: Sequence[float]) -> float:
    """CIoU of Zheng et al. 2020, with Python's numbers."""
    shared = max(min(box[2], other[2]) - max(box[0], other[0]), 0.0)
    shared *= max(min(box[3], other[3]) - max(box[1], other[1]), 0.0)
    (w, h), (u, v) = ((b[2] - b[0], b[3] - b[1]) for b in (box, other))
    iou = shared / (w * h + u * v - shared)
    apart = sum(((box[k] + box[k + 2]) / 2 - (other[k] + other[k + 2]) / 2) ** 2 for k in (0, 1))
    around = sum((max(box[k + 2], other[k + 2]) - min(box[k], other[k])) ** 2 for k in (0, 1))
    aspect = 4 / pi**2 * (atan(u / v) - atan(w / h)) ** 2
    factor = aspect / (1 - iou + aspect) if aspect else 0.0
    return iou - apart / around - factor * aspect


def slow_box(
    outputs: Sequence[float], row: int, column: int, anchor: Sequence[float], stride: int
) -> list[float]:
    """The box of a cell, left, top, right, bottom."""
    s = [2 / (1 + torch.tensor(-value, dtype=torch.float64).exp().item()) for value in outputs[:4]]
    x, y = (s[0] - 0.5 + column) * stride, (s[1] - 0.5 + row) * stride
    w, h = s[2] ** 2 * anchor[0], s[3] ** 2 * anchor[1]
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def random_boxes(m: int, height: int, width: int, seed: int, grid: float = 0.25) -> Tensor:
    """Boxes [m, 4] inside an image with corners on multiples of `grid`, so that arithmetic on them is exact."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(m, 2, 2, generator=generator, dtype=torch.float64)
    corners = (corners * torch.tensor([width, height]) / grid).round() * grid
    corners = corners.sort(1).values
    return corners.flatten(1)


def random_outputs(
    n: int, classes: int, height: int, width: int, seed: int, each: int = 3
) -> dict[int, Tensor]:
    """Outputs of a network by stride, float64, for images of this size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        stride: torch.randn(
            n, each, height // stride, width // stride, classes + 5, generator=generator, dtype=torch.float64
        )
        for stride in STRIDES
    }
