"""Batched normalization, with arithmetic that plain PyTorch can repeat bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_NEAR = 2**17  # numbers that fit in the inner caches of a processor; more are normalized in pieces


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std of each channel, as one multiplication and one addition.

    The arithmetic, exactly: with `scale = 1 / (255 std)` and `shift = -mean / std`, both computed in float64
    and rounded once to float32, it is `images.float() * scale + shift`, the product and the sum each rounded
    to float32.

    Args:
        images: uint8 [n, C, H, W]. Floats, such as features of images, are returned as they are.
        mean, std: one number per channel, of images scaled to [0, 1].

    Returns:
        float32 [n, C, H, W], on the device and in the memory format of `images`.

    >>> normalize(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), (0.5,), (0.25,)).item()
    2.0
    """
    if images.is_floating_point():
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
