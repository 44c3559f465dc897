"""The geometric change that an augmentation made to each image of a batch, so that targets can follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.core.device_copies import uploaded


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of several images that are joined to new ones, as in a mosaic. The p pieces are rectangles of the results.

    Attributes:
        source: int64 [p], the image before the change that each piece shows.
        result: int64 [p], the image after the change that each piece is a part of, in ascending order.
        regions: int64 [p, 4], left, top, right, bottom of the piece in its result, in whole pixels. Regions of one
            result do not overlap.
        images: the number of results.
    """

    source: Tensor
    result: Tensor
    regions: Tensor
    images: int

    def to(self, device: Any) -> Pieces:
        """The same on this device."""
        return Pieces(**uploaded(vars(self), torch.device(device)))


@dataclass(frozen=True, eq=False)
class Change:
    """A window of each image, scaled to one size and mirrored.

    The window is in pixels of the image before the change, and may reach outside it. Image k of the result has
    `size` pixels. With the window's top t, left l, height h and width w, and the result's height H and width W, a
    point (x, y) of image k moves to

        x' = (x - l) W / w        y' = (y - t) H / h,

    where pixel (i, j) covers the square from (j, i) to (j + 1, i + 1). Then the image is mirrored: x' becomes
    W - x' where `mirrored`, and y' becomes H - y' where `upended`.

    With `pieces`, the windows are those of the p pieces, not of the n images: piece j is image `source[j]` moved by
    window j, of which only the region of the piece remains, in image `result[j]`. `fedlens.vision.moved_targets` moves
    masks and boxes by a change of either form.

    Attributes:
        top, left, height, width: float32 [n] or [p], the windows; height and width are above 0.
        size: the height and width of the result, in pixels.
        mirrored: bool [n] or [p], whether the image is flipped left to right; None for no image.
        upended: bool [n] or [p], whether it is flipped top to bottom; None for no image.
        pieces: the parts that the results are joined of; None if each result shows one image.

    Raises `ValueError` if the tensors are not of one length.

    >>> one = Change.windows(torch.tensor([[0.0, 2.0, 4.0, 4.0]]), (8, 8), mirrored=torch.tensor([True]))
    >>> one.points(torch.tensor([[3.0, 1.0]]), torch.tensor([0])).tolist()
    [[6.0, 2.0]]
    >>> rows, columns = one.sources()
    >>> columns[0].tolist()
    [5, 5, 4, 4, 3, 3, 2, 2]
    """

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    size: tuple[int, int]
    mirrored: Tensor | None = None
    upended: Tensor | None = None
    pieces: Pieces | None = None

    def __post_init__(self) -> None:
        given = [self.top, self.left, self.height, self.width, self.mirrored, self.upended]
        if self.pieces is not None:
            given += [self.pieces.source, self.pieces.result, self.pieces.regions[:, 0]]
        shapes = {tuple(part.shape) for part in given if part is not None}
        if shapes != {(len(self.top),)}:
            raise ValueError(f"the windows and flips of a change have the shapes {sorted(shapes)}")

    @classmethod
    def windows(
        cls,
        windows: Tensor,
        size: tuple[int, int],
        mirrored: Tensor | None = None,
        upended: Tensor | None = None,
    ) -> Change:
        """The change to these windows, [n, 4]: top, left, height, width."""
        top, left, height, width = windows.float().unbind(1)
        return cls(top, left, height, width, size, mirrored, upended)

    @classmethod
    def flips(cls, mirrored: Tensor, size: tuple[int, int], upended: Tensor | None = None) -> Change:
        """The change that only mirrors images of this size."""
        zero = torch.zeros(len(mirrored), device=mirrored.device)
        return cls(zero, zero, zero + size[0], zero + size[1], size, mirrored, upended)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.top) if self.pieces is None else self.pieces.images

    def to(self, device: Any) -> Change:
        """The same on this device."""
        pieces = None if self.pieces is None else self.pieces.to(device)
        return Change(**{**uploaded(vars(self), torch.device(device)), "pieces": pieces})

    def sources(self) -> tuple[Tensor, Tensor]:
        """(rows int64 [n, H], columns int64 [n, W]): where nearest-neighbour interpolation reads each pixel.

        Pixel (i, j) of result k is pixel (rows[k, i], columns[k, j]) of image k: the pixel that contains the centre
        of (i, j). Where it lies outside the image, a mask has no class. With `pieces`, there is a row for each piece.
        """
        rows = _sources(self.top, self.height, self.size[0], self.upended)
        return rows, _sources(self.left, self.width, self.size[1], self.mirrored)

    def points(self, points: Tensor, images: Tensor) -> Tensor:
        """float32 [m, 2]: where the points (x, y) [m, 2] of the images at `images`, int64 [m], are now.

        With `pieces`, `images` are the numbers of pieces.
        """
        x, y = self._axes(points, images)
        return torch.cat([x, y], 1)

    def _axes(self, points: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y), each [m, k], of points [m, 2 k] that alternate x and y."""
        height, width = self.size
        x = (points[:, ::2] - self.left[images, None]) * (width / self.width[images])[:, None]
        y = (points[:, 1::2] - self.top[images, None]) * (height / self.height[images])[:, None]
        if self.mirrored is not None:
            x = torch.where(self.mirrored[images, None], width - x, x)
        if self.upended is not None:
            y = torch.where(self.upended[images, None], height - y, y)
        return x, y

    def boxes(self, boxes: Tensor, images: Tensor) -> Tensor:
        """float32 [m, 4]: where the boxes (left, top, right, bottom) [m, 4] of the images at `images` are now.

        With `pieces`, `images` are the numbers of pieces. The boxes are not clipped: a part of
        a box, or all of it, may lie outside the result.

        >>> turned = Change.flips(torch.tensor([True]), (10, 10))
        >>> turned.boxes(torch.tensor([[1.0, 2.0, 4.0, 6.0]]), torch.tensor([0])).tolist()
        [[6.0, 2.0, 9.0, 6.0]]
        """
        x, y = self._axes(boxes, images)
        return torch.stack([x.amin(1), y.amin(1), x.amax(1), y.amax(1)], 1)


def _sources(start: Tensor, length: Tensor, size: int, flipped: Tensor | None) -> Tensor:
    at = torch.arange(size, device=start.device)
    # In float64, in which a centre on the edge between two pixels falls to the same one on every device.
    inside = (at + 0.5) * (length.double()[:, None] / size)
    places = (start.double()[:, None] + inside).floor().long()
    return places if flipped is None else torch.where(flipped[:, None], places.flip(1), places)
