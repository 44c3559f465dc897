"""Cityscapes: street scenes of 21 cities in Germany and next to it, each pixel labelled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import locate, published, split_counts
from fedlens.data.datasets.masks import Pairs, class_ids, masked, missing_images, paired
from fedlens.data.formats import common_settings as common
from fedlens.data.images import Fit

# The published ids of the classes in the order of their training ids.
IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
SPLITS = tuple(
    Pairs(
        split,
        f"cityscapes/leftImg8bit/{split}/*/*_leftImg8bit.png",
        f"cityscapes/gtFine/{split}/*/*_gtFine_labelIds.png",
    )
    for split in ("train", "val")
)


def cityscapes(
    root: Path, download: bool, seed: int, *, size: common.GivenSize = (512, 1024), fit: common.Fit = "pad"
) -> Dataset:
    """Cityscapes with fine labels: 2,975 + 500 street scenes, 19 classes; `seed` plays no part.

    Reads `root/cityscapes/leftImg8bit/{train,val}/<city>/<city>_<sequence>_<frame>_leftImg8bit.png` and
    `root/cityscapes/gtFine/{train,val}/<city>/..._gtFine_labelIds.png`. The published ids of the 19 classes that
    are evaluated become 0 to 18 (road, sidewalk, ..., bicycle), all others 255, void. Masks are never
    interpolated. The labels of the published test split are withheld, so the val split is the test data here, as
    in chen2022 (table 1).

    Columns: `city` and the same as `client`; 18 cities train and 3 others test. Images are 2048x1024, and come at
    half of that each way unless `size` says otherwise: all of them take 5.5 GB, so most are read from disk over
    and over.

    Raises `DataError` if folders are missing, an image has no mask or a mask no image; with `download` too,
    because the files are given out to registered people only.

    Source: Cordts et al. 2016, The Cityscapes Dataset for Semantic Urban Scene Understanding; ids from
    github.com/mcordts/cityscapesScripts, helpers/labels.py.
    """
    locate("cityscapes", root)
    to = common.size_of(size)
    notes: list[str] = []
    splits = []
    for pairs, count in zip(SPLITS, split_counts("cityscapes"), strict=True):
        keys = paired(root, pairs)
        notes += missing_images(pairs.split, len(keys), count)
        splits.append(_examples(root, pairs, keys, to, fit))
    return published("cityscapes", splits, notes=notes)


def _examples(root: Path, pairs: Pairs, keys: list[str], size: tuple[int, int], fit: Fit) -> Examples:
    images = [pairs.file(pairs.image, key) for key in keys]
    masks = [pairs.file(pairs.mask, key) for key in keys]
    cities = np.array([key.partition("/")[0] for key in keys])
    return masked(root, images, masks, size, fit, {"client": cities, "city": cities}, training_ids())


def training_ids() -> NDArray[np.uint8]:
    """uint8 [256]: the training id of each published id, or 255 if it has none.

    >>> training_ids()[[7, 33, 0, 9]].tolist()
    [0, 18, 255, 255]
    """
    return class_ids(IDS)
