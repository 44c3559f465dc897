"""Decodes an image file to pixels of a given form, by rules that do not depend on the file's format.

Pillow decodes, not torchvision.io: that decodes no JPEG at a fraction of its size, reads neither TIFF nor BMP nor PPM,
and takes as long to import as PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from fedlens.base.errors import DataError
from fedlens.base.registry import load_target
from fedlens.core.dataset_info import VOID

Fit = Literal["crop", "pad", "stretch"]

MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")

# The transposition that undoes each value of the EXIF tag "Orientation"; 1 is upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
QUARTER_TURNS = range(5, 9)  # values of the EXIF tag "Orientation" that exchange width and height
_GAP = 2  # a JPEG is decoded at a fraction of its size if that leaves this many times the wanted size


def decode(
    path: Path,
    channels: int,
    height: int,
    width: int,
    fit: Fit,
    ids: NDArray[np.uint8] | None = None,
    upright: bool = False,
    opener: str | None = None,
) -> NDArray[np.uint8]:
    """uint8 [C, H, W], or [H, W] where `channels` is 0: the image in a file.

    A photograph is converted to RGB or grey (CMYK and palettes too), with transparent parts on black, and scaled
    bilinearly with antialiasing. If 2, 4 or 8 divides both sides of a large JPEG, it is decoded at that fraction of
    its size, as long as that is at least twice the wanted size. With `upright` it is turned as its EXIF tag says.
    The stored numbers of a mask (positions in a palette) are its ids, which `ids` maps to classes; it is scaled by
    the nearest neighbour and padded with 255. `opener` names the function (`module:function`) that opens formats
    that Pillow does not know.

    Raises `DataError` with the file name if it cannot be decoded, a photograph has more than 8 bits in one grey
    channel, or a mask is in colour or has ids above 255.
    """
    try:
        with _opened(path, opener) as image:
            if channels == 0:
                return np.asarray(
                    fitted(Image.fromarray(stored_ids(image, ids)), height, width, fit, mask=True)
                )
            pixels = np.asarray(_photograph(image, channels, height, width, fit, upright))
    except DataError as error:
        raise DataError(error.what, where=str(path), hint=error.hint) from None
    except UnidentifiedImageError as error:
        hint = "copy or export it again, as PNG or JPEG"
        raise DataError("not a readable image", where=str(path), hint=hint) from error
    except Exception as error:  # a damaged file can make a decoder raise any exception
        what = f"the image cannot be decoded: {error or type(error).__name__}"
        raise DataError(what, where=str(path), hint="copy or export it again") from error
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def _opened(path: Path, opener: str | None) -> Image.Image:
    opened: Image.Image = Image.open(path) if opener is None else load_target(opener)(path)
    return opened


def placement(
    width: int, height: int, to_width: int, to_height: int, fit: Fit
) -> tuple[float, float, float, float]:
    """(x scale, y scale, x shift, y shift): maps pixels of the file to pixels of the decoded image.

    A point (x, y) of the file, counted from the upper left corner, moves to (x scale x + x shift, ...).

    >>> placement(200, 100, 50, 50, "crop"), placement(200, 100, 50, 50, "pad")
    ((0.5, 0.5, -25.0, 0.0), (0.25, 0.25, 0.0, 12.0))
    """
    new_width, new_height, left, top = _geometry(width, height, to_width, to_height, fit)
    return new_width / width, new_height / height, float(left), float(top)


def fitted(image: Image.Image, height: int, width: int, fit: Fit, mask: bool = False) -> Image.Image:
    """The image scaled to `width` x `height`; a mask by the nearest neighbour and padded with 255."""
    if image.size == (width, height):
        return image
    new_width, new_height, left, top = _geometry(*image.size, width, height, fit)
    how = Image.Resampling.NEAREST if mask else Image.Resampling.BILINEAR
    if fit == "crop":
        # Scale only the part of the image that is kept.
        across, down = image.width / new_width, image.height / new_height
        right, bottom = min(image.width, (width - left) * across), min(image.height, (height - top) * down)
        return image.resize((width, height), how, box=(-left * across, -top * down, right, bottom))
    scaled = image.resize((new_width, new_height), how)
    if scaled.size == (width, height):
        return scaled
    fill: Any = VOID if mask else 0
    canvas = Image.new(scaled.mode, (width, height), fill)
    canvas.paste(scaled, (left, top))
    return canvas


def _geometry(width: int, height: int, to_width: int, to_height: int, fit: Fit) -> tuple[int, int, int, int]:
    """(width, height, left, top) of the scaled image in the result, computed in whole numbers."""
    new_width, new_height = to_width, to_height
    if fit != "stretch":
        wide = width * to_height > height * to_width  # wider than the result
        if wide == (fit == "crop"):
            new_width = max(1, (2 * width * to_height + height) // (2 * height))
        else:
            new_height = max(1, (2 * height * to_width + width) // (2 * width))
    return new_width, new_height, (to_width - new_width) // 2, (to_height - new_height) // 2


def _photograph(
    image: Image.Image, channels: int, height: int, width: int, fit: Fit, upright: bool
) -> Image.Image:
    if image.mode[0] in "IF":
        raise DataError(
            f"the image has more than 8 bits a channel ({image.mode})", hint="convert it to 8 bits"
        )
    turn = _UPRIGHT.get(_orientation(image)) if upright else None
    if image.format in ("JPEG", "MPO"):
        _draft(image, height, width, fit)
    if turn is not None:
        image = image.transpose(turn)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return fitted(image.convert("RGB" if channels == 3 else "L"), height, width, fit)


def _draft(image: Image.Image, height: int, width: int, fit: Fit) -> None:
    """Lets a JPEG be decoded at a fraction of its size if that loses nothing."""
    # Both sides stay `_GAP` times as large as wanted, however the image will be turned.
    side = max(
        _geometry(*image.size, width, height, fit)[:2] + _geometry(*image.size, height, width, fit)[:2]
    )
    for divisor in (8, 4, 2):
        small = (image.width // divisor, image.height // divisor)
        if not (image.width % divisor or image.height % divisor) and min(small) >= _GAP * side:
            image.draft(None, small)
            return


def _orientation(image: Image.Image) -> int:
    """The EXIF tag "Orientation"; 1, upright, if it is missing or cannot be read."""
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # cameras write tags of every kind, and one that cannot be read turns nothing
        return 1


def is_turned(image: Image.Image) -> bool:
    """Whether the EXIF tag of a photograph turns it by a quarter, so that its width becomes its height."""
    return _orientation(image) in QUARTER_TURNS


def orientation_of(path: Path) -> int:
    """The EXIF tag "Orientation" of an image file; 1, upright, if it is missing or cannot be read."""
    try:
        with Image.open(path) as image:
            return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # a damaged file can make a decoder raise any exception
        return 1


def stored_ids(image: Image.Image, ids: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """uint8 [h, w]: the numbers stored in a mask, mapped by `ids`, uint8 [256], if given.

    Raises `DataError` if the mask is in colour, or has a number that is not in 0 .. 255.
    """
    if image.mode not in MASK_MODES:
        what, hint = mask_in_colour(image)
        raise DataError(what, hint=hint)
    stored = np.asarray(image)
    if stored.dtype.itemsize > 1 and stored.size and not 0 <= stored.min() <= stored.max() <= VOID:
        outside = stored.max() if stored.max() > VOID else stored.min()
        raise DataError(f"the mask has the id {outside}, and ids go from 0 to 255", hint="use smaller ids")
    small = stored.astype(np.uint8)
    return small if ids is None else ids[small]


def mask_in_colour(image: Image.Image) -> tuple[str, str]:
    """(problem, hint) of a mask that has colours."""
    hint = "write ids instead of colours, as a PNG with one channel of 8 bits"
    return f"the mask is in colour ({image.mode}), and needs one class id per pixel", hint


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
