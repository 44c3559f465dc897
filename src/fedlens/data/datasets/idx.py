"""MNIST and Fashion-MNIST, in the IDX files in which both are published."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples, check_labels
from fedlens.data.datasets.missing_files import DAMAGED, missing
from fedlens.data.download import Resource, fetch

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
SIDE = 28


@dataclass(frozen=True)
class IdxRelease:
    """What is published under a name: where it is, how much of it there is, and what it says."""

    name: str
    folder: str
    mirrors: tuple[str, ...]
    md5: tuple[str, str, str, str]
    counts: tuple[int, int]
    classes: tuple[str, ...]
    mean: float
    std: float
    licence: str
    source: str


FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

MNIST = IdxRelease(
    name="mnist",
    folder="MNIST/raw",
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/",),
    md5=(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    counts=(60_000, 10_000),
    classes=tuple(str(digit) for digit in range(10)),
    mean=0.1307,
    std=0.3081,
    licence="CC BY-SA 3.0",
    source="MNIST, LeCun, Cortes and Burges 1998",
)

FASHION_MNIST = IdxRelease(
    name="fashion-mnist",
    folder="FashionMNIST/raw",
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    md5=(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    counts=(60_000, 10_000),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mean=0.28604,
    std=0.35302,
    licence="MIT, Zalando SE",
    source="Fashion-MNIST, Xiao, Rasul and Vollgraf 2017, github.com/zalandoresearch/fashion-mnist",
)


def mnist(root: Path, download: bool, seed: int) -> Dataset:
    """MNIST, from `root/MNIST/raw`: 60,000 + 10,000 images of 28x28; `seed` plays no part.

    The four files may be plain or end in `.gz`. Raises `DataError` where they are missing, damaged, or hold
    another number of images than was published.
    """
    return read_published(MNIST, root, download)


def fashion_mnist(root: Path, download: bool, seed: int) -> Dataset:
    """Fashion-MNIST, from `root/FashionMNIST/raw`: 60,000 + 10,000 images of 28x28; `seed` plays no part.

    The four files may be plain or end in `.gz`. Raises `DataError` where they are missing, damaged, or hold
    another number of images than was published.
    """
    return read_published(FASHION_MNIST, root, download)


def read_published(what: IdxRelease, root: Path, download: bool) -> Dataset:
    """The dataset `what` below `root`, fetched first where it is not there and `download` says so."""
    folder = root / what.folder
    paths = [_find(folder, file) for file in FILES]
    if download:
        for at, (file, md5) in enumerate(zip(FILES, what.md5, strict=True)):
            urls = tuple(f"{mirror}{file}.gz" for mirror in what.mirrors)
            paths[at] = paths[at] or fetch(Resource(f"{file}.gz", urls, md5), folder)
    found = [path for path in paths if path is not None]
    if len(found) < len(FILES):
        wanted = [file for file, path in zip(FILES, paths, strict=True) if path is None]
        raise missing(what.name, folder, f"{', '.join(wanted)} (each plain or .gz)")
    return Dataset(
        name=what.name,
        train=_read_split(found[0], found[1], what.counts[0], len(what.classes)),
        test=_read_split(found[2], found[3], what.counts[1], len(what.classes)),
        classes=what.classes,
        mean=(what.mean,),
        std=(what.std,),
        licence=what.licence,
        source=what.source,
    )


def _find(folder: Path, file: str) -> Path | None:
    candidates = (folder / file, folder / f"{file}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _read_split(images: Path, labels: Path, count: int, classes: int) -> Examples:
    inputs = read_idx(images, IMAGES_MAGIC, (count, SIDE, SIDE)).reshape(count, 1, SIDE, SIDE)
    targets = read_idx(labels, LABELS_MAGIC, (count,)).astype(np.int64)
    check_labels(targets, classes, where=str(labels))
    return Examples(inputs, targets)


def read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The bytes of an IDX file, plain or gzipped.

    Its header is big-endian: the magic number (2051 for images, 2049 for labels), then one 32-bit size a
    dimension.

    Raises `DataError` that names the file, what was expected and what was found, where the magic number or
    the sizes are not `magic` and `shape`, or the file is shorter or longer than they say.
    """
    try:
        with _open(path) as file:
            return _read(file, path, magic, shape)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), hint=DAMAGED) from error


def _open(path: Path) -> BinaryIO:
    # A gzip file is a readable binary file in all but its declared type.
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _read(file: BinaryIO, path: Path, magic: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    header = file.read(4 * (1 + len(shape)))
    if len(header) < 4 * (1 + len(shape)):
        raise DataError(
            f"the file ends in its header, after {len(header)} bytes", where=str(path), hint=DAMAGED
        )
    found_magic, *found_shape = struct.unpack(f">{1 + len(shape)}I", header)
    if found_magic != magic:
        raise DataError(
            f"magic number {magic} was expected, found {found_magic}", where=str(path), hint=DAMAGED
        )
    if tuple(found_shape) != shape:
        raise DataError(
            f"the header says {_by(found_shape)}, and {_by(shape)} was expected",
            where=str(path),
            hint=DAMAGED,
        )
    data = np.empty(shape, np.uint8)
    view, filled = memoryview(cast(bytearray, data)).cast("B"), 0
    while filled < data.nbytes and (got := file.readinto(view[filled:])):  # type: ignore[attr-defined]
        filled += got
    if filled < data.nbytes or file.read(1):
        more = "more" if filled == data.nbytes else str(filled)
        raise DataError(
            f"{data.nbytes} bytes of data were expected, found {more}", where=str(path), hint=DAMAGED
        )
    return data


def _by(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(str(size) for size in shape)
