"""Feature shifts: each client has its own rotation, blur, brightness, contrast and noise of images.

The result for an image depends only on the image, its client's numbers and its position in the training split, bit for
bit, and not on the other images of a batch. So every sum below has a fixed order, and no library routine is used that
chooses its algorithm by the size of the batch (as the convolution in torchvision's blur does).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from fedlens.base.errors import DataError, nearest
from fedlens.core.device_copies import uploaded
from fedlens.data.partition.feature import NEUTRAL

_BLOCK = 2**18  # values per pass, so that temporaries stay in cache


def shifted(images: Tensor, by: Mapping[str, Tensor], positions: Tensor) -> Tensor:
    """The images with the shifts of their clients.

    With x the image as float32, 0 to 255, and m the mean of all its values before anything else, in this order:

    1. `rotation`, degrees, counter-clockwise about the centre: bilinear between pixels, 0 outside.
    2. `blur`, standard deviation s in pixels: a Gaussian along the rows and one along the columns, cut off at
       ceil(3 s) and normalized; edge pixels are repeated outside.
    3. `brightness`, a factor b: x <- b x.
    4. `contrast`, a factor c: x <- b m + c (x - b m).
    5. `noise`, standard deviation s as a share of black to white: x <- x + 255 s z, with z standard normal (quantiles
       of 2^16 equally likely steps, so never beyond 4.4), one for each value of the image. z is a hash of
       `positions` and of the place in the image: an example has the same noise in every epoch, in training and in
       evaluation.

    Then x is rounded (half to even) and clamped to 0 .. 255. A step skips images whose number is neutral (factors 1,
    others 0), so an image with only neutral numbers keeps its bits.

    All five steps take 16 ms for 500 images of 3 x 32 x 32 on two idle cores (33 ms of processor time on one), most
    of it for blur (deviation 0.7) and noise.

    Args:
        images: uint8 [n, C, H, W].
        by: float32 [n] by name: `rotation`, `blur`, `brightness`, `contrast`, `noise`, or some of them; in ordinary
            memory, as the positions.
        positions: int64 [n], the position of each image in the training split.

    Returns:
        uint8 [n, C, H, W], in new memory; `images` is not changed.

    Raises `DataError` if the examples are not images, or `by` has another name.

    >>> image = torch.tensor([[[[10, 200]]]], dtype=torch.uint8)
    >>> shifted(image, {"brightness": torch.tensor([1.5])}, torch.tensor([0])).tolist()
    [[[[15, 255]]]]
    """
    for name in by:
        if name not in NEUTRAL:
            raise DataError(f"images have no feature '{name}' to shift", hint=nearest(name, NEUTRAL))
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise DataError(
            f"features such as {', '.join(by)} are for images, and the examples are {images.dtype} "
            f"{list(images.shape)}",
            hint="take another partition",
        )
    out = images.clone()
    changed = torch.zeros(len(images), dtype=torch.bool)
    for name, values in by.items():
        changed |= values != NEUTRAL[name]
    rows = changed.nonzero().squeeze(1)
    each = max(1, _BLOCK // max(1, math.prod(images.shape[1:])))
    for start in range(0, len(rows), each):
        part = rows[start : start + each]
        shifts = {name: values[part] for name, values in by.items()}
        at, numbers = uploaded((part, positions[part]), images.device)
        out[at] = _shifted_block(images[at], shifts, numbers)
    return out


def _shifted_block(images: Tensor, by: Mapping[str, Tensor], positions: Tensor) -> Tensor:
    """The images with the shifts `by`, which are in CPU memory: they decide what is computed."""
    x, on_device = images.float(), uploaded(by, images.device)
    values = math.prod(images.shape[1:])
    # A sum of whole numbers is exact, whatever its order.
    mean = (images.flatten(1).sum(1, dtype=torch.int64).double() / values).float()
    for name, step in (("rotation", _rotated), ("blur", _blurred)):
        some = _rows(by, name)
        if some is not None:
            at = uploaded(some, x.device)
            x[at] = step(x[at], by[name][some])
    some = uploaded(_rows(by, "brightness"), x.device)
    if some is not None:
        factor = on_device["brightness"][some]
        x[some] *= factor.view(-1, 1, 1, 1)
        mean[some] *= factor
    some = uploaded(_rows(by, "contrast"), x.device)
    if some is not None:
        middle = mean[some].view(-1, 1, 1, 1)
        x[some] = (x[some] - middle).mul_(on_device["contrast"][some].view(-1, 1, 1, 1)).add_(middle)
    some = uploaded(_rows(by, "noise"), x.device)
    if some is not None:
        noise = _normal(positions[some], values).mul_(255 * on_device["noise"][some].view(-1, 1))
        x[some] += noise.view(-1, *images.shape[1:])
    return x.round_().clamp_(0, 255).to(torch.uint8)


def _rows(by: Mapping[str, Tensor], name: str) -> Tensor | slice | None:
    """The images that the step changes: None for none, a slice for all, which needs no copy."""
    if name not in by:
        return None
    changed = by[name] != NEUTRAL[name]
    count = int(changed.sum())
    if count == len(changed):
        return slice(None)
    return changed.nonzero().squeeze(1) if count else None


def _rotated(x: Tensor, degrees: Tensor) -> Tensor:
    """float32 [n, C, H, W], each rotated by its angle."""
    height, width = x.shape[2:]
    turns = [math.radians(angle) for angle in degrees.tolist()]
    cos, sin = (
        uploaded(torch.tensor([part(turn) for turn in turns], dtype=torch.float32), x.device).view(-1, 1, 1)
        for part in (math.cos, math.sin)
    )
    # Distances from the middle in pixels, down and to the right; where each pixel of the result comes from.
    down = torch.arange(height, device=x.device).float().sub_((height - 1) / 2).view(1, -1, 1)
    right = torch.arange(width, device=x.device).float().sub_((width - 1) / 2).view(1, 1, -1)
    from_right = (right * cos - down * sin).mul_(2 / width)
    from_down = (right * sin + down * cos).mul_(2 / height)
    grid = torch.stack([from_right, from_down], dim=-1)
    return torch.nn.functional.grid_sample(
        x, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )


def _blurred(x: Tensor, sigmas: Tensor) -> Tensor:
    """float32 [n, C, H, W], each blurred by its own Gaussian."""
    kernels = [_kernel(sigma) for sigma in sigmas.tolist()]
    radius = max(map(len, kernels)) - 1
    # Shorter kernels are padded with zeros, which are added last and change no bit.
    filled = [kernel + (0.0,) * (radius + 1 - len(kernel)) for kernel in kernels]
    taps = uploaded(torch.tensor(filled, dtype=torch.float32), x.device).view(len(x), -1, 1, 1, 1)
    for dim, pad in ((3, (radius, radius, 0, 0)), (2, (0, 0, radius, radius))):
        length = x.shape[dim]
        wide = torch.nn.functional.pad(x, pad, mode="replicate")
        x = wide.narrow(dim, radius, length) * taps[:, 0]
        for away in range(1, radius + 1):
            both = wide.narrow(dim, radius - away, length) + wide.narrow(dim, radius + away, length)
            x += both.mul_(taps[:, away])
    return x


@lru_cache(maxsize=4096)
def _kernel(sigma: float) -> tuple[float, ...]:
    """The Gaussian's weights at distance 0, 1, ..; with both sides they sum to 1."""
    half = [math.exp(-0.5 * (away / sigma) ** 2) for away in range(math.ceil(3 * sigma) + 1)]
    total = half[0] + 2 * math.fsum(half[1:])
    return tuple(weight / total for weight in half)


def _normal(positions: Tensor, values: int) -> Tensor:
    """float32 [n, values]: standard normal numbers that depend on the position and on their place alone.

    Each is a quantile, looked up by 16 bits of a hash: whole numbers only, so that the bits are the same everywhere.
    """
    seeds = _mixed64(positions.long().unsqueeze(1) + torch.arange(1, 3, device=positions.device) * 2**40)
    low, high = seeds[:, :1].to(torch.int32), seeds[:, 1:].to(torch.int32)
    counter = torch.arange((values + 1) // 2, dtype=torch.int32, device=positions.device)
    bits = _mixed32(counter ^ low, high)
    two = torch.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF], dim=-1).flatten(1)[:, :values]
    return _quantiles(positions.device)[two]


def _mixed64(x: Tensor) -> Tensor:
    """int64: each number scrambled, one to one (the finalizer of SplitMix64); 32 bits of it are kept."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    x = (x ^ ((x >> 31) & (2**33 - 1))) & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x)


def _mixed32(x: Tensor, key: Tensor) -> Tensor:
    """int32: each number scrambled, one to one for each key (constants of Wellons' "lowbias32")."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x += key
    x ^= (x >> 15) & 0x1FFFF
    x *= -0x7B935975  # 0x846CA68B
    x ^= (x >> 16) & 0xFFFF
    return x


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> Tensor:
    """float32 [2^16]: the standard normal quantiles at (i + 1/2) / 2^16, scaled to a variance of exactly 1."""
    steps = 2**16
    upper = [NormalDist().inv_cdf((i + 0.5) / steps) for i in range(steps // 2, steps)]
    scale = math.sqrt(math.fsum(2 * z * z for z in upper) / steps)
    half = [z / scale for z in upper]
    with torch.inference_mode(False):
        return torch.tensor([-z for z in reversed(half)] + half, dtype=torch.float32, device=device)
