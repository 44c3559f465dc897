"""Chooses the renderer: compiled code if Numba is installed, else NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import told
from fedlens.data.fractals import numpy_renderer
from fedlens.data.fractals.codes import FractalCodes, thresholds
from fedlens.data.fractals.drawings import GRID, Drawings, Look


@cache
def why_slow() -> str | None:
    """Why fractals are rendered with NumPy and not with compiled code; None if they are not."""
    try:
        import fedlens.data.fractals.numba_renderer  # noqa: F401
    except ModuleNotFoundError as error:
        missing = error.name == "numba"
        why = "Numba is not installed" if missing else f"Numba cannot be imported: {told(error)}"
    except Exception as error:  # such as a Numba that was made for another NumPy
        why = f"Numba cannot be imported: {told(error)}"
    else:
        return None
    return (
        f"{why}. So fractals are rendered with NumPy, about 100 times slower; pip install 'fedlens[fractals]'"
    )


def render(drawings: Drawings) -> NDArray[np.uint8]:
    """uint8 [n, channels, size, size]: the images of these drawings."""
    if why_slow() is not None:
        return numpy_renderer.render(drawings)
    from fedlens.data.fractals import numba_renderer

    return numba_renderer.render(drawings)


def histograms(drawings: Drawings) -> NDArray[np.int32]:
    """int32 [f, size, size]: how many points of each fractal fall into each pixel of its box, from its corner on."""
    if why_slow() is not None:
        return numpy_renderer.histograms(drawings)
    from fedlens.data.fractals import numba_renderer

    return numba_renderer.histograms(drawings)


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
