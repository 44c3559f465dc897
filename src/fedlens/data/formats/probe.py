"""What is wrong with an image file, found out without decoding it where that will do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from fedlens.core.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.images import MASK_MODES, decode_threads

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".ppm": "PPM",
    ".pgm": "PPM",
    ".pbm": "PPM",
    ".pnm": "PPM",
}
_OPENED = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")

# What stands at the end of a file that is all there; anything else is decoded to be sure.
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_TAIL = 256

# (position, bytes, what the file is, what to do): files that often stand where an image should.
_OTHERS = (
    (0, b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself with 'git lfs pull'"),
    (128, b"DICM", "a DICOM file", "export its image as PNG"),
    (4, b"ftyphei", "a HEIC photograph", "convert it to JPEG"),
    (4, b"ftypmif1", "a HEIC photograph", "convert it to JPEG"),
    (4, b"ftypavif", "an AVIF image", "convert it to PNG"),
    (4, b"ftyp", "a film", "take single images out of it, as PNG"),
    (0, b"%PDF", "a PDF document", "export its image as PNG"),
    (0, b"PK\x03\x04", "a ZIP archive", "unpack it"),
    (0, b"\x1f\x8b", "compressed by gzip", "unpack it"),
    (0, b"\x93NUMPY", "a NumPy array", "save it as PNG"),
    (0, b"<", "a web page or other text", "fetch or copy the image again"),
    (0, b"{", "JSON text", "fetch or copy the image again"),
)
_AGAIN = "copy or export it again"


def probe(path: Path, mask: bool = False, full: bool = False) -> tuple[int, int]:
    """(width, height) of the pixels stored in an image file, in which nothing is wrong that can be told cheaply.

    Reads the header and the end of the file; decodes it where `full` says so, and where the end leaves doubt.
    Palettes and alpha channels are fine for photographs (see `fedlens.data.images.decode`). A mask has to be
    one channel of whole numbers; whether its ids fit is not looked at here. The tag by which phones turn their
    photographs is not applied: (width, height) is what is stored.

    Raises `DataError` with what is wrong, the file, and what to do: it is not there, a folder, empty, no image,
    cut off, of another format than its name says, CMYK, deeper than 8 bits, animated, or too large.
    """
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise _fault(path, "it is a folder, not an image file", "name the file")
        if size == 0:
            raise _fault(path, "the file is empty (0 bytes)", _AGAIN)
        with path.open("rb") as file:
            file.seek(max(0, size - _TAIL))
            tail = file.read()
    except FileNotFoundError:
        raise _fault(path, "the file is not there", "see to its name, upper and lower case too") from None
    except OSError as error:
        raise _fault(path, f"the file cannot be read: {error.strerror}", "see to its permissions") from error
    try:
        with Image.open(path, formats=_OPENED) as image:
            _check(image, path, mask)
            end = _ENDS.get(_format(image))
            if full or end is None or not tail.rstrip(b"\0\n\r ").endswith(end):
                image.load()
            return image.size
    except DataError:
        raise
    except UnidentifiedImageError:
        raise _no_image(path) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(path, None) from None
    except Exception as error:  # a damaged file can bring a decoder to raise anything at all
        raise _fault(path, f"the image cannot be decoded: {error or type(error).__name__}", _AGAIN) from error


def probe_all(
    root: Path,
    names: Sequence[str],
    findings: Findings,
    *,
    mask: bool = False,
    full: bool = False,
    threads: int | None = None,
) -> list[tuple[int, int] | None]:
    """(width, height) of each file `root / name`, None where something is wrong; that is added to `findings`.

    The findings come in the order of `names`. `threads` is by default one for each core.
    """

    def one(name: str) -> tuple[int, int] | DataError:
        try:
            return probe(root / name, mask, full)
        except DataError as error:
            return error

    sizes: list[tuple[int, int] | None] = []
    with ThreadPoolExecutor(threads or decode_threads()) as pool:
        for found in pool.map(one, names):
            if isinstance(found, DataError):
                findings.add(found.where, found.what, found.hint)
            sizes.append(None if isinstance(found, DataError) else found)
    return sizes


def _check(image: Image.Image, path: Path, mask: bool) -> None:
    """Raises `DataError` where the header says what cannot be used."""
    named, found = FORMATS.get(path.suffix.lower()), _format(image)
    if named != found:
        called = f"named {path.suffix}" if path.suffix else "named without an ending"
        ending = next(ending for ending, name in FORMATS.items() if name == found)
        raise _fault(path, f"the file is {called} and is a {found}", f"rename it to end in {ending}")
    width, height = image.size
    if width < 1 or height < 1:
        raise _fault(path, f"the image is {width} x {height} pixels", _AGAIN)
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise _too_large(path, image.size)
    # The second image of an MPO file, as cameras write it, is a smaller copy of the first.
    frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1
    if frames > 1:
        raise _fault(path, f"the image has {frames} frames", "save the one that is meant, as PNG")
    if mask:
        if image.mode not in MASK_MODES:
            raise _fault(
                path,
                f"the mask is in colour ({image.mode}), and has to hold one class id a pixel",
                "write ids instead of colours, as a PNG with one channel of 8 bits",
            )
        return
    if image.mode == "CMYK":
        raise _fault(path, "the image is in the colours of print (CMYK)", "convert it to RGB")
    if image.mode[0] in "IF" or re.search(";16", str(getattr(image, "tile", ""))):
        bits = 32 if image.mode in ("I", "F") else 16
        raise _fault(
            path,
            f"the image has {bits} bits a channel, and 8 are read",
            "convert it to 8 bits with the range of brightness that matters",
        )


def _format(image: Image.Image) -> str:
    return "JPEG" if image.format == "MPO" else str(image.format)


def _fault(path: Path, what: str, hint: str) -> DataError:
    return DataError(what, where=str(path), hint=hint)


def _too_large(path: Path, size: tuple[int, int] | None) -> DataError:
    pixels = f"{size[0]} x {size[1]} pixels" if size else "too many pixels"
    limit = (Image.MAX_IMAGE_PIXELS or 0) // 10**6
    return _fault(
        path,
        f"the image has {pixels}, and at most {limit} million are read",
        "scale it down, or cut it into tiles",
    )


def _no_image(path: Path) -> DataError:
    with path.open("rb") as file:
        head = file.read(256)
    for position, start, what, hint in _OTHERS:
        if head[position:].lstrip(b" \r\n\t\xef\xbb\xbf").startswith(start):
            return _fault(path, f"the file is {what}, not an image", hint)
    return _fault(path, "the file is no image that can be read", "convert it to PNG or JPEG, or remove it")
