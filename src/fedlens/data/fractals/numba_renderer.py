"""Fractals rendered by compiled code, pixel by pixel as `numpy_renderer` does it.

Floating-point operations are products, sums and quotients in the order that is written. Numba fuses none of them
unless `fastmath` is on, so that the points are those of NumPy to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fedlens.data.fractals.drawings import FARTHEST, GOLDEN, GRID, Drawings

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)
_A, _B, _C = np.uint64(30), np.uint64(27), np.uint64(31)

compiled = njit(nogil=True, cache=True)


def render(drawings: Drawings) -> NDArray[np.uint8]:
    """uint8 [n, channels, size, size]: the images. Other threads of Python run meanwhile."""
    size = drawings.size
    images = np.zeros((len(drawings), drawings.channels, size, size), np.uint8)
    _render(
        images,
        drawings.offsets,
        drawings.maps,
        drawings.bounds,
        drawings.seeds,
        drawings.boxes,
        drawings.flips,
        drawings.colours,
        drawings.backgrounds,
        drawings.iterations,
        int(drawings.look),
    )
    return images


def histograms(drawings: Drawings) -> NDArray[np.int32]:
    """int32 [f, size, size]: how many points of each fractal fall into each pixel of its box, from its corner on."""
    size = drawings.size
    counts = np.zeros((len(drawings.seeds), size, size), np.int32)
    x, y = np.empty(drawings.iterations), np.empty(drawings.iterations)
    for f in range(len(counts)):
        _histogram(
            counts[f],
            drawings.maps[f],
            drawings.bounds[f],
            drawings.seeds[f],
            drawings.boxes[f],
            drawings.flips[f],
            x,
            y,
        )
    return counts


@compiled
def _render(
    images: Any,
    offsets: Any,
    maps: Any,
    bounds: Any,
    seeds: Any,
    boxes: Any,
    flips: Any,
    colours: Any,
    backgrounds: Any,
    iterations: Any,
    look: Any,
) -> None:
    size = images.shape[2]
    counts = np.zeros((size, size), np.int32)
    x, y = np.empty(iterations), np.empty(iterations)
    for i in range(images.shape[0]):
        if backgrounds.shape[0]:
            _background(images[i], backgrounds[i])
        for f in range(offsets[i], offsets[i + 1]):
            counts[...] = 0
            filled = _histogram(counts, maps[f], bounds[f], seeds[f], boxes[f], flips[f], x, y)
            if filled:
                _paint(images[i], counts, boxes[f], colours[f], iterations / filled, look)


@compiled
def _histogram(counts: Any, maps: Any, bounds: Any, seed: Any, box: Any, flips: Any, x: Any, y: Any) -> int:
    """Plays the chaos game, and returns the number of pixels with points."""
    a, b, c, d, e, g = maps[0, 0], maps[0, 1], maps[0, 2], maps[0, 3], maps[0, 4], maps[0, 5]
    determinant = (1.0 - a) * (1.0 - d) - b * c
    if determinant == 0.0:
        return 0
    at_x = ((1.0 - d) * e + b * g) / determinant
    at_y = ((1.0 - a) * g + c * e) / determinant
    state = seed
    word = np.uint64(0)
    low_x, high_x, low_y, high_y = np.inf, -np.inf, np.inf, -np.inf
    for step in range(x.size):
        if step % 2 == 0:
            state += GOLDEN
            word = state
            word = (word ^ (word >> _A)) * _FIRST
            word = (word ^ (word >> _B)) * _SECOND
            word = word ^ (word >> _C)
            pick = np.int64(word & _LOW)
        else:
            pick = np.int64(word >> _HIGH)
        j = 0
        while pick >= bounds[j]:
            j += 1
        next_x = maps[j, 0] * at_x + maps[j, 1] * at_y + maps[j, 4]
        at_y = maps[j, 2] * at_x + maps[j, 3] * at_y + maps[j, 5]
        at_x = next_x
        if not (abs(at_x) <= FARTHEST and abs(at_y) <= FARTHEST):
            return 0
        x[step], y[step] = at_x, at_y
        low_x, high_x = min(low_x, at_x), max(high_x, at_x)
        low_y, high_y = min(low_y, at_y), max(high_y, at_y)
    width, height = box[2], box[3]
    scale_x = width / (high_x - low_x) if high_x > low_x else 0.0
    scale_y = height / (high_y - low_y) if high_y > low_y else 0.0
    filled = 0
    for step in range(x.size):
        column = min(np.int64((x[step] - low_x) * scale_x), width - 1)
        row = min(np.int64((y[step] - low_y) * scale_y), height - 1)
        if flips & 1:
            column = width - 1 - column
        if flips & 2:
            row = height - 1 - row
        if counts[row, column] == 0:
            filled += 1
        counts[row, column] += 1
    return filled


@compiled
def _paint(image: Any, counts: Any, box: Any, colour: Any, mean: Any, look: Any) -> None:
    channels = image.shape[0]
    left, top, width, height = box[0], box[1], box[2], box[3]
    hue, span, saturation, value = colour[0], colour[1], colour[2], colour[3]
    for row in range(height):
        for column in range(width):
            count = counts[row, column]
            if count == 0:
                continue
            if look == 0:
                for channel in range(channels):
                    image[channel, top + row, left + column] = 255
                continue
            tone = count / (count + mean)
            bright = (0.35 + 0.65 * tone) * value
            if look == 1 or channels == 1:
                for channel in range(channels):
                    image[channel, top + row, left + column] = _level(bright)
                continue
            along = tone if look == 2 else (row + column) / (height + width)
            at = hue + span * along
            sixths = (at - np.floor(at)) * 6.0
            sector = min(np.floor(sixths), 5.0)
            part = sixths - sector
            low = bright * (1.0 - saturation)
            falling = bright * (1.0 - saturation * part)
            rising = bright * (1.0 - saturation * (1.0 - part))
            if sector == 0.0:
                red, green, blue = bright, rising, low
            elif sector == 1.0:
                red, green, blue = falling, bright, low
            elif sector == 2.0:
                red, green, blue = low, bright, rising
            elif sector == 3.0:
                red, green, blue = low, falling, bright
            elif sector == 4.0:
                red, green, blue = rising, low, bright
            else:
                red, green, blue = bright, low, falling
            image[0, top + row, left + column] = _level(red)
            image[1, top + row, left + column] = _level(green)
            image[2, top + row, left + column] = _level(blue)


@compiled
def _background(image: Any, grid: Any) -> None:
    size = image.shape[2]
    step = (GRID - 1) / max(size - 1, 1)
    for channel in range(image.shape[0]):
        for row in range(size):
            at_row = row * step
            top: Any = min(np.int64(at_row), GRID - 2)
            down = at_row - top
            for column in range(size):
                at_column = column * step
                left: Any = min(np.int64(at_column), GRID - 2)
                right = at_column - left
                upper = grid[channel, top, left] * (1.0 - right) + grid[channel, top, left + 1] * right
                lower = (
                    grid[channel, top + 1, left] * (1.0 - right) + grid[channel, top + 1, left + 1] * right
                )
                image[channel, row, column] = _level(upper * (1.0 - down) + lower * down)


@compiled
def _level(value: Any) -> Any:
    return np.uint8(value * 255.0 + 0.5)
