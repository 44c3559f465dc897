"""Batched transforms: no loop over images, and arithmetic that a bare PyTorch loop can repeat bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

Augment = Callable[[Tensor, torch.Generator], Tensor]  # uint8 [n, C, H, W] to the same

_NEAR = 2**17  # numbers that a processor's nearer caches hold: more are normalized piece by piece


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std of each channel, as one multiplication and one addition.

    The arithmetic, exactly: with `scale = 1 / (255 std)` and `shift = -mean / std`, both computed in float64
    and rounded once to float32, it is `images.float() * scale + shift`, the product and the sum each rounded
    to float32.

    Args:
        images: uint8 [n, C, H, W].
        mean, std: one number a channel, of images scaled to [0, 1].

    Returns:
        float32 [n, C, H, W], on the device and in the memory format of `images`.

    >>> normalize(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), (0.5,), (0.25,)).item()
    2.0
    """
    scale, shift = _affine(tuple(mean), tuple(std), images.device)
    if images.is_cuda or images.numel() <= _NEAR:
        return images.to(torch.float32, copy=True).mul_(scale).add_(shift)
    found = torch.empty_like(images, dtype=torch.float32)
    size = max(1, _NEAR // images[0].numel())
    for part, own in zip(torch.split(images, size), torch.split(found, size), strict=True):
        own.copy_(part).mul_(scale).add_(shift)
    return found


@lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept, because for a small batch making these two takes longer than using them.
    with torch.inference_mode(False):
        middle = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
        spread = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
        return (1 / (255 * spread)).float().to(device), (-middle / spread).float().to(device)


def pad_crop_flip(images: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """Each image moved by up to `pad` pixels each way, zeros coming in, and mirrored with probability 1/2.

    The usual augmentation of 32x32 photographs: pad all sides with zeros (black, where the images are uint8),
    cut out a window of the old size at a uniformly random place, flip it left to right for half of the
    images.

    From `generator` it draws `torch.randint(0, 2 pad + 1, (2, n))`, the top and the left edges of the
    windows, and then `torch.randint(0, 2, (n,))`, the flips.

    Args:
        images: [n, C, H, W], of any type.

    Returns:
        The same shape and type; `images` is left as it was.

    >>> x = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> pad_crop_flip(x, torch.Generator().manual_seed(0), pad=0).shape
    torch.Size([1, 1, 2, 2])
    """
    n, channels, height, width = images.shape
    device, source = images.device, generator.device
    edges = torch.randint(0, 2 * pad + 1, (2, n), generator=generator, device=source).to(device)
    flips = torch.randint(0, 2, (n,), generator=generator, device=source).to(device)
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))

    # One gather does both: the place of each pixel of the result in the padded image, the same for all
    # channels.
    across = torch.arange(width, device=device)
    rows = edges[0, :, None] + torch.arange(height, device=device)
    columns = edges[1, :, None] + torch.where(flips[:, None] == 1, width - 1 - across, across)
    places = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
    places = places.view(n, 1, height * width).expand(n, channels, -1)
    return padded.flatten(2).gather(2, places).view(images.shape)
