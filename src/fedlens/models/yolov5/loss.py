"""The loss of a YOLOv5 network: which cells learn which boxes; overlap, class, and objectness of all cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor
from torch.nn import functional

from fedlens.core.device_copies import downloaded, uploaded
from fedlens.models.yolov5.decoding import CLASSES, OBJECTNESS, boxes_at, precise

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


_BALANCE = {8: 4.0, 16: 1.0, 32: 0.4}  # weights of the objectness by stride
_EPS = 1e-7


@dataclass(frozen=True)
class Gains:
    """The weights of the three parts of the loss; class and objectness are for 80 classes and 640 pixels."""

    box: float = 0.05
    class_: float = 0.5
    objectness: float = 1.0


def complete_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """CIoU [k] of pairs of boxes [k, 4] (Zheng et al. 2020, arXiv 1911.08287, equations 9 to 11).

    IoU - d^2 / c^2 - a v: d is the distance of the centres, c the diagonal of the smallest box around both, and
    v = 4 / pi^2 (atan(w' / h') - atan(w / h))^2. The factor a = v / (1 - IoU + v) is a constant for the gradient.

    Args:
        boxes: left, top, right, bottom.
        others: the same; boxes with an area.

    >>> complete_iou(torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]])).tolist()
    [1.0, -0.20000000298023224]
    """
    size, other = boxes[..., 2:] - boxes[..., :2], others[..., 2:] - others[..., :2]
    least = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])
    most = torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])
    shared = least.clamp(min=0).prod(-1)
    iou = shared / (size.prod(-1) + other.prod(-1) - shared).clamp(min=_EPS)
    apart = (boxes[..., :2] + boxes[..., 2:] - others[..., :2] - others[..., 2:]).square().sum(-1) / 4
    aspect = 4 / pi**2 * (_angle(other) - _angle(size)).square()
    with torch.no_grad():
        factor = aspect / (1 - iou + aspect).clamp(min=_EPS)
    return iou - apart / most.square().sum(-1).clamp(min=_EPS) - factor * aspect


def _angle(size: Tensor) -> Tensor:
    width, height = size.clamp(min=_EPS).unbind(-1)
    return torch.atan2(width, height)


def losses(
    raw: Mapping[int, Tensor],
    anchors: Mapping[int, Tensor],
    targets: Sequence[Mapping[str, Tensor]],
    gains: Gains,
) -> dict[str, Tensor]:
    """The losses `box`, `class` and `objectness` of a batch of n images, each with its gain, as 0-dim tensors.

    - box: the mean of 1 - CIoU over the matches of a stride.
    - class: binary cross-entropy, the mean over matches and classes of a stride, times classes / 80. With one class it
      stays, with a target of 1 everywhere.
    - objectness: binary cross-entropy, the mean over images, anchors and cells of a stride. The target is the CIoU of
      the box that the cell learns, at least 0 and without a gradient, and 0 in other cells; of several boxes the
      largest. It is weighted by 4 / 1 / 0.4 for the strides 8 / 16 / 32, and by (size / 640)^2, where size is the
      longer side of the image in pixels with its padding.

    Each is summed over the strides. A stride without a match adds 0 to the first two.

    Args:
        raw: by stride, the outputs [n, anchors, rows, columns, classes + 5].
        anchors: by stride, float [anchors, 2] in pixels; as the targets best in CPU memory, where boxes are
            assigned to places without waiting for the device of the outputs.
        targets: of each image, `boxes` float [k, 4], left, top, right, bottom in pixels, and `labels` int64 [k].
        gains: the weights of the parts.

    >>> raw, anchors = {8: torch.zeros(1, 1, 4, 4, 7)}, {8: torch.tensor([[10.0, 13]])}
    >>> empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    >>> {name: round(float(loss), 4) for name, loss in losses(raw, anchors, [empty], Gains()).items()}
    {'box': 0.0, 'class': 0.0, 'objectness': 0.0069}
    """
    anchors, targets = downloaded((anchors, targets))
    boxes, labels, image = _joined(targets)
    learned = []
    for stride, outputs in raw.items():
        at = assign(boxes, anchors[stride], stride, *outputs.shape[2:4])
        places = image[at.box], at.anchor, at.row, at.column
        learned.append((places, anchors[stride][at.anchor], boxes[at.box], labels[at.box]))
    stride, outputs = next(iter(raw.items()))
    learned = uploaded(learned, outputs.device)  # all at once, and then the steps of all strides
    parts = [_of_stride(raw[at], at, *matches) for at, matches in zip(raw, learned, strict=True)]
    box, class_, objectness = torch.stack(parts).sum(0)
    side = stride * max(outputs.shape[2:4])
    classes = outputs.shape[4] - CLASSES
    return {
        "box": gains.box * box,
        "class": gains.class_ * classes / 80 * class_,
        "objectness": gains.objectness * (side / 640) ** 2 * objectness,
    }


def _joined(targets: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The boxes, the labels and the images of all objects of a batch."""
    boxes = torch.cat([target["boxes"] for target in targets])
    labels = torch.cat([target["labels"] for target in targets])
    counts = torch.tensor([len(target["boxes"]) for target in targets])
    return boxes, labels, torch.arange(len(targets)).repeat_interleave(counts).to(boxes.device)


def _of_stride(
    outputs: Tensor, stride: int, at: tuple[Tensor, ...], sizes: Tensor, boxes: Tensor, labels: Tensor
) -> Tensor:
    """[3]: the parts of the loss for the cells of one stride, without gains.

    All else is of the k matches: the places `at` in the outputs (image, anchor, row and column), the `sizes` [k, 2] of
    the anchors, and the boxes and labels to learn.
    """
    matched = precise(outputs[at])
    overlap = complete_iou(boxes_at(matched, at[2], at[3], sizes, stride), boxes)
    logits = matched[:, CLASSES:]
    truth = torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)
    confidence = precise(outputs[..., OBJECTNESS])
    index = ((at[0] * outputs.shape[1] + at[1]) * outputs.shape[2] + at[2]) * outputs.shape[3] + at[3]
    target = torch.zeros_like(confidence).flatten()
    target.scatter_reduce_(0, index, overlap.detach().clamp(min=0).to(target), "amax")
    return torch.stack(
        [
            (1 - overlap).sum() / max(len(boxes), 1),
            functional.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
            / max(logits.numel(), 1),
            functional.binary_cross_entropy_with_logits(confidence, target.view_as(confidence))
            * _BALANCE[stride],
        ]
    )
