"""What a renderer draws: fractals with their codes, places and colours, several on each image."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRID = 4  # points of the smooth background in each direction
FARTHEST = 1e6  # coordinates beyond it have diverged


class Look(IntEnum):
    """How a fractal is coloured.

    BINARY is white. DENSITY is grey by the density of points. The others have a colour whose brightness is the
    density, and whose hue follows the density or the position.
    """

    BINARY = 0
    DENSITY = 1
    HUE_BY_DENSITY = 2
    HUE_BY_POSITION = 3


@dataclass(frozen=True, eq=False)
class Drawings:
    """The fractals of n images, f in all; later ones of an image cover earlier ones.

    Args:
        size: the side of an image in pixels.
        channels: 3, or 1 for the brightness alone.
        iterations: the number of points of each fractal.
        offsets: int64 [n + 1]; image i has the fractals `offsets[i]` to before `offsets[i + 1]`.
        maps: float64 [f, 8, 6], as in `FractalCodes`.
        bounds: int64 [f, 8], from `thresholds`.
        seeds: uint64 [f], of the chaos game.
        boxes: int64 [f, 4], the left, top, width and height in pixels of the rectangle that the fractal fills.
        flips: int64 [f], 1 for left to right, 2 for top to bottom, 3 for both, 0 for neither.
        colours: float64 [f, 4], hue in [0, 1), the range of hues, saturation and value in [0, 1].
        look: the colouring.
        backgrounds: float64 [n, 3, 4, 4] in [0, 1], a grid of colours that is interpolated; [0, 3, 4, 4] for black.
    """

    size: int
    channels: int
    iterations: int
    offsets: NDArray[np.int64]
    maps: NDArray[np.float64]
    bounds: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    boxes: NDArray[np.int64]
    flips: NDArray[np.int64]
    colours: NDArray[np.float64]
    look: Look
    backgrounds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.offsets) - 1


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(words: Any) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014), a bijection of 64-bit numbers that looks random."""
    z = np.atleast_1d(np.asarray(words, np.uint64))
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words_of(keys: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """uint64 [n, count]: the first numbers of the streams of SplitMix64 with these states.

    >>> words_of(np.array([0], np.uint64), 1)[0, 0] == 0xE220A8397B1DCDAF
    np.True_
    """
    with np.errstate(over="ignore"):
        states = keys[:, None] + GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    return mixed(states)


def uniform_of(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """float64 in [0, 1) from 64-bit numbers: their 53 high bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
