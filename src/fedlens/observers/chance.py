"""What a model that has learned nothing reaches: accuracies, and the scores of detection and segmentation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlens.data.client_datasets import ClientDatasets

_LEAST_MAP50 = 0.05  # of a detector that finds some objects
_SLACK = 1.05  # times the sum of a constant mask's intersections over union


@dataclass(frozen=True)
class Chance:
    """What a model that has learned nothing reaches: n examples of C classes, `share` of them of the most frequent.

    >>> chance = Chance(classes=10, examples=1000, share=0.25)
    >>> chance.has(0.117), chance.has(0.2), chance.has(0.25), chance.has(0.3)
    (True, False, True, False)
    """

    classes: int
    examples: int
    share: float

    def has(self, accuracy: float) -> bool:
        """At most 1/C within two standard errors, or the share of the most frequent class."""
        p = 1 / self.classes
        error = math.sqrt(p * (1 - p) / self.examples)
        return accuracy <= p + 2 * error or abs(accuracy - self.share) * self.examples < 0.5


def chance_levels(data: ClientDatasets) -> dict[str, Chance]:
    """What chance is for the accuracy on each split of held-out data.

    None where examples have no single class, or all have the same.
    """
    levels: dict[str, Chance] = {}
    for split, size in data.held().items():
        counts = data.class_counts(split) if split != "@train" and size else None
        if counts is not None and (counts > 0).sum() > 1:
            share = int(counts.max()) / size
            levels[f"{split[1:]}_accuracy"] = Chance(len(counts), size, share)
    return levels


def nothing_learned(line: Mapping[str, Any], classes: int) -> tuple[str, str] | None:
    """(metric, sentence) if a line of metrics.jsonl is that of a detector or segmenter without skill, else None.

    A detector is one if its mAP at IoU 0.5 is below 5 %. A mask of one class alone has an intersection over union of
    the pixel accuracy for that class, and 0 for all others; any other mask has a larger sum. So of `classes` classes,
    a mean IoU of at most accuracy/classes, within 5 %, is that of always the same class.

    >>> nothing_learned({"test_mean_iou": 0.1, "test_accuracy": 0.4}, classes=4)[0]
    'test_mean_iou'
    >>> nothing_learned({"test_mean_iou": 0.3, "test_accuracy": 0.6}, classes=4)
    """
    for split in ("test", "validation"):
        found, iou = line.get(f"{split}_map50"), line.get(f"{split}_mean_iou")
        if found is not None and found < _LEAST_MAP50:
            score = f"{split} mAP at IoU 0.5 is {100 * found:.1f} %"
            return f"{split}_map50", f"The {score} at the end: the model has learned next to nothing."
        if iou is not None and classes > 1 and iou * classes <= _SLACK * line.get(f"{split}_accuracy", 0.0):
            score = f"{split} mean IoU is {100 * iou:.1f} %"
            said = "as of always the same class: the model has learned next to nothing"
            return f"{split}_mean_iou", f"The {score} at the end, {said}."
        if found is not None or iou is not None:
            return None
    return None
