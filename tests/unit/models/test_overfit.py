"""Every model learns: it fits eight real images, the handwritten digits of scikit-learn, to a loss near zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.unit.models.zoo_kit import made

NIGHTLY = {
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet56",
    "resnet44",
    "gkt-resnet56",
    "mobilenet-v2",
    "efficientnet-b0",
    "vit-tiny",
    "vgg9",
    "resnet32",
}
SIDES = {
    "linear": 8, "mlp": 8, "small-cnn": 8, "mcmahan-cnn": 8, "hsu-cnn": 8, "vgg9": 32, "projection": 8,
    "resnet20": 8, "resnet32": 8, "resnet44": 8, "resnet56": 8,
    "gkt-resnet8": 8, "gkt-resnet56": 8, "resnet18": 32, "resnet34": 32, "resnet50": 32,
    "mobilenet-v2": 32, "mobilenet-v3-large": 32, "efficientnet-b0": 32, "vit-tiny": 64,
}  # fmt: skip


def eight(side: int) -> tuple[Tensor, Tensor]:
    """Eight digits of 8x8, each pixel repeated up to `side`, and their classes."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images[:8]).float()[:, None] / 16
    return nn.functional.interpolate(pixels, size=side) - 0.3, torch.from_numpy(digits.target[:8]).long()


def losses(module: nn.Module, side: int, steps: int, lr: float) -> list[float]:
    """The losses of at most so many steps of Adam; it ends below 0.1."""
    images, classes = eight(side)
    optimizer, seen = torch.optim.Adam(module.train().parameters(), lr=lr), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(module(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        if seen[-1] < 0.1:
            break
    return seen


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in SIDES]
)
def test_it_fits_eight_real_images(name: str) -> None:
    side = SIDES[name]
    lr = {"linear": 0.1, "mlp": 1e-2, "small-cnn": 1e-2, "vit-tiny": 3e-4}.get(name, 1e-3)
    seen = losses(made(name, (1, side, side)), side, 100, lr)
    assert seen[0] > 1.5
    assert seen[-1] < 0.1


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("name", ["resnet20", pytest.param("mobilenet-v2", marks=pytest.mark.nightly)])
def test_it_fits_them_with_another_normalization_and_a_bottleneck(name: str, norm: str) -> None:
    keys: dict[str, Any] = {"norm": norm, "bottleneck": 8}
    side = SIDES[name]
    assert losses(made(name, (1, side, side), prepare=keys), side, 100, 1e-3)[-1] < 0.1


@pytest.mark.nightly
def test_the_loss_of_vit_b_16_falls_over_five_steps() -> None:
    seen = losses(made("vit-b-16", (1, 64, 64)), 64, 5, 3e-5)
    assert seen[-1] < seen[0] - 0.3
