"""The loss of YOLOv5: CIoU by its formula, each term by hand and by a slow loop, and batches without boxes."""

from __future__ import annotations

from math import atan, exp, log, pi

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedlens.models.yolov5.loss import ANCHORS, Gains, complete_iou, losses
from tests.unit.models.yolov5_kit import (
    STRIDES,
    random_boxes,
    random_outputs,
    slow_box,
    slow_ciou,
    slow_places,
)

ALL = {stride: torch.tensor(ANCHORS[3 * k : 3 * k + 3]).double() for k, stride in enumerate(STRIDES)}
HALF = -log(0.5)


def target(boxes: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
    return {
        "boxes": boxes,
        "labels": torch.zeros(len(boxes), dtype=torch.int64) if labels is None else labels,
    }


def test_ciou_follows_its_formula_on_random_boxes() -> None:
    boxes, others = (random_boxes(500, 60, 80, seed) for seed in (0, 1))
    area = ((boxes[:, 2:] > boxes[:, :2]) & (others[:, 2:] > others[:, :2])).all(1)
    boxes, others = boxes[area], others[area]
    pairs = zip(boxes.tolist(), others.tolist(), strict=True)
    expected = torch.tensor([slow_ciou(*pair) for pair in pairs], dtype=torch.float64)
    assert torch.allclose(complete_iou(boxes, others), expected, rtol=0, atol=1e-12)
    assert torch.allclose(complete_iou(boxes.float(), others.float()).double(), expected, rtol=0, atol=2e-6)
    assert torch.allclose(complete_iou(others, boxes), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("box", "other", "value"),
    [
        ([0, 0, 4, 4], [0, 0, 4, 4], 1.0),
        ([0, 0, 4, 4], [4, 0, 8, 4], -16 / 80),  # disjoint: minus d^2 / c^2 = 4^2 / (8^2 + 4^2)
        ([0, 0, 4, 4], [1, 1, 3, 3], 4 / 16),  # contained, of the same centre and shape: the IoU
        ([0, 0, 2, 2], [2, 2, 4, 4], -8 / 32),  # only a corner in common
    ],
)
def test_ciou_by_hand(box, other, value: float) -> None:
    pair = torch.tensor([box, other], dtype=torch.float64)
    assert complete_iou(pair[:1], pair[1:]).item() == pytest.approx(value, abs=1e-12)


def test_the_gradient_of_ciou_takes_the_factor_of_the_aspect_as_a_constant() -> None:
    box = torch.tensor([[0.0, 0, 6, 4]], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([[1.0, 1, 4, 9]], dtype=torch.float64)

    def parts(given: Tensor) -> tuple[Tensor, Tensor]:
        """(IoU - d^2 / c^2, v), each by the formula."""
        (l, t, r, b), (u, v, w, x) = given[0], other[0]  # noqa: E741
        shared = (torch.minimum(r, w) - torch.maximum(l, u)) * (torch.minimum(b, x) - torch.maximum(t, v))
        iou = shared / ((r - l) * (b - t) + (w - u) * (x - v) - shared)
        apart = ((l + r - u - w) ** 2 + (t + b - v - x) ** 2) / 4
        diagonal = (torch.maximum(r, w) - torch.minimum(l, u)) ** 2
        diagonal = diagonal + (torch.maximum(b, x) - torch.minimum(t, v)) ** 2
        angle = torch.atan((w - u) / (x - v)) - torch.atan((r - l) / (b - t))
        return iou - apart / diagonal, 4 / torch.pi**2 * angle**2

    near, aspect = parts(box)
    iou = 9 / (24 + 24 - 9)
    factor = (aspect / (1 - iou + aspect)).detach()
    (expected,) = torch.autograd.grad(near - factor * aspect, box)
    (gradient,) = torch.autograd.grad(complete_iou(box, other).sum(), box)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert gradient.abs().min() > 0


def test_ciou_of_a_box_that_has_shrunk_to_a_point_has_a_finite_gradient() -> None:
    for corners in ([2.0, 2, 2, 2], [2.0, 1, 2, 3], [9.0, 9, 9, 9]):
        box = torch.tensor([corners], requires_grad=True)
        overlap = complete_iou(box, torch.tensor([[0.0, 0, 4, 4]]))
        overlap.sum().backward()
        assert overlap.isfinite().all()
        assert box.grad.isfinite().all()


def test_each_term_by_hand() -> None:
    # One cell of stride 8, one anchor; all outputs 0: the box is the anchor around the centre of the cell.
    raw = {8: torch.zeros(1, 1, 1, 1, 8, dtype=torch.float64)}
    anchors = {8: torch.tensor([[8.0, 8.0]]).double()}
    boxes = torch.tensor([[0.0, 0, 8, 16]]).double()
    found = losses(raw, anchors, [target(boxes - torch.tensor([0, 4, 0, 4]))], Gains())
    aspect = 4 / pi**2 * (atan(1) - atan(0.5)) ** 2
    overlap = 0.5 - aspect * aspect / (0.5 + aspect)  # of the same centre
    assert found["box"].item() == pytest.approx(0.05 * (1 - overlap))
    assert found["class"].item() == pytest.approx(0.5 * 3 / 80 * HALF)  # at 0 the cross-entropy is log 2
    assert found["objectness"].item() == pytest.approx(4.0 * (8 / 640) ** 2 * HALF)


def test_the_target_of_the_objectness_is_the_overlap_cut_at_0() -> None:
    logit = 2.0
    raw = {8: torch.zeros(1, 1, 1, 2, 6, dtype=torch.float64)}
    raw[8][..., 4] = logit
    anchors = {8: torch.tensor([[8.0, 8.0]]).double()}
    near, far = torch.tensor([[0.0, 0, 8, 8]]).double(), torch.tensor([[0.0, 0, 30, 2]]).double()
    # The first box is exactly that of the left cell; the second, with a negative CIoU there, is taken as 0.
    assert slow_ciou([0, 0, 8, 8], [0, 0, 8, 8]) == 1
    positive, negative = log(1 + exp(-logit)), log(1 + exp(logit))
    scale = 4.0 * (16 / 640) ** 2
    one = losses(raw, anchors, [target(near)], Gains())["objectness"].item()
    assert one == pytest.approx(scale * (positive + negative) / 2)
    raw[8][..., 2:4] = -6.0  # tiny boxes
    raw[8][..., :2] = 6.0  # at the far corner
    found = losses(raw, anchors, [target(far)], Gains())["objectness"].item()
    assert found == pytest.approx(scale * negative, rel=1e-12)


def test_the_objectness_learns_the_largest_overlap_of_several_boxes_in_either_order() -> None:
    raw = {8: torch.zeros(1, 1, 1, 1, 6, dtype=torch.float64)}
    anchors = {8: torch.tensor([[8.0, 8.0]]).double()}
    boxes = torch.tensor([[0.0, 0, 8, 8], [1, 0, 7, 8]]).double()
    alone = losses(raw, anchors, [target(boxes[:1])], Gains())["objectness"]
    for order in ([0, 1], [1, 0]):
        raw[8].requires_grad_()
        (gradient,) = torch.autograd.grad(
            losses(raw, anchors, [target(boxes[order])], Gains())["objectness"], raw[8]
        )
        assert gradient[..., 4].item() == pytest.approx(4 * (8 / 640) ** 2 * (0.5 - 1))
        assert gradient[..., :4].abs().max() == 0  # the target is detached
    assert alone.item() == pytest.approx(4 * (8 / 640) ** 2 * HALF)


def slow_losses(raw: dict[int, Tensor], targets: list[dict[str, Tensor]]) -> dict[str, float]:
    """The loss of a batch by the table, with loops over images, boxes and cells."""
    box = of_class = objectness = 0.0
    for stride, balance in ((8, 4.0), (16, 1.0), (32, 0.4)):
        outputs, anchors = raw[stride], ALL[stride].tolist()
        n, each, rows, columns, values = outputs.shape
        overlaps, entropies = [], []
        truth = torch.zeros(n, each, rows, columns, dtype=torch.float64)
        for i, given in enumerate(targets):
            for b, a, r, c in slow_places(given["boxes"], anchors, stride, rows, columns):
                cell = outputs[i, a, r, c]
                overlap = slow_ciou(
                    slow_box(cell.tolist(), r, c, anchors[a], stride), given["boxes"][b].tolist()
                )
                overlaps.append(1 - overlap)
                truth[i, a, r, c] = max(truth[i, a, r, c].item(), overlap)
                for k, logit in enumerate(cell[5:]):
                    p = torch.sigmoid(logit)
                    entropies.append(-(p if k == given["labels"][b] else 1 - p).log().item())
        box += sum(overlaps) / len(overlaps) if overlaps else 0.0
        of_class += sum(entropies) / len(entropies) if entropies else 0.0
        p = outputs[..., 4].sigmoid()
        objectness += balance * -(truth * p.log() + (1 - truth) * (1 - p).log()).mean().item()
    size = max(8 * raw[8].shape[2], 8 * raw[8].shape[3])
    return {
        "box": 0.05 * box,
        "class": 0.5 * (values - 5) / 80 * of_class,
        "objectness": (size / 640) ** 2 * objectness,
    }


@pytest.mark.parametrize(("seed", "classes"), [(0, 3), (1, 1), (2, 12)])
def test_a_slow_loop_gives_the_same_losses(seed: int, classes: int) -> None:
    height, width = 64, 96
    raw = random_outputs(3, classes, height, width, seed)
    generator = torch.Generator().manual_seed(seed)
    targets = [
        target(random_boxes(m, height, width, seed + m), torch.randint(classes, (m,), generator=generator))
        for m in (7, 0, 12)
    ]
    found = losses(raw, ALL, targets, Gains())
    expected = slow_losses(raw, targets)
    assert list(found) == ["box", "class", "objectness"]
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value, rel=1e-9), name
        assert value > 0
    scaled = losses(raw, ALL, targets, Gains(0.1, 2.0, 0.0))
    assert scaled["box"].item() == pytest.approx(2 * expected["box"])
    assert scaled["class"].item() == pytest.approx(4 * expected["class"])
    assert scaled["objectness"].item() == 0


def test_the_order_of_boxes_and_images_plays_no_part() -> None:
    raw = random_outputs(2, 3, 64, 64, 5)
    first, second = (target(random_boxes(9, 64, 64, seed), torch.arange(9) % 3) for seed in (3, 4))
    expected = losses(raw, ALL, [first, second], Gains())
    turned = {name: value.flip(0) for name, value in second.items()}
    swapped = {stride: outputs.flip(0) for stride, outputs in raw.items()}
    found = losses(swapped, ALL, [turned, first], Gains())
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-12)


@pytest.mark.parametrize("empty", ["images", "one image", "boxes without area", "boxes that fit no anchor"])
def test_without_a_box_only_the_background_is_learned(empty: str) -> None:
    raw = {stride: outputs.requires_grad_() for stride, outputs in random_outputs(2, 3, 64, 64, 0).items()}
    boxes = {
        "images": torch.zeros(0, 4),
        "one image": torch.zeros(0, 4),
        "boxes without area": torch.tensor([[4.0, 4, 4, 9], [7, 7, 7, 7]]),
        "boxes that fit no anchor": torch.tensor([[0.0, 0, 60, 1]]),
    }[empty].double()
    n = 1 if empty == "one image" else 2
    raw = {stride: outputs[:n] for stride, outputs in raw.items()}
    found = losses(raw, ALL, [target(boxes)] * n, Gains())
    background = sum(
        balance * functional.softplus(raw[stride][..., 4]).mean()
        for stride, balance in ((8, 4.0), (16, 1.0), (32, 0.4))
    )
    assert (found["box"].item(), found["class"].item()) == (0, 0)
    assert found["objectness"].item() == pytest.approx(0.01 * background.item())
    for name in ("box", "class"):
        gradients = torch.autograd.grad(found[name], list(raw.values()), retain_graph=True)
        assert all(not gradient.any() for gradient in gradients)
    assert all(g.isfinite().all() for g in torch.autograd.grad(sum(found.values()), list(raw.values())))


def test_500_boxes_in_an_image_are_all_learned() -> None:
    boxes = random_boxes(500, 64, 64, seed=1)
    raw = random_outputs(1, 2, 64, 64, 0)
    found = losses(raw, ALL, [target(boxes)], Gains())
    assert found["box"].item() == pytest.approx(slow_losses(raw, [target(boxes)])["box"], rel=1e-9)


def test_outputs_in_half_precision_have_their_loss_in_float32() -> None:
    raw = {stride: outputs.bfloat16() for stride, outputs in random_outputs(1, 2, 64, 64, 0).items()}
    given = [target(random_boxes(5, 64, 64, 0).float())]
    anchors = {stride: pairs.float() for stride, pairs in ALL.items()}
    found = losses(raw, anchors, given, Gains())
    exact = losses({s: o.float() for s, o in raw.items()}, anchors, given, Gains())
    assert all(value.dtype == torch.float32 and value == exact[name] for name, value in found.items())
