"""The settings of how large photographs are delivered, which the readers of masks and boxes share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from PIL import Image
from pydantic import Field, PlainValidator

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.images import Fit

_LARGEST = 16_384


def height_width(size: object) -> tuple[int, int]:
    """(height, width) of a setting that is one number, or [height, width].

    Raises `ValueError` if it is neither.

    >>> height_width(256), height_width([360, 480])
    ((256, 256), (360, 480))
    """
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, (list, tuple)) else []
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= _LARGEST for side in sides):
        raise ValueError(f"it must be one number of pixels, or [height, width], from 1 to {_LARGEST}")
    return sides[0], sides[1]


def _height_width_or_none(size: object) -> tuple[int, int] | None:
    return None if size is None else height_width(size)


_WHAT = "pixels of every image after scaling: one number, or [height, width]"

Size = Annotated[int | tuple[int, int], PlainValidator(height_width), Field(description=_WHAT)]
SizeOrOwn = Annotated[
    int | tuple[int, int] | None,
    PlainValidator(_height_width_or_none),
    Field(description=f"{_WHAT}; by default the size of the first image"),
]
HowToFit = Annotated[
    Fit,
    Field(
        description="for images of another shape: `pad` fills the rest, `crop` cuts out the centre, "
        "`stretch` distorts"
    ),
]


def size_of(size: object) -> tuple[int, int]:
    """`height_width` for a reader that is called from Python; raises `ConfigError`."""
    try:
        return height_width(size)
    except ValueError as error:
        raise ConfigError(f"the size is {size!r}, and {error}", where="size") from None


def own_size(path: Path) -> tuple[int, int]:
    """(height, width) of the image in a file, from its first bytes. Raises `DataError`."""
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image cannot be decoded: {error}", where=str(path)) from error
