"""ImageNet (ILSVRC 2012), in class folders; validation images in folders too, or flat beside the devkit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published, read_lines
from fedlens.data.datasets.folders import folders_in, images_in
from fedlens.data.diagnostics import Findings
from fedlens.data.images import ImageFiles, Paths

DEVKIT = "ILSVRC2012_devkit_t12"
_WNID = re.compile(r"n\d{8}")


def imagenet(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: Annotated[int, Field(ge=8, le=1024, description="pixels per side, e.g. 224, 64 or 32")] = 224,
) -> Dataset:
    """ImageNet (ILSVRC 2012) from `root/imagenet` or `root/ILSVRC2012`; `seed` plays no part.

    `train/<wnid>/*.JPEG` is the training split and the published validation images are the test split: in
    `val/<wnid>/*.JPEG`, or flat in `val/` with the folder `ILSVRC2012_devkit_t12` beside them. Complete, these
    are 1,281,167 and 50,000 images of 1,000 classes; a smaller copy with fewer classes or images is read as it
    is. Labels are positions in the sorted WordNet ids, as in torchvision.

    Class names come from `LOC_synset_mapping.txt`, `words.txt` or the devkit's `meta.mat`, the first of a
    class's names each; without these files they are the WordNet ids. Images stay in their files; each is
    scaled so that its shorter side is `size`, and the middle cut out. Mean and deviation are ImageNet's usual
    ones. There are no clients in it.

    Source: Russakovsky et al. 2015, ImageNet large scale visual recognition challenge.

    Raises `DataError` if the folders are missing (they are not fetched: one has to register), a class
    folder is empty, a validation folder has no training folder, or the devkit does not fit the flat images.
    """
    folder = locate("imagenet", root)[0].parents[1]
    wnids = folders_in(folder / "train")
    wrong = [name for name in wnids if not _WNID.fullmatch(name)]
    if wrong or not wnids:
        what = (
            f"the folder '{wrong[0]}' is not called by a WordNet id"
            if wrong
            else "there are no class folders"
        )
        raise damaged(what, folder / "train", hint="one looks like n01440764")
    sorted_in = bool(folders_in(folder / "val"))
    train = in_class_folders(folder, "train", wnids, size)
    test = in_class_folders(folder, "val", wnids, size) if sorted_in else _flat(folder, wnids, size)
    return published("imagenet", (train, test), class_names(wnids, _words(folder)))


def in_class_folders(root: Path, split: str, wnids: Sequence[str], size: int, inner: str = "") -> Examples:
    """The images of `root/<split>/<wnid>/<inner>`, class by class in the order of `wnids`.

    Raises `DataError` with all folders that have no class or no images, and (of `train`) all classes without a folder.
    """
    folder, findings = root / split, Findings(remedy="unpack the archives again")
    present = folders_in(folder)
    for name in sorted(set(present) - set(wnids)):
        findings.add(folder, f"the folder '{name}' is of no class")
    names: list[str] = []
    labels: list[int] = []
    for label, wnid in enumerate(wnids):
        place = folder / wnid / inner
        images = images_in(place) if place.is_dir() else []
        if wnid not in present and split == "train":
            findings.add(folder, f"the class {wnid} has no folder")
        elif wnid in present and not images:
            findings.add(place, "there are no images in the folder")
        names += [Path(split, wnid, inner, name).as_posix() for name in images]
        labels += [label] * len(images)
    findings.settle(None)
    return photographs(root, names, labels, size)


def photographs(root: Path, names: Sequence[str], labels: Sequence[int], size: int) -> Examples:
    """Colour images in files with their labels, brought to `size` x `size` by scaling and cutting."""
    return Examples(ImageFiles(root, Paths.of(names), 3, size, size), np.array(labels, np.int64))


def class_names(wnids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """The first name of each WordNet id; if classes share it (there are two cranes), with the id.

    >>> class_names(["n1", "n2", "n3"], {"n1": "crane", "n2": "crane, hoist"})
    ('crane (n1)', 'crane (n2)', 'n3')
    """
    firsts = [words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
    often = Counter(firsts)
    return tuple(
        f"{first} ({wnid})" if often[first] > 1 else first for first, wnid in zip(firsts, wnids, strict=True)
    )


def read_words(path: Path, separator: str) -> dict[str, str]:
    """The names of each WordNet id, from lines of an id, `separator` and the names."""
    pairs = [line.split(separator, 1) for line in read_lines(path)]
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _words(folder: Path) -> dict[str, str]:
    for name, separator in (("LOC_synset_mapping.txt", " "), ("words.txt", "\t")):
        if (folder / name).is_file():
            return read_words(folder / name, separator)
    meta = folder / DEVKIT / "data" / "meta.mat"
    return dict(_synsets(meta).values()) if meta.is_file() else {}


def _flat(folder: Path, wnids: Sequence[str], size: int) -> Examples:
    """The validation images as they come out of their archive, with the classes that the devkit lists."""
    names = images_in(folder / "val")
    truth = folder / DEVKIT / "data" / "ILSVRC2012_validation_ground_truth.txt"
    meta = truth.with_name("meta.mat")
    for path in (truth, meta):
        if not path.is_file():
            what = "the validation images are not in class folders, and the list of their classes is missing"
            how = f"unpack {DEVKIT}.tar.gz into {folder}, or sort the images into val/<wnid>"
            raise damaged(what, path, hint=how)
    numbers = read_lines(truth)
    if len(numbers) != len(names):
        what = f"the list has {len(numbers)} classes, and there are {len(names)} images in {folder / 'val'}"
        raise damaged(what, truth, hint="unpack ILSVRC2012_img_val.tar again")
    synsets = _synsets(meta)
    places = {wnid: label for label, wnid in enumerate(wnids)}
    labels = []
    for line, number in enumerate(numbers, start=1):
        wnid = synsets.get(int(number), ("", ""))[0] if number.strip().isdecimal() else ""
        if wnid not in places:
            name = f"'{number}' ({wnid})" if wnid else f"'{number}'"
            hint = (
                f"add the folder of this class to {folder / 'train'}, or remove its images from "
                f"{folder / 'val'} and their lines from the list"
            )
            raise damaged(f"the class {name} has no training folder", truth, line, hint)
        labels.append(places[wnid])
    return photographs(folder, [f"val/{name}" for name in names], labels, size)


def _synsets(path: Path) -> dict[int, tuple[str, str]]:
    """(WordNet id, names) of each number in the devkit's `meta.mat`."""
    from scipy.io import loadmat  # takes longer than the rest of a start

    try:
        rows = loadmat(str(path), squeeze_me=True)["synsets"]
        return {
            int(row["ILSVRC2012_ID"]): (str(row["WNID"]), str(row["words"])) for row in np.atleast_1d(rows)
        }
    except Exception as error:  # a damaged file can raise any exception
        raise damaged(f"the file cannot be read: {error}", path) from error
