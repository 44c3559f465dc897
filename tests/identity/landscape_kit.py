"""A task whose loss is any function of the model's only weight vector, so that every surface has a known form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedlens.analyses.model_evaluation import ModelEvaluator
from fedlens.core.measured import Measured
from fedlens.core.protocol import ModelSpec
from tests.identity.identity_kit import LossOnly, Points

Surface = Callable[[Tensor], Tensor]  # [d] -> []


class Landscape(LossOnly):
    """The loss is a function of the outputs, which are the weights."""

    score = "height"

    def __init__(self, surface: Surface) -> None:
        self.surface = surface

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        return self.surface(outputs[0])

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        n = len(targets)
        return Measured({"loss": n * self.surface(outputs[0]).double(), "examples": torch.tensor(n)})

    def metrics(self, measured: Measured) -> dict[str, float]:
        loss = float(measured.sums["loss"]) / int(measured.sums["examples"])
        return {"loss": loss, "height": -loss}


class Place(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), -1)


def place(input_shape: Sequence[int], classes: int, *, size: int) -> nn.Module:
    return Place(size)


def evaluator(surface: Surface, size: int) -> ModelEvaluator:
    data = Points(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long))
    spec = ModelSpec(place, "place", {"size": size}, (1,), 2, 0)
    return ModelEvaluator(spec, Landscape(surface), data, 5, 2)


def at(*weights: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(weights, dtype=torch.float32)}
