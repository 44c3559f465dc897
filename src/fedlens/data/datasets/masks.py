"""Published images with masks: pairs of files, and the ids that masks are read with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.dataset_info import VOID
from fedlens.data.dataset import Examples
from fedlens.data.datasets.dataset_files import damaged
from fedlens.data.diagnostics import Findings
from fedlens.data.images import Fit, ImageFiles, Paths


@dataclass(frozen=True)
class Pairs:
    """Where the images and masks of one split are, as glob patterns below the data folder.

    An image and its mask have the same key, which is the text from the first to the last asterisk.

    >>> Pairs("train", "a/*/*_x.png", "b/*/*_y.png").file("a/*/*_x.png", "c/1")
    'a/c/1_x.png'
    """

    split: str
    image: str
    mask: str

    def file(self, pattern: str, key: str) -> str:
        """The file with this key: the part of the pattern before the asterisks, the key, the part after them."""
        return f"{pattern.partition('*')[0]}{key}{pattern.rpartition('*')[2]}"

    def keys(self, root: Path, pattern: str) -> set[str]:
        """The keys of all files below `root` that match the pattern, without hidden files."""
        before, after = len(pattern.partition("*")[0]), len(pattern.rpartition("*")[2])
        files = [path.relative_to(root).as_posix() for path in root.glob(pattern) if path.name[0] != "."]
        return {file[before : len(file) - after] for file in files}


def paired(root: Path, pairs: Pairs) -> list[str]:
    """The keys of a split, sorted; each has an image and a mask.

    Raises `DataError` with all images without a mask and masks without an image, or if there are no images.
    """
    images, masks = pairs.keys(root, pairs.image), pairs.keys(root, pairs.mask)
    findings = Findings()
    sides = ((images - masks, pairs.image, pairs.mask), (masks - images, pairs.mask, pairs.image))
    for unpaired, present, missing in sides:
        for key in sorted(unpaired):
            place, _, name = pairs.file(missing, key).rpartition("/")
            hint = "unpack or copy the published files again"
            findings.add(root / pairs.file(present, key), f"there is no {name} in {place}", hint)
    findings.settle(None)
    if not images:
        folder = root / pairs.image.partition("*")[0]
        pattern = pairs.image[pairs.image.index("*") :]
        raise damaged(
            f"there are no images {pattern}", folder, hint="unpack or copy the published images there"
        )
    return sorted(images, key=lambda key: key.split("/"))


def masked(
    root: Path,
    images: Sequence[str],
    masks: Sequence[str],
    size: tuple[int, int],
    fit: Fit,
    columns: Mapping[str, NDArray[Any]],
    ids: NDArray[np.uint8] | None = None,
    opener: str | None = None,
) -> Examples:
    """Images and masks in files below `root`, brought to `size`; for `ids` and `opener` see `ImageFiles`."""
    masks_in_files = ImageFiles(root, Paths.of(masks), 0, *size, fit, ids=ids, opener=opener)
    return Examples(ImageFiles(root, Paths.of(images), 3, *size, fit), masks_in_files, columns)


def class_ids(published: Sequence[int]) -> NDArray[np.uint8]:
    """uint8 [256]: the class of each id in the files, its position in `published`; 255, void, for all others.

    >>> class_ids([7, 33])[[7, 33, 0]].tolist()
    [0, 1, 255]
    """
    ids = np.full(256, VOID, np.uint8)
    ids[list(published)] = np.arange(len(published))
    return ids


def missing_images(split: str, count: int, published: int) -> list[str]:
    """A note if a split has another number of images than was published."""
    if count == published:
        return []
    return [f"{count:,} of the {published:,} published images of {split} are there"]
