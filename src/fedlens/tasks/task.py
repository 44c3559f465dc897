"""What a task has to say: its loss, its metrics, and the metric that a best model is chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Task(Protocol):
    """A task; `fedlens.tasks.classification` is one. A dataset's kind (`fedlens.data.dataset.Kind`) names it."""

    @property
    def score(self) -> str:
        """The metric that the best model is chosen by; larger is better."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, a 0-dim tensor."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, [n]; `loss` is their mean."""

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Sums over batches, including `examples`."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The metrics, by name, from the sums over all batches; a run records and prints them as `test_<name>`."""

    def misfit(self, outputs: object, examples: int, classes: int) -> str | None:
        """The required form of a model's outputs, if these outputs do not have it; None if they do."""

    def random_targets(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Random targets that fit these outputs, for trials of models."""

    def predict(self, outputs: Any) -> Mapping[str, Tensor]:
        """The predictions by name, each [n, ...]: what an exported model returns. Exporters trace it."""

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The prediction of one image, [...] of each name, as columns of predictions.csv."""

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: Any = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]: an image uint8 [C, H, W] with its prediction, and its target if it is known."""
