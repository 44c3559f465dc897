"""Random cases of detection, and the metrics of the two COCO evaluators for them."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.vision.box_batch import BoxBatch


@dataclass(frozen=True)
class Case:
    """The outputs of a detector for some images, their true boxes, and the number of classes."""

    outputs: list[dict[str, Tensor]]
    truth: BoxBatch
    classes: int


def random_case(seed: int) -> Case:
    """One of many kinds: no detections, no true boxes, over 100 detections, duplicates, degenerate boxes, one class."""
    draw = np.random.default_rng(seed)
    images, classes = int(draw.integers(1, 7)), int(draw.choice([1, 2, 3, 6]))
    side = 64.0
    outputs, boxes, labels, image = [], [], [], []
    for at in range(images):
        true = int(draw.choice([0, 1, 3, 12]))
        own = _boxes(draw, true, side)
        classes_of = draw.integers(0, max(1, classes - 1), true)  # the last class has no true box
        found = int(draw.choice([0, 2, 10, 40, 160]))
        near = draw.integers(0, true, found) if true else np.empty(0, int)
        guesses = _boxes(draw, found, side)
        guessed = draw.integers(0, classes, found)
        if true and found:
            close = draw.random(found) < 0.7
            guesses[close] = (own[near] + draw.normal(0, draw.choice([0, 1, 4]), (found, 4)))[close]
            guessed[close & (draw.random(found) < 0.8)] = 0
            right = draw.random(found) < 0.6
            guessed[right] = classes_of[near][right]
            guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2])  # some without an area
        scores = draw.permutation(found * images * 7)[:found] / (found * images * 7 + 1)
        outputs.append(
            {
                "boxes": torch.tensor(guesses, dtype=torch.float32).view(-1, 4),
                "labels": torch.tensor(guessed, dtype=torch.int64),
                "scores": torch.tensor(scores + 1e-4 * at + 1e-6 * draw.random(), dtype=torch.float32),
            }
        )
        boxes.append(own)
        labels.append(classes_of)
        image.append(np.full(true, at))
    truth = BoxBatch(
        torch.tensor(np.concatenate(boxes), dtype=torch.float32).view(-1, 4),
        torch.tensor(np.concatenate(labels), dtype=torch.int64),
        torch.tensor(np.concatenate(image), dtype=torch.int64),
        images,
    )
    return Case(outputs, truth, classes)


def _boxes(draw: np.random.Generator, n: int, side: float) -> Any:
    corner = draw.random((n, 2)) * side * 0.7
    size = draw.random((n, 2)) * side * 0.4
    size[draw.random(n) < 0.03] = 0
    return np.concatenate([corner, corner + size], axis=1).reshape(-1, 4)


def evaluated_by_coco(case: Case, fast: bool = False) -> dict[str, float]:
    """`map`, `map50` and both of each class, as pycocotools or faster-coco-eval computes them."""
    if fast:
        from faster_coco_eval import COCO
        from faster_coco_eval import COCOeval_faster as Evaluator
    else:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval as Evaluator
    true = [
        {"id": at + 1, "image_id": int(i), "category_id": int(label), "iscrowd": 0, **_as_coco(box)}
        for at, (box, label, i) in enumerate(
            zip(case.truth.boxes, case.truth.labels, case.truth.image, strict=True)
        )
    ]
    found = [
        {"image_id": at, "category_id": int(label), "score": float(score), **_as_coco(box)}
        for at, one in enumerate(case.outputs)
        for box, label, score in zip(one["boxes"], one["labels"], one["scores"], strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": at} for at in range(len(case.truth))],
            "categories": [{"id": label, "name": str(label)} for label in range(case.classes)],
            "annotations": true,
            "info": {},
        }
        coco.createIndex()
        answers = coco.loadRes(found) if found else COCO()
        if not found:
            answers.dataset = {**coco.dataset, "annotations": []}
            answers.createIndex()
        made = Evaluator(coco, answers, "bbox")
        made.params.imgIds = list(range(len(case.truth)))
        made.evaluate()
        made.accumulate()
    precision = np.asarray(made.eval["precision"])[
        ..., 0, -1
    ]  # [10, 101, classes], of all areas, 100 detections
    known = [label for label in range(case.classes) if (precision[:, :, label] > -1).any()]
    values = {f"ap_{label}": float(precision[:, :, label].mean()) for label in known}
    values |= {f"ap50_{label}": float(precision[0, :, label].mean()) for label in known}
    if known:
        values |= {"map": float(precision[:, :, known].mean()), "map50": float(precision[0, :, known].mean())}
    return values


def _as_coco(box: Tensor) -> dict[str, Any]:
    left, top, right, bottom = box.double().tolist()
    width, height = right - left, bottom - top
    return {"bbox": [left, top, width, height], "area": width * height}
