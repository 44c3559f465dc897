"""Replaces the batch normalization of any model: the key `norm` of `[model]`."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedlens.base.errors import ConfigError
from fedlens.core.tree import FixedBuffers

Norm = Literal["batch", "group", "layer", "frozen"]
_STATISTICS = ("running_mean", "running_var")


def groups(channels: int) -> int:
    """The number of groups of up to 8 channels: of as many as divide both the channels and 8.

    >>> groups(16), groups(12), groups(3)
    (2, 3, 3)
    """
    return channels // gcd(channels, 8)


class GroupNormAct(nn.GroupNorm):
    """Group normalization, and after it the layers that the replaced batch normalization applied, by their names.

    >>> GroupNormAct(2, 4, {"act": nn.ReLU()})(torch.ones(1, 4, 2, 2)).shape
    torch.Size([1, 4, 2, 2])
    """

    def __init__(self, count: int, channels: int, after: Mapping[str, nn.Module], **more: Any) -> None:
        super().__init__(count, channels, **more)
        for name, layer in after.items():
            self.add_module(name, layer)

    def forward(self, input: Tensor) -> Tensor:
        """Images [n, C, ...] in the same shape."""
        return self.after(super().forward(input))

    def after(self, normalized: Tensor) -> Tensor:
        """What the layers after the normalization make of its output."""
        for layer in self.children():
            normalized = layer(normalized)
        return normalized


class FrozenBatchNorm(FixedBuffers):
    """Batch normalization in which nothing moves, also under `train()`: (x - mean) / sqrt(var + eps) * weight + bias.

    Statistics, weight and bias are those of the replaced layer, and stay so. `spec_of` gives the statistics the role
    `fixed`. Layers that the replaced one applied afterwards follow. Loads the state of a batch normalization.

    >>> frozen = FrozenBatchNorm(nn.BatchNorm2d(3), {})
    >>> torch.equal(frozen.train()(torch.ones(2, 3, 4, 4)), frozen.eval()(torch.ones(2, 3, 4, 4)))
    True
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, replaced: _BatchNorm, after: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.eps = replaced.eps
        for name in ("weight", "bias"):
            own = replaced.get_parameter(name) if replaced.affine else None
            kept = None if own is None else nn.Parameter(own.detach(), requires_grad=False)
            self.register_parameter(name, kept)
        for name in _STATISTICS:
            self.register_buffer(name, replaced.get_buffer(name).detach())
        for name, layer in after.items():
            self.add_module(name, layer)

    def forward(self, input: Tensor) -> Tensor:
        """Images [n, C, ...] in the same shape."""
        out = functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
        for layer in self.children():
            out = layer(out)
        return out

    def extra_repr(self) -> str:
        """The channels and eps."""
        return f"{len(self.running_mean)}, eps={self.eps}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def with_norm(module: nn.Module, norm: Norm) -> nn.Module:
    """The module with another normalization in place of each batch normalization; changes the module.

    Args:
        module: any.
        norm: "batch" leaves it as it is; "group" is group normalization (Wu and He 2018, arXiv 1803.08494) in groups
            of up to 8 channels; "layer" is group normalization in one group, so over all channels and pixels of an
            image, with a weight and a bias for each channel; "frozen" is `FrozenBatchNorm`.

    Weight, bias and eps are kept, and so is what timm's layers do after the normalization (`drop` and `act`).

    Raises `ConfigError` for a model without batch normalization, or with one that has a forward pass of its own.

    >>> with_norm(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)), "group")[1].num_groups
    2
    """
    found = [
        (name, layer)
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _BatchNorm)
    ]
    if not found:
        raise ConfigError(
            f"the model has no batch normalization that norm = '{norm}' could replace",
            where="model.norm",
            hint="leave model.norm out, or choose a model with batch normalization such as 'resnet20'",
        )
    if norm == "batch":
        return module
    replaced = {id(layer): _replaced(layer, name, norm) for name, layer in found}
    for name, layer in found:
        if not name:
            return replaced[id(layer)]
        above, _, place = name.rpartition(".")
        setattr(module.get_submodule(above), place, replaced[id(layer)])
    return module


def _replaced(layer: _BatchNorm, name: str, norm: Norm) -> nn.Module:
    after = _after(layer, name)
    if norm == "frozen":
        if layer.running_mean is None:
            raise ConfigError(
                f"the layer '{name}' keeps no statistics (track_running_stats=False), so they cannot be frozen",
                where="model.norm",
                hint="set model.norm = 'group' or 'layer'",
            )
        return FrozenBatchNorm(layer, after).train(layer.training)
    channels = layer.num_features
    count = groups(channels) if norm == "group" else 1
    like = next((value for value in layer.state_dict().values() if value.is_floating_point()), None)
    more: dict[str, Any] = {"eps": layer.eps, "affine": layer.affine}
    if like is not None:
        more |= {"device": like.device, "dtype": like.dtype}
    made = GroupNormAct(count, channels, after, **more) if after else nn.GroupNorm(count, channels, **more)
    if layer.affine:
        for leaf, own in made.named_parameters(recurse=False):
            given = layer.get_parameter(leaf)
            with torch.no_grad():
                own.copy_(given)
            own.requires_grad_(given.requires_grad)
    return made.train(layer.training)


def _after(layer: _BatchNorm, name: str) -> dict[str, nn.Module]:
    """The layers that this batch normalization applies to what it has normalized, in their order."""
    kind = type(layer)
    if kind.forward is _BatchNorm.forward or isinstance(layer, nn.SyncBatchNorm):
        return {}
    if kind.__module__.startswith("timm.layers."):  # BatchNormAct2d: drop, then act
        return dict(layer.named_children())
    raise ConfigError(
        f"the layer '{name}' is a {kind.__name__}, a batch normalization with a forward pass of its own, which may do "
        "more than normalize",
        where="model.norm",
        hint="leave model.norm out, and choose the normalization in the model's code",
    )
