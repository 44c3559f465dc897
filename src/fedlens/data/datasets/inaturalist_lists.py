"""hsu2020's populations of iNaturalist-2017, as they are published: lists of images, users and cells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.datasets.federated_csv import Listing, check_apart, read_header, read_list
from fedlens.data.datasets.inaturalist_metadata import (
    FOLDER,
    HOW,
    Metadata,
    find_metadata,
    read_metadata,
    stems,
    walk,
)
from fedlens.data.datasets.missing_files import DAMAGED
from fedlens.data.download import Resource, fetch

LISTS = "federated_vision_datasets"
EXAMPLES = 120_300
# The lists of TensorFlow Federated: one column for each population. URLs and MD5s are those of its source.
_TFF = "https://storage.googleapis.com/tff-datasets-public"
TFF_TRAIN = Resource(
    "iNaturalist_train.csv", (f"{_TFF}/iNaturalist_train.csv",), "63d5a41699434bc2b13f5853f3764c18"
)
TFF_TEST = Resource(
    "iNaturalist_test.csv", (f"{_TFF}/iNaturalist_test.csv",), "bcf08a5a740ee76dac4e5af668081891"
)


@dataclass(frozen=True)
class Population:
    """One of the published populations.

    Args:
        name: as in the registry, without "inaturalist-".
        clients: as TensorFlow Federated ships it; the paper counts one fewer of the geographic ones.
        n_max: how many examples a cell may have at most; None where the clients are users.
    """

    name: str
    clients: int
    n_max: int | None

    @property
    def column(self) -> str:
        """The column of TensorFlow Federated's list: user_120k, geo_100, ..."""
        return self.name.replace("-", "_")

    @property
    def list_name(self) -> re.Pattern[str]:
        """The training list of the paper's archives: federated_train_user_120k.csv and the like."""
        return re.compile(rf"federated_train.*{self.name.replace('-', '[-_]?')}\.csv", re.IGNORECASE)


USER_120K = Population("user-120k", 9_275, None)
GEO = {
    "100": Population("geo-100", 3_607, 100),
    "300": Population("geo-300", 1_209, 300),
    "1k": Population("geo-1k", 369, 1_000),
    "3k": Population("geo-3k", 136, 3_000),
    "10k": Population("geo-10k", 39, 10_000),
    "30k": Population("geo-30k", 12, 30_000),
}


def find_lists(population: Population, root: Path) -> tuple[Path, str, Path] | None:
    """(training list, its column of users, test list) below `root`, the paper's archive first."""
    folder = root / LISTS / ("inaturalist-geo" if population.n_max else "inaturalist-user-120k")
    found = sorted(path for path in folder.glob("*.csv") if population.list_name.fullmatch(path.name))
    if found and (folder / "test.csv").is_file():
        return found[0], "user_id", folder / "test.csv"
    train, test = (root / LISTS / "inaturalist" / resource.name for resource in (TFF_TRAIN, TFF_TEST))
    if train.is_file() and test.is_file() and population.column in read_header(train):
        return train, population.column, test
    return None


def fetch_lists(population: Population, root: Path) -> tuple[Path, str, Path]:
    """TensorFlow Federated's lists, fetched: (training list, its column of users, test list)."""
    folder = root / LISTS / "inaturalist"
    return fetch(TFF_TRAIN, folder), population.column, fetch(TFF_TEST, folder)


@dataclass(frozen=True, eq=False)
class Listed:
    """What lists say, with what is known of their images besides."""

    train: Metadata
    clients: NDArray[np.str_]  # [n], of the training images
    labels: NDArray[np.str_] | None  # [n], their classes in iNaturalist-2017, where the list says so
    test: Metadata
    notes: tuple[str, ...]


def listed(population: Population, found: tuple[Path, str, Path], root: Path) -> Listed:
    """Reads the lists `found`, and looks their images up in the metadata, or else in the folders of images.

    Raises `DataError` where the lists are not as published (User-120k: 120,300 images of 9,275 users), name an
    image twice or one that is not known. A class is called as its first image is; where others of it
    are called otherwise, and where a geographic list has another number of clients, a note says so.
    """
    train_list, test_list = read_list(found[0], found[1]), read_list(found[2], None)
    check_apart(train_list, test_list)
    assert train_list.users is not None
    clients = len(set(train_list.users.tolist()))
    notes = _counted(population, train_list, clients)
    places = find_metadata(root / FOLDER, "train"), find_metadata(root / FOLDER, "val")
    if places[0] and places[1]:
        pools = [read_metadata(*place)[0] for place in places if place]
    else:
        pools = [walk(root / FOLDER)] * 2
        notes.append(f"without the metadata in {FOLDER}/ the places are not known")
    train, test = _join(train_list, pools[0]), _join(test_list, pools[1])
    classes, supercategories, odd = _names(train_list, train)
    if odd:
        notes.append(f"{odd} images of {found[0].name} are of another species than the first of their class")
    if (unseen := test_list.classes >= len(classes)).any():
        first = int(np.flatnonzero(unseen)[0])
        raise DataError(
            f"class {test_list.classes[first]} is not among the {len(classes)} of the training list",
            where=f"{test_list.path}, line {test_list.lines[first]}",
            hint=DAMAGED,
        )
    parts = [
        Metadata(part.files, listing.classes, classes, supercategories, part.users, part.lat, part.lon)
        for part, listing in ((train, train_list), (test, test_list))
    ]
    return Listed(parts[0], train_list.users, train_list.labels, parts[1], tuple(notes))


def _counted(population: Population, listing: Listing, clients: int) -> list[str]:
    if population is USER_120K and (len(listing), clients) != (EXAMPLES, population.clients):
        raise DataError(
            f"{EXAMPLES:,} images of {population.clients:,} users were expected, found {len(listing):,} "
            f"of {clients:,}",
            where=str(listing.path),
            hint=DAMAGED,
        )
    if clients == population.clients:
        return []
    return [f"{listing.path.name} has {clients:,} clients; TensorFlow Federated ships {population.clients:,}"]


def _join(listing: Listing, pool: Metadata) -> Metadata:
    """The images of the list, in its order."""
    row_of = {stem: row for row, stem in enumerate(stems(pool.files).tolist())}
    rows = np.array([row_of.get(image, -1) for image in listing.images.tolist()], np.int64)
    if (rows < 0).any():
        first = int(np.flatnonzero(rows < 0)[0])
        raise DataError(
            f"{int((rows < 0).sum()):,} of the {len(rows):,} images of the list are not known, "
            f"'{listing.images[first]}' is the first",
            where=f"{listing.path}, line {listing.lines[first]}",
            hint=HOW,
        )
    return pool.take(rows)


def _names(listing: Listing, images: Metadata) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """(names, supercategories, images that disagree): each class is called as its first image is."""
    shown, first = np.unique(listing.classes, return_index=True)
    species = np.full(int(shown[-1]) + 1, -1, np.int64)
    species[shown] = images.labels[first]
    names = tuple(images.classes[k] if k >= 0 else f"class {c}" for c, k in enumerate(species.tolist()))
    groups = tuple(images.supercategories[k] if k >= 0 else "" for k in species.tolist())
    return names, groups, int((species[listing.classes] != images.labels).sum())
