"""Images that stay on disk: decoded when they are wanted, and kept in memory as far as that was allowed."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.core.errors import DataError

Fit = Literal["crop", "pad", "stretch"]


@dataclass(frozen=True, eq=False)
class Paths:
    """Many file names as two arrays: a list of strings would cost a hundred bytes each, in every worker."""

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, names: Sequence[str]) -> Paths:
        """Packs names."""
        encoded = [name.encode() for name in names]
        return cls(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> str:
        return self.text[self.offsets[at] : self.offsets[at + 1]].tobytes().decode()

    def take(self, rows: NDArray[Any]) -> Paths:
        """The names at `rows`."""
        return Paths.of([self[int(row)] for row in rows])


@dataclass(frozen=True, eq=False)
class Store:
    """Decoded images in memory: `slots` of them, spread evenly over all.

    Which images have a slot is fixed. Over an epoch every image is wanted once, so that a choice that never
    changes finds as many as the cleverest one would, and workers that share the memory need no lock: whoever
    fills a slot writes the same bytes.
    """

    pixels: NDArray[np.uint8]  # [slots, ...]
    filled: NDArray[np.uint8]  # [at least slots]
    slots: int


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images of one shape, in files. It stands where an array uint8 [n, C, H, W] may stand.

    Args:
        root: the folder that the names are below.
        files: the names.
        channels: 3 for colour, 1 for grey, 0 for a mask of class ids: uint8 [n, H, W], never interpolated.
        height, width: what every image is brought to.
        fit: `crop` scales the shorter side and cuts the middle out, `pad` scales the longer side and fills up,
            `stretch` scales both.
        ids: uint8 [256], for masks: what each stored id becomes; None leaves them.
        store: the images that are kept.
    """

    root: Path
    files: Paths
    channels: int
    height: int
    width: int
    fit: Fit = "crop"
    ids: NDArray[np.uint8] | None = None
    store: Store | None = None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, C, H, W), or (n, H, W) of masks."""
        size = (self.height, self.width)
        return (len(self), self.channels, *size) if self.channels else (len(self), *size)

    @property
    def dtype(self) -> Any:
        """uint8, always."""
        return np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        """What all of them take in memory, decoded."""
        return int(np.prod(self.shape))

    def take(self, index: NDArray[Any]) -> NDArray[np.uint8]:
        """uint8 [k, ...]: the images at the positions `index`, int64 [k].

        Raises `DataError` with the name of a file that cannot be decoded.
        """
        out = np.empty((len(index), *self.shape[1:]), np.uint8)
        for row, at in enumerate(index.tolist()):
            out[row] = self._image(at)
        return out

    def path(self, at: int) -> Path:
        """The file of one image."""
        return self.root / self.files[at]

    def subset(self, rows: NDArray[Any]) -> ImageFiles:
        """The images at `rows`, without a store."""
        return replace(self, files=self.files.take(rows), store=None)

    def kept(self, nbytes: int) -> ImageFiles:
        """The same images, of which as many as fit in `nbytes` are kept once they are decoded."""
        each = max(1, self.nbytes // max(1, len(self)))
        slots = min(len(self), nbytes // each)
        if slots < 1:
            return replace(self, store=None)
        # Memory of its own mapping, which costs nothing until it is written to.
        pixels = np.frombuffer(mmap.mmap(-1, slots * each), np.uint8).reshape(slots, *self.shape[1:])
        # Large enough to be shared between processes, not copied with the message.
        return replace(self, store=Store(pixels, np.zeros(max(slots, 4096), np.uint8), slots))

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of the names and sizes of the files, and of the form they are brought to."""
        hashed = hashlib.sha256(f"{self.shape} {self.fit}\n".encode())
        hashed.update(self.files.text.tobytes())
        for at in range(len(self)):
            hashed.update(self.path(at).stat().st_size.to_bytes(8, "little"))
        return hashed.hexdigest()

    def decode(self, at: int) -> NDArray[np.uint8]:
        """uint8 [C, H, W] or [H, W]: one image, from its file."""
        return decode(self.path(at), self.channels, self.height, self.width, self.fit, self.ids)

    def _image(self, at: int) -> NDArray[np.uint8]:
        store, slot = self.store, self._slot(at)
        if store is None or slot is None:
            return self.decode(at)
        if not store.filled[slot]:
            store.pixels[slot] = self.decode(at)
            store.filled[slot] = 1
        kept: NDArray[np.uint8] = store.pixels[slot]
        return kept

    def _slot(self, at: int) -> int | None:
        if self.store is None:
            return None
        slots, n = self.store.slots, len(self)
        slot = at * slots // n
        return slot if (at + 1) * slots // n > slot else None


def decode(
    path: Path, channels: int, height: int, width: int, fit: Fit, ids: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """uint8 [C, H, W], or [H, W] where `channels` is 0: the image in a file.

    Raises `DataError` with the file's name where it cannot be decoded.
    """
    try:
        with Image.open(path) as image:
            image.load()
            mask = channels == 0
            picture = image if mask else image.convert("RGB" if channels == 3 else "L")
            pixels = np.asarray(fitted(picture, height, width, fit, mask))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image cannot be decoded: {error}", where=str(path)) from error
    if mask:
        return pixels.astype(np.uint8) if ids is None else ids[pixels]
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def placement(
    width: int, height: int, to_width: int, to_height: int, fit: Fit
) -> tuple[float, float, float, float]:
    """(x scale, y scale, x shift, y shift): where a pixel of the file lands in the delivered image."""
    across, down = to_width / width, to_height / height
    if fit != "stretch":
        across = down = max(across, down) if fit == "crop" else min(across, down)
    new_width, new_height = max(1, round(width * across)), max(1, round(height * down))
    return (
        new_width / width,
        new_height / height,
        float((to_width - new_width) // 2),
        float((to_height - new_height) // 2),
    )


def fitted(image: Image.Image, height: int, width: int, fit: Fit, mask: bool = False) -> Image.Image:
    """The image brought to `width` x `height`; a mask by nearest neighbour and filled up with 255."""
    if image.size == (width, height):
        return image
    across, down, left, top = placement(*image.size, width, height, fit)
    size = (round(image.width * across), round(image.height * down))
    scaled = image.resize(size, Image.Resampling.NEAREST if mask else Image.Resampling.BILINEAR)
    if fit == "stretch":
        return scaled
    fill: Any = 255 if mask else 0
    canvas = Image.new(scaled.mode, (width, height), fill)
    canvas.paste(scaled, (int(left), int(top)))
    return canvas


def decode_all(images: ImageFiles, threads: int) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """(pixels uint8 [n, ...], faults by position): every image, decoded by several threads."""
    out = np.zeros(images.shape, np.uint8)
    faults: dict[int, str] = {}

    def one(out: NDArray[np.uint8], at: int) -> None:
        try:
            out[at] = images.decode(at)
        except DataError as error:
            faults[at] = error.what

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(one, out), range(len(images))))
    return out, faults
