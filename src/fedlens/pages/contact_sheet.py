"""Contact sheets: many small images side by side in one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence

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


def sheet_of_views(views: NDArray[np.uint8], columns: int) -> Image.Image:
    """Images uint8 [n, views, C, H, W] in rows, the views of an image below each other.

    Images of fewer than 64 pixels are enlarged.

    >>> sheet_of_views(np.zeros((4, 2, 3, 8, 8), np.uint8), columns=2).size
    (160, 320)
    """
    blocks = [views[start : start + columns] for start in range(0, len(views), columns)]
    white = np.full((columns, *views.shape[1:]), 255, np.uint8)
    padded = [np.concatenate([block, white[len(block) :]]) for block in blocks]
    rows = np.concatenate([block.swapaxes(0, 1).reshape(-1, *views.shape[2:]) for block in padded])
    return contact_sheet(rows, columns, max(1, _SIDE // max(views.shape[-2:])))


def tiled(pictures: Sequence[NDArray[np.uint8]], width: int) -> Image.Image:
    """Pictures uint8 [H, W, 3] in rows on white, as many beside each other as fit into `width` pixels, at least one.

    >>> tiled([np.zeros((8, 30, 3), np.uint8)] * 3, width=70).size
    (60, 16)
    """
    wide = max(picture.shape[1] for picture in pictures)
    columns = max(1, min(len(pictures), width // wide))
    rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    heights = [max(picture.shape[0] for picture in row) for row in rows]
    sheet = Image.new("RGB", (columns * wide, sum(heights)), "white")
    for row, top in zip(rows, np.cumsum([0, *heights]).tolist(), strict=False):
        for column, picture in enumerate(row):
            sheet.paste(Image.fromarray(picture), (column * wide, top))
    return sheet


def png(picture: Image.Image) -> bytes:
    """The picture as a PNG file; the same picture gives the same bytes."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
