"""Places365-Standard: photographs of 365 kinds of places."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published, read_lines
from fedlens.data.datasets.folders import check_present
from fedlens.data.datasets.imagenet import photographs

FOLDERS = ("places365", "places365_standard", ".")
CATEGORIES = "categories_places365.txt"
LISTS = (CATEGORIES, "places365_train_standard.txt", "places365_val.txt")


def places365(
    root: Path,
    download: bool,
    seed: int,
    *,
    small: Annotated[
        bool, Field(description="read the images published at 256x256, not the large ones")
    ] = True,
    size: Annotated[int, Field(ge=8, le=1024, description="pixels per side, e.g. 224, 64 or 32")] = 224,
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

    Raises `DataError` if lists or folders are missing, a line of a list is not a file and a class, or an
    image of a list is not there. `download` fetches 24 GB, or 105 GB of large images.
    """
    images = ("data_256", "val_256") if small else ("data_large", "val_large")
    inner = next((name for name in FOLDERS if (root / name / CATEGORIES).is_file()), FOLDERS[0])
    # torchvision adds "_standard" to the names of the folders.
    wanted = [*LISTS, *(f"{name}|{name}_standard" for name in images)]
    files = tuple(
        "|".join(str(PurePosixPath(inner, one)) for one in pattern.split("|")) for pattern in wanted
    )
    categories, train_list, test_list, train, test = locate("places365", root, download, [files], inner)
    classes = _categories(categories)
    train_split = _split(train, train_list, len(classes), size)
    return published("places365", (train_split, _split(test, test_list, len(classes), size)), classes)


def _categories(path: Path) -> tuple[str, ...]:
    """The names of the classes by their numbers: `/a/airfield 0` is airfield."""
    names: dict[int, str] = {}
    for number, line in enumerate(read_lines(path), start=1):
        name, label = _pair(line, path, number)
        names[label] = "/".join(name.strip("/").split("/")[1:])
    if sorted(names) != list(range(len(names))) or not names:
        raise damaged("the numbers of the classes are not 0, 1, 2, ...", path)
    return tuple(names[label] for label in range(len(names)))


def _split(images: Path, path: Path, classes: int, size: int) -> Examples:
    names: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), start=1):
        name, label = _pair(line, path, number)
        if label >= classes:
            raise damaged(f"the class {label} is not in 0 .. {classes - 1}", path, number)
        names.append(f"{images.name}/{name.lstrip('/')}")
        labels.append(label)
    check_present(images.parent, names, str(path))
    return photographs(images.parent, names, labels, size)


def _pair(line: str, path: Path, number: int) -> tuple[str, int]:
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdecimal():
        raise damaged(f"'{line}' is not a name and a number", path, number)
    return parts[0], int(parts[1])
