"""Random scaling and a crop of fixed size, as segmentation networks and detectors are trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedlens.core.change import Change
from fedlens.core.errors import ConfigError
from fedlens.data.augmented import Augmentation, Augmented

Side = Annotated[int, Field(ge=1, le=8192)]
_LARGEST = 16.0  # the largest factor


@dataclass(frozen=True)
class ScaleCrop(Augmentation):
    """Scales each image by a random factor, and cuts a window of a fixed size out at a random place.

    The factor is uniform in `scale`, by default between 0.5 and 2 (Chen et al. 2017, DeepLabv3, section 4.1). Sides of
    the scaled image are rounded to whole pixels. Where it is smaller than the crop, all of it lies at a random place
    in the crop, and the rest is 0, in masks 255 (no class). Interpolation is bilinear, with antialiasing for factors
    below 1: in fixed-point numbers on a processor (the same bits on each), in float32 on a GPU (at most 1 of 255
    apart).

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
        n, channels, height, width = images.shape
        size = self.crop or (height, width)
        drawn = torch.rand(3, n, generator=generator, device=generator.device)
        low, high = self.scale
        result = images.new_zeros(n, channels, *size)
        windows = []
        for k, (factor, down, across) in enumerate(drawn.double().t().tolist()):
            factor = low + (high - low) * factor
            sides = max(1, round(height * factor)), max(1, round(width * factor))
            top, left = _offset(down, sides[0] - size[0]), _offset(across, sides[1] - size[1])
            rows = slice(max(0, -top), min(size[0], sides[0] - top))
            columns = slice(max(0, -left), min(size[1], sides[1] - left))
            scaled = _scaled(images[k : k + 1], sides)[0]
            result[k, :, rows, columns] = scaled[
                :, rows.start + top : rows.stop + top, columns.start + left : columns.stop + left
            ]
            y, x = height / sides[0], width / sides[1]  # pixels of the image in one of the result
            windows.append([top * y, left * x, size[0] * y, size[1] * x])
        at = torch.tensor(windows, device=images.device).view(n, 4)
        return Augmented(result, targets, Change.windows(at, size))


def _offset(share: float, room: int) -> int:
    """Where the crop starts in the scaled image, uniform over the whole pixels; below 0 if the image is smaller."""
    place = int(share * (abs(room) + 1))
    return place if room >= 0 else -place


def _scaled(images: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [n, C, h, w]: the images scaled to this size, antialiased.

    PyTorch scales uint8 on a processor in fixed-point numbers, which takes a fifth of the time of float32. It cannot
    on a GPU.
    """
    if size == tuple(images.shape[2:]):
        return images
    exact = images if images.device.type == "cpu" else images.float()
    scaled = torch.nn.functional.interpolate(exact, size, mode="bilinear", antialias=True)
    return scaled if scaled.dtype == torch.uint8 else scaled.round_().clamp_(0, 255).to(torch.uint8)


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
