"""Low-rank adapters: the weights stay, and small factors are trained and sent. Hu et al. 2022 (arXiv 2106.09685)."""

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from fedlens.parts import MODELS


class Adapted(nn.Linear):
    """y = (W + up down) x + b with frozen W and b; `up` is 0 at first. Names are those of `nn.Linear`."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.load_state_dict(layer.state_dict())
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer with its adapter."""
        return super().forward(x) + x @ self.down.T @ self.up.T


def low_rank(input_shape, classes, *, of: str = "mlp", rank: Annotated[int, Field(ge=1)] = 4) -> nn.Module:
    """A model of fedlens whose linear layers have adapters; everything else is frozen."""
    module = MODELS.find(of, where="model")(input_shape, classes).requires_grad_(False)
    for name, layer in list(module.named_modules()):
        if type(layer) is nn.Linear:
            module.set_submodule(name, Adapted(layer, rank))
    return module
