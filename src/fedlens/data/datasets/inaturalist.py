"""iNaturalist-2017, and hsu2020's populations of it: by user, and by cells of the globe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD, by_hand
from fedlens.data.datasets.inaturalist_lists import (
    GEO,
    LISTS,
    USER_120K,
    Population,
    fetch_lists,
    find_lists,
    listed,
)
from fedlens.data.datasets.inaturalist_metadata import (
    FOLDER,
    HOW,
    Metadata,
    balanced,
    find_metadata,
    read_metadata,
)
from fedlens.data.datasets.missing_files import DAMAGED, missing
from fedlens.data.datasets.picture_size import Size, size_of
from fedlens.data.images import ImageFiles, Paths

PER_CLASS = 100
NO_USER = "unknown"
LICENCE = "non-commercial research and education only, no redistribution (terms of the competition)"
SOURCE = "Van Horn et al. 2018, The iNaturalist Species Classification and Detection Dataset"

Source = Annotated[
    Literal["auto", "csv", "metadata"],
    Field(
        description="the published lists, or built from the metadata; `auto`: the lists where they are there"
    ),
]


def inaturalist_2017(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: Size = 299,
    subset: Annotated[
        Literal["all", "balanced"],
        Field(description="all images, or hsu2020's 100 of each species that has as many"),
    ] = "all",
) -> Dataset:
    """iNaturalist-2017: 579,184 + 95,986 photographs of 5,089 species, with user and place.

    Reads `root/inaturalist-2017`: train2017.json, val2017.json, train2017_locations.json and
    val2017_locations.json, there or in a folder in it, and train_val_images/, which need not be there for a
    partition alone. The published validation images are the test split, as in hsu2020; the competition's own
    test images have no public labels. Columns: user_id (whose it is, "" where that is not known), client (the
    same, "unknown" for all of those), lat and lon in degrees (NaN where they are not known), supercategory, and
    image_id (the file's name).

    With subset = "balanced" the training split is the class-balanced one of hsu2020 4.1: species with at least
    100 training images, 100 of each drawn with `seed`; 1,203 species, 120,300 images in the paper. The paper
    calls its test set class-balanced too; the one that TensorFlow Federated ships has 35,641 images, which is
    no multiple of 1,203, so that it is read as: every test image of these species. Species are numbered anew,
    in the order of their category ids.

    hsu2020 6.5 trains on 299 x 299. Raises `DataError` where files are not there or contradict each other.
    """
    height_width = size_of(size)
    train, test, notes = _published(root, "inaturalist-2017")
    if subset == "balanced":
        train, test = _balanced(train, test, seed)
    columns = {**train.columns(), "client": np.where(train.users == "", NO_USER, train.users)}
    seeded = subset == "balanced"
    return _dataset("inaturalist-2017", root, height_width, (train, columns), test, notes, seeded)


def inaturalist_user_120k(
    root: Path, download: bool, seed: int, *, size: Size = 299, source: Source = "auto"
) -> Dataset:
    """iNaturalist-User-120k (hsu2020 4.1): 120,300 photographs, 100 of each of 1,203 species, by 9,275 users.

    The column `client` is the user, so that the partition `natural` gives the population. The images lie as
    for `inaturalist-2017`.

    With source = "csv" the population is the published one: `federated_train_user_120k.csv` and `test.csv` in
    `root/federated_vision_datasets/inaturalist-user-120k` (hsu2020's archive), or `iNaturalist_train.csv` and
    `iNaturalist_test.csv` in `root/federated_vision_datasets/inaturalist` (TensorFlow Federated's, which
    `download` fetches). With "metadata" the balanced subset is drawn with `seed`, as for `inaturalist-2017`:
    the same rule, but **not the published population image for image**, since the paper's draw is not known.

    Raises `DataError` where files are not there, are damaged or contradict each other.
    """
    return _population(USER_120K, root, download, seed, size, source)


def _geo(population: Population) -> Callable[..., Dataset]:
    def read(root: Path, download: bool, seed: int, *, size: Size = 299, source: Source = "auto") -> Dataset:
        return _population(population, root, download, seed, size, source)

    read.__name__ = f"inaturalist_{population.column}"
    read.__qualname__ = read.__name__
    read.__doc__ = f"""iNaturalist-{population.name.capitalize()} (hsu2020 4.1): the balanced images by S2 cells.

    Cells are split into four until none holds more than {population.n_max:,} images; those below a hundredth
    of that are dropped. TensorFlow Federated ships {population.clients:,} clients. The columns `client` and
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
    name, height_width = f"inaturalist-{population.name}", size_of(size)
    lists = None if source == "metadata" else find_lists(population, root)
    if lists is None and source != "metadata" and download:
        lists = fetch_lists(population, root)
    labels = None
    if lists is not None:
        found = listed(population, lists, root)
        train, clients, labels = found.train, found.clients, found.labels
        test, notes = found.test, found.notes
    elif source == "csv":
        wanted = "inaturalist-*/federated_train_*.csv or inaturalist/iNaturalist_train.csv, each with its test list"
        raise missing(name, root / LISTS, wanted)
    else:
        train, test, notes = _published(root, name)
        train, test = _balanced(train, test, seed)
        train, clients, more = _clients(population, train, seed)
        drawn = f"built from the metadata with seed {seed}: not the published population image for image"
        notes = (*notes, *more, drawn)
    columns = {**train.columns(), "client": clients, "cell" if population.n_max else "user_id": clients}
    if labels is not None:
        columns["label"] = labels
    return _dataset(name, root, height_width, (train, columns), test, notes, lists is None)


def _dataset(
    name: str,
    root: Path,
    height_width: tuple[int, int],
    train: tuple[Metadata, dict[str, NDArray[Any]]],
    test: Metadata,
    notes: tuple[str, ...],
    seeded: bool,
) -> Dataset:
    def examples(part: Metadata, columns: dict[str, NDArray[Any]]) -> Examples:
        files = Paths.of(part.files.tolist())
        return Examples(ImageFiles(root / FOLDER, files, 3, *height_width), part.labels, columns)

    part, columns = train
    return Dataset(
        name=name,
        train=examples(part, columns),
        test=examples(test, test.columns()),
        classes=part.classes,
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence=LICENCE,
        source=SOURCE,
        notes=notes,
        seeded=seeded,
    )


def _published(root: Path, name: str) -> tuple[Metadata, Metadata, tuple[str, ...]]:
    """The published training and validation images."""
    places = find_metadata(root / FOLDER, "train"), find_metadata(root / FOLDER, "val")
    if places[0] is None or places[1] is None:
        wanted = "train2017.json, val2017.json, train2017_locations.json and val2017_locations.json"
        raise by_hand(name, root / FOLDER, wanted, HOW)
    train, train_notes = read_metadata(*places[0])
    test, test_notes = read_metadata(*places[1])
    if train.classes != test.classes:
        raise DataError(
            "the two files do not have the same categories",
            where=f"{places[0][0]}, {places[1][0]}",
            hint=DAMAGED,
        )
    return train, test, (*train_notes, *test_notes)


def _balanced(train: Metadata, test: Metadata, seed: int) -> tuple[Metadata, Metadata]:
    rows = balanced(train.labels, PER_CLASS, seed)
    kept = np.unique(train.labels[rows])
    return train.take(rows).of_classes(kept), test.of_classes(kept)


def _clients(
    population: Population, train: Metadata, seed: int
) -> tuple[Metadata, NDArray[np.str_], tuple[str, ...]]:
    """(the images that have a client, whose each is, notes)."""
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
