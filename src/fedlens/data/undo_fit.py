"""Takes masks and boxes back from a model's input to the image file: undoes scaling, padding and cropping."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedlens.core.dataset_info import VOID
from fedlens.data.decoding import Fit, placement


def mask_of_file(mask: NDArray[np.uint8], width: int, height: int, fit: Fit) -> NDArray[np.uint8]:
    """uint8 [height, width]: a mask [h, w] of the model's input as one of the image file.

    Each pixel of the file takes the class at the place of its centre. Pixels that the crop cut off are 255.

    Args:
        width, height: of the file, in pixels.
        fit: how the file was brought to the size of the mask; see `fedlens.data.decoding.decode`.

    >>> mask_of_file(np.array([[1, 2]], np.uint8), 4, 2, "stretch").tolist()
    [[1, 1, 2, 2], [1, 1, 2, 2]]
    >>> mask_of_file(np.array([[1, 2]], np.uint8), 2, 2, "crop").tolist()
    [[255, 255], [1, 2]]
    """
    h, w = mask.shape
    across, down, left, top = placement(width, height, w, h, fit)
    columns = np.floor((np.arange(width) + 0.5) * across + left).astype(np.int64)
    rows = np.floor((np.arange(height) + 0.5) * down + top).astype(np.int64)
    out = np.full((height, width), VOID, np.uint8)
    inside = ((rows >= 0) & (rows < h)), ((columns >= 0) & (columns < w))
    out[np.ix_(*inside)] = mask[np.ix_(rows[inside[0]], columns[inside[1]])]
    return out


def boxes_of_file(
    boxes: NDArray[np.float32], width: int, height: int, to_width: int, to_height: int, fit: Fit
) -> NDArray[np.float64]:
    """float64 [k, 4]: boxes (left, top, right, bottom) of the model's input in pixels of the image file, cut to it.

    A box that lies in the padding alone becomes one without area.

    Args:
        width, height: of the file; `to_width`, `to_height`: of the model's input.

    >>> boxes_of_file(np.array([[0, 12, 50, 30]], np.float32), 200, 100, 50, 50, "pad").tolist()
    [[0.0, 0.0, 200.0, 72.0]]
    """
    across, down, left, top = placement(width, height, to_width, to_height, fit)
    scale, shift = np.array([across, down] * 2), np.array([left, top] * 2)
    placed: NDArray[np.float64] = np.clip((boxes - shift) / scale, 0.0, np.array([width, height] * 2))
    return placed
