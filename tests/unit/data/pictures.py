"""Writes small image files for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def pixels(seed: int, height: int = 8, width: int = 8, channels: int = 3) -> np.ndarray:
    """Random uint8 [h, w, 3], or [h, w] for one channel."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def write(path: Path, array: np.ndarray | int = 0, **save: object) -> Path:
    """Saves an array, or the random picture of a seed, in the format of the name; makes the folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(array) if isinstance(array, int) else array).save(path, **save)
    return path


def smooth(height: int, width: int) -> np.ndarray:
    """uint8 [h, w, 3] without hard edges, as photographs mostly are."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / width * a) + np.cos(y / height * b) for a, b in ((9, 5), (4, 11), (7, 3))]
    return np.stack([(wave + 2) * 63 for wave in waves], axis=-1).astype(np.uint8)
