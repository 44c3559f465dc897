"""The section "Test data in detail" in the page of a classifier: classes, calibration, and the worst mistakes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import MISSING, count, many, metric_value, percent
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.pages.client_section import SCROLLS_FROM, ClientValue
from fedlens.pages.run_charts import tested_model
from fedlens.pages.shown_images import HOW, LEAVES_OUT, may_get_images, shows_images, why_left_out
from fedlens.results.figures import classification_figures as data
from fedlens.results.figures.classification_figures import confused_pairs
from fedlens.results.run import Run

_PAIRS = 12  # of the most confused classes


@dataclass(frozen=True)
class Mistake:
    """A wrong answer with a high confidence; `picture` is a data URL, or empty."""

    index: int
    truth: str
    answer: str
    confidence: str
    picture: str

    @property
    def row(self) -> tuple[int, str, str, str]:
        """The cells of a table without pictures."""
        return self.index, self.truth, self.answer, self.confidence


def classification_section(run: Run, evaluation: FinalEvaluation) -> dict[str, Any]:
    """The part of a classifier. Raises `KeyError` or `ValueError` if the measurements do not fit each other."""
    results = data.ClassResults.of(evaluation.classes, evaluation.sums)
    calibration = data.Calibration.of(evaluation.sums)
    heat = data.confusion_map(results)
    pairs = [] if results.confusion is None else _pairs(results, results.confusion)
    images = many(int(results.examples.sum()), "test image")
    empty = [results.classes[k] for k in np.flatnonzero(results.examples == 0).tolist()]
    return {
        "lead": [
            f"{tested_model(run)} after round {evaluation.round}, on {images}.",
            "" if heat else "The confusion matrix is recorded up to 1,000 classes.",
            _without(empty),
        ],
        "confusion": heat,
        "pairs": pairs if len(results.classes) > data.COUNTED_UP_TO else [],
        "accuracies": replace(data.class_accuracies(results), shape="low"),
        "reliability": replace(data.reliability(calibration), shape="low"),
        "rows": _class_rows(results),
        "scrolls": len(results.classes) > SCROLLS_FROM,
        **_mistakes(run, evaluation),
    }


def _pairs(results: data.ClassResults, confusion: NDArray[np.int64]) -> list[tuple[str, str, str, str]]:
    return [
        (
            results.classes[truth],
            results.classes[answer],
            count(times),
            percent(times / int(results.examples[truth])),
        )
        for truth, answer, times in confused_pairs(confusion, _PAIRS)
    ]


def _class_rows(results: data.ClassResults) -> list[list[ClientValue]]:
    """Class, accuracy, test images, and the most frequent wrong answer; the least accurate class first."""
    rows = []
    for k in results.order().tolist():
        wrong = ClientValue(MISSING)
        if results.confusion is not None:
            others = results.confusion[k].copy()
            others[k] = 0
            most = int(others.argmax())
            if others[most]:
                wrong = ClientValue(
                    f"{results.classes[most]} ({count(int(others[most]))})", int(others[most])
                )
        value, examples = float(results.accuracy[k]), int(results.examples[k])
        rows.append(
            [
                ClientValue(results.classes[k]),
                ClientValue(metric_value("accuracy", value), value),
                ClientValue(count(examples), examples),
                wrong,
            ]
        )
    return rows


def _without(empty: Sequence[str]) -> str:
    """The sentence on classes without test images, or empty."""
    if not empty:
        return ""
    named = ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else "")
    return f"{many(len(empty), 'class', 'classes')} without test images: {named}."


def _mistakes(run: Run, evaluation: FinalEvaluation) -> dict[str, Any]:
    """The most confident mistakes, with their images unless the settings leave them out."""
    given = evaluation.mistakes
    images = evaluation.images if shows_images(run) else None
    mistakes = [
        Mistake(
            int(given["index"][k]),
            evaluation.classes[int(given["truth"][k])],
            evaluation.classes[int(given["answer"][k])],
            percent(float(given["confidence"][k])),
            "" if images is None else data_url(images[k]),
        )
        for k in range(len(given["index"]) if given else 0)
    ]
    if not mistakes:
        notes = ["The model gave no wrong answer." if given else "No mistakes were recorded."]
    elif images is not None:
        notes = [f"This page contains these test images; {LEAVES_OUT}"]
    elif len(evaluation.input_shape) != 3:
        notes = ["The examples are not images, so only their positions in the test data are shown."]
    else:
        why = why_left_out(run)
        notes = [f"The images are left out ({why}): only their positions in the test data are shown."]
        notes += [HOW] if may_get_images(run) else []
    return {"mistakes": mistakes, "mistakes_note": notes, "pictures": images is not None}


def data_url(image: NDArray[np.uint8]) -> str:
    """A PNG of an image uint8 [C, H, W], with C = 1 or 3, as a data URL.

    >>> data_url(np.zeros((1, 8, 8), np.uint8))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    from PIL import Image  # here, because most pages have no pictures

    file = io.BytesIO()
    pixels = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
