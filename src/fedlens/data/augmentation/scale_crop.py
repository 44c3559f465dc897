"""Random scaling and a crop of fixed size, as segmentation networks and detectors are trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

from fedlens.base.errors import ConfigError
from fedlens.core.device_copies import uploaded
from fedlens.data.augmentation.augmented import Augmentation, Augmented
from fedlens.vision.change import Change

Side = Annotated[int, Field(ge=1, le=8192)]
# Height and width of a scaled image; row and column of its window.
Placed = tuple[tuple[int, int], tuple[int, int]]
_LARGEST = 16.0  # the largest factor
_BITS = 22  # of a weight of 1


@dataclass(frozen=True)
class ScaleCrop(Augmentation):
    """Scales each image by a random factor, and cuts a window of a fixed size out at a random place.

    The factor is uniform in `scale`, by default between 0.5 and 2 (Chen et al. 2017, DeepLabv3, section 4.1). Sides of
    the scaled image are rounded to whole pixels. Where it is smaller than the crop, all of it lies at a random place
    in the crop, and the rest is 0, in masks 255 (no class). Interpolation is bilinear, with antialiasing for factors
    below 1, in fixed-point numbers with the same bits on every processor and GPU.

    Draws one `torch.rand(3, n)`: the factor, and the place down and across.

    Args:
        crop: height and width of the result; None for the size of the images.
        scale: the smallest and the largest factor.

    >>> step = ScaleCrop((4, 6), (0.5, 2.0))
    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> step(images, None, torch.Generator()).images.shape, step.output_shape((3, 8, 8))
    (torch.Size([2, 3, 4, 6]), (3, 4, 6))
    """

    crop: tuple[int, int] | None
    scale: tuple[float, float]

    def output_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """(C, H', W') with the size of the crop."""
        return (input_shape[0], *(self.crop or input_shape[1:]))

    def note(self, input_shape: Sequence[int]) -> str | None:
        """A sentence if images that are not scaled are smaller than the crop."""
        given, (height, width) = input_shape[1:], self.crop or input_shape[1:]
        if given[0] >= height and given[1] >= width:
            return None
        return (
            f"scale-crop: the images of {given[0]}x{given[1]} pixels are smaller than the crop of {height}x{width} "
            "(height x width), which is filled up with 0, in masks with 255 (no class)"
        )

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        n, _, height, width = images.shape
        size = self.crop or (height, width)
        drawn = torch.rand(3, n, generator=generator, device=generator.device)
        low, high = self.scale
        placed, windows = [], []
        for factor, down, across in drawn.double().t().tolist():
            factor = low + (high - low) * factor
            sides = max(1, round(height * factor)), max(1, round(width * factor))
            top, left = _offset(down, sides[0] - size[0]), _offset(across, sides[1] - size[1])
            placed.append((sides, (top, left)))
            y, x = height / sides[0], width / sides[1]  # pixels of the image in one of the result
            windows.append([top * y, left * x, size[0] * y, size[1] * x])
        scaled = _scaled_by_pytorch if images.device.type == "cpu" else fixed_point_scaled
        at = torch.tensor(windows).view(n, 4)
        return Augmented(scaled(images, placed, size), targets, Change.windows(at, size))


def _offset(share: float, room: int) -> int:
    """Where the crop starts in the scaled image, uniform over the whole pixels; below 0 if the image is smaller."""
    place = int(share * (abs(room) + 1))
    return place if room >= 0 else -place


def _scaled_by_pytorch(images: Tensor, placed: Sequence[Placed], size: tuple[int, int]) -> Tensor:
    """The windows on a processor, one image after the other."""
    result = images.new_zeros(len(images), images.shape[1], *size)
    for k, (sides, (top, left)) in enumerate(placed):
        rows = slice(max(0, -top), min(size[0], sides[0] - top))
        columns = slice(max(0, -left), min(size[1], sides[1] - left))
        scaled = images[k]
        if sides != tuple(images.shape[2:]):
            scaled = interpolate(images[k : k + 1], sides, mode="bilinear", antialias=True)[0]
        result[k, :, rows, columns] = scaled[
            :, rows.start + top : rows.stop + top, columns.start + left : columns.stop + left
        ]
    return result


def fixed_point_scaled(images: Tensor, placed: Sequence[Placed], size: tuple[int, int]) -> Tensor:
    """Windows of scaled images, with the bits that PyTorch computes on a processor, on any device.

    PyTorch scales uint8 on a processor alone: first the rows, then the columns, each with weights of 15 bits and
    rounded to uint8. Here each axis of all images is a weighted sum in int32.

    Args:
        images: uint8 [n, C, h, w].
        placed: for each image the sides of the scaled image, and the row and the column where its window begins.
        size: height and width of the windows, which are 0 outside of their images.

    >>> image = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> fixed_point_scaled(image, [((2, 4), (0, 1))], (2, 3)).tolist()
    [[[[0, 1, 1], [2, 3, 3]]]]
    """
    for axis in (3, 2):
        table = [
            _taps(images.shape[axis], sides[axis - 2], start[axis - 2], size[axis - 2])
            for sides, start in placed
        ]
        most = max((taps.shape[1] for taps in table), default=0)
        padded = np.zeros((2, most, len(table), size[axis - 2]), np.int32)
        for k, taps in enumerate(table):
            padded[:, : taps.shape[1], k] = taps
        at, weights = uploaded(torch.from_numpy(padded), images.device)
        shape = [*images.shape[:3], size[1]] if axis == 3 else [*images.shape[:2], *size]
        total = torch.full(shape, 1 << (_BITS - 1), dtype=torch.int32, device=images.device)
        over = (slice(None), None, None) if axis == 3 else (slice(None), None, slice(None), None)
        for positions, weight in zip(at.long(), weights, strict=True):
            total.addcmul_(images.gather(axis, positions[over].expand(shape)).int(), weight[over])
        images = (total >> _BITS).clamp_(0, 255).to(torch.uint8)
    return images


def _taps(source: int, scaled: int, start: int, count: int) -> NDArray[np.int32]:
    """int32 [2, taps, count]: the positions and weights of pixels `start` and on of an axis of `scaled` pixels.

    The weights are those of PyTorch (`_compute_index_ranges_int16_weights` in UpSampleKernel.cpp): triangles of float64
    with the sum 1, rounded to as many bits as fit 16. They are returned in units of 2**-22. Outside they are 0.
    """
    scale = source / scaled
    support = max(scale, 1.0)
    centers = scale * (np.arange(scaled) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + support + 0.5).astype(np.int64), source) - first
    steps = np.arange(2 * math.ceil(support) + 1)[:, None]
    weights = np.maximum(1 - np.abs((steps + first - centers + 0.5) * (1 / support)), 0.0) * (steps < counts)
    weights /= sum(weights)  # in PyTorch's order
    bits = _BITS
    while bits and int(0.5 + weights.max() * 2**bits) >= 2**15:
        bits -= 1
    rounded = (0.5 + weights * 2**bits).astype(np.int32) << (_BITS - bits)
    taps = np.zeros((2, len(steps), count), np.int32)
    inside = slice(max(0, -start), min(count, scaled - start))
    shown = slice(inside.start + start, inside.stop + start)
    taps[:, :, inside] = np.minimum(steps + first, source - 1)[:, shown], rounded[:, shown]
    return taps


def make_scale_crop(
    shape: Sequence[int],
    *,
    crop: Annotated[
        Side | tuple[Side, Side] | None,
        Field(description="side, or height and width, in pixels; by default the size of the images"),
    ] = None,
    scale: Annotated[tuple[float, float], Field(description="smallest and largest factor")] = (0.5, 2.0),
) -> ScaleCrop:
    """Scales at random and crops to a fixed size. Raises `ConfigError` if the bounds of the scale are not in order."""
    if not 0 < scale[0] <= scale[1] <= _LARGEST:
        raise ConfigError(
            f"the scale is {list(scale)}, but needs 0 < smallest <= largest <= {_LARGEST:g}", where="scale"
        )
    return ScaleCrop((crop, crop) if isinstance(crop, int) else crop, scale)
