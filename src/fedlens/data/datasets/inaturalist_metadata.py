"""What is known of iNaturalist-2017's images besides their pixels: species, user and place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.core.errors import ConfigError, DataError
from fedlens.data.datasets.missing_files import DAMAGED
from fedlens.data.partition.drawing import streams
from fedlens.data.table import Table

FOLDER = "inaturalist-2017"
IMAGES = "train_val_images"
HOW = (
    "fetch train_val_images.tar.gz (186 GB), train_val2017.zip and inat2017_locations.zip from "
    "https://ml-inat-competition-datasets.s3.amazonaws.com/2017/ "
    f"and unpack all three in {FOLDER}/ of the data folder; a partition alone needs the two small ones only"
)


@dataclass(frozen=True, eq=False)
class Metadata:
    """One row an image, in the order of the published file.

    Args:
        files: str [n], below the folder: `train_val_images/<supercategory>/<species>/<hash>.jpg`.
        labels: int64 [n], positions in `classes`.
        classes: the name of each species.
        supercategories: str [classes], "Plantae", "Aves", ...
        users: str [n], "" where it is not known.
        lat, lon: float64 [n], degrees, NaN where it is not known.
    """

    files: NDArray[np.str_]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    supercategories: tuple[str, ...]
    users: NDArray[np.str_]
    lat: NDArray[np.float64]
    lon: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: NDArray[Any]) -> Metadata:
        """The rows `rows`, int64 [k], with the same classes."""
        return Metadata(
            self.files[rows],
            self.labels[rows],
            self.classes,
            self.supercategories,
            self.users[rows],
            self.lat[rows],
            self.lon[rows],
        )

    def of_classes(self, kept: NDArray[np.int64]) -> Metadata:
        """The images of the classes `kept` alone, int64 [k] ascending; the classes are counted anew from 0."""
        number = np.full(len(self.classes), -1, np.int64)
        number[kept] = np.arange(len(kept))
        rows = np.flatnonzero(number[self.labels] >= 0)
        part = self.take(rows)
        return Metadata(
            part.files,
            number[part.labels],
            tuple(self.classes[k] for k in kept),
            tuple(self.supercategories[k] for k in kept),
            part.users,
            part.lat,
            part.lon,
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns of a split: user_id, lat, lon, supercategory, image_id (the hash)."""
        return {
            "user_id": self.users,
            "lat": self.lat,
            "lon": self.lon,
            "supercategory": np.array(self.supercategories)[self.labels],
            "image_id": stems(self.files),
        }

    def table(self) -> Table:
        """What a partitioner may know of these images."""
        columns = {"user_id": self.users, "lat": self.lat, "lon": self.lon}
        return Table.of(self.labels, columns, classes=self.classes)


def balanced(labels: ArrayLike, per_class: int, seed: int) -> NDArray[np.int64]:
    """Rows, ascending, of a subset with `per_class` examples of each class that has as many (hsu2020 4.1).

    Classes with fewer are left out whole; of the others `per_class` examples are drawn uniformly at random.
    On iNaturalist-2017's training images and 100 a class the paper counts 1,203 classes, 120,300 examples.

    Raises `ConfigError` where `per_class` is below 1 or no class has as many.

    >>> rows = balanced([0, 1, 1, 2, 2, 2], 2, seed=0)
    >>> len(rows), np.bincount(np.array([0, 1, 1, 2, 2, 2])[rows]).tolist()
    (4, [0, 2, 2])
    """
    classes = Table.of(labels).labels
    if per_class < 1:
        raise ConfigError(f"per_class is {per_class}, and has to be at least 1", where="per_class")
    counts = np.bincount(classes)
    if not (counts >= per_class).any():
        largest = int(counts.max(initial=0))
        raise ConfigError(
            f"no class has {per_class} examples, the largest has {largest}",
            where="per_class",
            hint=f"take at most {largest}",
        )
    shuffled = streams(seed, 1)[0].permutation(len(classes))
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    rank = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = by_class[(rank < per_class) & (counts[classes[by_class]] >= per_class)]
    return np.sort(chosen).astype(np.int64)


def stems(files: NDArray[np.str_]) -> NDArray[np.str_]:
    """str [n]: the names of the files without folder and ending, which are the ids in hsu2020's lists."""
    return np.array([os.path.splitext(name.rpartition("/")[2])[0] for name in files.tolist()], np.str_)


def find_metadata(folder: Path, split: str) -> tuple[Path, Path] | None:
    """(the annotations, the locations) of "train" or "val" in `folder` or a folder in it; None where one lacks."""
    found = [_find(folder, f"{split}2017{what}.json") for what in ("", "_locations")]
    return (found[0], found[1]) if found[0] and found[1] else None


def _find(folder: Path, name: str) -> Path | None:
    return next(
        iter([path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.is_file()]), None
    )


def read_metadata(annotations: Path, locations: Path) -> tuple[Metadata, tuple[str, ...]]:
    """(the images of one published split, notes): COCO-style annotations and the separate locations.

    The annotations are an object with `images` (id, file_name), `annotations` (image_id, category_id) and
    `categories` (id, name, supercategory); the locations a list of objects with id, lat, lon, user_id, of
    which any but the id may be null. Classes are numbered by category id. An image without a location has
    NaN and the user "", and the notes count them. Locations of other images do not matter.

    Raises `DataError` with the file and the id where a key is missing, an id is there twice, an image has no
    category, or a place is not on the globe.
    """
    content = _load(annotations)
    if not isinstance(content, dict):
        raise DataError("an object was expected", where=str(annotations), hint=DAMAGED)
    categories = sorted(
        _objects(content, "categories", annotations), key=lambda c: _key(c, "id", annotations)
    )
    class_of = _numbered([_key(c, "id", annotations) for c in categories], "category", annotations)
    images = _objects(content, "images", annotations)
    row_of = _numbered([_key(image, "id", annotations) for image in images], "image", annotations)
    labels = np.full(len(images), -1, np.int64)
    for mark in _objects(content, "annotations", annotations):
        image, category = _key(mark, "image_id", annotations), _key(mark, "category_id", annotations)
        if image not in row_of or category not in class_of:
            fault = f"image {image}" if image not in row_of else f"category {category}"
            raise DataError(
                f"an annotation is of {fault}, which is not there", where=str(annotations), hint=DAMAGED
            )
        labels[row_of[image]] = class_of[category]
    if (labels < 0).any():
        first = images[int(np.flatnonzero(labels < 0)[0])]["id"]
        raise DataError(f"the image {first} has no annotation", where=str(annotations), hint=DAMAGED)
    users, lat, lon, notes = _places(_load(locations), row_of, locations)
    found = Metadata(
        np.array([_key(image, "file_name", annotations) for image in images], np.str_),
        labels,
        tuple(str(_key(c, "name", annotations)) for c in categories),
        tuple(str(_key(c, "supercategory", annotations)) for c in categories),
        users,
        lat,
        lon,
    )
    return found, notes


def _places(
    content: Any, row_of: Mapping[Any, int], path: Path
) -> tuple[NDArray[np.str_], NDArray[np.float64], NDArray[np.float64], tuple[str, ...]]:
    if not isinstance(content, list):
        raise DataError("a list was expected", where=str(path), hint=DAMAGED)
    users = [""] * len(row_of)
    where = np.full((2, len(row_of)), np.nan)
    seen: set[Any] = set()
    for place in content:
        image = _key(place, "id", path)
        if image in seen:
            raise DataError(f"the image {image} has two locations", where=str(path), hint=DAMAGED)
        seen.add(image)
        if image not in row_of:
            continue
        row = row_of[image]
        user, lat, lon = (_key(place, key, path) for key in ("user_id", "lat", "lon"))
        users[row] = "" if user is None else str(user)
        if lat is not None and lon is not None:
            where[:, row] = _degrees(image, lat, lon, path)
    notes = []
    unplaced, unowned = int(np.isnan(where[0]).sum()), users.count("")
    if unplaced:
        notes.append(f"{path.name} has no place for {unplaced} of {len(users)} images")
    if unowned:
        notes.append(f"{path.name} has no user for {unowned} of {len(users)} images")
    return np.array(users, np.str_), where[0], where[1], tuple(notes)


def _degrees(image: Any, lat: Any, lon: Any, path: Path) -> tuple[float, float]:
    try:
        found = float(lat), float(lon)
    except (TypeError, ValueError):
        found = float("inf"), float("inf")
    if np.isnan(found).any():
        return float("nan"), float("nan")
    if not (abs(found[0]) <= 90 and abs(found[1]) <= 180):
        raise DataError(
            f"the image {image} is at latitude {lat}, longitude {lon}", where=str(path), hint=DAMAGED
        )
    return found


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise DataError(f"the file is no JSON: {error}", where=str(path), hint=DAMAGED) from error


def _objects(content: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    found = content.get(key)
    if not isinstance(found, list):
        raise DataError(f"there is no list '{key}'", where=str(path), hint=DAMAGED)
    return found


def _key(item: Any, key: str, path: Path) -> Any:
    try:
        return item[key]
    except (KeyError, TypeError, IndexError):
        said = str(item.get("id", item) if isinstance(item, dict) else item)[:60]
        raise DataError(f"the entry {said} has no '{key}'", where=str(path), hint=DAMAGED) from None


def _numbered(ids: Sequence[Any], what: str, path: Path) -> dict[Any, int]:
    numbered = {one: at for at, one in enumerate(ids)}
    if len(numbered) < len(ids):
        twice = next(one for at, one in enumerate(ids) if numbered[one] != at)
        raise DataError(f"the {what} {twice} is there twice", where=str(path), hint=DAMAGED)
    return numbered


def walk(folder: Path) -> Metadata:
    """The images in `train_val_images/<supercategory>/<species>/`, without users and places.

    For published lists, which say the rest. Classes are the species in the order of their folders.
    """
    found = sorted(_walk(folder / IMAGES, 2))
    files = [f"{IMAGES}/{name}" for name in found]
    pairs = [name.split("/")[:2] for name in found]
    species = sorted({(parent, kind) for parent, kind in pairs})
    number = {pair: at for at, pair in enumerate(species)}
    labels = np.array([number[parent, kind] for parent, kind in pairs], np.int64)
    nowhere = np.full(len(files), np.nan)
    return Metadata(
        np.array(files, np.str_),
        labels,
        tuple(kind for _, kind in species),
        tuple(parent for parent, _ in species),
        np.full(len(files), "", np.str_),
        nowhere,
        nowhere,
    )


def _walk(folder: Path, depth: int) -> Iterator[str]:
    """The JPEG files `depth` folders below `folder`."""
    if not folder.is_dir():
        return
    for entry in os.scandir(folder):
        if depth and entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in _walk(Path(entry.path), depth - 1))
        elif not depth and entry.name.endswith(".jpg"):
            yield entry.name
