"""iNaturalist-2017, and hsu2020's populations of it: by user, and by cells of the globe.

The populations are published as lists of images, users and cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE, DatasetFacts, search
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, get_again, locate, provide, published
from fedlens.data.datasets.federated_csv import Listing, check_apart, read_header, read_list
from fedlens.data.datasets.inaturalist_metadata import (
    FILES,
    FOLDER,
    Metadata,
    balanced,
    find_metadata,
    from_folders,
    read_metadata,
    stems,
)
from fedlens.data.formats import common_settings as common
from fedlens.data.images import ImageFiles, Paths

PER_CLASS = 100
NO_USER = "unknown"

Source = Annotated[
    Literal["auto", "csv", "metadata"],
    Field(description="the published lists, or built from the metadata; `auto`: the lists if found"),
]


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


def inaturalist_2017(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: common.GivenSize = 299,
    subset: Annotated[
        Literal["all", "balanced"],
        Field(description="all images, or 100 of each species that has as many (Hsu et al. 2020)"),
    ] = "all",
) -> Dataset:
    """iNaturalist-2017: 579,184 + 95,986 photographs of 5,089 species, with user and place.

    Reads `root/inaturalist-2017`: train2017.json, val2017.json, train2017_locations.json and
    val2017_locations.json, there or in a folder in it, and train_val_images/, which need not be there for a
    partition alone. The published validation images are the test split, as in hsu2020; the competition's own
    test images have no public labels. Columns: user_id ("" if it is unknown), client (the
    same, but "unknown" for those), lat and lon in degrees (NaN if they are unknown), supercategory, and
    image_id (the file's name).

    With subset = "balanced" the training split is the class-balanced one of hsu2020 4.1: species with at least
    100 training images, 100 of each drawn with `seed`; 1,203 species, 120,300 images in the paper. The paper
    calls its test set class-balanced too; the one that TensorFlow Federated ships has 35,641 images, not a
    multiple of 1,203, so here it is every test image of these species. Species are renumbered,
    in the order of their category ids.

    hsu2020 6.5 trains on 299 x 299. Raises `DataError` if files are not there or contradict each other.
    """
    height_width = common.size_of(size)
    train, test, notes = _metadata(root, "inaturalist-2017")
    if subset == "balanced":
        train, test = _balanced(train, test, seed)
    columns = {**train.columns(), "client": np.where(train.users == "", NO_USER, train.users)}
    seeded = subset == "balanced"
    splits = (
        _examples(root, train, columns, height_width),
        _examples(root, test, test.columns(), height_width),
    )
    return published("inaturalist-2017", splits, train.classes, notes=notes, seeded=seeded)


def inaturalist_user_120k(
    root: Path, download: bool, seed: int, *, size: common.GivenSize = 299, source: Source = "auto"
) -> Dataset:
    """iNaturalist-User-120k (hsu2020 4.1): 120,300 photographs, 100 of each of 1,203 species, by 9,275 users.

    The column `client` is the user, so that the partition `natural` gives the population. The images lie as
    for `inaturalist-2017`.

    With source = "csv" the population is the published one: `federated_train_user_120k.csv` and `test.csv` in
    `root/federated_vision_datasets/inaturalist-user-120k` (hsu2020's archive), or `iNaturalist_train.csv` and
    `iNaturalist_test.csv` in `root/federated_vision_datasets/inaturalist` (TensorFlow Federated's, which
    `download` fetches). With "metadata" the balanced subset is drawn with `seed`, as for `inaturalist-2017`:
    the same rule, but **not the published population image for image**, since the paper's draw is not known.

    Raises `DataError` if files are not there, are damaged or contradict each other.
    """
    return _population(USER_120K, root, download, seed, size, source)


def _geo(population: Population) -> Callable[..., Dataset]:
    def read(
        root: Path, download: bool, seed: int, *, size: common.GivenSize = 299, source: Source = "auto"
    ) -> Dataset:
        return _population(population, root, download, seed, size, source)

    read.__name__ = population.name.replace("-", "_")
    read.__qualname__ = read.__name__
    read.__doc__ = f"""{population.facts.title} (hsu2020 4.1): the balanced images by S2 cells.

    Cells are split into four until none holds more than {population.n_max:,} images; those below a hundredth
    of that are dropped. TensorFlow Federated ships {population.facts.clients:,} clients. The columns `client` and
    `cell` are the cell. The lists of hsu2020 are looked for in
    `root/federated_vision_datasets/inaturalist-geo`; for everything else see `inaturalist_user_120k`.
    """
    return read


inaturalist_geo_100 = _geo(GEO["100"])
inaturalist_geo_300 = _geo(GEO["300"])
inaturalist_geo_1k = _geo(GEO["1k"])
inaturalist_geo_3k = _geo(GEO["3k"])
inaturalist_geo_10k = _geo(GEO["10k"])
inaturalist_geo_30k = _geo(GEO["30k"])


def _population(
    population: Population, root: Path, download: bool, seed: int, size: Any, source: str
) -> Dataset:
    name, height_width = population.name, common.size_of(size)
    lists = None if source == "metadata" else find_lists(population, root, download)
    if lists is None and (source == "csv" or (source == "auto" and find_metadata(root) is None)):
        paper, shared = (patterns[:2] for patterns in CATALOGUE[name].files[:2])
        locate(name, root, files=[paper, shared] if source == "csv" else [paper, shared, FILES])
        # All files are there, but TensorFlow Federated's list lacks the column of this population.
        raise damaged(f"the list has no column '{population.column}'", root / shared[0])
    more: dict[str, NDArray[Any]] = {}
    if lists is not None:
        listed = read_lists(population, lists, root)
        train, test, clients, notes = listed.train, listed.test, listed.clients, listed.notes
        more = {} if listed.labels is None else {"label": listed.labels}
    else:
        train, test, notes = _metadata(root, name)
        train, test = _balanced(train, test, seed)
        train, clients, left_out = _clients(population, train, seed)
        drawn = f"built from the metadata with seed {seed}: not the published population image for image"
        notes = (*notes, *left_out, drawn)
    columns = {
        **train.columns(),
        "client": clients,
        "cell" if population.n_max else "user_id": clients,
        **more,
    }
    splits = (
        _examples(root, train, columns, height_width),
        _examples(root, test, test.columns(), height_width),
    )
    return published(name, splits, train.classes, notes=notes, seeded=lists is None)


def _examples(
    root: Path, part: Metadata, columns: dict[str, NDArray[Any]], size: tuple[int, int]
) -> Examples:
    images = ImageFiles(root / FOLDER, Paths.of(part.files.tolist()), 3, *size)
    return Examples(images, part.labels, columns)


def _metadata(root: Path, name: str) -> tuple[Metadata, Metadata, tuple[str, ...]]:
    """(training images, validation images, notes), from the published metadata."""
    paths = locate(name, root, files=[FILES])
    train, train_notes = read_metadata(*paths[:2])
    test, test_notes = read_metadata(*paths[2:])
    if train.classes != test.classes:
        what = "the two files do not have the same categories"
        raise DataError(what, where=f"{paths[0]}, {paths[2]}", hint=get_again(paths[2]))
    return train, test, (*train_notes, *test_notes)


def _balanced(train: Metadata, test: Metadata, seed: int) -> tuple[Metadata, Metadata]:
    rows = balanced(train.labels, PER_CLASS, seed)
    kept = np.unique(train.labels[rows])
    return train.take(rows).of_classes(kept), test.of_classes(kept)


def _clients(
    population: Population, train: Metadata, seed: int
) -> tuple[Metadata, NDArray[np.str_], tuple[str, ...]]:
    """(the images that have a client, the client of each, notes)."""
    if population.n_max is None:
        owned = np.flatnonzero(train.users != "")
        gone = len(train) - len(owned)
        notes = (
            (f"left out {gone:,} of {len(train):,} training images whose user is not known",) if gone else ()
        )
        return train.take(owned), train.users[owned], notes
    from fedlens.data.partition.s2 import s2

    cells = s2(train.table(), seed, n_max=population.n_max, missing="skip")
    order = np.argsort(cells.indices, kind="stable")
    gone = len(train) - len(order)
    told = f"left out {gone:,} of {len(train):,} training images without a place or in cells with too few"
    notes = (told,) if gone else ()
    return train.take(cells.indices[order]), np.array(cells.ids)[cells.owners()[order]], notes


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
