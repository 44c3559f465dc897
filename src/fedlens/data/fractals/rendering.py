"""Chooses the renderer: compiled code if Numba is installed, else NumPy."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from fedlens.data.fractals.codes import FractalCodes, thresholds
from fedlens.data.fractals.drawings import GRID, Drawings, Look

SLOW = (
    "Numba is not installed, so fractals are rendered with NumPy, about 100 times slower; "
    "pip install 'fedlens[fractals]'"
)


def has_numba() -> bool:
    """Whether the compiled renderer can be used."""
    return find_spec("numba") is not None


def render(drawings: Drawings) -> NDArray[np.uint8]:
    """uint8 [n, channels, size, size]: the images of these drawings."""
    if has_numba():
        from fedlens.data.fractals import numba_renderer

        return numba_renderer.render(drawings)
    from fedlens.data.fractals import numpy_renderer

    return numpy_renderer.render(drawings)


def histograms(drawings: Drawings) -> NDArray[np.int32]:
    """int32 [f, size, size]: how many points of each fractal fall into each pixel of its box, from its corner on."""
    if has_numba():
        from fedlens.data.fractals import numba_renderer

        return numba_renderer.histograms(drawings)
    from fedlens.data.fractals import numpy_renderer

    return numpy_renderer.histograms(drawings)


def whole_images(codes: FractalCodes, size: int, iterations: int, seed: int = 0) -> Drawings:
    """Drawings of one white fractal an image, as large as the image."""
    n = len(codes)
    return Drawings(
        size,
        1,
        iterations,
        np.arange(n + 1),
        codes.maps,
        thresholds(codes.maps, codes.counts),
        np.arange(n, dtype=np.uint64) + np.uint64(seed),
        np.tile(np.array([0, 0, size, size]), (n, 1)),
        np.zeros(n, np.int64),
        np.zeros((n, 4)),
        Look.BINARY,
        np.zeros((0, 3, GRID, GRID)),
    )


def filled_shares(codes: FractalCodes, size: int = 32, iterations: int = 1000) -> NDArray[np.float64]:
    """float64 [n]: the share of pixels that each code reaches, 0 where its points diverge."""
    shares: NDArray[np.float64] = (histograms(whole_images(codes, size, iterations)) > 0).mean(axis=(1, 2))
    return shares
