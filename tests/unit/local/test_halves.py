"""The backward pass of a half from the gradient of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedlens.core.arithmetic import Arithmetic
from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.local.halves import Half
from fedlens.local.settings import LocalSettings


def layer(input_shape: Sequence[int], classes: int) -> nn.Module:
    return nn.Linear(input_shape[0], classes)


def gradients(precision: str, gradient: Tensor) -> list[Tensor]:
    spec = ModelSpec(layer, "layer", {}, (4,), 3, seed=0)
    half = Half("first", spec, LocalSettings(lr=0.1))
    state = {"tree": tree_of(spec.build()), "optimizer": {}}
    arithmetic = Arithmetic(precision)  # type: ignore[arg-type]
    client = Client(0, None, state, Secrets(0, 0), {}, torch.device("cpu"), arithmetic)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return half.backward(half.forward(state, client, inputs, Rng((0, "x"))), gradient, client)


def test_in_half_precision_small_gradients_are_scaled_up_before_the_pass() -> None:
    gradient = torch.full((8, 3), 1e-9)  # float16 has nothing below 6e-8
    for half, full in zip(gradients("fp16", gradient), gradients("fp32", gradient), strict=True):
        torch.testing.assert_close(half, full, rtol=5e-3, atol=1e-12)


def test_a_gradient_in_another_layout_gives_the_same() -> None:
    gradient = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).T
    for a, b in zip(gradients("fp32", gradient), gradients("fp32", gradient.contiguous()), strict=True):
        assert torch.equal(a, b)
