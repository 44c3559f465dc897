"""MNIST and Fashion-MNIST, in the IDX files in which both are published."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset, Examples, check_labels
from fedlens.data.datasets.dataset_files import damaged, locate, published, reading, split_counts

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
SIDE = 28


def mnist(root: Path, download: bool, seed: int) -> Dataset:
    """MNIST, from `root/MNIST/raw`: 60,000 + 10,000 images of 28x28; `seed` plays no part.

    The four files may be plain or end in `.gz`. Raises `DataError` if they are missing, damaged, or hold
    another number of images than was published.
    """
    return _read("mnist", root, download)


def fashion_mnist(root: Path, download: bool, seed: int) -> Dataset:
    """Fashion-MNIST, from `root/FashionMNIST/raw`: 60,000 + 10,000 images of 28x28; `seed` plays no part.

    The four files may be plain or end in `.gz`. Raises `DataError` if they are missing, damaged, or hold
    another number of images than was published.
    """
    return _read("fashion-mnist", root, download)


def _read(name: str, root: Path, download: bool) -> Dataset:
    paths, classes = locate(name, root, download), len(CATALOGUE[name].labels)
    files = zip(paths[::2], paths[1::2], split_counts(name), strict=True)
    return published(name, [_read_split(images, labels, count, classes) for images, labels, count in files])


def _read_split(images: Path, labels: Path, count: int, classes: int) -> Examples:
    inputs = read_idx(images, IMAGES_MAGIC, (count, SIDE, SIDE)).reshape(count, 1, SIDE, SIDE)
    targets = read_idx(labels, LABELS_MAGIC, (count,)).astype(np.int64)
    check_labels(targets, classes, where=str(labels))
    return Examples(inputs, targets)


def read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The bytes of an IDX file, plain or gzipped.

    Its header is big-endian: the magic number (2051 for images, 2049 for labels), then one 32-bit size for each
    dimension.

    Raises `DataError` with the file, the expected and the actual value if the magic number or the sizes are not
    `magic` and `shape`, or the file is shorter or longer than they say.
    """
    with reading(path), _open(path) as file:
        size = 4 * (1 + len(shape))
        header = file.read(size)
        if len(header) < size:
            raise damaged(f"the file ends in its header, after {len(header)} bytes", path)
        file_magic, *file_shape = struct.unpack(f">{size // 4}I", header)
        if file_magic != magic:
            raise damaged(f"magic number {magic} was expected, found {file_magic}", path)
        if tuple(file_shape) != shape:
            raise damaged(f"the header says {_by(file_shape)}, and {_by(shape)} was expected", path)
        data = np.empty(shape, np.uint8)
        filled = file.readinto(data)  # type: ignore[attr-defined]
        if filled < data.nbytes or file.read(1):
            more = "more" if filled == data.nbytes else str(filled)
            raise damaged(f"{data.nbytes} bytes of data were expected, found {more}", path)
        return data


def _open(path: Path) -> BinaryIO:
    # A gzip file is a readable binary file in all but its declared type.
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _by(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(str(size) for size in shape)
