"""BCCD: blood cells under a microscope, with boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.dataset_files import locate, published
from fedlens.data.datasets.voc_files import VocFolder, detection_splits
from fedlens.data.formats import common_settings as common


def bccd(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: common.GivenSize = (480, 640),
    fit: common.Fit = "pad",
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
    they are left out, and `Dataset.notes` says so. See `fedlens.data.boxes.placed` for what `fit="crop"` does
    to boxes.

    Raises `DataError` if files are missing or damaged, and with `download`, because there is no archive to
    fetch.

    Source: github.com/Shenggan/BCCD_Dataset.
    """
    lists = ["train", "val"] if val == "train" else ["train"]
    locate("bccd", root, files=[tuple(f"BCCD/ImageSets/Main/{name}.txt" for name in (*lists, "test"))])
    folder = VocFolder(root, "BCCD", CATALOGUE["bccd"].labels)
    train, test, notes = detection_splits(folder, lists, ["test"], common.size_of(size), fit)
    return published("bccd", (train, test), notes=notes)
