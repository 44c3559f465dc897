"""The part "Test data in detail" of a detector: precision by recall, and average precision a class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.base.format import count, many, percent
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.report.client_section import SCROLLS_FROM, ClientValue
from fedlens.report.detection_figures import BoxResults, precision_recall
from fedlens.report.own_curves import tested_model
from fedlens.results.run import Run


def detection_section(run: Run, evaluation: FinalEvaluation) -> dict[str, Any]:
    """The part of a detector. Raises `KeyError` or `ValueError` if the measurements do not fit each other."""
    results = BoxResults.of(evaluation.classes, evaluation.sums)
    boxes = many(int(results.truths.sum()), "true box", "true boxes")
    half = results.average_precision[:, 0]
    rows = [
        [
            ClientValue(results.classes[k]),
            ClientValue(percent(float(results.ap[k])), float(results.ap[k])),
            ClientValue(percent(float(half[k])), float(half[k])),
            ClientValue(count(int(results.truths[k])), int(results.truths[k])),
        ]
        for k in results.known.tolist()
    ]
    return {
        "lead": f"{tested_model(run)} after round {evaluation.round}, on {boxes}. Average precision (AP) is that of "
        "COCO: the mean of the precision at 101 recalls, and over the IoU thresholds 0.5, 0.55, ... 0.95.",
        "curves": replace(precision_recall(results), shape="tall") if rows else None,
        "rows": rows,
        "scrolls": len(rows) > SCROLLS_FROM,
        "without": _without(results),
    }


def _without(results: BoxResults) -> str:
    """The sentence on classes without a true box, or empty."""
    absent = [results.classes[k] for k in np.flatnonzero(results.truths == 0).tolist()]
    if not absent:
        return ""
    named = ", ".join(absent[:10]) + (", ..." if len(absent) > 10 else "")
    return f"The mean leaves out {many(len(absent), 'class', 'classes')} without a true box: {named}."
