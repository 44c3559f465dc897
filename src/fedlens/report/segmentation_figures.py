"""The figures of a segmentation model on the test data, from its confusion matrix of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import many
from fedlens.report.classification_figures import sorted_classes
from fedlens.results.chart import Panel

_OF_CLIENTS = ("class_pixels", "class_predicted", "class_right")


@dataclass(frozen=True, eq=False)
class OverlapResults:
    """The pixels of each class in the truth, in the predictions, and in both.

    Args:
        classes: their names.
        true, predicted, right: int64 [..., classes].

    >>> results = OverlapResults.of(("road", "sky"), {"confusion": np.array([[6, 2], [0, 0]])})
    >>> results.iou.tolist(), results.mean_iou
    ([0.75, 0.0], 0.375)
    """

    classes: Sequence[str]
    true: NDArray[np.int64]
    predicted: NDArray[np.int64]
    right: NDArray[np.int64]

    @classmethod
    def of(cls, classes: Sequence[str], sums: Mapping[str, NDArray[Any]]) -> OverlapResults:
        """From the task's sums: `confusion` [classes, classes], or its margins and diagonal, [..., classes].

        Raises `KeyError` if they are missing, and `ValueError` if they do not fit the classes.
        """
        if "confusion" in sums:
            confusion = sums["confusion"]
            if confusion.shape != (len(classes), len(classes)):
                found, known = list(confusion.shape), many(len(classes), "class", "classes")
                raise ValueError(f"'confusion' is {found} for {known}")
            parts = [confusion.sum(axis=1), confusion.sum(axis=0), confusion.diagonal()]
        else:
            parts = [sums[name] for name in _OF_CLIENTS]
        if any(p.dtype != np.int64 or (p < 0).any() or p.shape[-1:] != (len(classes),) for p in parts):
            raise ValueError("counts of pixels are not whole numbers from 0 on, one a class")
        if len({part.shape for part in parts}) > 1:
            raise ValueError("the counts of pixels differ in shape")
        return cls(classes, *parts)

    @property
    def union(self) -> NDArray[np.int64]:
        """int64 [..., classes]: the pixels in the truth, in the predictions, or in both."""
        union: NDArray[np.int64] = self.true + self.predicted - self.right
        return union

    @property
    def iou(self) -> NDArray[np.float64]:
        """float64 [..., classes]: intersection over union; NaN for a class in neither truth nor predictions."""
        empty = np.full(self.union.shape, np.nan)
        shares: NDArray[np.float64] = np.divide(self.right, self.union, out=empty, where=self.union > 0)
        return shares

    @property
    def mean_iou(self) -> float:
        """The mean over the classes in truth or predictions; NaN without any."""
        iou = self.iou[self.union > 0]
        return float(iou.mean()) if len(iou) else float("nan")

    def order(self) -> NDArray[np.int64]:
        """The classes in truth or predictions, the lowest IoU first; of equal ones, the one with more pixels first."""
        order = np.lexsort((-self.true, self.iou))
        return order[self.union[order] > 0]


def class_overlaps(results: OverlapResults) -> Panel:
    """The IoU of each class, the lowest first."""
    order = results.order()
    return sorted_classes(
        "IoU", results.mean_iou, results.classes, order, results.iou, results.true, "true pixel"
    )
