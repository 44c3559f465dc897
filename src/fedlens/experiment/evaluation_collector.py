"""Collects the measurements of the last round on the test data while they are evaluated, for `evaluation.npz`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.core.measured import Measured, total
from fedlens.core.protocol import Answer, Answers, Ask, Op, Reply, Request
from fedlens.experiment.build import Built
from fedlens.experiment.final_evaluation import PIXELS, WORST, FinalEvaluation, most_confident, scaled_down
from fedlens.tasks.central_evaluation import MISTAKES, Evaluate

_TEST = "@test"


class EvaluationCollector:
    """Passes the asks and answers of an evaluation on, and keeps the measurements of the test data.

    The requests for the test data also ask for the most confident mistakes. Only asks of
    `fedlens.tasks.central_evaluation.Evaluate` are changed, so an algorithm's own evaluation is not.
    """

    def __init__(self, ops: Mapping[str, Op]) -> None:
        self._ops = ops
        self._parts: list[Measured] = []
        self._asked = 0  # test examples

    def collect(self, steps: Generator[Ask, Answers, Any]) -> Generator[Ask, Answers, Any]:
        """The same evaluation, observed."""
        try:
            ask = next(steps)
            while True:
                if isinstance(self._ops.get(ask.op), Evaluate):
                    answers = yield replace(ask, requests=[self._extended(each) for each in ask.requests])
                    ask = steps.send(self._kept(answers))
                else:
                    ask = steps.send((yield ask))
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    def _extended(self, request: Request) -> Request:
        if request.client != _TEST:
            return request
        self._asked += request.payload["stop"] - request.payload["start"]
        return Request(_TEST, {**request.payload, "mistakes": WORST})

    def _kept(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            if isinstance(answer, Reply) and answer.client == _TEST:
                self._parts.append(Measured.from_payload(answer.payload))
            yield answer

    def measured(self, examples: int) -> Measured | None:
        """The measurements of all `examples` test examples; None if they were not measured, or not once each."""
        return total(self._parts) if self._parts and self._asked == examples else None


def final_evaluation(built: Built, round: int, measured: Measured) -> FinalEvaluation:
    """What `evaluation.npz` keeps of the measurements: the sums and, as the settings say, images of mistakes."""
    dataset = built.holders.dataset
    rows = {
        name.removeprefix(MISTAKES): values.numpy()
        for name, values in measured.rows.items()
        if name.startswith(MISTAKES)
    }
    mistakes = most_confident(rows) if rows else {}
    pictured = built.config.record.images and len(dataset.input_shape) == 3 and len(mistakes.get("index", ()))
    return FinalEvaluation(
        round,
        dataset.kind,
        tuple(dataset.classes),
        dataset.input_shape,
        {name: value.numpy() for name, value in measured.sums.items()},
        mistakes,
        _images(built, mistakes["index"]) if pictured else None,
    )


def _images(built: Built, index: NDArray[np.int64]) -> NDArray[np.uint8]:
    """uint8 [k, C, h, w]: the test images at these positions; one at a time, because files may be large."""
    test, room = built.holders.dataset.test, PIXELS // len(index)
    images = (test.batch(torch.tensor([at]))[0][0].numpy() for at in index.tolist())
    return np.stack([scaled_down(image, room) for image in images])
