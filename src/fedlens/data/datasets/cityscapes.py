"""Cityscapes: street scenes of 21 cities in Germany and next to it, each pixel labelled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.dataset import VOID, Dataset, Examples
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD, by_hand, folders_in, images_in
from fedlens.data.datasets.picture_size import HowToFit, Size, size_of
from fedlens.data.diagnostics import Findings
from fedlens.data.images import Fit, ImageFiles, Paths

# Of the published id and class, those with a training id, which is the position here.
LABELS = (
    (7, "road"),
    (8, "sidewalk"),
    (11, "building"),
    (12, "wall"),
    (13, "fence"),
    (17, "pole"),
    (19, "traffic light"),
    (20, "traffic sign"),
    (21, "vegetation"),
    (22, "terrain"),
    (23, "sky"),
    (24, "person"),
    (25, "rider"),
    (26, "car"),
    (27, "truck"),
    (28, "bus"),
    (31, "train"),
    (32, "motorcycle"),
    (33, "bicycle"),
)
COUNTS = {"train": 2_975, "val": 500}
_IMAGE, _MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"
_HOW = (
    "register at cityscapes-dataset.com, and unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip "
    "into cityscapes/"
)


def cityscapes(
    root: Path, download: bool, seed: int, *, size: Size = (512, 1024), fit: HowToFit = "pad"
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

    Raises `DataError` where folders are missing, an image has no mask or a mask no image; with `download` too,
    because the files are given out to registered people only.

    Source: Cordts et al. 2016, The Cityscapes Dataset for Semantic Urban Scene Understanding; ids from
    github.com/mcordts/cityscapesScripts, helpers/labels.py.
    """
    folder = root / "cityscapes"
    if not all((folder / kind / split).is_dir() for kind in ("leftImg8bit", "gtFine") for split in COUNTS):
        wanted = "cityscapes/leftImg8bit/{train,val} and cityscapes/gtFine/{train,val}"
        raise by_hand("cityscapes", root, wanted, _HOW)
    found = {split: _pairs(folder, split) for split in COUNTS}
    partial = [
        f"{len(pairs):,} of the {COUNTS[split]:,} published images of {split} are there"
        for split, pairs in found.items()
        if len(pairs) != COUNTS[split]
    ]
    to = size_of(size)
    return Dataset(
        name="cityscapes",
        train=_examples(root, "train", found["train"], to, fit),
        test=_examples(root, "val", found["val"], to, fit),
        classes=tuple(name for _, name in LABELS),
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence="Cityscapes terms of use: non-commercial research, not to be passed on",
        source="Cityscapes, Cordts et al. 2016",
        notes=tuple(partial),
    )


def _pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    """(city, name without ending) of every image of a split, city after city; each has a mask."""
    pairs: list[tuple[str, str]] = []
    findings = Findings()
    cities = {kind: folders_in(folder / kind / split) for kind in ("leftImg8bit", "gtFine")}
    for city in sorted({*cities["leftImg8bit"], *cities["gtFine"]}):
        images = _names(folder / "leftImg8bit" / split / city, _IMAGE)
        masks = _names(folder / "gtFine" / split / city, _MASK)
        for name in sorted(images - masks):
            where = folder / "leftImg8bit" / split / city / f"{name}{_IMAGE}"
            findings.add(
                where, f"there is no {name}{_MASK} in gtFine", "unpack gtFine_trainvaltest.zip again"
            )
        for name in sorted(masks - images):
            where = folder / "gtFine" / split / city / f"{name}{_MASK}"
            hint = "unpack leftImg8bit_trainvaltest.zip again"
            findings.add(where, f"there is no {name}{_IMAGE} in leftImg8bit", hint)
        pairs += [(city, name) for name in sorted(images & masks)]
    findings.settle(None)
    if not pairs:
        empty = str(folder / "leftImg8bit" / split)
        raise DataError(f"there are no images <city>/*{_IMAGE}", where=empty, hint=_HOW)
    return pairs


def _names(folder: Path, ending: str) -> set[str]:
    """The names of the files with this ending, without it."""
    files = images_in(folder) if folder.is_dir() else []
    return {file.removesuffix(ending) for file in files if file.endswith(ending)}


def _examples(
    root: Path, split: str, pairs: list[tuple[str, str]], size: tuple[int, int], fit: Fit
) -> Examples:
    images = [f"cityscapes/leftImg8bit/{split}/{city}/{name}{_IMAGE}" for city, name in pairs]
    masks = [f"cityscapes/gtFine/{split}/{city}/{name}{_MASK}" for city, name in pairs]
    cities = np.array([city for city, _ in pairs])
    return Examples(
        ImageFiles(root, Paths.of(images), 3, *size, fit),
        ImageFiles(root, Paths.of(masks), 0, *size, fit, ids=training_ids()),
        {"client": cities, "city": cities},
    )


def training_ids() -> NDArray[np.uint8]:
    """uint8 [256]: the training id of each published id, 255 where it has none.

    >>> training_ids()[[7, 33, 0, 9]].tolist()
    [0, 18, 255, 255]
    """
    ids = np.full(256, VOID, np.uint8)
    ids[[published for published, _ in LABELS]] = np.arange(len(LABELS))
    return ids
