"""Pictures of predictions: an image, enlarged, with lines of text below it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedlens.base.errors import one_line

WIDTH = 224  # pixels that a picture has at least
_TEXT, _MARGIN = 14, 6  # pixels
_SWATCH = 10  # pixels of a side
_END = 9  # characters at the end of a line that are always shown, such as a probability
BLACK, GREEN, RED = (20, 20, 20), (0, 110, 40), (180, 20, 20)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Colour = tuple[int, int, int]
Line = tuple[str, Colour]  # a text, and its colour


def enlarged(image: NDArray[np.uint8], width: int = WIDTH) -> Image.Image:
    """The image uint8 [C, H, W], of one or three channels, enlarged by a whole number to at least `width` pixels."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).convert("RGB")
    factor = -(-width // picture.width)
    return picture.resize((factor * picture.width, factor * picture.height), Image.Resampling.NEAREST)


def captioned(
    picture: Image.Image, lines: Sequence[Line], swatches: Mapping[int, Colour] | None = None
) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the picture with the lines below it; one that is too wide has dots before its last characters.

    Args:
        swatches: the colours of squares before lines, by the position of the line.

    >>> captioned(enlarged(np.zeros((1, 8, 8), np.uint8)), [("cat  97.0 %", BLACK)]).shape
    (250, 224, 3)
    """
    step = _TEXT + _MARGIN
    canvas = Image.new("RGB", (picture.width, picture.height + step * len(lines) + _MARGIN), "white")
    canvas.paste(picture)
    draw = ImageDraw.Draw(canvas)
    for row, (text, colour) in enumerate(lines):
        shown, font = _written(one_line(text))
        left, top = _MARGIN, picture.height + _MARGIN // 2 + row * step
        if swatches and row in swatches:
            draw.rectangle((left, top + 2, left + _SWATCH, top + 2 + _SWATCH), swatches[row], outline=BLACK)
            left += _SWATCH + _MARGIN
        draw.text((left, top), _fitting(shown, font, picture.width - left - _MARGIN), colour, font)
    return np.asarray(canvas)


def _written(text: str) -> tuple[str, Font]:
    """The text, and a font that has its letters; "?" for letters that no font at hand has.

    Pillow's own font has ASCII only. DejaVu Sans, which most systems have, covers Latin, Cyrillic and Greek.
    """
    if not text.isascii():
        try:
            return text, _dejavu()
        except OSError:
            text = unicodedata.normalize("NFKD", text.replace("\u00df", "ss"))
            text = "".join(letter for letter in text if not unicodedata.combining(letter))
    return text.encode("ascii", "replace").decode(), _default()


@lru_cache(maxsize=1)
def _default() -> Font:
    return ImageFont.load_default(_TEXT)


@lru_cache(maxsize=1)
def _dejavu() -> Font:
    return ImageFont.truetype("DejaVuSans.ttf", _TEXT - 2)  # its letters are wider


def _fitting(text: str, font: Font, width: int) -> str:
    """The text, with dots in place of its middle where it is wider than `width` pixels."""
    start, end = text[:-_END], text[-_END:]
    shown = text
    while start and font.getlength(shown) > width:
        start = start[:-1]
        shown = f"{start.rstrip()}...{end}"
    return shown
