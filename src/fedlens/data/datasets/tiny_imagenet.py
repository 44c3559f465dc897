"""Tiny ImageNet: 200 classes of ImageNet at 64x64."""

from __future__ import annotations

from pathlib import Path

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD, check_present, read_lines
from fedlens.data.datasets.imagenet import class_names, in_class_folders, photographs, read_words
from fedlens.data.datasets.missing_files import missing
from fedlens.data.datasets.zips import unzip
from fedlens.data.download import Resource, fetch

FOLDER = "tiny-imagenet-200"
SIDE = 64
ARCHIVE = Resource(
    "tiny-imagenet-200.zip",
    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
    "90528d7ca1a48142e341f4ef8d21d0de",
)


def tiny_imagenet(root: Path, download: bool, seed: int) -> Dataset:
    """Tiny ImageNet from `root/tiny-imagenet-200`: photographs of 64x64, 200 classes; `seed` plays no part.

    `train/<wnid>/images/*.JPEG` is the training split, 100,000 images; the 10,000 validation images, with the
    classes of `val/val_annotations.txt`, are the test split (the published test images have no labels). The
    classes are those of `wnids.txt`, and labels are positions in the sorted ids; names come from `words.txt`.
    A smaller copy is read as it is. Images stay in their files. Mean and deviation are ImageNet's usual ones.
    There are no clients in it.

    Source: Le, Yang 2015, Tiny ImageNet visual recognition challenge, Stanford CS231N.

    Raises `DataError` where files are missing, a class has no folder or a folder no class, an annotation is
    not of a file and a class, or its image is not there.
    """
    folder = root / FOLDER
    needed = ("wnids.txt", "words.txt", "train", "val/val_annotations.txt")
    if download and not all((folder / name).exists() for name in needed):
        archive = fetch(ARCHIVE, root)
        unzip(archive, root, lambda member: member.startswith(f"{FOLDER}/") and "/test/" not in member)
    gone = [name for name in needed if not (folder / name).exists()]
    if gone:
        raise missing("tiny-imagenet", folder, ", ".join(gone))
    wnids = sorted({line.strip() for line in read_lines(folder / "wnids.txt")} - {""})
    return Dataset(
        name="tiny-imagenet",
        train=in_class_folders(folder, "train", wnids, SIDE, "images"),
        test=_validation(folder, wnids),
        classes=class_names(wnids, read_words(folder / "words.txt", "\t")),
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence="ImageNet's terms of access: research and teaching, not for commerce",
        source="Tiny ImageNet, Le and Yang 2015, Stanford CS231N, cs231n.stanford.edu",
    )


def _validation(folder: Path, wnids: list[str]) -> Examples:
    """The validation images in the order of the annotations: file, class, and a box that is left unread."""
    path = folder / "val" / "val_annotations.txt"
    places = {wnid: label for label, wnid in enumerate(wnids)}
    names: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t")
        if len(parts) < 2 or parts[1] not in places:
            what = f"the class '{parts[1]}' is not in wnids.txt" if len(parts) > 1 else "there is no class"
            raise DataError(what, where=f"{path}, line {number}", hint="a line is: file, class, box")
        names.append(f"val/images/{parts[0]}")
        labels.append(places[parts[1]])
    check_present(folder, names, str(path))
    return photographs(folder, names, labels, SIDE)
