"""What the tests of the models share: which there are, and how one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedlens import Experiment
from fedlens.core.protocol import ModelSpec
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS

OF_TIMM = [
    name for name, entry in MODELS.entries.items() if entry.target.startswith("fedlens.models.timm_models:")
]
CLASSIFIERS = [name for name, entry in MODELS.entries.items() if entry.task == "classification"]
CIFAR_RESNETS = ["resnet20", "resnet32", "resnet44", "resnet56"]
TRANSFORMERS = ["vit-b-16", "vit-tiny"]
CONVOLUTIONAL = [name for name in OF_TIMM if name not in TRANSFORMERS]
WITH_BATCH_NORM = {
    "resnet20": 19, "resnet32": 31, "resnet44": 43, "resnet56": 55,
    "gkt-resnet8": 8, "gkt-resnet56": 58, "resnet18": 20, "resnet34": 36, "resnet50": 53,
    "mobilenet-v2": 52, "mobilenet-v3-large": 46, "efficientnet-b0": 49,
}  # fmt: skip


def made(name: str, shape: Sequence[int] = (3, 32, 32), classes: int = 10, **settings: Any) -> nn.Module:
    """A model of the table with its settings, its weights drawn from seed 0; `prepare` has the keys of any model."""
    prepare = Preparation(**settings.pop("prepare", {}))
    return ModelSpec(MODELS.find(name), name, settings, tuple(shape), classes, 0, prepare).build()


def shape_only(
    name: str, shape: Sequence[int] = (3, 224, 224), classes: int = 1000, **more: Any
) -> nn.Module:
    """The same without memory for its weights."""
    with torch.device("meta"):
        return made(name, shape, classes, **more)


def parameters(module: nn.Module) -> int:
    """The numbers in all its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def images(*shape: int, seed: int = 1) -> Tensor:
    """Random images."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experiment(model: Any, engine: Any = "inline", **more: Any) -> Experiment:
    """Two rounds of two clients of 30 on the digits."""
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 30}},
        "select": {"clients_per_round": 2},
        "model": model,
        "local": {"lr": 0.1, "batch_size": 16},
        "engine": engine,
    }
    return Experiment(**{**settings, **more})
