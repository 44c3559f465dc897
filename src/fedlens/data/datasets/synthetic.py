"""Synthetic images: a smooth pattern for each class, and noise."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import published

_GRID = 4  # the patterns are drawn on a grid this coarse, so that a convolution has something to find
_BLOCK = 1 << 22  # pixels a pass

Side = Annotated[int, Field(ge=1, le=4096)]


def synthetic(
    root: Path,
    download: bool,
    seed: int,
    *,
    shape: Annotated[tuple[Side, Side, Side], Field(description="channels, height and width of an image")] = (
        1,
        28,
        28,
    ),
    classes: Annotated[int, Field(ge=2, description="number of classes")] = 10,
    train: Annotated[int, Field(ge=1, description="number of training images")] = 6000,
    test: Annotated[int, Field(ge=1, description="number of test images")] = 1000,
    noise: Annotated[
        float,
        Field(ge=0, le=10, description="standard deviation of the noise; 1 is the whole range of brightness"),
    ] = 0.5,
) -> Dataset:
    """Smooth random patterns, one a class; each image is its pattern plus Gaussian noise, cut to 0 .. 255.

    The noise has 256 levels (the quantiles of a Gaussian), so that 60,000 images take a fraction of a second.
    Labels are balanced to within one. Depends on `seed` alone, through NumPy's PCG64.

    >>> data = synthetic(Path(), False, 0, shape=(3, 16, 16), classes=4, train=20, test=8)
    >>> data.train.inputs.shape, np.bincount(data.test.targets).tolist()
    ((20, 3, 16, 16), [2, 2, 2, 2])
    """
    if seed < 0:
        raise ConfigError(f"the seed is {seed}, but must be at least 0")
    streams = [np.random.PCG64(child) for child in np.random.SeedSequence(seed).spawn(3)]
    patterns = _patterns(streams[0], classes, shape)
    splits = [
        _draw(stream, patterns, shape, n, noise) for stream, n in zip(streams[1:], (train, test), strict=True)
    ]
    names = tuple(f"class {c}" for c in range(classes))
    return published("synthetic", splits, names, seeded=True, source=f"fedlens, synthetic, seed {seed}")


def _patterns(stream: np.random.PCG64, classes: int, shape: tuple[int, int, int]) -> NDArray[np.int16]:
    """int16 [classes, pixels]: a coarse random grid for each class and channel, blown up linearly."""
    channels, height, width = shape
    grid = _uniform(stream, classes * channels * _GRID * _GRID).reshape(classes, channels, _GRID, _GRID)
    image = np.einsum("hi,wj,ncij->nchw", _blow_up(height), _blow_up(width), grid)
    patterns: NDArray[np.int16] = np.rint(255 * image).astype(np.int16).reshape(classes, -1)
    return patterns


def _blow_up(size: int) -> NDArray[np.float64]:
    """[size, grid] weights of linear interpolation from the grid to `size` points."""
    at = np.linspace(0, _GRID - 1, size)
    weights: NDArray[np.float64] = np.maximum(0.0, 1.0 - np.abs(at[:, None] - np.arange(_GRID)))
    return weights


def _draw(
    stream: np.random.PCG64, patterns: NDArray[np.int16], shape: tuple[int, int, int], n: int, noise: float
) -> Examples:
    classes, pixels = patterns.shape
    targets = np.arange(n, dtype=np.int64) % classes
    targets = targets[np.argsort(stream.random_raw(n), kind="stable")]
    quantiles = [NormalDist().inv_cdf((level + 0.5) / 256) for level in range(256)]
    levels = np.rint(255 * noise * np.array(quantiles)).astype(np.int16)
    out = np.empty((n, pixels), np.uint8)
    rows = max(1, _BLOCK // pixels)
    for start in range(0, n, rows):
        block = out[start : start + rows]
        words = stream.random_raw(-(-block.size // 8)).astype("<u8")
        grain = levels[words.view(np.uint8)[: block.size].reshape(block.shape)]
        grain += patterns[targets[start : start + rows]]
        np.clip(grain, 0, 255, out=block, casting="unsafe")
    return Examples(out.reshape(n, *shape), targets)


def _uniform(stream: np.random.PCG64, n: int) -> NDArray[np.float64]:
    raw: NDArray[np.uint64] = stream.random_raw(n)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
