"""The part "Test data in detail" of a segmentation model: IoU a class and a client, and the confusion of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import MISSING, many, percent
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.pages.client_section import SCROLLS_FROM, ClientValue
from fedlens.pages.run_charts import tested_model
from fedlens.results.figures.chart import Panel
from fedlens.results.figures.classification_figures import ClassResults, confusion_map, sorted_classes
from fedlens.results.run import Run

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


_CLIENTS, _CLASSES = 40, 40  # rows and columns of the table of clients


def segmentation_section(run: Run, evaluation: FinalEvaluation) -> dict[str, Any]:
    """The part of a segmentation model. Raises `KeyError` or `ValueError` if the measurements do not fit each other."""
    results = OverlapResults.of(evaluation.classes, evaluation.sums)
    counted = ClassResults.of(evaluation.classes, evaluation.sums)
    heat = confusion_map(counted, unit="pixel")
    pixels = many(int(results.true.sum()), "pixel")
    return {
        "lead": [
            f"{tested_model(run)} after round {evaluation.round}, on {pixels} that have a true class.",
            _without(results),
        ],
        "confusion": heat,
        "overlaps": class_overlaps(results),
        "rows": _rows(results, counted),
        "scrolls": len(results.classes) > SCROLLS_FROM,
        "clients": _clients(evaluation),
    }


def _rows(results: OverlapResults, counted: ClassResults) -> list[list[ClientValue]]:
    """Class, IoU, accuracy, share of the true pixels, and the most frequent wrong answer; the lowest IoU first."""
    rows, total = [], max(1, int(results.true.sum()))
    for k in results.order().tolist():
        wrong = ClientValue(MISSING)
        if counted.confusion is not None and results.true[k]:
            others = counted.confusion[k].copy()
            others[k] = 0
            most = int(others.argmax())
            if others[most]:
                share = float(others[most] / results.true[k])
                wrong = ClientValue(f"{results.classes[most]} ({percent(share)})", share)
        iou, share = float(results.iou[k]), int(results.true[k]) / total
        accuracy = float(results.right[k] / results.true[k]) if results.true[k] else None
        rows.append(
            [
                ClientValue(results.classes[k]),
                ClientValue(percent(iou), iou),
                ClientValue(percent(accuracy), -1.0 if accuracy is None else accuracy),
                ClientValue(percent(share), share),
                wrong,
            ]
        )
    return rows


def _without(results: OverlapResults) -> str:
    """The sentence on classes that occur in neither truth nor predictions, or empty."""
    absent = [results.classes[k] for k in np.flatnonzero(results.union == 0).tolist()]
    if not absent:
        return ""
    named = ", ".join(absent[:10]) + (", ..." if len(absent) > 10 else "")
    of = many(len(absent), "class", "classes")
    return f"The mean leaves out {of} without a pixel in the truth or the predictions: {named}."


def _clients(evaluation: FinalEvaluation) -> dict[str, Any] | None:
    """The table of the IoU of each class at each client, the lowest mean first; None without measured clients."""
    if not evaluation.clients:
        return None
    results = OverlapResults.of(evaluation.classes, evaluation.of_clients)
    iou, there = results.iou, results.union > 0
    means = np.where(there, iou, 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    order = np.argsort(np.where(there.any(axis=1), means, np.inf), kind="stable")[:_CLIENTS].tolist()
    # The classes with the most pixels, in their own order.
    most = np.sort(np.argsort(-results.union.sum(axis=0), kind="stable")[:_CLASSES]).tolist()
    rows = [
        [ClientValue(evaluation.clients[c]), _share(float(means[c]) if there[c].any() else None)]
        + [_share(float(iou[c, k]) if there[c, k] else None) for k in most]
        for c in order
    ]
    left = []
    if len(order) < len(evaluation.clients):
        left.append(f"the {len(order)} of {many(len(evaluation.clients), 'client')} with the lowest mean")
    if len(most) < len(evaluation.classes):
        left.append(
            f"the {len(most)} of {many(len(evaluation.classes), 'class', 'classes')} with the most pixels"
        )
    empty = any(cell.value is None for row in rows for cell in row[1:])
    return {
        "lead": [
            f"On the images that each client holds out of its own data, in round {evaluation.round}.",
            f"{MISSING} stands for a class without a pixel in the client's truth and predictions."
            if empty
            else "",
            f"Shown: {' and '.join(left)}." if left else "",
        ],
        "head": ["client", "mean", *(evaluation.classes[k] for k in most)],
        "rows": rows,
    }


def _share(value: float | None) -> ClientValue:
    return ClientValue(percent(value).replace(" %", ""), value)
