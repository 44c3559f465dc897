"""Google Landmarks v2 by photographer: Landmarks-User-160k of hsu2020, and its small sibling gld23k."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.federated_csv import Listing, check_apart, read_list, read_rows
from fedlens.data.datasets.folders import PHOTO_MEAN, PHOTO_STD
from fedlens.data.datasets.landmark_rules import Rules, kept_images, leftover_images
from fedlens.data.datasets.missing_files import DAMAGED, missing
from fedlens.data.datasets.picture_size import Size, size_of
from fedlens.data.datasets.zips import unzip
from fedlens.data.download import Resource, fetch
from fedlens.data.images import ImageFiles, Paths

FOLDER = "google-landmarks-v2"
LISTS = "federated_vision_datasets"
RULES = Rules()
LICENCE = (
    "lists and labels CC BY 4.0; each image its own licence, CC BY for all of them by the publisher's account"
)
SOURCE = "Google Landmarks Dataset v2, Weyand et al. 2020; github.com/cvdfoundation/google-landmark"
_LAYOUTS = (
    "train/{0}/{1}/{2}/{id}.jpg",
    "{0}/{1}/{2}/{id}.jpg",
    "images/{id}.jpg",
    "train/{id}.jpg",
    "{id}.jpg",
)
_PROBES = 100
_TFF = "https://storage.googleapis.com/tff-datasets-public"


@dataclass(frozen=True)
class LandmarkLists:
    """The lists of a published population. URLs and MD5s are those in TensorFlow Federated's source.

    Args:
        folder: below `federated_vision_datasets/`.
        train, test: the files in it.
        resources: what to fetch: the two lists, or one zip archive of their folder.
        counts: images, users and landmarks of the training list, images of the test list.
    """

    name: str
    folder: str
    train: str
    test: str
    resources: tuple[Resource, ...]
    counts: tuple[int, int, int, int] | None


USER_160K = LandmarkLists(
    name="landmarks-user-160k",
    folder="landmarks-user-160k",
    train="federated_train.csv",
    test="test.csv",
    resources=(
        Resource(
            "landmarks-user-160k.zip",
            ("https://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k.zip",),
            "53c36bd7d5fc12f927af2820b7e4a57c",
        ),
    ),
    counts=(164_172, 1_262, 2_028, 19_526),
)
GLD23K = LandmarkLists(
    name="gld23k",
    folder="gld23k",
    train="mini_gld_train_split.csv",
    test="mini_gld_test.csv",
    resources=(
        Resource(
            "mini_gld_train_split.csv",
            (f"{_TFF}/mini_gld_train_split.csv",),
            "9fd62cf79a67046fdd673d3a0ac52841",
        ),
        Resource("mini_gld_test.csv", (f"{_TFF}/mini_gld_test.csv",), "298e9d19d66357236f66fe8e22920933"),
    ),
    counts=None,  # 23,080 images, 233 users, 203 landmarks; whether that counts test images is not said
)


def landmarks_user_160k(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: Size = 224,
    source: Annotated[
        Literal["auto", "csv", "metadata"],
        Field(
            description="the published lists, or the paper's rules on the metadata; `auto`: the lists if they are there"
        ),
    ] = "auto",
) -> Dataset:
    """Landmarks-User-160k (hsu2020 4.2): 164,172 + 19,526 photographs of 2,028 landmarks, by 1,262 users.

    Images: `root/google-landmarks-v2`, as they are published, `train/a/b/c/<id>.jpg` with the first three
    characters of the id, or all in one folder, `images/<id>.jpg`; for a partition alone they need not be there.
    Columns of the training split: client and user_id (the user), image_id. hsu2020 6.5 trains on 224 x 224.

    With source = "csv" the population is the published one: `federated_train.csv` and `test.csv` in
    `root/federated_vision_datasets/landmarks-user-160k`, which `download` fetches. With "metadata" it is built
    from `train_clean.csv` and `train_attribution.csv` in `root/google-landmarks-v2`: the rules of
    `kept_images` on the clean images, and a test split of `leftover_images`, drawn with `seed`. Images without
    an author are left out. It has not been compared with the published lists, and its classes are numbered
    by landmark id, which need not be the published order.

    Raises `DataError` where files are not there, are damaged or contradict each other.
    """
    height_width = size_of(size)
    if source != "metadata":
        found = _find_lists(USER_160K, root, download)
        if found is not None:
            return _from_lists(USER_160K, found, root, height_width)
    if source == "csv":
        raise missing(
            USER_160K.name, root / LISTS, f"{USER_160K.folder}/{{{USER_160K.train},{USER_160K.test}}}"
        )
    return _from_metadata(root, height_width, seed)


def gld23k(root: Path, download: bool, seed: int, *, size: Size = 224) -> Dataset:
    """gld23k: 23,080 photographs of 203 landmarks, by 233 users; a small Landmarks-User-160k.

    The lists are `mini_gld_train_split.csv` and `mini_gld_test.csv` in `root/federated_vision_datasets/gld23k`,
    which `download` fetches; the images lie as for `landmarks-user-160k`. `seed` plays no part.

    Source: TensorFlow Federated, tff.simulation.datasets.gldv2.

    Raises `DataError` where files are not there, are damaged or contradict each other.
    """
    found = _find_lists(GLD23K, root, download)
    if found is None:
        raise missing(GLD23K.name, root / LISTS, f"{GLD23K.folder}/{{{GLD23K.train},{GLD23K.test}}}")
    return _from_lists(GLD23K, found, root, size_of(size))


def _find_lists(what: LandmarkLists, root: Path, download: bool) -> tuple[Path, Path] | None:
    """(training list, test list), fetched where they are not there and `download` says so."""
    folder = root / LISTS / what.folder
    lists = folder / what.train, folder / what.test
    if not all(path.is_file() for path in lists) and download:
        for resource in what.resources:
            fetched = fetch(resource, folder)
            if fetched.suffix == ".zip":
                unzip(fetched, root / LISTS, lambda name: name in _members(what))
    return lists if all(path.is_file() for path in lists) else None


def _members(what: LandmarkLists) -> tuple[str, str]:
    return f"{what.folder}/{what.train}", f"{what.folder}/{what.test}"


def _from_lists(what: LandmarkLists, found: tuple[Path, Path], root: Path, size: tuple[int, int]) -> Dataset:
    train, test = read_list(found[0]), read_list(found[1], None)
    check_apart(train, test)
    assert train.users is not None
    _check_counts(what, train, test)
    classes = tuple(map(str, range(int(train.classes.max()) + 1)))
    return _dataset(what.name, root, size, classes, _Split.of(train), _Split.of(test), (), False)


def _check_counts(what: LandmarkLists, train: Listing, test: Listing) -> None:
    users = len(set(train.users.tolist())) if train.users is not None else 0
    counts = len(train), users, len(np.unique(train.classes)), len(test)
    if what.counts is not None and counts != what.counts:
        words = ("training images", "users", "landmarks", "test images")
        wrong = next(k for k in range(4) if counts[k] != what.counts[k])
        path = test.path if wrong == 3 else train.path
        raise DataError(
            f"{what.counts[wrong]:,} {words[wrong]} were expected, found {counts[wrong]:,}",
            where=str(path),
            hint=DAMAGED,
        )


@dataclass(frozen=True, eq=False)
class _Split:
    images: NDArray[np.str_]
    labels: NDArray[np.int64]
    users: NDArray[np.str_] | None

    @classmethod
    def of(cls, listing: Listing) -> _Split:
        return cls(listing.images, listing.classes, listing.users)


def _dataset(
    name: str,
    root: Path,
    size: tuple[int, int],
    classes: tuple[str, ...],
    train: _Split,
    test: _Split,
    notes: tuple[str, ...],
    seeded: bool,
) -> Dataset:
    folder = root / FOLDER
    layout = _layout(folder, train.images)
    files = [[_file(layout, image) for image in split.images.tolist()] for split in (train, test)]
    examples = []
    for split, names in zip((train, test), files, strict=True):
        columns = {"image_id": split.images}
        if split.users is not None:
            columns |= {"user_id": split.users, "client": split.users}
        examples.append(Examples(ImageFiles(folder, Paths.of(names), 3, *size), split.labels, columns))
    return Dataset(
        name=name,
        train=examples[0],
        test=examples[1],
        classes=classes,
        mean=PHOTO_MEAN,
        std=PHOTO_STD,
        licence=LICENCE,
        source=SOURCE,
        notes=notes,
        seeded=seeded,
    )


def _file(layout: str, image: str) -> str:
    return layout.format(*image[:3].ljust(3, "_"), id=image)


def _layout(folder: Path, images: NDArray[np.str_]) -> str:
    """How the images lie: the layout in which most of the first ones are found, the published one where none is."""
    probes = images[:_PROBES].tolist()
    found = {one: sum((folder / _file(one, image)).is_file() for image in probes) for one in _LAYOUTS}
    return max(found, key=lambda layout: found[layout])


def _from_metadata(root: Path, size: tuple[int, int], seed: int) -> Dataset:
    folder = root / FOLDER
    clean, attribution = folder / "train_clean.csv", folder / "train_attribution.csv"
    if not (clean.is_file() and attribution.is_file()):
        wanted = f"{USER_160K.folder}/{USER_160K.train} in {LISTS}, or {clean.name} and {attribution.name} in {FOLDER}"
        raise missing(USER_160K.name, root, wanted)
    images, landmarks = read_clean(clean)
    users, authors = read_authors(attribution, images)
    known = users >= 0
    images, landmarks, users = images[known], landmarks[known], users[known]
    kept = kept_images(landmarks, users, RULES)
    if not kept.any():
        raise DataError("no image meets the rules of hsu2020 4.2", where=str(clean), hint=DAMAGED)
    left = leftover_images(landmarks, users, kept, seed)
    shown, numbers = np.unique(landmarks[kept], return_inverse=True)
    notes = [f"built from the metadata with seed {seed}, and not compared with the published lists"]
    if not known.all():
        notes.append(f"left out {int((~known).sum()):,} clean images without an author")
    return _dataset(
        USER_160K.name,
        root,
        size,
        tuple(f"landmark {landmark}" for landmark in shown.tolist()),
        _Split(images[kept], numbers.astype(np.int64), np.array(authors)[users[kept]]),
        _Split(images[left], np.searchsorted(shown, landmarks[left]).astype(np.int64), None),
        tuple(notes),
        True,
    )


def read_clean(path: Path) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """(image ids [n], landmark ids [n]) of GLD-v2's train_clean.csv: `landmark_id,images`, the ids between blanks.

    A line can be longer than a CSV reader allows a cell to be. Raises `DataError` with the line.
    """
    images: list[str] = []
    landmarks: list[int] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            if next(file, "").strip() != "landmark_id,images":
                raise DataError(
                    "the columns are not landmark_id,images", where=f"{path}, line 1", hint=DAMAGED
                )
            for number, line in enumerate(file, 2):
                landmark, _, ids = line.partition(",")
                found = ids.split()
                if not (landmark.isdecimal() and found):
                    raise DataError(
                        "a landmark id and image ids were expected",
                        where=f"{path}, line {number}",
                        hint=DAMAGED,
                    )
                images += found
                landmarks += [int(landmark)] * len(found)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), hint=DAMAGED) from error
    if len(set(images)) < len(images):
        raise DataError(
            f"{len(images) - len(set(images))} images are listed more than once",
            where=str(path),
            hint=DAMAGED,
        )
    return np.array(images, np.str_), np.array(landmarks, np.int64)


def read_authors(path: Path, images: NDArray[np.str_]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """(int64 [n], which author each image has, -1 for none; the authors), from GLD-v2's train_attribution.csv.

    Its columns are id,url,author,license,title. Raises `DataError` where an image is not in it.
    """
    row_of = {image: row for row, image in enumerate(images.tolist())}
    numbers: dict[str, int] = {}
    owners = np.full(len(images), -2, np.int64)
    for _, (image, author) in read_rows(path, ["id", "author"]):
        row = row_of.get(image)
        if row is not None:
            name = author.strip()
            owners[row] = numbers.setdefault(name, len(numbers)) if name else -1
    absent = np.flatnonzero(owners == -2)
    if len(absent):
        raise DataError(
            f"{len(absent):,} of the {len(images):,} clean images are not in it, "
            f"'{images[absent[0]]}' is the first",
            where=str(path),
            hint=DAMAGED,
        )
    return owners, tuple(numbers)
