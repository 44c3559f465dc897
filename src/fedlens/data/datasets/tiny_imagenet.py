"""Tiny ImageNet: 200 classes of ImageNet at 64x64."""

from __future__ import annotations

from pathlib import Path

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published, read_lines
from fedlens.data.datasets.folders import check_present
from fedlens.data.datasets.imagenet import class_names, in_class_folders, photographs, read_words

SIDE = 64


def tiny_imagenet(root: Path, download: bool, seed: int) -> Dataset:
    """Tiny ImageNet from `root/tiny-imagenet-200`: photographs of 64x64, 200 classes; `seed` plays no part.

    `train/<wnid>/images/*.JPEG` is the training split, 100,000 images; the 10,000 validation images, with the
    classes of `val/val_annotations.txt`, are the test split (the published test images have no labels). The
    classes are those of `wnids.txt`, and labels are positions in the sorted ids; names come from `words.txt`.
    A smaller copy is read as it is. Images stay in their files. Mean and deviation are ImageNet's usual ones.
    There are no clients in it.

    Source: Le, Yang 2015, Tiny ImageNet visual recognition challenge, Stanford CS231N.

    Raises `DataError` if files are missing, a class has no folder or a folder no class, an annotation is
    not of a file and a class, or its image is not there.
    """
    list_path, words_path, _, annotations = locate("tiny-imagenet", root, download)
    folder = list_path.parent
    wnids = sorted({line.strip() for line in read_lines(list_path)} - {""})
    train = in_class_folders(folder, "train", wnids, SIDE, "images")
    test = _validation(folder, annotations, wnids)
    return published("tiny-imagenet", (train, test), class_names(wnids, read_words(words_path, "\t")))


def _validation(folder: Path, path: Path, wnids: list[str]) -> Examples:
    """The validation images in the order of the annotations: file, class, and a box, which is not read."""
    places = {wnid: label for label, wnid in enumerate(wnids)}
    names: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t")
        if len(parts) < 2 or parts[1] not in places:
            what = f"the class '{parts[1]}' is not in wnids.txt" if len(parts) > 1 else "there is no class"
            raise damaged(what, path, number, "a line is: file, class, box")
        names.append(f"val/images/{parts[0]}")
        labels.append(places[parts[1]])
    check_present(folder, names, str(path))
    return photographs(folder, names, labels, SIDE)
