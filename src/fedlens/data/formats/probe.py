"""Checks image files, decoded only where needed, and measures how they look."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedlens.base.errors import DataError
from fedlens.base.threads import map_threads
from fedlens.data.decoding import MASK_MODES, is_turned, mask_in_colour
from fedlens.data.diagnostics import Findings, shortened
from fedlens.data.formats.file_safety import LinkCheck, special_file

_ENDINGS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
FORMATS = {ending: name for name, endings in _ENDINGS.items() for ending in endings}
"""Pillow's name of the format, by the ending of a file's name."""

# The last bytes of a complete file. A file that ends otherwise is decoded to be sure.
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_TAIL = 256

# (position, bytes, what the file is, hint): files that are often found in place of an image.
_OTHERS = (
    (0, b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself with 'git lfs pull'"),
    (128, b"DICM", "a DICOM file", "export its image as PNG"),
    (4, b"ftyphei", "a HEIC photograph", "convert it to JPEG"),
    (4, b"ftypmif1", "a HEIC photograph", "convert it to JPEG"),
    (4, b"ftypavif", "an AVIF image", "convert it to PNG"),
    (4, b"ftyp", "a video", "extract single images from it, as PNG"),
    (0, b"%PDF", "a PDF document", "export its image as PNG"),
    (0, b"PK\x03\x04", "a ZIP archive", "unpack it"),
    (0, b"\x1f\x8b", "compressed by gzip", "unpack it"),
    (0, b"\x93NUMPY", "a NumPy array", "save it as PNG"),
    (0, b"<", "a web page or other text", "fetch or copy the image again"),
    (0, b"{", "JSON text", "fetch or copy the image again"),
)
_AGAIN = "copy or export it again"

_SIDE = 128  # pixels: images of all sizes are measured at one size
_CLIENTS = 4  # that are compared at least
_IMAGES = 10  # of a client that is compared, at least
_DEVIATIONS = 3.5  # scaled median absolute deviations from the median, beyond which a client is an outlier
_RATIO = 1.5  # to the median, beyond which a client is an outlier
_GAP = 1.2  # to the nearest client that is not one
_SCALE = 1.4826  # of a median absolute deviation to the standard deviation of a normal distribution
_WORDS = {
    "brightness": ("darker", "brighter"),
    "contrast": ("lower in contrast", "higher in contrast"),
    "sharpness": ("less sharp", "sharper or noisier"),
}
_FLAT = 1e-6  # variance of an image of one grey value, computed in float32
_LISTED = 10  # clients that are warned about one by one


class ImageHeader(NamedTuple):
    """What the header of an image file states, and how the image looks if all of it was decoded.

    Args:
        width, height: pixels as they are stored.
        mode: Pillow's mode, such as "RGB" or "L" (grey).
        turned: whether the EXIF tag of a photograph exchanges width and height.
        statistics: of the pixels; None if they were not asked for.
    """

    width: int
    height: int
    mode: str
    turned: bool = False
    statistics: ImageStatistics | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) as stored."""
        return self.width, self.height


def probe(path: Path, mask: bool = False, full: bool = False) -> ImageHeader:
    """The header of an image file, after cheap checks.

    Reads the header and the end of the file, and decodes it if `full` is set or the end is unexpected. With `full`, the
    result has `statistics`. Palettes and
    alpha channels are fine for photographs (see `fedlens.data.decoding.decode`). A mask has to be one channel of
    whole numbers; its ids are not checked here. The EXIF tag that turns photographs is not applied.

    Raises `DataError` with the problem, the file and a hint: it does not exist, or is a folder, a pipe or device,
    empty, not an image, cut off, of another format than its name says, CMYK, deeper than 8 bits, animated, or too
    large.
    """
    try:
        status = path.stat()
        size = status.st_size
        if stat.S_ISDIR(status.st_mode):
            raise DataError("it is a folder, not an image file", where=str(path), hint="name the file")
        if (kind := special_file(status.st_mode)) is not None:
            raise DataError(f"it is {kind}, not an image file", where=str(path), hint="remove it")
        if size == 0:
            raise DataError("the file is empty (0 bytes)", where=str(path), hint=_AGAIN)
        with path.open("rb") as file:
            file.seek(max(0, size - _TAIL))
            tail = file.read()
    except FileNotFoundError:
        hint = "check its name, upper and lower case too"
        raise DataError("the file does not exist", where=str(path), hint=hint) from None
    except OSError as error:
        what = f"the file cannot be read: {error.strerror}"
        raise DataError(what, where=str(path), hint="check its permissions") from error
    try:
        with Image.open(path, formats=tuple(_ENDINGS)) as image:
            problem = _problem(image, path, mask)
            if problem is None:
                end = _ENDS.get(_format(image))
                if full or end is None or not tail.rstrip(b"\0\n\r ").endswith(end):
                    image.load()
                header = ImageHeader(*image.size, image.mode, is_turned(image))
                return header._replace(statistics=ImageStatistics.of(image)) if full else header
    except UnidentifiedImageError:
        problem = _other_format(path)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        problem = _too_large(None)
    except Exception as error:  # a damaged file can make a decoder raise any exception
        what = f"the image cannot be decoded: {error or type(error).__name__}"
        raise DataError(what, where=str(path), hint=_AGAIN) from error
    raise DataError(problem[0], where=str(path), hint=problem[1])


def probe_all(
    root: Path,
    names: Sequence[str],
    findings: Findings,
    *,
    mask: bool = False,
    full: bool = False,
    threads: int | None = None,
) -> list[ImageHeader | None]:
    """The header of each file `root / name`; None if it is faulty, which is added to `findings`.

    A link that leads out of `root` is faulty, and is not opened. The findings come in the order of `names`.
    `threads` is by default one for each core.
    """

    links = LinkCheck(root)

    def header_or_error(name: str) -> ImageHeader | DataError:
        try:
            links.refuse_outside(name)
            return probe(root / name, mask, full)
        except DataError as error:
            return error

    results = map_threads(header_or_error, names, threads)
    for error in results:
        if isinstance(error, DataError):
            findings.add(error.where, error.what, error.hint)
    return [None if isinstance(result, DataError) else result for result in results]


def stored_sizes(headers: Sequence[ImageHeader | None]) -> list[tuple[int, int] | None]:
    """(width, height) of each stored image; None if the file is faulty."""
    return [None if header is None else header.size for header in headers]


def _problem(image: Image.Image, path: Path, mask: bool) -> tuple[str, str] | None:
    """(problem, hint) that the header of an image shows; None if it can be used."""
    actual = _format(image)
    if FORMATS.get(path.suffix.lower()) != actual:
        ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
        return (
            f"the file name {ending}, and the file is a {actual}",
            f"rename it to end in {_ENDINGS[actual][0]}",
        )
    width, height = image.size
    if width < 1 or height < 1:
        return f"the image is {width} x {height} pixels", _AGAIN
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        return _too_large(image.size)
    # The second image of an MPO file, as cameras write it, is a smaller copy of the first.
    frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1
    if frames > 1:
        return f"the image has {frames} frames", "save one of them, as PNG"
    if mask:
        return None if image.mode in MASK_MODES else mask_in_colour(image)
    if image.mode == "CMYK":
        return "the colours of the image are CMYK, for print", "convert it to RGB"
    if image.mode[0] in "IF" or ";16" in str(getattr(image, "tile", "")):
        bits = 32 if image.mode in ("I", "F") else 16
        hint = "convert it to 8 bits with the range of brightness that matters"
        return f"the image has {bits} bits per channel, and at most 8 are supported", hint
    return None


def _format(image: Image.Image) -> str:
    return "JPEG" if image.format == "MPO" else str(image.format)


def _too_large(size: tuple[int, int] | None) -> tuple[str, str]:
    pixels = f"{size[0]} x {size[1]} pixels" if size else "too many pixels"
    limit = (Image.MAX_IMAGE_PIXELS or 0) // 10**6
    return f"the image has {pixels}; the limit is {limit} million", "scale it down, or cut it into tiles"


def _other_format(path: Path) -> tuple[str, str]:
    with path.open("rb") as file:
        head = file.read(256)
    if b"<svg" in head:
        return "the file is an SVG drawing, not an image of pixels", "export it as PNG"
    for position, start, what, hint in _OTHERS:
        if head[position:].lstrip(b" \r\n\t\xef\xbb\xbf").startswith(start):
            return f"the file is {what}, not an image", hint
    return "not a readable image", "convert it to PNG or JPEG, or remove it"


class ImageStatistics(NamedTuple):
    """How an image looks: of its grey values from 0 to 255, scaled to 128 x 128 pixels.

    Args:
        brightness: their mean.
        contrast: their standard deviation.
        sharpness: 1,000 times the variance of their Laplacian (four neighbours) over their variance; 0 if all are
            equal. The ratio does not change with brightness or contrast: a dark image is not taken for a blurred one.
    """

    brightness: float
    contrast: float
    sharpness: float

    @classmethod
    def of(cls, image: Image.Image) -> ImageStatistics:
        """The statistics of a decoded image.

        >>> ImageStatistics.of(Image.new("L", (8, 8), 40))
        ImageStatistics(brightness=40.0, contrast=0.0, sharpness=0.0)
        """
        if image.mode not in ("L", "RGB"):
            image = image.convert("L" if image.mode in ("1", "LA") else "RGB")
        across, down = (max(1, side // (2 * _SIDE)) for side in image.size)
        # Floats: rounded to whole numbers, a dark or enlarged image would have noise of its own.
        reduced = image.reduce((across, down)).convert("L").convert("F")
        grey = np.asarray(reduced.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR))
        inner = grey[1:-1, 1:-1]
        laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
        variance = float(grey.var())
        sharpness = 1000 * float(laplacian.var()) / variance if variance > _FLAT else 0.0
        return cls(float(grey.mean()), variance**0.5, sharpness)


def medians(statistics: Sequence[ImageStatistics | None], names: Sequence[str]) -> dict[str, ImageStatistics]:
    """The medians over the images of each name, a class or a client; images without statistics do not count."""
    of_name: defaultdict[str, list[ImageStatistics]] = defaultdict(list)
    for one, name in zip(statistics, names, strict=True):
        if one is not None:
            of_name[name].append(one)
    return {name: ImageStatistics(*np.median(rows, axis=0).tolist()) for name, rows in of_name.items()}


def check_looks(
    of_client: Mapping[str, ImageStatistics], counts: Mapping[str, int], where: object, findings: Findings
) -> None:
    """Adds a warning for each client whose images are an outlier in brightness, contrast or sharpness.

    A client is one if its median differs from the median of all clients by more than 3.5 scaled median absolute
    deviations (Iglewicz and Hoaglin 1993) and by a factor of more than 1.5, and from that of the nearest other client
    by one of more than 1.2. Clients with fewer than ten images are not compared, nor are fewer than four clients.

    >>> findings = Findings()
    >>> looks = {name: ImageStatistics(110.0 + at, 50.0, 0.1) for at, name in enumerate("abc")}
    >>> looks["Ulm"] = ImageStatistics(38.0, 50.0, 0.1)
    >>> check_looks(looks, dict.fromkeys(looks, 10), "scans", findings)
    >>> print(findings.warnings[0])
    scans: the images of 'Ulm' are darker (brightness 38, others 110 to 112); check its scanner or export.
    """
    compared = [name for name in of_client if counts[name] >= _IMAGES]
    if len(compared) < _CLIENTS:
        return
    differences: defaultdict[str, list[str]] = defaultdict(list)
    for at, (statistic, words) in enumerate(_WORDS.items()):
        values = np.array([of_client[name][at] for name in compared])
        median = float(np.median(values))
        distance = np.abs(values - median)
        far = distance > _DEVIATIONS * _SCALE * float(np.median(distance))
        apart = (values * _RATIO < median) | (values > _RATIO * median)
        outliers = far & apart
        usual = values[~outliers]
        outliers &= (values * _GAP < usual.min()) | (values > _GAP * usual.max())
        for index in np.flatnonzero(outliers).tolist():
            span = f"{statistic} {values[index]:.3g}, others {usual.min():.3g} to {usual.max():.3g}"
            word = words[int(values[index] > median)]
            differences[compared[index]].append(f"{word} ({span})")
    for name in list(differences)[:_LISTED]:
        *first, last = differences[name]
        listed = f"{', '.join(first)} and {last}" if first else last
        what = f"the images of '{shortened(name, 60)}' are {listed}"
        findings.warn(where, what, "check its scanner or export")
    if len(differences) > _LISTED:
        more = f"the images of {len(differences) - _LISTED:,} more clients look different"
        findings.warn(where, more, "--json has the brightness, contrast and sharpness of each client")
