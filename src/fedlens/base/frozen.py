"""Frozen parts of a module: layers that stay in evaluation mode, and a module that also takes what they compute.

A frozen weight has `requires_grad` False. A layer whose statistics must not move is marked by `hold`: `train()` leaves
it in evaluation mode, and `fedlens.core.tree.spec_of` says of its buffers that they are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def hold(layer: nn.Module) -> None:
    """Keeps this layer in evaluation mode whatever `train()` says; the layers inside it still follow `train()`.

    >>> net = nn.Sequential(nn.Dropout(), nn.Dropout())
    >>> hold(net[0])
    >>> [layer.training for layer in net.train()]
    [False, True]
    """
    layer.__dict__["train"] = partial(_train, layer)
    layer.training = False


def held(layer: nn.Module) -> bool:
    """Whether `hold` was called for this layer."""
    train = layer.__dict__.get("train")
    return isinstance(train, partial) and train.func is _train


def _train(layer: nn.Module, mode: bool = True) -> nn.Module:
    for child in layer.children():
        child.train(mode)
    layer.training = False
    return layer


class _Reached(Exception):
    """The forward pass has come to the layer whose input is wanted."""


class FrozenSplit:
    """A forward pass that takes images, or the features that the frozen part of the module computes from them.

    Features are the input of the first trained layer. They are told from images by their shape.

    Args:
        module: the module; its forward pass is replaced by this one.
        input_shape: the shape of one image.
        layers: the names of the layers that follow the frozen part, in order; the module's output is the last one's.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    >>> split = FrozenSplit(net, (1, 2, 2), ["2"])
    >>> images = torch.ones(5, 1, 2, 2)
    >>> features = split.features(images)
    >>> features.shape, bool((net(features) == net(images)).all())
    (torch.Size([5, 3]), True)
    """

    def __init__(self, module: nn.Module, input_shape: Sequence[int], layers: Sequence[str]) -> None:
        self.module, self.input_shape, self.layers = module, tuple(input_shape), list(layers)
        self.plain = module.forward
        module.__dict__["forward"] = self

    @classmethod
    def of(cls, module: nn.Module) -> FrozenSplit | None:
        """The split of this module, if it has one."""
        forward = module.__dict__.get("forward")
        return forward if isinstance(forward, FrozenSplit) else None

    def __call__(self, inputs: Tensor, *more: Any, **named: Any) -> Any:
        """The module's output for images or for features."""
        if tuple(inputs.shape[1:]) == self.input_shape:
            return self.plain(inputs, *more, **named)
        for name in self.layers:
            inputs = self.module.get_submodule(name)(inputs)
        return inputs

    def features(self, images: Tensor) -> Tensor:
        """The features of images [n, C, H, W], without history: [n, ...]."""
        found: list[Tensor] = []

        def reached(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.append(inputs[0].detach())
            raise _Reached

        handle = self.module.get_submodule(self.layers[0]).register_forward_pre_hook(reached)
        try:
            # The hook ends the pass by `_Reached`: what comes after the frozen part need not be computed.
            with suppress(_Reached), torch.no_grad():
                self.plain(images)
        finally:
            handle.remove()
        return found[0]
