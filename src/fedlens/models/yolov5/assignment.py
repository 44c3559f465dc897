"""Which anchors and cells of a YOLOv5 network learn which boxes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ANCHORS = (
    (10.0, 13.0), (16.0, 30.0), (33.0, 23.0),
    (30.0, 61.0), (62.0, 45.0), (59.0, 119.0),
    (116.0, 90.0), (156.0, 198.0), (373.0, 326.0),
)  # fmt: skip
"""Width and height in pixels, three for each of the strides 8, 16 and 32."""

_RATIO = 4.0  # a side of a box and of its anchor differ by less than this factor


@dataclass(frozen=True)
class Matches:
    """Pairs of a box and a place that learns it; one box has several, and one place may have several boxes.

    Attributes:
        box: int64 [k], the position of the box among all boxes.
        anchor: int64 [k].
        row: int64 [k], of the cell.
        column: int64 [k], of the cell.
    """

    box: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor

    def __len__(self) -> int:
        """k."""
        return len(self.box)


def fits(boxes: Tensor, anchors: Tensor) -> Tensor:
    """bool [m, a]: whether both sides of a box differ from those of an anchor by a factor below 4.

    Args:
        boxes: float [m, 4], left, top, right, bottom in pixels. A box without area fits no anchor.
        anchors: float [a, 2], width and height in pixels.

    >>> fits(torch.tensor([[0.0, 0, 39, 13], [0, 0, 40, 13], [5, 5, 5, 9]]), torch.tensor([[10.0, 13]])).tolist()
    [[True], [False], [False]]
    """
    sizes = (boxes[:, 2:] - boxes[:, :2])[:, None]
    factor = torch.maximum(sizes / anchors, anchors / sizes).amax(2)
    return (factor < _RATIO) & (sizes > 0).all(2)


def unmatched_share(boxes: Tensor, anchors: Tensor) -> float:
    """The share of boxes [m, 4] that fit none of the anchors [a, 2], which no cell learns; 0 without boxes.

    >>> unmatched_share(torch.tensor([[0.0, 0, 20, 20], [0, 0, 100, 2]]), torch.tensor(ANCHORS))
    0.5
    """
    if not len(boxes):
        return 0.0
    return float((~fits(boxes, anchors).any(1)).double().mean())


def assign(boxes: Tensor, anchors: Tensor, stride: int, rows: int, columns: int) -> Matches:
    """The places that learn each box, among the cells of one stride.

    A box goes to every anchor that it `fits`. There it goes to three cells: the one that its centre lies in, the nearer
    neighbour across and the nearer neighbour down. Cells outside the grid are left out, and so is the neighbour of a
    centre in the middle of its cell, to which both are equally near.

    Args:
        boxes: float [m, 4], left, top, right, bottom in pixels.
        anchors: float [a, 2], width and height in pixels, of this stride.
        stride: the pixels of a cell.
        rows: of the grid.
        columns: of the grid.

    >>> places = assign(torch.tensor([[4.0, 6, 14, 16]]), torch.tensor([[10.0, 13]]), 8, rows=4, columns=4)
    >>> list(zip(places.row.tolist(), places.column.tolist(), strict=True))
    [(1, 1), (1, 0), (0, 1)]
    """
    centres = (boxes[:, :2] + boxes[:, 2:]) / (2 * stride)
    own = centres.floor()
    nearer = (centres - own - 0.5).sign()  # -1, 1, or 0 in the middle
    steps = torch.stack([torch.zeros_like(nearer), nearer, nearer], 1)  # [m, 3, 2]: none, across, down
    steps[:, 1, 1] = steps[:, 2, 0] = 0
    cells = own[:, None] + steps
    grid = cells.new_tensor([columns, rows])
    learns = ((cells >= 0) & (cells < grid)).all(2)
    learns[:, 1:] &= nearer != 0
    box, anchor, candidate = (fits(boxes, anchors)[:, :, None] & learns[:, None]).nonzero(as_tuple=True)
    column, row = cells[box, candidate].long().unbind(1)
    return Matches(box, anchor, row, column)
