"""Classification: cross-entropy and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Classification:
    """One class an image. Outputs are logits [n, classes], targets int64 [n].

    >>> task = Classification()
    >>> task.metrics(task.sums(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])))["accuracy"]
    0.5
    """

    score: str = "accuracy"  # the metric that a best model is chosen by; larger is better

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats, a 0-dim tensor."""
        return F.cross_entropy(outputs, targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each example, [n]; `loss` is their mean."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """What adds up over batches: summed loss, correct predictions, examples."""
        return {
            "loss": float(F.cross_entropy(outputs, targets, reduction="sum")),
            "accuracy": float(torch.count_nonzero(outputs.argmax(1) == targets)),
            "examples": float(len(targets)),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss and accuracy from the sums."""
        return {name: sums[name] / sums["examples"] for name in ("loss", "accuracy")}

    def misfit(self, outputs: object, examples: int, classes: int) -> str | None:
        """The logits must be [n, classes]."""
        if isinstance(outputs, Tensor) and outputs.dim() == 2:
            n, logits = outputs.shape
            if n == examples and logits == classes:
                return None
        return f"[{examples}, {classes}]: one number a class"

    def random_targets(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Random targets for these outputs, int64 [n]; a trial of a model trains on them."""
        return torch.randint(outputs.shape[1], (len(outputs),), generator=generator)
