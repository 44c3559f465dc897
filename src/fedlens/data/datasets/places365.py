"""Places365-Standard: photographs of 365 kinds of places."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD, check_present, read_lines
from fedlens.data.datasets.imagenet import photographs
from fedlens.data.datasets.missing_files import missing
from fedlens.data.download import Resource, extract, fetch

FOLDERS = ("places365", "places365_standard", ".")
CATEGORIES = "categories_places365.txt"
TRAIN_LIST, TEST_LIST = "places365_train_standard.txt", "places365_val.txt"
_MIRROR = "http://data.csail.mit.edu/places/places365/"


def _resource(name: str, md5: str) -> Resource:
    return Resource(name, (f"{_MIRROR}{name}",), md5)


LISTS = _resource("filelist_places365-standard.tar", "35a0585fee1fa656440f3ab298f8479c")
ARCHIVES = {  # the folder in each
    "data_256": _resource("train_256_places365standard.tar", "53ca1c756c3d1e7809517cc47c5561c5"),
    "val_256": _resource("val_256.tar", "e27b17d8d44f4af9a78502beb927f808"),
    "data_large": _resource("train_large_places365standard.tar", "67e186b496a84c929568076ed01a8aa1"),
    "val_large": _resource("val_large.tar", "9b71c4993ad89d2d8bcbdc4aef38042f"),
}


def places365(
    root: Path,
    download: bool,
    seed: int,
    *,
    small: Annotated[
        bool, Field(description="the images that were published at 256x256, and not the large ones")
    ] = True,
    size: Annotated[int, Field(ge=8, le=1024, description="pixels a side, say 224, 64 or 32")] = 224,
) -> Dataset:
    """Places365-Standard from `root/places365`: 365 kinds of places; `seed` plays no part.

    The lists `categories_places365.txt`, `places365_train_standard.txt` and `places365_val.txt` say which
    images there are and what they show. Training images are in `data_256` and validation images, which are
    the test split, in `val_256`; with `small=false` in `data_large` and `val_large`. The names that
    torchvision gives (`data_256_standard`, `data_large_standard`) are read too, and all of it may lie in
    `root` itself. Complete, these are 1,803,460 and 36,500 images (100 a class). Images stay in their files;
    each is scaled so that its shorter side is `size`, and the middle cut out. Mean and deviation are
    ImageNet's usual ones. There are no clients in it.

    Source: Zhou, Lapedriza, Khosla, Oliva, Torralba 2017, Places: a 10 million image database for scene
    recognition.

    Raises `DataError` where lists or folders are missing, a line of a list is not a file and a class, or an
    image of a list is not there. `download` fetches 24 GB, or 105 GB of large images.
    """
    train_folder, test_folder = ("data_256", "val_256") if small else ("data_large", "val_large")
    folder = next(
        (root / name for name in FOLDERS if (root / name / CATEGORIES).is_file()), root / FOLDERS[0]
    )
    if download:
        _download(folder, (train_folder, test_folder))
    gone = [name for name in (CATEGORIES, TRAIN_LIST, TEST_LIST) if not (folder / name).is_file()]
    gone += [name for name in (train_folder, test_folder) if _images(folder, name) is None]
    if gone:
        raise missing("places365", folder, ", ".join(gone))
    classes = _categories(folder / CATEGORIES)
    return Dataset(
        name="places365",
        train=_split(folder, train_folder, TRAIN_LIST, len(classes), size),
        test=_split(folder, test_folder, TEST_LIST, len(classes), size),
        classes=classes,
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence="Places' terms of use: research and teaching, not for commerce; photographers keep their rights",
        source="Places365-Standard, Zhou et al. 2017, places2.csail.mit.edu",
    )


def _download(folder: Path, wanted: tuple[str, str]) -> None:
    if not all((folder / name).is_file() for name in (CATEGORIES, TRAIN_LIST, TEST_LIST)):
        # Its files are in no folder of their own.
        extract(fetch(LISTS, folder), folder, ".")
    for name in wanted:
        if _images(folder, name) is None:
            extract(fetch(ARCHIVES[name], folder), folder, name)


def _images(folder: Path, name: str) -> str | None:
    """The name of the folder with the images, as published or as torchvision calls it."""
    return next((found for found in (name, f"{name}_standard") if (folder / found).is_dir()), None)


def _categories(path: Path) -> tuple[str, ...]:
    """The names of the classes by their numbers: `/a/airfield 0` is airfield."""
    found: dict[int, str] = {}
    for number, line in enumerate(read_lines(path), start=1):
        name, label = _pair(line, f"{path}, line {number}")
        found[label] = "/".join(name.strip("/").split("/")[1:])
    if sorted(found) != list(range(len(found))) or not found:
        raise DataError(
            "the numbers of the classes are not 0, 1, 2, ...", where=str(path), hint="fetch it again"
        )
    return tuple(found[label] for label in range(len(found)))


def _split(folder: Path, images: str, listed: str, classes: int, size: int) -> Examples:
    names: list[str] = []
    labels: list[int] = []
    path = folder / listed
    inner = _images(folder, images)
    for number, line in enumerate(read_lines(path), start=1):
        name, label = _pair(line, f"{path}, line {number}")
        if label >= classes:
            raise DataError(f"the class {label} is not in 0 .. {classes - 1}", where=f"{path}, line {number}")
        names.append(f"{inner}/{name.lstrip('/')}")
        labels.append(label)
    check_present(folder, names, str(path))
    return photographs(folder, names, labels, size)


def _pair(line: str, where: str) -> tuple[str, int]:
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdecimal():
        raise DataError(f"'{line}' is not a name and a number", where=where, hint="fetch the list again")
    return parts[0], int(parts[1])
