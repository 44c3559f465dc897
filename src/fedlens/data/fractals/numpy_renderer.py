"""Fractals rendered with NumPy: slow, and what the compiled renderer is held to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedlens.data.fractals.drawings import FARTHEST, GOLDEN, GRID, Drawings, Look, mixed

_LOW = np.uint64(0xFFFFFFFF)


def render(drawings: Drawings) -> NDArray[np.uint8]:
    """uint8 [n, channels, size, size]: the images."""
    counts = histograms(drawings)
    size, n = drawings.size, len(drawings)
    images = np.zeros((n, drawings.channels, size, size), np.uint8)
    for i in range(n):
        canvas = images[i]
        if len(drawings.backgrounds):
            canvas[...] = _levels(_smooth(drawings.backgrounds[i], size))[: drawings.channels]
        for f in range(drawings.offsets[i], drawings.offsets[i + 1]):
            left, top, width, height = drawings.boxes[f]
            part = canvas[:, top : top + height, left : left + width]
            _paint(part, counts[f][:height, :width], drawings, f)
    return images


def histograms(drawings: Drawings) -> NDArray[np.int32]:
    """int32 [f, size, size]: how many points of each fractal fall into each pixel of its box, from its corner on.

    A fractal whose points diverge has none.
    """
    f, size = len(drawings.seeds), drawings.size
    x, y = points(drawings)
    counts = np.zeros((f, size, size), np.int32)
    spans = [(values.min(axis=1), values.max(axis=1)) for values in (x, y)]
    finite = np.ones(f, bool)
    for low, high in spans:
        finite &= (low >= -FARTHEST) & (high <= FARTHEST)
    places = []
    for axis, (values, (low, high)) in enumerate(zip((x, y), spans, strict=True)):
        length = drawings.boxes[:, 2 + axis]
        span = high - low
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scale = np.where(span > 0, length / span, 0.0)
            at = (values - low[:, None]) * scale[:, None]
        place = np.minimum(np.where(finite[:, None], at, 0.0).astype(np.int64), length[:, None] - 1)
        turned = (drawings.flips & (1 << axis)) != 0
        places.append(np.where(turned[:, None], length[:, None] - 1 - place, place))
    rows = np.repeat(np.arange(f), x.shape[1]).reshape(x.shape)[finite]
    np.add.at(counts, (rows, places[1][finite], places[0][finite]), 1)
    return counts


def points(drawings: Drawings) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(x, y) float64 [f, iterations]: the points that the chaos game visits, from a fixed point of the first map on."""
    f, steps = len(drawings.seeds), drawings.iterations
    x, y = np.empty((f, steps)), np.empty((f, steps))
    rows = np.arange(f)
    a, b, c, d, e, g = (drawings.maps[:, 0, k] for k in range(6))
    with np.errstate(all="ignore"):
        determinant = (1.0 - a) * (1.0 - d) - b * c
        at_x = ((1.0 - d) * e + b * g) / determinant
        at_y = ((1.0 - a) * g + c * e) / determinant
        state = drawings.seeds.copy()
        word = np.zeros(f, np.uint64)
        for step in range(steps):
            if step % 2 == 0:
                state += GOLDEN
                word = mixed(state)
                pick = word & _LOW
            else:
                pick = word >> np.uint64(32)
            j = (pick.astype(np.int64)[:, None] >= drawings.bounds).sum(axis=1)
            a, b, c, d, e, g = (drawings.maps[rows, j, k] for k in range(6))
            at_x, at_y = a * at_x + b * at_y + e, c * at_x + d * at_y + g
            x[:, step], y[:, step] = at_x, at_y
    return x, y


def _paint(part: NDArray[np.uint8], counts: NDArray[np.int32], drawings: Drawings, f: int) -> None:
    """Colours the pixels of a box that have points."""
    hit = counts > 0
    if not hit.any():
        return
    if drawings.look == Look.BINARY:
        part[:, hit] = 255
        return
    seen = counts[hit].astype(np.float64)
    tone = seen / (seen + drawings.iterations / hit.sum())
    hue, span, saturation, value = drawings.colours[f]
    bright = (0.35 + 0.65 * tone) * value
    if drawings.look == Look.DENSITY or drawings.channels == 1:
        part[:, hit] = _levels(bright)
        return
    if drawings.look == Look.HUE_BY_DENSITY:
        along = tone
    else:
        rows, columns = np.nonzero(hit)
        along = (rows + columns) / (counts.shape[0] + counts.shape[1])
    part[:, hit] = _levels(_rgb(hue + span * along, saturation, bright))


def _rgb(hue: NDArray[np.float64], saturation: float, value: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [3, k] in [0, 1]: the colours of these hues, which repeat with period 1."""
    sixths = (hue - np.floor(hue)) * 6.0
    sector = np.minimum(np.floor(sixths), 5.0)
    part = sixths - sector
    low = value * (1.0 - saturation)
    falling = value * (1.0 - saturation * part)
    rising = value * (1.0 - saturation * (1.0 - part))
    table = (
        (value, rising, low),
        (falling, value, low),
        (low, value, rising),
        (low, falling, value),
        (rising, low, value),
        (value, low, falling),
    )
    out = np.empty((3, len(hue)))
    for number, channels in enumerate(table):
        here = sector == number
        for channel in range(3):
            out[channel, here] = channels[channel][here]
    return out


def _smooth(grid: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """float64 [3, size, size]: the grid [3, 4, 4] interpolated linearly."""
    at = np.arange(size) * ((GRID - 1) / max(size - 1, 1))
    low = np.minimum(np.floor(at).astype(np.int64), GRID - 2)
    part = at - low
    across = grid[:, :, low] * (1.0 - part) + grid[:, :, low + 1] * part
    down: NDArray[np.float64] = across[:, low] * (1.0 - part[:, None]) + across[:, low + 1] * part[:, None]
    return down


def _levels(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return (values * 255.0 + 0.5).astype(np.uint8)
