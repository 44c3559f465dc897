"""What a task has to say: its loss, its metrics, and the metric that a best model is chosen by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Task(Protocol):
    """What a task has to say; see `Classification`."""

    @property
    def score(self) -> str: ...
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]: ...
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]: ...
    def random_targets(self, outputs: Tensor, generator: torch.Generator) -> Tensor: ...
