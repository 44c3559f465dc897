"""The part "Test data in detail" of a detector: precision by recall, and average precision a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import MISSING, count, many, percent
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.pages.client_section import SCROLLS_FROM, ClientValue
from fedlens.pages.run_charts import tested_model
from fedlens.results.figures.chart import DASHES, Axis, Panel, Series, drawn_values, share_limits
from fedlens.results.run import Run
from fedlens.vision.mask_colors import mask_colors

_LINES = 12  # classes with a curve of their own, if they are at most so many
_ENDS = 4  # lowest and highest classes with a curve, if they are more


@dataclass(frozen=True, eq=False)
class BoxResults:
    """The average precision of each class.

    Args:
        classes: their names.
        truths: int64 [classes], the true boxes.
        average_precision: float64 [classes, 10], at the overlaps 0.5, 0.55, ... 0.95; of a class without a true box 0.
        precision: float64 [classes, 101], at the overlap 0.5: the largest precision at a recall of 0, 0.01, ... 1 or
            above, 0 where the recall is not reached.
    """

    classes: Sequence[str]
    truths: NDArray[np.int64]
    average_precision: NDArray[np.float64]
    precision: NDArray[np.float64]

    @classmethod
    def of(cls, classes: Sequence[str], sums: Mapping[str, NDArray[Any]]) -> BoxResults:
        """From the recorded sums of the task. Raises `KeyError` if one is missing, `ValueError` if they do not fit.

        >>> sums = {"truths": np.array([2]), "average_precision": np.full((1, 10), 0.5), "precision": np.ones((1, 101))}
        >>> results = BoxResults.of(["cat"], sums)
        >>> results.ap.tolist(), results.mean
        ([0.5], 0.5)
        """
        truths, average, precision = (sums[name] for name in ("truths", "average_precision", "precision"))
        n = len(classes)
        if truths.shape != (n,) or truths.dtype != np.int64 or (truths < 0).any():
            raise ValueError(f"'truths' are not {many(n, 'number')} from 0 on")
        for name, given, wide in (("average_precision", average, 10), ("precision", precision, 101)):
            if given.shape != (n, wide) or not np.isfinite(given).all():
                raise ValueError(f"'{name}' is {list(given.shape)} for {many(n, 'class', 'classes')}")
        return cls(classes, truths, average, precision)

    @property
    def known(self) -> NDArray[np.int64]:
        """The classes with a true box, the lowest average precision first."""
        order = np.argsort(self.ap, kind="stable")
        return order[self.truths[order] > 0]

    @property
    def ap(self) -> NDArray[np.float64]:
        """float64 [classes]: the mean over the ten overlaps."""
        means: NDArray[np.float64] = self.average_precision.mean(axis=1)
        return means

    @property
    def mean(self) -> float:
        """The mean average precision over the classes with a true box; NaN without any."""
        return float(self.ap[self.known].mean()) if len(self.known) else float("nan")


def precision_recall(results: BoxResults) -> Panel:
    """The curves at an overlap of 0.5: of each class, or with more than 12 of the mean and the lowest and highest."""
    known = results.known.tolist()
    recalls = np.linspace(0, 1, 101).round(2).tolist()
    half = results.average_precision[:, 0]
    shown, note = known, ""
    if len(known) > _LINES:
        by_half = sorted(known, key=lambda k: float(half[k]))
        shown = [*by_half[:_ENDS], *by_half[-_ENDS:]]
        note = f"the mean, and the {_ENDS} lowest and {_ENDS} highest of {len(known)} classes"
    colors = mask_colors(len(results.classes)).tolist()
    series = []
    if note:
        mean = results.precision[known].mean(axis=0)
        name = f"mean ({percent(float(half[known].mean()))})"
        series.append(Series(recalls, mean.round(4).tolist(), name, color="var(--ink)", width=3))
    for place, k in enumerate(shown):
        color = "#{:02x}{:02x}{:02x}".format(*colors[k])
        name = f"{results.classes[k]} ({percent(float(half[k]))})"
        dash = DASHES[place % 2]
        values = results.precision[k].round(4).tolist()
        series.append(Series(recalls, values, name, color=color, dash=dash))
    ends = [f"{results.classes[k]} {percent(float(half[k]))}" for k in shown] or [MISSING]
    return Panel(
        title="Precision by recall at IoU 0.5, with the average precision",
        about=f"Curves of precision by recall of each class. Average precision at IoU 0.5: {', '.join(ends)}.",
        x=Axis("recall", "share", limits=(0.0, 1.01), ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        y=Axis("precision", "share", limits=share_limits(drawn_values(series)) if series else None),
        series=series,
        note=note,
    )


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
        "lead": [
            f"{tested_model(run)} after round {evaluation.round}, on {boxes}.",
            "Average precision (AP) is that of COCO: the mean of the precision at 101 recalls, and over the IoU "
            "thresholds 0.5, 0.55, ... 0.95."
            if rows
            else "",
            _without(results),
        ],
        "curves": replace(precision_recall(results), shape="tall") if rows else None,
        "rows": rows,
        "scrolls": len(rows) > SCROLLS_FROM,
    }


def _without(results: BoxResults) -> str:
    """The sentence on classes without a true box, or empty."""
    absent = [results.classes[k] for k in np.flatnonzero(results.truths == 0).tolist()]
    if not absent:
        return ""
    named = ", ".join(absent[:10]) + (", ..." if len(absent) > 10 else "")
    return f"The mean leaves out {many(len(absent), 'class', 'classes')} without a true box: {named}."
