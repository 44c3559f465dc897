"""EMNIST: handwritten letters and digits of NIST, in six ways of counting the classes."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset, Examples, check_labels
from fedlens.data.datasets.dataset_files import locate, published
from fedlens.data.datasets.mnist import IMAGES_MAGIC, LABELS_MAGIC, SIDE, read_idx

SplitName = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]

_ALL = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
# Small letters that look like their capitals are one class with them.
_MERGED = tuple(c for c in _ALL if c not in "cijklmopsuvwxyz")
_DIGITS = tuple(string.digits)
_BLOCK = 4096  # images turned at a time


@dataclass(frozen=True)
class Split:
    """One of the six splits: its numbers of images, its classes, and the number its labels start from."""

    counts: tuple[int, int]
    classes: tuple[str, ...]
    first: int = 0


SPLITS: dict[str, Split] = {
    "byclass": Split((697_932, 116_323), _ALL),
    "bymerge": Split((697_932, 116_323), _MERGED),
    "balanced": Split((112_800, 18_800), _MERGED),
    "letters": Split((124_800, 20_800), tuple(string.ascii_lowercase), first=1),
    "digits": Split((240_000, 40_000), _DIGITS),
    "mnist": Split((60_000, 10_000), _DIGITS),
}


def emnist(
    root: Path,
    download: bool,
    seed: int,
    *,
    split: Annotated[
        SplitName,
        Field(
            description="byclass (62 classes), bymerge or balanced (47), letters (26), digits or mnist (10)"
        ),
    ] = "balanced",
) -> Dataset:
    """EMNIST, from `root/EMNIST/raw`: handwritten characters of 28x28, ink bright; `seed` plays no part.

    | split | train | test | classes |
    |---|---|---|---|
    | byclass | 697,932 | 116,323 | 62: digits, capitals, small letters |
    | bymerge | 697,932 | 116,323 | 47: 15 small letters are one class with their capitals |
    | balanced | 112,800 | 18,800 | 47, all equally often |
    | letters | 124,800 | 20,800 | 26: capital and small together; the files count from 1, here from 0 |
    | digits | 240,000 | 40,000 | 10 |
    | mnist | 60,000 | 10,000 | 10 |

    The four files `emnist-<split>-{train,test}-{images-idx3,labels-idx1}-ubyte` may be plain or end in
    `.gz`, and may stand in the archive's folder `gzip`. The files hold every image transposed; here it stands
    upright. Mean and deviation are those of the training images. There are no writers in these files: those
    are in `femnist`.

    Source: Cohen, Afshar, Tapson, van Schaik 2017, EMNIST: an extension of MNIST to handwritten letters.

    Raises `DataError` if files are missing, damaged, or hold another number of images than was published.
    `download` fetches the archive of all six splits, 562 MB.

    >>> SPLITS["letters"].classes[0], len(SPLITS["balanced"].classes)
    ('a', 47)
    """
    counts, classes = SPLITS[split].counts, SPLITS[split].classes
    names = [
        f"emnist-{split}-{part}-{kind}-ubyte"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    wanted = [f"EMNIST/raw/{name}|EMNIST/raw/{name}.gz|EMNIST/raw/gzip/{name}.gz" for name in names]
    paths = locate("emnist", root, download, [tuple(wanted)])
    train = _read_split(SPLITS[split], paths[0], paths[1], counts[0])
    test = _read_split(SPLITS[split], paths[2], paths[3], counts[1])
    source = f"{CATALOGUE['emnist'].source}, split {split}"
    return published("emnist", (train, test), classes, source=source)


def _read_split(split: Split, images: Path, labels: Path, count: int) -> Examples:
    inputs = read_idx(images, IMAGES_MAGIC, (count, SIDE, SIDE))
    _transpose(inputs)
    targets = read_idx(labels, LABELS_MAGIC, (count,)).astype(np.int64) - split.first
    try:
        check_labels(targets, len(split.classes), where=str(labels))
    except DataError as error:
        counted = f", once counted from 0 and not from {split.first}" if split.first else ""
        raise DataError(error.what + counted, where=error.where) from None
    return Examples(inputs.reshape(count, 1, SIDE, SIDE), targets)


def _transpose(images: NDArray[np.uint8]) -> None:
    """Transposes every image in place: a copy of `byclass` as a whole would take another 550 MB."""
    for start in range(0, len(images), _BLOCK):
        block = images[start : start + _BLOCK]
        block[:] = block.transpose(0, 2, 1).copy()
