"""Batched normalization, with arithmetic that plain PyTorch can repeat bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.data.dataset import Dataset

Normalization = Literal["standard", "unit", "half", "imagenet"]
Moments = tuple[tuple[float, ...], tuple[float, ...]]

# He et al. 2016's, as torchvision rounds them.
_IMAGENET: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_NEAR = 2**20  # numbers that fit in the caches of a processor; more are normalized in pieces


def moments(name: Normalization, mean: Sequence[float], std: Sequence[float]) -> Moments:
    """(mean, std): what `normalize` subtracts and divides by, one number per channel.

    - `standard`: those of the training images, `mean` and `std`.
    - `unit`: 0 and 1, so that values are between 0 and 1.
    - `half`: 0.5 and 0.5, so that values are between -1 and 1 (FedCV, section 7.1.4).
    - `imagenet`: (0.485, 0.456, 0.406) and (0.229, 0.224, 0.225), those of the images that most published weights
      were trained on. Grey images get the mean of the three, 0.449 and 0.226.

    Args:
        mean, std: of the training images scaled to [0, 1]; empty for text.

    Raises `ConfigError` for text, and for `imagenet` with another number of channels than 1 or 3.

    >>> moments("half", (0.4, 0.3, 0.3), (0.2, 0.2, 0.2))
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    >>> moments("imagenet", (0.13,), (0.3,))
    ((0.449,), (0.226,))
    """
    channels, where = len(mean), "data.normalize"
    if name == "standard":
        return tuple(mean), tuple(std)
    if not channels:
        hint = 'remove it, or set it to "standard", which leaves text unchanged'
        raise ConfigError(f"text cannot be normalized as '{name}'", where=where, hint=hint)
    if name == "unit":
        return (0.0,) * channels, (1.0,) * channels
    if name == "half":
        return (0.5,) * channels, (0.5,) * channels
    if channels == 3:
        return _IMAGENET
    if channels == 1:
        middle, spread = (round(sum(part) / 3, 3) for part in _IMAGENET)
        return (middle,), (spread,)
    raise ConfigError(
        f"'imagenet' has a mean and a deviation for 3 channels, and the images have {channels}",
        where=where,
        hint='set data.normalize = "standard"',
    )


def normalized(dataset: Dataset, name: Normalization) -> Dataset:
    """The dataset with the `moments` of this name; each party's images with those of their own."""
    mean, std = moments(name, dataset.mean, dataset.std)
    parties = tuple(party and normalized(party, name) for party in dataset.parties)
    return replace(dataset, mean=mean, std=std, parties=parties)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std of each channel, as one multiplication and one addition.

    The arithmetic, exactly: with `scale = 1 / (255 std)` and `shift = -mean / std`, both computed in float64
    and rounded once to float32, it is `images.float() * scale + shift`, the product and the sum each rounded
    to float32.

    Args:
        images: uint8 [n, C, H, W]. Floats, such as features of images, are returned as they are.
        mean, std: one number per channel, of images scaled to [0, 1]; empty for tokens of text, which are returned.

    Returns:
        float32 [n, C, H, W], on the device and in the memory format of `images`.

    >>> normalize(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), (0.5,), (0.25,)).item()
    2.0
    """
    if not mean or images.is_floating_point():
        return images
    scale, shift = _affine(tuple(mean), tuple(std), images.device)
    if images.is_cuda or images.numel() <= _NEAR:
        return images.to(torch.float32, copy=True).mul_(scale).add_(shift)
    normalized = torch.empty_like(images, dtype=torch.float32)
    size = max(1, _NEAR // images[0].numel())
    for part, out in zip(torch.split(images, size), torch.split(normalized, size), strict=True):
        out.copy_(part).mul_(scale).add_(shift)
    return normalized


@lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached: for a small batch, computing these two takes longer than using them.
    with torch.inference_mode(False):
        middle = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
        spread = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
        return (1 / (255 * spread)).float().to(device), (-middle / spread).float().to(device)
