"""The part "Test data in detail" of a segmentation model: IoU a class and a client, and the confusion of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedlens.base.format import MISSING, many, percent
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.report.classification_figures import ClassResults, confusion_map
from fedlens.report.client_section import SCROLLS_FROM, ClientValue
from fedlens.report.own_curves import tested_model
from fedlens.report.segmentation_figures import OverlapResults, class_overlaps
from fedlens.results.run import Run

_CLIENTS, _CLASSES = 40, 40  # rows and columns of the table of clients


def segmentation_section(run: Run, evaluation: FinalEvaluation) -> dict[str, Any]:
    """The part of a segmentation model. Raises `KeyError` or `ValueError` if the measurements do not fit each other."""
    results = OverlapResults.of(evaluation.classes, evaluation.sums)
    counted = ClassResults.of(evaluation.classes, evaluation.sums)
    heat = confusion_map(counted, unit="pixel")
    pixels = many(int(results.true.sum()), "pixel")
    return {
        "lead": f"{tested_model(run)} after round {evaluation.round}, on {pixels} that have a true class.",
        "confusion": heat,
        "overlaps": class_overlaps(results),
        "rows": _rows(results, counted),
        "scrolls": len(results.classes) > SCROLLS_FROM,
        "without": _without(results),
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
    shown = f" Shown: {' and '.join(left)}." if left else ""
    return {
        "lead": f"On the images that each client holds out of its own data, in round {evaluation.round}. "
        f"– stands for a class without a pixel in the client's truth and predictions.{shown}",
        "head": ["client", "mean", *(evaluation.classes[k] for k in most)],
        "rows": rows,
    }


def _share(value: float | None) -> ClientValue:
    return ClientValue(percent(value).replace(" %", ""), value)
