"""Batched augmentation of training images: each image of a batch gets its own random change, without a loop.

An augmentation is called with `(images, targets, generator)`: uint8 [n, C, H, W], the targets of the n images and a
generator. It returns the new images and targets as `Augmented`, and does not change its inputs. A geometric one leaves
the targets as they are and returns its `Change`; the task moves the targets by it. All random numbers of a batch are
drawn at once, in the order of the docstrings, on the generator's device.

torchvision's transforms draw one change for a whole batch, from the global generator. So they would need a loop over
images, and other random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.base.registry import Entry, Registry
from fedlens.core.device_copies import uploaded
from fedlens.data.augmentation.augmented import Augmentation, Augmented
from fedlens.vision.change import Change

_HERE = "fedlens.data.augmentation.augment"

AUGMENTS = Registry(
    "augmentation",
    {
        "pad-crop-flip": Entry(
            f"{_HERE}:make_pad_crop_flip", "crop and flip in one pass (Hsu et al. 2019, He et al. 2016)"
        ),
        "crop": Entry(f"{_HERE}:make_crop", "random shift by a few pixels, filled with zeros"),
        "flip": Entry(f"{_HERE}:make_flip", "random horizontal flip, or vertical"),
        "colour-jitter": Entry(
            f"{_HERE}:make_colour_jitter", "random brightness, contrast, saturation and hue"
        ),
        "grey": Entry(f"{_HERE}:make_grey", "random conversion to grey (Chen et al. 2020, SimCLR)"),
        "random-resized-crop": Entry(
            f"{_HERE}:make_random_resized_crop",
            "random crop, resized to the full size (Szegedy et al. 2015)",
        ),
        "scale-crop": Entry(
            "fedlens.data.augmentation.scale_crop:make_scale_crop",
            "random scale, then a random crop of a fixed size (Chen et al. 2017)",
        ),
        "mosaic": Entry(
            "fedlens.data.augmentation.mosaic:make_mosaic",
            "four images of the batch joined at a random point (Bochkovskiy et al. 2020)",
        ),
    },
)

Shape = Sequence[int]
_TRIES = 10
_GREY = (0.2989, 0.587, 0.114)  # ITU-R BT.601, as torchvision rounds it


@dataclass(frozen=True)
class PadCropFlip(Augmentation):
    """Pads with zeros, crops to the old size at a random place, and mirrors with probability 1/2.

    This is the usual augmentation of 32x32 photographs. The place is uniform, up to `pad` pixels from the original
    one in each direction. The images may have any type.

    Draws `torch.randint(0, 2 pad + 1, (2, n))`, the top and the left edges of the windows, and then
    `torch.randint(0, 2, (n,))`, the flips.

    >>> x = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> images, targets, change = PadCropFlip(pad=0)(x, torch.tensor([3]), torch.Generator().manual_seed(0))
    >>> images.shape, targets.tolist(), change.size
    (torch.Size([1, 1, 2, 2]), [3], (2, 2))
    """

    pad: int = 4

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        edges = _draw_edges(len(images), self.pad, generator)
        flips = torch.randint(0, 2, (len(images),), generator=generator, device=generator.device)
        return _cropped(images, targets, self.pad, edges, flips)


@dataclass(frozen=True)
class Crop(Augmentation):
    """Pads with zeros and cuts a window of the old size out. Draws `torch.randint(0, 2 pad + 1, (2, n))`."""

    pad: int

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        return _cropped(images, targets, self.pad, _draw_edges(len(images), self.pad, generator))


def _draw_edges(n: int, pad: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2 * pad + 1, (2, n), generator=generator, device=generator.device)


def _cropped(images: Tensor, targets: Any, pad: int, edges: Tensor, flips: Tensor | None = None) -> Augmented:
    """Windows of the old size of images padded with zeros; `edges` [2, n] are top and left, `flips` [n] are 0 or 1."""
    n, channels, height, width = images.shape
    turned = None if flips is None else flips == 1
    at, mirrored = uploaded((edges, turned), images.device)
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
    # One gather does both: the position of each pixel of the result in the padded image, the same for all channels.
    rows = at[0, :, None] + torch.arange(height, device=images.device)
    columns = at[1, :, None] + torch.arange(width, device=images.device)
    if mirrored is not None:
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    positions = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
    positions = positions.view(n, 1, height * width).expand(n, channels, -1)
    cropped = padded.flatten(2).gather(2, positions).view(images.shape)
    top, left = (edges - pad).float()
    change = Change(
        top, left, torch.full_like(top, height), torch.full_like(left, width), (height, width), turned
    )
    return Augmented(cropped, targets, change)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirrors each image left to right where `torch.rand(n) < p`.

    With `vertical` above 0, it then mirrors top to bottom where a second `torch.rand(n) < vertical`.
    """

    p: float
    vertical: float = 0.0

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        mirrored = self._drawn(self.p, images, generator)
        upended = self._drawn(self.vertical, images, generator) if self.vertical else None
        across, down = uploaded((mirrored, upended), images.device)
        flipped = torch.where(across[:, None, None, None], images.flip(3), images)
        if down is not None:
            flipped = torch.where(down[:, None, None, None], flipped.flip(2), flipped)
        height, width = images.shape[2:]
        return Augmented(flipped, targets, Change.flips(mirrored, (height, width), upended))

    @staticmethod
    def _drawn(p: float, images: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(len(images), generator=generator, device=generator.device)
        return drawn < p


@dataclass(frozen=True)
class ColourJitter(Augmentation):
    """Brightness, contrast, saturation and hue, in this order, each image by its own factors.

    With a strength s, the factor is uniform in [max(0, 1 - s), 1 + s]; for the hue h, the turn is uniform in
    [-h, h] of a full turn. Draws one `torch.rand(4, n)`. Brightness multiplies; contrast blends with the mean grey
    of the image; saturation blends with the grey image; hue turns it in HSV. These are torchvision's definitions,
    but values are rounded only once, at the end, and the order of the four is fixed.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        drawn = torch.rand(4, len(images), generator=generator, device=generator.device)
        drawn = uploaded(drawn, images.device)[:, :, None, None, None]
        x = images.float().div_(255)
        if self.brightness:
            x = x.mul_(_factor(drawn[0], self.brightness)).clamp_(0, 1)
        if self.contrast:
            mean = grey(x).mean((1, 2, 3), keepdim=True)
            x = _blend(x, mean, _factor(drawn[1], self.contrast))
        if self.saturation:
            x = _blend(x, grey(x), _factor(drawn[2], self.saturation))
        if self.hue:
            x = turn_hue(x, self.hue * (2 * drawn[3] - 1).squeeze(1))
        return Augmented(x.mul_(255).round_().to(torch.uint8), targets)


@dataclass(frozen=True)
class Grey(Augmentation):
    """Replaces each image by its luma in all three channels where `torch.rand(n) < p`.

    >>> images = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    >>> Grey(1.0)(images, None, torch.Generator()).images.flatten().tolist()
    [76, 76, 76]
    """

    p: float

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        drawn = torch.rand(len(images), generator=generator, device=generator.device)
        greyed = (grey(images.float() / 255) * 255).round().to(torch.uint8)
        chosen = uploaded(drawn < self.p, images.device)[:, None, None, None]
        return Augmented(torch.where(chosen, greyed, images), targets)


def _factor(drawn: Tensor, strength: float) -> Tensor:
    low = max(0.0, 1 - strength)
    return low + (1 + strength - low) * drawn


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other.expand_as(images), images, factor).clamp_(0, 1)


def grey(images: Tensor) -> Tensor:
    """[n, 1, H, W]: the luma of images in [0, 1]; images of one channel are returned unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue).unsqueeze(1)


def turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turns the hue of images float [n, 3, H, W] in [0, 1] by `turn` [n, 1, 1] full turns, in HSV.

    With v the largest channel and c = v - the smallest, channel k of a colour of hue h in [0, 6) is
    v - c max(0, min(1, q, 4 - q)) with q = (offset_k + h) mod 6, offset 5, 3, 1 for red, green, blue.

    >>> red = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1)
    >>> turn_hue(red, torch.full((1, 1, 1), 1 / 3)).flatten().round().tolist()
    [0.0, 1.0, 0.0]
    """
    value, top = images.max(1)
    chroma = value - images.amin(1)
    red, green, blue = images.unbind(1)
    safe = torch.where(chroma > 0, chroma, 1.0)
    # Which of the three sixths the hue is measured from depends on the largest channel.
    ahead = torch.where(top == 0, green - blue, torch.where(top == 1, blue - red, red - green))
    hue = ahead / safe + 2 * top + 6 * turn
    offsets = torch.arange(5.0, 0.0, -2.0, device=images.device).view(1, 3, 1, 1)
    q = (offsets + hue.unsqueeze(1)).remainder_(6)
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(q, 4 - q).clamp_(0, 1)


@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """A window of random area and aspect ratio, scaled to the full size by bilinear interpolation.

    The share of the area is uniform in `scale`, log(width / height) is uniform between the logarithms of `ratio`, and
    the place is uniform; sides are rounded to whole pixels. A window that is larger than the image is drawn again, up
    to 10 times; then the largest central window within `ratio` is taken. Draws one `torch.rand(4, 10, n)`.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        n, _, height, width = images.shape
        windows = self.windows(n, height, width, generator)
        change = Change.windows(windows, (height, width))
        return Augmented(resized(images, uploaded(windows, images.device)), targets, change)

    def windows(self, n: int, height: int, width: int, generator: torch.Generator) -> Tensor:
        """float32 [n, 4]: top, left, height and width of the windows, in pixels."""
        area, aspect, down, across = torch.rand(4, _TRIES, n, generator=generator, device=generator.device)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        shape = torch.exp(low + (high - low) * aspect)
        size = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * area)
        wide, tall = torch.sqrt(size * shape).round(), torch.sqrt(size / shape).round()
        fits = (wide >= 1) & (tall >= 1) & (wide <= width) & (tall <= height)
        first = fits.int().argmax(0, keepdim=True)
        tall, wide = tall.gather(0, first)[0], wide.gather(0, first)[0]
        top = torch.floor(down.gather(0, first)[0] * (height - tall + 1))
        left = torch.floor(across.gather(0, first)[0] * (width - wide + 1))
        drawn = torch.stack([top, left, tall, wide], 1)
        return torch.where(fits.any(0)[:, None], drawn, self._middle(height, width).to(drawn))

    def _middle(self, height: int, width: int) -> Tensor:
        wide, tall = width, height
        if width / height < self.ratio[0]:
            tall = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            wide = max(1, round(height * self.ratio[1]))
        return torch.tensor([(height - tall) // 2, (width - wide) // 2, tall, wide])


def resized(images: Tensor, windows: Tensor) -> Tensor:
    """The windows [n, 4] (top, left, height, width) of images uint8 [n, C, H, W], each scaled to H x W.

    Bilinear, with half-pixel centres and no pixels from outside the window: torchvision's `resized_crop` of each
    image without antialiasing (a window is never larger than the result). It is computed as two products with
    matrices of weights, which is faster than sampling each point.

    >>> x = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    >>> torch.equal(resized(x, torch.tensor([[0.0, 0, 4, 4]])), x)
    True
    """
    _, _, height, width = images.shape
    down = _weights(windows[:, 0], windows[:, 2], height)
    across = _weights(windows[:, 1], windows[:, 3], width)
    x = down[:, None] @ images.float() @ across[:, None].transpose(2, 3)
    return x.round_().clamp_(0, 255).to(torch.uint8)


def _weights(start: Tensor, length: Tensor, size: int) -> Tensor:
    """float32 [n, size, size]: row i has the weight of each source pixel in pixel i of the result."""
    at = torch.arange(size, device=start.device)
    inside = (at + 0.5) * (length[:, None] / size) - 0.5
    place = start[:, None] + inside.clamp(min=0).minimum(length[:, None] - 1)
    return (1 - (place[:, :, None] - at).abs()).clamp_(min=0)


Strength = Annotated[float, Field(ge=0, le=1)]
Pad = Annotated[int, Field(ge=1, le=512, description="pixels")]


def make_pad_crop_flip(shape: Shape, *, pad: Pad = 4) -> PadCropFlip:
    """Crops and flips in one pass."""
    return PadCropFlip(pad)


def make_crop(shape: Shape, *, pad: Pad = 4) -> Crop:
    """Shifts by up to `pad` pixels in each direction."""
    return Crop(pad)


def make_grey(
    shape: Shape, *, p: Annotated[float, Field(gt=0, le=1, description="probability of a grey image")] = 0.2
) -> Grey:
    """Makes some images grey. Raises `ConfigError` for images that are not in colour."""
    if shape[0] != 3:
        raise ConfigError(f"the images have {shape[0]} channels, and 'grey' needs 3", where="name")
    return Grey(p)


def make_flip(
    shape: Shape,
    *,
    p: Annotated[float, Field(ge=0, le=1, description="probability of a flip left to right")] = 0.5,
    vertical: Annotated[
        bool | Annotated[float, Field(ge=0, le=1)],
        Field(description="probability of a flip top to bottom; true for p"),
    ] = 0.0,
) -> Flip:
    """Mirrors left to right, or top to bottom. Raises `ConfigError` if it would do neither."""
    upended = p if vertical is True else float(vertical)
    if not p and not upended:
        raise ConfigError(
            "the probability of a flip is 0 in both directions", where="p", hint="set p or vertical above 0"
        )
    return Flip(p, upended)


def make_colour_jitter(
    shape: Shape,
    *,
    brightness: Annotated[Strength, Field(description="s: the factor is between 1 - s and 1 + s")] = 0.4,
    contrast: Annotated[Strength, Field(description="s: the factor is between 1 - s and 1 + s")] = 0.4,
    saturation: Annotated[
        Strength | None, Field(description="like brightness; by default 0.4, or 0 for grey images")
    ] = None,
    hue: Annotated[
        float | None,
        Field(
            ge=0,
            le=0.5,
            description="largest shift of the hue, 1 is a full turn; by default 0.1, or 0 for grey images",
        ),
    ] = None,
) -> ColourJitter:
    """Changes colours. Raises `ConfigError` for saturation or hue of grey images."""
    if shape[0] != 3 and (saturation or hue):
        name = "saturation" if saturation else "hue"
        raise ConfigError(f"images of {shape[0]} channel have no {name}", where=name, hint="leave it out")
    colour = shape[0] == 3
    return ColourJitter(
        brightness,
        contrast,
        (0.4 if colour else 0.0) if saturation is None else saturation,
        (0.1 if colour else 0.0) if hue is None else hue,
    )


def make_random_resized_crop(
    shape: Shape,
    *,
    scale: Annotated[tuple[float, float], Field(description="smallest and largest share of the area")] = (
        0.08,
        1.0,
    ),
    ratio: Annotated[tuple[float, float], Field(description="smallest and largest width / height")] = (
        3 / 4,
        4 / 3,
    ),
) -> RandomResizedCrop:
    """Scales a random part to the full size. Raises `ConfigError` if the bounds are not in order."""
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ConfigError(
            f"the scale is {list(scale)}, but needs 0 < smallest <= largest <= 1", where="scale"
        )
    if not 0 < ratio[0] <= ratio[1]:
        raise ConfigError(f"the ratio is {list(ratio)}, but needs 0 < smallest <= largest", where="ratio")
    return RandomResizedCrop(scale, ratio)
