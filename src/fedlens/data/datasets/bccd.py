"""BCCD: blood cells under a microscope, with boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedlens.data.dataset import Dataset
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD, by_hand
from fedlens.data.datasets.picture_size import HowToFit, Size, size_of
from fedlens.data.datasets.voc_files import VocFolder, detection, no_leak

CLASSES = ("RBC", "WBC", "Platelets")
_HOW = "clone github.com/Shenggan/BCCD_Dataset, and put its folder BCCD there"


def bccd(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: Size = (480, 640),
    fit: HowToFit = "pad",
    val: Annotated[
        Literal["train", "leave"], Field(description="whether the published val split joins training")
    ] = "train",
) -> Dataset:
    """BCCD: 364 photographs of blood, 640x480, with 4,888 boxes of 3 classes; `seed` plays no part.

    Reads `root/BCCD/{JPEGImages,Annotations,ImageSets/Main/{train,val,test}.txt}`. Training has 292 images, which
    are the published train (205) and val (87), because fedlens holds out its own share with `data.validation`;
    with `val="leave"` it has the 205 alone. Test has 72. There is no natural client; the column `image` is the
    name of the image.

    Boxes come out in pixels of the delivered image. Two boxes of red blood cells have corners that coincide:
    they are left out, and `Dataset.notes` says so. See `fedlens.data.box_transforms.placed` for what `fit="crop"` does
    to boxes.

    Raises `DataError` where files are missing or damaged, and with `download`, because there is no archive to
    fetch.

    Source: github.com/Shenggan/BCCD_Dataset.
    """
    folder = VocFolder(root, "BCCD", CLASSES)
    lists = ["train", "val"] if val == "train" else ["train"]
    wanted = [folder.path / "ImageSets" / "Main" / f"{name}.txt" for name in (*lists, "test")]
    if not all(path.is_file() for path in wanted):
        raise by_hand("bccd", root, "BCCD/{JPEGImages,Annotations,ImageSets/Main/{train,val,test}.txt}", _HOW)
    train_ids, test_ids = folder.ids(lists), folder.ids(["test"])
    no_leak(train_ids, test_ids, folder.path / "ImageSets" / "Main")
    train, train_notes = detection(folder, train_ids, size_of(size), fit, "train")
    test, test_notes = detection(folder, test_ids, size_of(size), fit, "test")
    return Dataset(
        name="bccd",
        train=train,
        test=test,
        classes=CLASSES,
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence="MIT",
        source="BCCD, github.com/Shenggan/BCCD_Dataset",
        notes=(*train_notes, *test_notes),
    )
