"""Boxes of YOLOv5's outputs: by hand, by a slow loop, and suppression as torchvision does it class by class."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor
from torchvision.ops import nms

from fedlens.models.yolov5.decoding import Suppression, boxes_at, detections
from fedlens.models.yolov5.loss import ANCHORS
from tests.unit.models.yolov5_kit import STRIDES, random_outputs, slow_box

ALL = {stride: torch.tensor(ANCHORS[3 * k : 3 * k + 3]).double() for k, stride in enumerate(STRIDES)}
LARGE = 20.0  # a logit whose sigmoid is 1


@pytest.mark.parametrize(
    ("outputs", "box"),
    [
        ((0, 0, 0, 0), (8 * 3.5 - 5, 8 * 2.5 - 10, 8 * 3.5 + 5, 8 * 2.5 + 10)),
        (
            (log(3), -log(3), 0, 0),
            (8 * 4.0 - 5, 8 * 2.0 - 10, 8 * 4.0 + 5, 8 * 2.0 + 10),
        ),  # sigmoids 3/4, 1/4
        (
            (0, 0, log(3), -log(3)),
            (28 - 11.25, 20 - 2.5, 28 + 11.25, 20 + 2.5),
        ),  # 2.25 and 0.25 of the anchor
        ((40, -40, 40, 40), (8 * 4.5 - 20, 8 * 1.5 - 40, 8 * 4.5 + 20, 8 * 1.5 + 40)),  # the extremes
    ],
)
def test_a_box_by_hand(outputs, box) -> None:
    given = torch.tensor([outputs], dtype=torch.float64)
    found = boxes_at(given, torch.tensor([2]), torch.tensor([3]), torch.tensor([[10.0, 20.0]]).double(), 8)
    assert found[0].tolist() == pytest.approx(list(box))


def slow_detections(
    raw: dict[int, Tensor], height: int, width: int, score: float, iou: float, most: int
) -> list[list[tuple[float, ...]]]:
    """(score, label, left, top, right, bottom) of each kept box, with torchvision's nms of each class alone."""
    images = []
    for i in range(len(raw[8])):
        candidates = []
        for stride, outputs in raw.items():
            for a, r, c in torch.ones(outputs.shape[1:4]).nonzero().tolist():
                cell = outputs[i, a, r, c]
                box = slow_box(cell.tolist(), r, c, ALL[stride][a].tolist(), stride)
                limits = (width, height, width, height)
                box = [min(max(x, 0.0), limit) for x, limit in zip(box, limits, strict=True)]
                for k, logit in enumerate(cell[5:]):
                    candidates.append((float(cell[4].sigmoid() * logit.sigmoid()), k, *box))
        rows = torch.tensor(candidates, dtype=torch.float64)
        rows = rows[(rows[:, 0] > score) & (rows[:, 4] > rows[:, 2]) & (rows[:, 5] > rows[:, 3])]
        kept = []
        for k in rows[:, 1].unique():
            of_class = rows[rows[:, 1] == k]
            kept.append(of_class[nms(of_class[:, 2:], of_class[:, 0], iou)])
        images.append(sorted(map(tuple, torch.cat(kept).tolist()), reverse=True)[:most])
    return images


@pytest.mark.parametrize(("score", "iou", "most"), [(0.3, 0.6, 300), (0.1, 0.2, 300), (0.5, 0.6, 12)])
@pytest.mark.parametrize("classes", [1, 4])
def test_a_slow_loop_with_torchvisions_suppression_of_each_class_keeps_the_same_boxes(
    score: float, iou: float, most: int, classes: int
) -> None:
    height, width = 60, 50  # inside the padded 64x64; fewer candidates than are compared at most
    raw = random_outputs(2, classes, 64, 64, seed=classes)
    expected = slow_detections(raw, height, width, score, iou, most)
    found = detections(raw, ALL, height, width, Suppression(score, iou, most))
    for image, boxes in zip(found, expected, strict=True):
        rows = torch.cat([image["scores"][:, None], image["labels"][:, None], image["boxes"]], 1)
        assert torch.allclose(rows, torch.tensor(boxes, dtype=torch.float64), rtol=0, atol=1e-9)
        assert len(boxes) > 5
        assert image["labels"].dtype == torch.int64


def one_box(*cells: tuple[int, float, float]) -> dict[int, Tensor]:
    """Outputs of a grid of 1x4 cells of stride 8, three classes: (column, objectness, class 0) of sure cells."""
    raw = torch.full((1, 1, 1, 4, 8), -LARGE)
    for column, objectness, of_class in cells:
        raw[0, 0, 0, column] = torch.tensor([0, 0, 0, 0, objectness, of_class, -LARGE, -LARGE])
    return {8: raw}


SQUARE = {8: torch.tensor([[8.0, 8.0]])}


def test_the_score_is_the_objectness_times_the_probability_of_the_class() -> None:
    (found,) = detections(one_box((1, log(3), 0.0)), SQUARE, 8, 32, Suppression())
    assert found["boxes"].tolist() == [[8, 0, 16, 8]]
    assert found["labels"].tolist() == [0]
    assert found["scores"].tolist() == pytest.approx([0.75 * 0.5])


def test_a_box_counts_for_every_class_above_the_threshold() -> None:
    raw = one_box((1, LARGE, 1.0))
    raw[8][0, 0, 0, 1, 6] = 0.0
    for threshold, labels in ((0.001, [0, 1]), (0.6, [0]), (0.9, [])):
        (found,) = detections(raw, SQUARE, 8, 32, Suppression(score=threshold))
        assert found["labels"].tolist() == labels


def test_of_two_boxes_of_one_class_that_overlap_the_better_one_is_kept() -> None:
    raw = one_box((1, LARGE, 1.0), (2, LARGE, 2.0))
    raw[8][0, 0, 0, 1, 0] = log(3)  # to 4 pixels from the other: an IoU of 1/3
    for threshold, kept in ((0.6, [2.0, 1.0]), (0.3, [2.0])):
        (found,) = detections(raw, SQUARE, 8, 32, Suppression(iou=threshold))
        assert found["scores"].tolist() == pytest.approx(
            [1 / (1 + torch.tensor(-x).exp().item()) for x in kept]
        )
    raw[8][0, 0, 0, 2, 5:7] = torch.tensor([-LARGE, 2.0])  # of another class now
    (found,) = detections(raw, SQUARE, 8, 32, Suppression(iou=0.3))
    assert found["labels"].tolist() == [1, 0]


def test_boxes_are_cut_to_the_image_and_those_in_the_padding_are_left_out() -> None:
    (found,) = detections(one_box((0, 1.0, 1.0), (1, 2.0, 1.0), (2, 3.0, 1.0)), SQUARE, 5, 13, Suppression())
    assert found["boxes"].tolist() == [[8, 0, 13, 5], [0, 0, 8, 5]]


def test_only_so_many_boxes_are_kept_and_the_best_first() -> None:
    raw = random_outputs(1, 3, 64, 64, seed=0)
    (every,) = detections(raw, ALL, 64, 64, Suppression(iou=1.0, most=1000))
    assert len(every["boxes"]) > 3 * 3 * (64 + 16 + 4) - 9  # a few lie outside the image
    assert (every["scores"].diff() <= 0).all()
    (few,) = detections(raw, ALL, 64, 64, Suppression(iou=1.0, most=7))
    assert torch.equal(few["scores"], every["scores"][:7])


@pytest.mark.parametrize("position", range(8))
def test_outputs_with_nan_give_no_boxes(position: int) -> None:
    raw = random_outputs(2, 3, 64, 64, seed=0)
    for outputs in raw.values():
        outputs[0, ..., position] = float("nan")
    broken, whole = detections(raw, ALL, 64, 64, Suppression())
    assert len(whole["boxes"]) > 0
    assert torch.cat([broken["boxes"].flatten(), broken["scores"]]).isfinite().all()
    if position < 5:
        assert broken["boxes"].shape == (0, 4)
        assert broken["scores"].shape == broken["labels"].shape == (0,)
    else:
        assert position - 5 not in broken["labels"]
    (found,) = detections({s: o[:1] * float("inf") for s, o in raw.items()}, ALL, 64, 64, Suppression())
    assert found["boxes"].isfinite().all()
