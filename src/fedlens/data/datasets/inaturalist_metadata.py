"""The metadata of iNaturalist-2017's images: species, user and place."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.catalogue import CATALOGUE, search
from fedlens.data.datasets.dataset_files import damaged, read_json
from fedlens.data.partition.drawing import streams
from fedlens.data.table import Table

FOLDER = "inaturalist-2017"
IMAGES = "train_val_images"
# Annotations and locations of the training split, then of the validation split.
FILES = CATALOGUE["inaturalist-2017"].files[0][:4]


@dataclass(frozen=True, eq=False)
class Metadata:
    """One row an image, in the order of the published file.

    Args:
        files: str [n], below the folder: `train_val_images/<supercategory>/<species>/<hash>.jpg`.
        labels: int64 [n], positions in `classes`.
        classes: the name of each species.
        supercategories: str [classes], "Plantae", "Aves", ...
        users: str [n], "" if it is unknown.
        lat, lon: float64 [n], degrees, NaN if it is unknown.
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
        users, lat, lon = self.users[rows], self.lat[rows], self.lon[rows]
        return replace(self, files=self.files[rows], labels=self.labels[rows], users=users, lat=lat, lon=lon)

    def of_classes(self, kept: NDArray[np.int64]) -> Metadata:
        """The images of the classes `kept` alone, int64 [k] ascending; the classes are counted anew from 0."""
        number = np.full(len(self.classes), -1, np.int64)
        number[kept] = np.arange(len(kept))
        part = self.take(np.flatnonzero(number[self.labels] >= 0))
        return replace(
            part,
            labels=number[part.labels],
            classes=tuple(self.classes[k] for k in kept),
            supercategories=tuple(self.supercategories[k] for k in kept),
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
        """The table of these images for a partitioner."""
        columns = {"user_id": self.users, "lat": self.lat, "lon": self.lon}
        return Table.of(self.labels, columns, classes=self.classes)


def balanced(labels: ArrayLike, per_class: int, seed: int) -> NDArray[np.int64]:
    """Rows, ascending, of a subset with `per_class` examples of each class that has as many (hsu2020 4.1).

    Classes with fewer are left out whole; of the others `per_class` examples are drawn uniformly at random.
    On iNaturalist-2017's training images and 100 a class the paper counts 1,203 classes, 120,300 examples.

    Raises `ConfigError` if `per_class` is below 1 or no class has as many.

    >>> rows = balanced([0, 1, 1, 2, 2, 2], 2, seed=0)
    >>> len(rows), np.bincount(np.array([0, 1, 1, 2, 2, 2])[rows]).tolist()
    (4, [0, 2, 2])
    """
    classes = Table.of(labels).labels
    if per_class < 1:
        raise ConfigError(f"per_class is {per_class}, but must be at least 1", where="per_class")
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


def find_metadata(root: Path) -> tuple[Path, ...] | None:
    """The four files of `FILES` below the data folder `root`, or None if one is missing."""
    result = search([FILES], root)
    return None if result.lacking else result.found


def read_metadata(annotations: Path, locations: Path) -> tuple[Metadata, tuple[str, ...]]:
    """(the images of one published split, notes): COCO-style annotations and the separate locations.

    The annotations are an object with `images` (id, file_name), `annotations` (image_id, category_id) and
    `categories` (id, name, supercategory); the locations a list of objects with id, lat, lon, user_id, of
    which any but the id may be null. Classes are numbered by category id. An image without a location has
    NaN and the user "", and the notes count them. Locations of other images do not matter.

    Raises `DataError` with the file and the id if a key is missing, an id occurs twice, an image has no
    category, or a place is not on the globe.
    """
    content = read_json(annotations)
    if not isinstance(content, dict):
        raise damaged("an object was expected", annotations)
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
            unknown = f"image {image}" if image not in row_of else f"category {category}"
            raise damaged(f"an annotation is of {unknown}, which is not in the file", annotations)
        labels[row_of[image]] = class_of[category]
    if (labels < 0).any():
        first = images[int(np.flatnonzero(labels < 0)[0])]["id"]
        raise damaged(f"the image {first} has no annotation", annotations)
    users, lat, lon, notes = _places(read_json(locations), row_of, locations)
    metadata = Metadata(
        np.array([_key(image, "file_name", annotations) for image in images], np.str_),
        labels,
        tuple(str(_key(c, "name", annotations)) for c in categories),
        tuple(str(_key(c, "supercategory", annotations)) for c in categories),
        users,
        lat,
        lon,
    )
    return metadata, notes


def _places(
    content: Any, row_of: Mapping[Any, int], path: Path
) -> tuple[NDArray[np.str_], NDArray[np.float64], NDArray[np.float64], tuple[str, ...]]:
    if not isinstance(content, list):
        raise damaged("a list was expected", path)
    users = [""] * len(row_of)
    where = np.full((2, len(row_of)), np.nan)
    seen: set[Any] = set()
    for place in content:
        image = _key(place, "id", path)
        if image in seen:
            raise damaged(f"the image {image} has two locations", path)
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
        place = float(lat), float(lon)
    except (TypeError, ValueError):
        place = float("inf"), float("inf")
    if np.isnan(place).any():
        return float("nan"), float("nan")
    if not (abs(place[0]) <= 90 and abs(place[1]) <= 180):
        raise damaged(f"the image {image} is at latitude {lat}, longitude {lon}", path)
    return place


def _objects(content: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    objects = content.get(key)
    if not isinstance(objects, list):
        raise damaged(f"there is no list '{key}'", path)
    return objects


def _key(item: Any, key: str, path: Path) -> Any:
    try:
        return item[key]
    except (KeyError, TypeError, IndexError):
        shown = str(item.get("id", item) if isinstance(item, dict) else item)[:60]
        raise damaged(f"the entry {shown} has no '{key}'", path) from None


def _numbered(ids: Sequence[Any], what: str, path: Path) -> dict[Any, int]:
    numbered = {one: at for at, one in enumerate(ids)}
    if len(numbered) < len(ids):
        twice = next(one for at, one in enumerate(ids) if numbered[one] != at)
        raise damaged(f"the {what} {twice} occurs twice", path)
    return numbered


def from_folders(folder: Path) -> Metadata:
    """The images in `train_val_images/<supercategory>/<species>/`, without users and places.

    For published lists, which state the rest. Classes are the species in the order of their folders.
    """
    names = sorted(glob.glob("*/*/*.jpg", root_dir=folder / IMAGES))
    pairs = [tuple(name.split("/")[:2]) for name in names]
    species = sorted(set(pairs))
    number = {pair: at for at, pair in enumerate(species)}
    nowhere = np.full(len(names), np.nan)
    return Metadata(
        np.array([f"{IMAGES}/{name}" for name in names], np.str_),
        np.array([number[pair] for pair in pairs], np.int64),
        tuple(kind for _, kind in species),
        tuple(parent for parent, _ in species),
        np.full(len(names), "", np.str_),
        nowhere,
        nowhere,
    )
