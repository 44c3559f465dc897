"""The colours of classes in masks and boxes: on pages, in pictures, and in the palettes of PNG files."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The eight of Okabe and Ito (2008), and twelve chosen one by one as far as possible from those before, in CIELAB, as
# seen with normal colour vision, without red and without green receptors (Machado et al. 2009).
FIXED = (
    *(
        "#0072b2",
        "#e69f00",
        "#009e73",
        "#d55e00",
        "#56b4e9",
        "#f0e442",
        "#cc79a7",
        "#000000",
        "#2323c7",
        "#b4ec93",
    ),
    *(
        "#0b0b41",
        "#5f2e11",
        "#603951",
        "#241782",
        "#f5f9dc",
        "#3c64dd",
        "#c09959",
        "#2a3b6f",
        "#aa4e41",
        "#7ece9c",
    ),
)
VOID_COLOR = (184, 188, 194)  # of pixels without a class
_GOLDEN = 0.618033988749895  # of a turn around the colour wheel: neighbours lie far apart
_LIGHTNESS = (0.35, 0.6, 0.48, 0.75)


def mask_colors(classes: int) -> NDArray[np.uint8]:
    """uint8 [classes, 3]: the colour of each class, red, green and blue; the first 20 are fixed.

    >>> mask_colors(2).tolist(), len(np.unique(mask_colors(255), axis=0))
    ([[0, 114, 178], [230, 159, 0]], 255)
    """
    fixed = [[int(text[k : k + 2], 16) for k in (1, 3, 5)] for text in FIXED[:classes]]
    made = [
        [round(255 * part) for part in colorsys.hls_to_rgb(k * _GOLDEN % 1.0, _LIGHTNESS[k % 4], 0.6)]
        for k in range(len(fixed), classes)
    ]
    return np.array([*fixed, *made], np.uint8).reshape(classes, 3)


def ink_on(color: Sequence[int]) -> str:
    """Black or white as #rrggbb, whichever is easier to read on this colour.

    >>> ink_on((240, 228, 66)), ink_on((0, 114, 178))
    ('#000000', '#ffffff')
    """
    red, green, blue = (float(part) for part in color)
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#ffffff"
