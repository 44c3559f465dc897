"""The network of vertical learning: a bottom for each party, and a top on what they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import Window
from fedlens.core.protocol import ModelSpec
from fedlens.models.prepare import Preparation
from fedlens.models.projection import last_linear
from fedlens.models.registry import MODELS

Join = Literal["sum", "concat"]


@dataclass(frozen=True)
class WithoutBias:
    """The `wrapper` of a bottom: its last linear layer has no bias, since the top has one in the same place."""

    def __call__(self, module: nn.Module, model: ModelSpec) -> nn.Module:
        """The same module. Raises `ConfigError` if it does not end with a linear layer of the bottom's width."""
        last = last_linear(module)
        if last is None or last[1].out_features != model.classes:
            raise ConfigError(
                f"the model '{model.name}' has no linear layer with the {model.classes} outputs of a party",
                where="model.name",
                hint="take a model that ends with one",
            )
        last[1].register_parameter("bias", None)
        return module


@dataclass(frozen=True)
class InDtype:
    """The `wrapper` of a top: in the number format of the bottoms."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, model: ModelSpec) -> nn.Module:
        """The same module."""
        return module.to(self.dtype)


class Top(nn.Module):
    """Logits [B, classes] from the embeddings of all parties, [parties, B, width]; `input_shape` is (parties, width).

    Their sum and a bias, or their concatenation through linear layers with ReLU between them; a sum goes through such
    layers too if `hidden` names any.

    >>> Top((2, 3), 3, join="sum")(torch.ones(2, 4, 3)).shape
    torch.Size([4, 3])
    >>> Top((2, 3), 5, join="concat", hidden=[7])(torch.ones(2, 4, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, join: Join, hidden: Sequence[int] = ()
    ) -> None:
        super().__init__()
        (parties, width), self.join, layers = input_shape, join, list[nn.Module]()
        if join == "sum":
            self.bias = nn.Parameter(torch.zeros(width))
            layers += [nn.ReLU()] if hidden else []
        widths = [width if join == "sum" else parties * width, *hidden, classes]
        if hidden or join == "concat":
            for given, made in pairwise(widths):
                layers += [nn.Linear(given, made), nn.ReLU()]
            layers.pop()
        self.layers = nn.Sequential(*layers)

    def forward(self, embeddings: Tensor) -> Tensor:
        """The logits."""
        joined = (
            self.bias + embeddings.sum(0) if self.join == "sum" else embeddings.transpose(0, 1).flatten(1)
        )
        logits: Tensor = self.layers(joined)
        return logits


class PartyNetwork(nn.Module):
    """All bottoms and the top as one network: on images if each party sees a window of the same image.

    Parties with data of their own have no `windows`; then it takes a sequence with the inputs of each party.
    """

    def __init__(self, bottoms: Sequence[nn.Module], top: Top, windows: Sequence[Window] | None) -> None:
        super().__init__()
        self.bottoms, self.top, self.windows = nn.ModuleList(bottoms), top, windows

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Logits [B, classes] of whole images [B, C, H, W]. Raises `ConfigError` for one tensor without windows."""
        if self.windows is None and isinstance(inputs, Tensor):
            raise ConfigError(
                "the parties have images of their own, and this is one image for all of them",
                hint="in Python give the model a list with the images of each party; party-K.safetensors has the "
                "part of party K",
            )
        seen = inputs if self.windows is None else [window.of(inputs) for window in self.windows]
        embeddings = [bottom(part) for bottom, part in zip(self.bottoms, seen, strict=True)]
        logits: Tensor = self.top(torch.stack(embeddings))
        return logits


def party_network(
    input_shape: Sequence[int],
    classes: int,
    *,
    bottom: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    windows: Sequence[Sequence[int]] | None,
    width: int,
    join: Join,
    hidden: Sequence[int] = (),
) -> PartyNetwork:
    """The network of parties that see windows of images, as the final model of a run with `vertical` has it.

    Args:
        input_shape: (C, H, W) of whole images.
        bottom: `name`, `settings` and `prepare`, of the model of each party.
        shapes: (C, h, w) of an input of each party.
        windows: `Window` of each party, or None for data of their own.
        width: of the embeddings.
        join, hidden: see `Top`.

    >>> halves = [(0, 0, 28, 14), (0, 14, 28, 14)]
    >>> shape = {"shapes": [(1, 28, 14)] * 2, "windows": halves}
    >>> net = party_network((1, 28, 28), 10, bottom={"name": "linear"}, **shape, width=10, join="sum")
    >>> net(torch.ones(2, 1, 28, 28)).shape, sum(p.numel() for p in net.parameters())
    (torch.Size([2, 10]), 7850)
    """
    rectangles = None if windows is None else [Window(*window) for window in windows]
    bottoms = [bottom_of(bottom, tuple(shape), width).build() for shape in shapes]
    top = Top((len(bottoms), width), classes, join=join, hidden=hidden).to(
        next(bottoms[0].parameters()).dtype
    )
    return PartyNetwork(bottoms, top, rectangles)


def bottom_of(table: Mapping[str, Any], shape: tuple[int, ...], width: int) -> ModelSpec:
    """The model of one party from the settings of `party_network`."""
    name, prepare = str(table["name"]), Preparation(**table.get("prepare", {}))
    return ModelSpec(
        MODELS.find(name), name, dict(table.get("settings", {})), shape, width, 0, prepare, WithoutBias()
    )
