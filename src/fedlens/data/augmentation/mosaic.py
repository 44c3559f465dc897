"""Mosaics: each image of a batch is replaced by parts of four images around a random point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.data.augmentation.augmented import Augmentation, Augmented
from fedlens.vision.change import Change, Pieces
from fedlens.vision.moved_targets import quick_slices


@dataclass(frozen=True)
class Mosaic(Augmentation):
    """Joins four images of the batch at a random point (Bochkovskiy et al. 2020, YOLOv4, section 3.3).

    The result has the size of the images. A random point, the centre, divides it into quadrants. Each quadrant shows
    one image in its own scale, which touches the centre with a corner; the rest of the image is cut off. One quadrant,
    drawn at random, shows the image itself, and the other three images are drawn from the batch, with repetition. So
    they are images of the same client, and a batch of one image shows it four times.

    With height H, the row of the centre is H (a + (b - a) u) rounded to whole pixels, where a and b are `centre` and
    u is uniform in [0, 1); the column likewise.

    Draws `torch.rand(3, n)`: the row and the column of the centre, and an image is left as it is where the third is
    at least p; then `torch.randint(0, n, (3, n))`, the other images; then `torch.randint(0, 4, (n,))`, the quadrant
    of the image itself.

    Args:
        p: the probability of a mosaic.
        centre: the smallest and the largest place of the centre, as shares of the height and the width.

    >>> images = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 6, 6)
    >>> mixed, _, change = Mosaic(1.0, (0.5, 0.5))(images, None, torch.Generator().manual_seed(0))
    >>> mixed.shape, len(change), len(change.pieces.source)
    (torch.Size([4, 1, 6, 6]), 4, 16)
    """

    p: float
    centre: tuple[float, float]
    combines: ClassVar[bool] = True

    def __call__(self, images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
        n, _, height, width = images.shape
        device = generator.device
        down, across, chance = torch.rand(3, n, generator=generator, device=device).double().tolist()
        others = torch.randint(0, n, (3, n), generator=generator, device=device).t().tolist()
        turns = torch.randint(0, 4, (n,), generator=generator, device=device).tolist()
        low, high = self.centre
        result = torch.empty_like(images, memory_format=torch.contiguous_format)
        to, given = quick_slices(result), quick_slices(images)
        pieces: list[tuple[int, ...]] = []
        for k, (turn, other) in enumerate(zip(turns, others, strict=True)):
            y = round(height * (low + (high - low) * down[k]))
            x = round(width * (low + (high - low) * across[k]))
            if chance[k] >= self.p:  # the whole image, as a quadrant without neighbours
                y, x, turn = height, width, 0
            shown = [*other[:turn], k, *other[turn:]]
            quadrants = ((0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height))
            for q, (left, top, right, bottom) in enumerate(quadrants):
                if left == right or top == bottom:
                    continue
                # The image's own rows and columns at the start of the result.
                row, column = (0 if q >= 2 else height) - y, (0 if q % 2 else width) - x
                to[k, :, top:bottom, left:right] = given[
                    shown[q], :, top + row : bottom + row, left + column : right + column
                ]
                pieces.append((shown[q], k, left, top, right, bottom, row, column, height, width))
        return Augmented(result, targets, _joined(pieces, n, (height, width)))


def _joined(pieces: list[tuple[int, ...]], n: int, size: tuple[int, int]) -> Change:
    """The change of pieces given as source, result, region (4), and window (4)."""
    # NumPy turns lists into arrays several times faster than PyTorch.
    table = torch.from_numpy(np.array(pieces, np.int64).reshape(-1, 10))
    top, left, height, width = table[:, 6:].float().unbind(1)
    parts = Pieces(table[:, 0], table[:, 1], table[:, 2:6], n)
    return Change(top, left, height, width, size, pieces=parts)


def make_mosaic(
    shape: Sequence[int],
    *,
    p: Annotated[float, Field(gt=0, le=1, description="probability of a mosaic")] = 1.0,
    centre: Annotated[
        tuple[float, float],
        Field(description="smallest and largest place of the centre, as shares of height and width"),
    ] = (0.25, 0.75),
) -> Mosaic:
    """Joins four images of a batch. Raises `ConfigError` if the bounds of the centre are not in order."""
    if not 0 <= centre[0] <= centre[1] <= 1:
        raise ConfigError(
            f"the centre is {list(centre)}, but needs 0 <= smallest <= largest <= 1", where="centre"
        )
    return Mosaic(p, centre)
