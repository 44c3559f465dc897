"""hsu2020's populations of iNaturalist-2017, as they are published: lists of images, users and cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlens.data.catalogue import CATALOGUE, DatasetFacts, search
from fedlens.data.datasets.dataset_files import damaged, locate, provide
from fedlens.data.datasets.federated_csv import Listing, check_apart, read_header, read_list
from fedlens.data.datasets.inaturalist_metadata import (
    FOLDER,
    Metadata,
    find_metadata,
    from_folders,
    read_metadata,
    stems,
)


@dataclass(frozen=True)
class Population:
    """One of the published populations.

    Args:
        name: as in the registry.
        n_max: how many examples a cell may have at most; None if the clients are users.
    """

    name: str
    n_max: int | None

    @property
    def facts(self) -> DatasetFacts:
        """The facts in the catalogue. TensorFlow Federated's clients: one more cell than in the paper."""
        return CATALOGUE[self.name]

    @property
    def column(self) -> str:
        """The column of TensorFlow Federated's list: user_120k, geo_100, ..."""
        return self.name.removeprefix("inaturalist-").replace("-", "_")


USER_120K = Population("inaturalist-user-120k", None)
GEO = {
    limit: Population(f"inaturalist-geo-{limit}", int(limit.replace("k", "000")))
    for limit in ("100", "300", "1k", "3k", "10k", "30k")
}


def find_lists(population: Population, root: Path, download: bool) -> tuple[Path, str, Path] | None:
    """(training list, its column of users, test list) below `root`, or None if they are missing.

    The archive of the paper comes first. The lists of TensorFlow Federated, with one column for each population,
    come second; `download` fetches them if they are missing or lack the column.
    """
    paper, shared = (patterns[:2] for patterns in population.facts.files[:2])
    if not (result := search([paper], root)).lacking:
        return result.found[0], "user_id", result.found[1]
    result = search([shared], root)
    if not result.lacking and population.column in read_header(result.found[0]):
        return result.found[0], population.column, result.found[1]
    if not download:
        return None
    if not result.lacking:  # the list has no such column
        for archive in population.facts.archives:
            provide(archive, root / archive.folder)
    train, test = locate(population.name, root, download, [shared])
    return train, population.column, test


@dataclass(frozen=True, eq=False)
class Listed:
    """The content of a population's lists, with the metadata of their images."""

    train: Metadata
    clients: NDArray[np.str_]  # [n], of the training images
    labels: NDArray[np.str_] | None  # [n], their classes in iNaturalist-2017, if the list states them
    test: Metadata
    notes: tuple[str, ...]


def read_lists(population: Population, lists: tuple[Path, str, Path], root: Path) -> Listed:
    """Reads `lists`, and finds their images in the metadata, or else in the folders of images.

    Raises `DataError` if the lists are not as published (User-120k: 120,300 images of 9,275 users), name an
    image twice or one that is unknown. A class is named after the species of its first image. Notes state how many
    images of a class have another species, and whether a geographic list has another number of clients.
    """
    train_list, test_list = read_list(lists[0], lists[1]), read_list(lists[2], None)
    check_apart(train_list, test_list)
    assert train_list.users is not None
    clients = len(set(train_list.users.tolist()))
    notes = _counted(population, train_list, clients)
    metadata = find_metadata(root)
    if metadata:
        pools = [read_metadata(*metadata[:2])[0], read_metadata(*metadata[2:])[0]]
    else:
        pools = [from_folders(root / FOLDER)] * 2
        notes.append(f"without the metadata in {FOLDER}/ the places are not known")
    train, test = _join(population, train_list, pools[0]), _join(population, test_list, pools[1])
    classes, supercategories, odd = _names(train_list, train)
    if odd:
        notes.append(f"{odd} images of {lists[0].name} are of another species than the first of their class")
    if (unseen := test_list.classes >= len(classes)).any():
        first = int(np.flatnonzero(unseen)[0])
        what = f"class {test_list.classes[first]} is not among the {len(classes)} of the training list"
        raise damaged(what, test_list.path, int(test_list.lines[first]))
    parts = [
        replace(part, labels=listing.classes, classes=classes, supercategories=supercategories)
        for part, listing in ((train, train_list), (test, test_list))
    ]
    return Listed(parts[0], train_list.users, train_list.labels, parts[1], tuple(notes))


def _counted(population: Population, listing: Listing, clients: int) -> list[str]:
    facts = population.facts
    if population.n_max is None and (len(listing), clients) != (facts.train, facts.clients):
        what = f"{facts.train:,} images of {facts.clients:,} users were expected"
        raise damaged(f"{what}, found {len(listing):,} of {clients:,}", listing.path)
    if clients == facts.clients:
        return []
    return [f"{listing.path.name} has {clients:,} clients; TensorFlow Federated ships {facts.clients:,}"]


def _join(population: Population, listing: Listing, pool: Metadata) -> Metadata:
    """The images of the list, in its order."""
    row_of = {stem: row for row, stem in enumerate(stems(pool.files).tolist())}
    rows = np.array([row_of.get(image, -1) for image in listing.images.tolist()], np.int64)
    unknown = np.flatnonzero(rows < 0)
    if len(unknown):
        first = unknown[0]
        what = f"{len(unknown):,} of the {len(rows):,} images of the list are not known"
        line = int(listing.lines[first])
        hint = population.facts.how
        raise damaged(f"{what}, '{listing.images[first]}' is the first", listing.path, line, hint)
    return pool.take(rows)


def _names(listing: Listing, images: Metadata) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """(names, supercategories, images that disagree): each class is called as its first image is."""
    shown, first = np.unique(listing.classes, return_index=True)
    species = np.full(int(shown[-1]) + 1, -1, np.int64)
    species[shown] = images.labels[first]
    names = tuple(images.classes[k] if k >= 0 else f"class {c}" for c, k in enumerate(species.tolist()))
    groups = tuple(images.supercategories[k] if k >= 0 else "" for k in species.tolist())
    return names, groups, int((species[listing.classes] != images.labels).sum())
