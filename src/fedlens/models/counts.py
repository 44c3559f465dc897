"""What a model costs, counted without memory for its weights: parameters, multiply-adds, normalization layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlens.models.multiply_adds import multiply_adds

_NORMS = {"batch": _BatchNorm, "group": nn.GroupNorm, "layer": nn.LayerNorm}


@dataclass(frozen=True)
class ModelCounts:
    """What was counted of a model.

    Attributes:
        parameters: numbers in all parameters.
        multiply_adds: of a forward pass for one example, see `fedlens.models.multiply_adds`.
        norm_layers: how many normalization layers it has, by kind: `batch`, `group`, `layer`.
    """

    parameters: int
    multiply_adds: int | None
    norm_layers: Mapping[str, int]


def counted(
    build: Callable[[], nn.Module], input_shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> ModelCounts:
    """The counts of the model that `build` makes, for examples of this shape; computes no value.

    >>> counted(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)), (3, 8, 8))
    ModelCounts(parameters=1669, multiply_adds=9216, norm_layers={})
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = build().eval()
        products = multiply_adds(module, torch.zeros(1, *input_shape, dtype=dtype))
    kinds = (
        next((kind for kind, base in _NORMS.items() if isinstance(layer, base)), None)
        for layer in module.modules()
    )
    return ModelCounts(
        sum(parameter.numel() for parameter in module.parameters()),
        products,
        dict(Counter(kind for kind in kinds if kind is not None)),
    )
