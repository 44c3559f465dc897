"""What a task has to say: its loss, its metrics, and the metric that a best model is chosen by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
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
