"""Images that stay on disk: decoded on demand, and cached in memory up to a limit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.base.threads import map_threads, own_cores
from fedlens.data.decoding import Fit as Fit
from fedlens.data.decoding import decode
from fedlens.data.lazy_images import LazyImages

MOMENTS_OF = 1000  # images of the sample that mean and deviation are computed of
_SHARED = 4096  # bytes: workers share arrays from this size on (fedlens.engines.shared_memory)


@dataclass(frozen=True, eq=False)
class Paths:
    """Many file names as two arrays. A list of strings would cost a hundred bytes per name in every worker."""

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, names: Sequence[str]) -> Paths:
        """Packs names. Names on disk that are not UTF-8 are kept (PEP 383).

        >>> Paths.of(["a.png", "b/ü.png"])[1]
        'b/ü.png'
        """
        encoded = [name.encode(errors="surrogateescape") for name in names]
        return cls(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal of the names."""
        return hashlib.sha256(self.offsets.astype("<i8").tobytes() + self.text.tobytes()).hexdigest()

    def __getitem__(self, at: int) -> str:
        return self.text[self.offsets[at] : self.offsets[at + 1]].tobytes().decode(errors="surrogateescape")

    def take(self, rows: NDArray[Any]) -> Paths:
        """The names at `rows`."""
        return Paths.of([self[int(row)] for row in rows])


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """A cache of decoded images in memory, with `slots` of them spread evenly over all.

    Which images have a slot is fixed. An epoch reads every image once, so a fixed choice has as many hits as any
    other. It needs no lock between workers that share the memory: all of them write the same bytes into a slot, and
    set its flag afterwards.

    Flags and images are one array, so that they are shared between processes, or copied, together.
    """

    memory: NDArray[np.uint8]  # a flag for each slot, then the images
    slots: int

    @classmethod
    def of(cls, slots: int, each: int) -> DecodedImages:
        """An empty cache of images of `each` bytes. It takes no memory until it is written to."""
        return cls(np.zeros(max(_SHARED, slots * (1 + each)), np.uint8), slots)

    @property
    def filled(self) -> NDArray[np.uint8]:
        """uint8 [slots]: 1 if the image is stored; a view."""
        return self.memory[: self.slots]

    def image(self, slot: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """The memory of one image; a view."""
        each = int(np.prod(shape))
        start = self.slots + slot * each
        return self.memory[start : start + each].reshape(shape)


@dataclass(frozen=True, eq=False)
class ImageFiles(LazyImages):
    """Images of one shape, in files. It can be used in place of an array uint8 [n, C, H, W].

    Args:
        root: the folder that the names are below.
        files: the names.
        channels: 3 for colour, 1 for grey, 0 for a mask of class ids: uint8 [n, H, W], never interpolated.
        height, width: the size of every image after decoding.
        fit: `crop` scales the shorter side and cuts out the middle, `pad` scales the longer side and fills the
            rest, `stretch` scales both.
        ids: uint8 [256], for masks: the class of each stored id; None keeps the ids.
        store: the cache of decoded images.
        upright: whether photographs are turned as their EXIF tag says. It is off for boxes and masks: some tools
            draw them on the stored pixels, others on the turned ones.
        contents: SHA-256 in hexadecimal of the bytes of all files, if they have been read.
        opener: `module:function` from a path to a Pillow image, for formats that Pillow does not open.
    """

    root: Path
    files: Paths
    channels: int
    height: int
    width: int
    fit: Fit = "crop"
    ids: NDArray[np.uint8] | None = None
    store: DecodedImages | None = None
    upright: bool = False
    opener: str | None = None
    contents: str | None = None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, C, H, W), or (n, H, W) of masks."""
        size = (self.height, self.width)
        return (len(self), self.channels, *size) if self.channels else (len(self), *size)

    @property
    def held_nbytes(self) -> int:
        """The bytes of the cache."""
        return 0 if self.store is None else self.store.memory.nbytes

    def take(self, index: NDArray[Any]) -> NDArray[np.uint8]:
        """uint8 [k, ...]: the images at the positions `index`, int64 [k].

        Images that are not in the cache are decoded in threads, one for each core of this process. Raises `DataError`
        with the file name of the first image that cannot be decoded.
        """
        out = np.empty((len(index), *self.shape[1:]), np.uint8)

        def read(row: int) -> None:
            out[row] = self._image(int(index[row]))

        rows = range(len(index))
        absent = [row for row in rows if not self._cached(int(index[row]))]
        if len(absent) < 2 or own_cores() == 1:
            for row in rows:
                read(row)
            return out
        map_threads(read, absent, min(own_cores(), len(absent)))
        for row in set(rows).difference(absent):
            read(row)
        return out

    def path(self, at: int) -> Path:
        """The file of one image."""
        return self.root / self.files[at]

    def subset(self, rows: NDArray[Any]) -> ImageFiles:
        """The images at `rows`, without a cache."""
        return replace(self, files=self.files.take(rows), store=None, contents=None)

    def kept(self, nbytes: int) -> ImageFiles:
        """The same images, with a cache of at most `nbytes` for decoded ones."""
        each = int(np.prod(self.shape[1:]))
        slots = min(len(self), nbytes // (1 + each))
        return replace(self, store=DecodedImages.of(slots, each) if slots > 0 else None)

    def decode(self, at: int) -> NDArray[np.uint8]:
        """uint8 [C, H, W] or [H, W]: one image, from its file."""
        form = (self.channels, self.height, self.width, self.fit)
        return decode(self.path(at), *form, self.ids, self.upright, self.opener)

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of the names and bytes of the files, and of the form they are decoded to.

        Reads the bytes unless their hash is known (`contents`). Raises `DataError` if a file cannot be read.
        """
        contents = self.contents
        if contents is None:
            digests = map_threads(self.file_digest, range(len(self)))
            contents = hashlib.sha256(b"".join(digests)).hexdigest()
        hashed = self.form_hash()
        hashed.update(contents.encode())
        return hashed.hexdigest()

    def file_digest(self, at: int) -> bytes:
        """SHA-256 of the bytes of one file. Raises `DataError` if it cannot be read."""
        path = self.path(at)
        try:
            return file_sha256(path)
        except OSError as error:
            raise DataError(f"the file cannot be read: {error.strerror}", where=str(path)) from error

    def form_hash(self) -> hashlib._Hash:
        """A hash of the names of the files and the form they are decoded to."""
        hashed = hashlib.sha256(repr((self.shape, self.fit, self.upright, self.opener)).encode())
        hashed.update(b"" if self.ids is None else self.ids.tobytes())
        hashed.update(self.files.offsets.astype("<i8").tobytes())
        hashed.update(self.files.text.tobytes())
        return hashed

    def _image(self, at: int) -> NDArray[np.uint8]:
        slot = self._slot(at)
        if self.store is None or slot is None:
            return self.decode(at)
        kept = self.store.image(slot, self.shape[1:])
        if not self.store.filled[slot]:
            kept[...] = self.decode(at)
            self.store.filled[slot] = 1
        return kept

    def _cached(self, at: int) -> bool:
        slot = self._slot(at)
        return self.store is not None and slot is not None and bool(self.store.filled[slot])

    def _slot(self, at: int) -> int | None:
        if self.store is None:
            return None
        slots, n = self.store.slots, len(self)
        slot = at * slots // n
        return slot if (at + 1) * slots // n > slot else None


def file_sha256(path: Path) -> bytes:
    """SHA-256 of the bytes of a file. Raises `OSError` if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def decode_all(
    images: ImageFiles, threads: int | None = None
) -> tuple[NDArray[np.uint8], dict[int, DataError]]:
    """(pixels uint8 [n, ...], errors by position): every image, decoded in threads."""
    pixels = np.zeros(images.shape, np.uint8)
    errors: dict[int, DataError] = {}

    def decode_one(at: int) -> None:
        try:
            pixels[at] = images.decode(at)
        except DataError as error:
            errors[at] = error

    map_threads(decode_one, range(len(images)), threads)
    return pixels, errors


def sample_moments(
    images: ImageFiles | NDArray[np.uint8], at_most: int = MOMENTS_OF
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, scaled to [0, 1], of `at_most` images evenly spaced over all.

    Of k = min(n, at_most) images it takes those at floor(j n / k), j = 0 .. k - 1. Sums are exact integers, so
    the numbers do not depend on the machine or the number of threads. A constant channel gets the deviation 1, so
    that it can be divided by it. Files that cannot be decoded are skipped here; loading the images reports them.

    Raises `DataError` if no image of the sample can be decoded.

    >>> sample_moments(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    count = min(len(images), at_most)
    positions = [j * len(images) // count for j in range(count)]

    def sums_of(at: int) -> NDArray[np.int64] | None:
        try:
            pixels = images.decode(at) if isinstance(images, ImageFiles) else images[at]
        except DataError:
            return None
        wide = pixels.reshape(len(pixels), -1).astype(np.int64)
        return np.stack([wide.sum(axis=1), np.square(wide).sum(axis=1)])

    sums = [pair for pair in map_threads(sums_of, positions) if pair is not None]
    if not sums:
        where = str(images.root) if isinstance(images, ImageFiles) else None
        raise DataError("no image can be decoded to compute mean and deviation", where=where)
    total, squares = np.sum(sums, axis=0)
    pixels = len(sums) * int(np.prod(images.shape[2:]))
    mean = total / pixels
    variance = (pixels * squares - total * total) / (pixels * pixels)
    deviation = np.sqrt(np.maximum(variance, 0.0))
    return tuple(float(m) / 255 for m in mean), tuple(float(s) / 255 or 1.0 for s in deviation)
