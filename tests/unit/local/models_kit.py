"""The models that fedlens brings and that are to be stacked as one large batch."""

from __future__ import annotations

from typing import Any

from fedlens.core.protocol import ModelSpec
from fedlens.models.registry import MODELS

BUILT_IN: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "linear": ("linear", {}, (1, 28, 28)), "mlp": ("mlp", {}, (1, 28, 28)),
    "mcmahan-cnn": ("mcmahan-cnn", {}, (1, 28, 28)), "hsu-cnn": ("hsu-cnn", {}, (3, 32, 32)),
    "vgg9": ("vgg9", {}, (3, 8, 8)),
    "small-cnn": ("small-cnn", {"norm": "none"}, (1, 8, 8)),
    "small-cnn, group": ("small-cnn", {"norm": "group"}, (3, 32, 32)),
    "projection": ("projection", {"base": "small-cnn"}, (1, 28, 28)),
}  # fmt: skip


def built_in(name: str, seed: int) -> ModelSpec:
    known, settings, shape = BUILT_IN[name]
    return ModelSpec(MODELS.find(known), known, settings, shape, 10, seed)
