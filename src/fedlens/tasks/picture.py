"""Pictures of predictions: an image, enlarged, with lines of text below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedlens.core.errors import one_line

WIDTH = 224  # pixels that a picture has at least
_TEXT, _MARGIN = 14, 6  # pixels
BLACK, GREEN, RED = (20, 20, 20), (0, 110, 40), (180, 20, 20)

Line = tuple[str, tuple[int, int, int]]  # a text, and its colour


def enlarged(image: NDArray[np.uint8]) -> Image.Image:
    """The image uint8 [C, H, W], of one or three channels, enlarged by a whole number to at least 224 pixels wide."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).convert("RGB")
    factor = -(-WIDTH // picture.width)
    return picture.resize((factor * picture.width, factor * picture.height), Image.Resampling.NEAREST)


def captioned(picture: Image.Image, lines: Sequence[Line]) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the picture with the lines below it; a line that is too long ends in dots.

    >>> captioned(enlarged(np.zeros((1, 8, 8), np.uint8)), [("cat 97.0 %", BLACK)]).shape
    (250, 224, 3)
    """
    font = ImageFont.load_default(_TEXT)
    step = _TEXT + _MARGIN
    canvas = Image.new("RGB", (picture.width, picture.height + step * len(lines) + _MARGIN), "white")
    canvas.paste(picture)
    draw = ImageDraw.Draw(canvas)
    for row, (text, colour) in enumerate(lines):
        place = (_MARGIN, picture.height + _MARGIN // 2 + row * step)
        draw.text(place, _fitting(text, font, picture.width - 2 * _MARGIN), colour, font)
    return np.asarray(canvas)


def _fitting(text: str, font: Any, width: int) -> str:
    """The text in one line, without its end where it is wider than `width` pixels."""
    whole = one_line(text)
    if not isinstance(font, ImageFont.FreeTypeFont):  # Pillow's built-in bitmap has no other letters
        whole = whole.encode("latin-1", "replace").decode("latin-1")
    shown = whole
    while shown and font.getlength(shown) > width:
        whole = whole[:-1]
        shown = f"{whole}..." if whole else ""
    return shown
