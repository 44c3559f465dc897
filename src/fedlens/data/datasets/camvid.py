"""CamVid: frames of drives through Cambridge, each pixel labelled, in the form of the SegNet tutorial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import locate, published
from fedlens.data.datasets.masks import Pairs, class_ids, masked, missing_images, paired
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.images import Fit

COUNTS = {"train": 367, "val": 101, "test": 233}
SPLITS = {split: Pairs(split, f"CamVid/{split}/*.png", f"CamVid/{split}annot/*.png") for split in COUNTS}
_FRAME = re.compile(r"(?P<sequence>[0-9A-Za-z]+)_f?(?P<frame>\d+)")


def camvid(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: common.SizeOrOwn = None,
    fit: common.Fit = "pad",
    val: Annotated[
        Literal["train", "leave"], Field(description="whether the published val split joins training")
    ] = "train",
) -> Dataset:
    """CamVid: 701 frames of four drives, 11 classes; `seed` plays no part.

    Reads `root/CamVid/{train,val,test}/<sequence>_<frame>.png` and, under the same names, the masks in
    `{train,val,test}annot`, with the ids of the SegNet tutorial: 0 to 10 are the classes, 11 is void and becomes
    255. The published frames are 480x360; without `size`, all frames are brought to the size of the first.

    Training has 468 frames, which are the published train (367) and val (101), because fedlens holds out its own
    share with `data.validation`; with `val="leave"` it has the 367 alone, as SegNet had. Test has 233. Columns:
    `sequence`, the drive (0001TP, 0006R0, 0016E5 in training; 0001TP and Seq05VD in testing), `client`, the
    same, and `frame`, its number in the drive. A client's frames are seconds apart and look alike.

    Raises `DataError` if folders are missing, a frame has no mask or a mask no frame, or a name is not of
    this form; with `download` too, because there is no archive to fetch.

    Source: Brostow, Fauqueur and Cipolla 2009, Semantic object classes in video; the split of Badrinarayanan,
    Kendall and Cipolla 2017, SegNet.
    """
    given = None if size is None else common.size_of(size)
    joined = ["train", "val"] if val == "train" else ["train"]
    locate(
        "camvid",
        root,
        files=[tuple(f"CamVid/{one}{kind}" for one in (*joined, "test") for kind in ("", "annot"))],
    )
    frames = {split: _frames(root, SPLITS[split]) for split in (*joined, "test")}
    first = SPLITS["train"].file(SPLITS["train"].image, frames["train"][0])
    to = given or own_size(root / first)
    notes = [
        note for split, keys in frames.items() for note in missing_images(split, len(keys), COUNTS[split])
    ]
    train = _examples(root, [(SPLITS[split], key) for split in joined for key in frames[split]], to, fit)
    test = _examples(root, [(SPLITS["test"], key) for key in frames["test"]], to, fit)
    return published("camvid", (train, test), notes=notes)


def _frames(root: Path, pairs: Pairs) -> list[str]:
    """The frames of a split in order, each with an image and a mask."""
    keys = paired(root, pairs)
    findings = Findings()
    for key in keys:
        if not _FRAME.fullmatch(key):
            where = root / pairs.file(pairs.image, key)
            findings.add(where, "the name is not <sequence>_<frame>.png", "take the published names")
    findings.settle(None)
    return keys


def _examples(root: Path, frames: list[tuple[Pairs, str]], size: tuple[int, int], fit: Fit) -> Examples:
    names = [match for _, key in frames if (match := _FRAME.fullmatch(key))]
    sequence = np.array([name["sequence"] for name in names])
    frame = np.array([int(name["frame"]) for name in names])
    images = [pairs.file(pairs.image, key) for pairs, key in frames]
    masks = [pairs.file(pairs.mask, key) for pairs, key in frames]
    columns = {"client": sequence, "sequence": sequence, "frame": frame}
    return masked(root, images, masks, size, fit, columns, class_ids(range(len(CATALOGUE["camvid"].labels))))


def own_size(path: Path) -> tuple[int, int]:
    """(height, width) of the image in a file, from its first bytes. Raises `DataError`."""
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image cannot be decoded: {error}", where=str(path)) from error
