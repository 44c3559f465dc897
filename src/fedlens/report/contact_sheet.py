"""Contact sheets: many small images side by side in one picture."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_SIDE = 64  # pixels up to which small images are enlarged


def contact_sheet(images: NDArray[np.uint8], columns: int, scale: int = 1) -> Image.Image:
    """The images row by row on white, with a gap of two pixels, each pixel `scale` pixels wide.

    Args:
        images: uint8 [n, C, H, W]. Of two channels or more than three, the first is shown, in grey.
        columns: the images in a row.
        scale: of the picture.

    >>> contact_sheet(np.zeros((5, 3, 8, 8), np.uint8), columns=3, scale=2).size
    (60, 40)
    """
    n, channels, height, width = images.shape
    shown = images if channels == 3 else images[:, :1].repeat(3, axis=1)
    rows = -(-n // columns)
    gap = np.full((rows * columns, 3, height + 2, width + 2), 255, np.uint8)
    gap[:n, :, 1:-1, 1:-1] = shown
    tiled = gap.reshape(rows, columns, 3, height + 2, width + 2).transpose(0, 3, 1, 4, 2)
    picture = Image.fromarray(
        np.ascontiguousarray(tiled).reshape(rows * (height + 2), columns * (width + 2), 3)
    )
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def sheet_of_views(views: NDArray[np.uint8], columns: int) -> bytes:
    """A PNG of images uint8 [n, views, C, H, W], in which the views of an image are below each other.

    Images of fewer than 64 pixels are enlarged.

    >>> sheet_of_views(np.zeros((4, 2, 3, 8, 8), np.uint8), columns=2)[1:4]
    b'PNG'
    """
    blocks = [views[start : start + columns] for start in range(0, len(views), columns)]
    white = np.full((columns, *views.shape[1:]), 255, np.uint8)
    padded = [np.concatenate([block, white[len(block) :]]) for block in blocks]
    rows = np.concatenate([block.swapaxes(0, 1).reshape(-1, *views.shape[2:]) for block in padded])
    buffer = io.BytesIO()
    scale = max(1, _SIDE // max(views.shape[-2:]))
    contact_sheet(rows, columns, scale).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
