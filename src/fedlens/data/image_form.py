"""The form in which a model takes images, and decoding a file to it by the rules that read the training images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.data.decoding import Fit, decode, is_turned


@dataclass(frozen=True)
class ImageForm:
    """The form of a model's input images.

    Args:
        channels: 3 for colour, 1 for grey.
        height, width: of every image after scaling.
        fit: how images of another shape are brought to this size; see `fedlens.data.decoding.decode`.
        upright: whether photographs are turned as their EXIF tag says.
        inverted: whether the reader of the dataset exchanges dark and bright, as that of Omniglot does.

    >>> ImageForm.of({**ImageForm(1, 28, 28, inverted=True).table(), "unknown": 1})
    ImageForm(channels=1, height=28, width=28, fit='crop', upright=True, inverted=True)
    """

    channels: int
    height: int
    width: int
    fit: Fit = "crop"
    upright: bool = True
    inverted: bool = False

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> ImageForm:
        """The form that `table` returned; other keys are ignored."""
        return cls(**{name: table[name] for name in cls.__dataclass_fields__ if name in table})

    def table(self) -> dict[str, Any]:
        """The form as JSON can hold it."""
        return asdict(self)

    def decode(self, path: Path) -> NDArray[np.uint8]:
        """uint8 [C, H, W]: the image in a file. Raises `DataError` with the file name if it cannot be decoded."""
        form = (self.channels, self.height, self.width, self.fit)
        pixels = decode(path, *form, upright=self.upright)
        return 255 - pixels if self.inverted else pixels

    def file_size(self, path: Path) -> tuple[int, int]:
        """(width, height) of the image in a file, in pixels, turned as `decode` turns it."""
        with Image.open(path) as image:
            width, height = image.size
            return (height, width) if self.upright and is_turned(image) else (width, height)
