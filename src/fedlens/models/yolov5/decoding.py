"""Boxes, classes and scores from the outputs of a YOLOv5 network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import nms

from fedlens.core.device_copies import uploaded

OBJECTNESS, CLASSES = 4, 5
"""Positions in the last dimension of the outputs: 4 of the box, 1 of the objectness, then the classes."""

_CANDIDATES = (
    4  # compared with one another for each box that is kept at most; more cost time and change little
)


@dataclass(frozen=True)
class Suppression:
    """Which of overlapping boxes are kept.

    Attributes:
        score: a box counts for every class whose score is above this.
        iou: of two boxes of one class that overlap by more than this, the one with the higher score is kept.
        most: the number of boxes of an image that are kept at most, those of the highest scores.
    """

    score: float = 0.001
    iou: float = 0.6
    most: int = 300


def precise(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def boxes_at(outputs: Tensor, row: Tensor, column: Tensor, anchors: Tensor, stride: int) -> Tensor:
    """Boxes [k, 4], left, top, right, bottom in pixels, from the outputs of k cells.

    With s the sigmoid of the first four outputs, the centre is (2 s - 0.5 + cell) stride, and the size (2 s)^2 anchor.

    Args:
        outputs: [k, 4 or more], across and down of the centre, width and height.
        row: int64 [k], of the cell.
        column: int64 [k], of the cell.
        anchors: [k, 2], width and height in pixels.
        stride: the pixels of a cell.

    >>> cell = torch.tensor([1])
    >>> boxes_at(torch.zeros(1, 4), 2 * cell, cell, torch.tensor([[10.0, 14]]), 8).tolist()
    [[7.0, 13.0, 17.0, 27.0]]
    """
    twice = 2 * outputs[:, :OBJECTNESS].sigmoid()
    centre = (twice[:, :2] - 0.5 + torch.stack([column, row], 1)) * stride
    half = twice[:, 2:].square() * anchors / 2
    return torch.cat([centre - half, centre + half], 1)


def detections(
    raw: Mapping[int, Tensor],
    anchors: Mapping[int, Tensor],
    height: int,
    width: int,
    suppression: Suppression,
) -> list[dict[str, Tensor]]:
    """The boxes of each of n images, those of the highest scores first.

    The score of a class is the objectness times the probability of the class. Boxes are cut to the image; those
    outside it or with NaN are left out. Four times as many candidates as boxes are kept at most, those of the highest
    scores, are compared with one another.

    Args:
        raw: by stride, the outputs [n, anchors, rows, columns, classes + 5].
        anchors: by stride, float [anchors, 2] in pixels.
        height: of the images without padding, in pixels.
        width: of the images without padding, in pixels.
        suppression: which boxes are kept.

    Returns, for each image, `boxes` float [k, 4], left, top, right, bottom in pixels, `labels` int64 [k] from 0 on,
    and `scores` float [k].

    >>> raw, anchors = {8: torch.zeros(1, 1, 1, 2, 6)}, {8: torch.tensor([[8.0, 8]])}
    >>> found = detections(raw, anchors, 8, 16, Suppression())
    >>> found[0]["boxes"].tolist(), found[0]["scores"].tolist()
    ([[0.0, 0.0, 8.0, 8.0], [8.0, 0.0, 16.0, 8.0]], [0.25, 0.25])
    """
    parts = [
        _candidates(outputs, anchors[stride], stride, suppression.score) for stride, outputs in raw.items()
    ]
    boxes, scores, labels, image = (torch.cat(part) for part in zip(*parts, strict=True))
    extent = uploaded(torch.tensor([width, height, width, height], dtype=boxes.dtype), boxes.device)
    boxes = torch.minimum(boxes.clamp(min=0), extent)
    (inside,) = (boxes[:, 2:] > boxes[:, :2]).all(1).nonzero(as_tuple=True)  # false for NaN
    boxes, scores, labels, image = boxes[inside], scores[inside], labels[inside], image[inside]
    order = scores.argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]
    images = len(next(iter(raw.values())))
    counts = (image == torch.arange(images, device=image.device)[:, None]).sum(1).tolist()
    most = _CANDIDATES * suppression.most
    return [
        _suppressed(boxes[at], scores[at], labels[at], suppression, max(height, width))
        for at in (candidates[:most] for candidates in torch.split(order, counts))
    ]


def _candidates(
    outputs: Tensor, anchors: Tensor, stride: int, least: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boxes [k, 4], scores [k], labels [k] and images [k] of one stride whose scores are above `least`."""
    confidence = precise(outputs[..., OBJECTNESS]).sigmoid()
    image, anchor, row, column = at = (confidence > least).nonzero(as_tuple=True)
    kept = precise(outputs[at])
    scores = confidence[at][:, None] * kept[:, CLASSES:].sigmoid()
    cell, label = (scores > least).nonzero(as_tuple=True)
    boxes = boxes_at(kept, row, column, anchors[anchor], stride)
    return boxes[cell], scores[cell, label], label, image[cell]


def _suppressed(
    boxes: Tensor, scores: Tensor, labels: Tensor, suppression: Suppression, side: int
) -> dict[str, Tensor]:
    """The boxes of one image that are kept."""
    # Boxes of other classes never overlap once each class has its own place. In float64 that costs no precision.
    apart = boxes.double() + (labels * (side + 1)).double()[:, None]
    kept = nms(apart, scores.double(), suppression.iou)[: suppression.most]
    return {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]}
