"""FEMNIST: handwritten characters by writer, in LEAF's JSON files."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

from fedlens.data.dataset import Dataset
from fedlens.data.datasets.dataset_files import published
from fedlens.data.datasets.leaf import Converted, User, by_user, split_folders, whole_numbers

SIDE = 28
PIXELS = SIDE * SIDE
CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def femnist(root: Path, download: bool, seed: int) -> Dataset:
    """FEMNIST from `root/femnist/{train,test}/*.json`: characters of 28x28 by writer; `seed` plays no part.

    Both ways in which LEAF splits are read: by sample (every writer is in both splits) and by user (the
    writers of the test split are others). LEAF's own count of the whole is 805,263 images of 3,550 writers;
    its script of today makes 817,851 of 3,597. The text of the whole is 13 GB and takes some minutes to read,
    a file at a time; `--sf 0.05` of LEAF's script makes a twentieth of it.

    Pixels are kept as LEAF stores them, times 255: the paper is 1.0 and becomes 255, ink is dark. (In EMNIST
    and MNIST ink is bright.) Columns: `client` and `writer`, both the writer's id. Mean and deviation are
    those of the training images.

    Source: Caldas et al. 2018, LEAF: a benchmark for federated settings, arXiv 1812.01097.

    Raises `DataError` if the files are missing (they are made by LEAF's script, not fetched) or broken, an
    image does not have 784 numbers in 0 .. 1, or a label is not in 0 .. 61.

    >>> CLASSES[0], CLASSES[10], CLASSES[36], len(CLASSES)
    ('0', 'A', 'a', 62)
    """
    train, test = (by_user(folder, _images, "writer") for folder in split_folders(root, "femnist"))
    return published("femnist", (train, test), CLASSES)


def _images(user: User) -> Converted:
    """(uint8 [n, 1, 28, 28], int64 [n]) of one writer."""
    targets = whole_numbers(user, len(CLASSES))
    for at, image in enumerate(user.x):
        if not isinstance(image, list) or len(image) != PIXELS:
            size = f"{len(image)} numbers" if isinstance(image, list) else f"a {type(image).__name__}"
            raise user.fault(at, f"is {size}, and {PIXELS} numbers are expected")
    pixels = np.array(user.x)
    if pixels.ndim != 2 or pixels.dtype.kind not in "fiu":
        raise user.fault(0, "or a later one is not made of numbers alone")
    wrong = ~((pixels >= 0) & (pixels <= 1))  # not-a-number is wrong too
    if wrong.any():
        at, pixel = (int(where) for where in np.argwhere(wrong)[0])
        raise user.fault(at, f"has {pixels[at, pixel]} at pixel {pixel}, and 0 .. 1 is expected")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), targets
