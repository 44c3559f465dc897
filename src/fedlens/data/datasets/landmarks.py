"""Google Landmarks v2 by photographer: Landmarks-User-160k of hsu2020, and its small sibling gld23k."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.catalogue import CATALOGUE, search
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published, reading
from fedlens.data.datasets.federated_csv import Listing, check_apart, read_list, read_rows
from fedlens.data.formats import common_settings as common
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.partition.drawing import streams
from fedlens.data.table import Table

TEST_IMAGES = 10
FOLDER = "google-landmarks-v2"
_LAYOUTS = (
    "train/{0}/{1}/{2}/{id}.jpg",
    "{0}/{1}/{2}/{id}.jpg",
    "images/{id}.jpg",
    "train/{id}.jpg",
    "{id}.jpg",
)
_PROBES = 100


@dataclass(frozen=True)
class Rules:
    """What hsu2020 4.2 asks of landmarks and users: at least so many."""

    images_per_landmark: int = 30
    users_per_landmark: int = 10
    images_per_user: int = 30
    landmarks_per_user: int = 5


RULES = Rules()


def kept_images(landmarks: ArrayLike, users: ArrayLike, rules: Rules | None = None) -> NDArray[np.bool_]:
    """bool [n]: the images that hsu2020's training split keeps (section 4.2).

    "Requiring every landmark to have at least 30 images and be visited by at least 10 users, meanwhile
    requiring every user to have contributed at least 30 images that depict 5 or more landmarks." Dropping a
    landmark takes images from users, and dropping a user takes images from landmarks, so the rules are applied
    in turn until nothing changes: landmarks first, then users. The turn does not matter. Images only ever make
    the rules easier to meet, so any two selections of landmarks and users that meet all of them do so
    together, and there is one largest selection, which every order of dropping ends at. The paper does not say
    that it repeats the rules; applied once, its sentence would not hold of the result.

    Args:
        landmarks, users: int [n], from 0 on, of each image.

    >>> rules = Rules(2, 2, 2, 1)
    >>> kept_images([0, 0, 1, 1], [0, 1, 0, 0], rules).tolist()
    [False, False, False, False]
    >>> kept_images([0, 0, 0, 0, 1], [0, 0, 1, 1, 1], rules).tolist()
    [True, True, True, True, False]
    """
    asked = rules or Rules()
    images = Table.of(landmarks).labels, Table.of(users).labels
    kept = np.ones(len(images[0]), bool)
    needed = (
        (asked.images_per_landmark, asked.users_per_landmark),
        (asked.images_per_user, asked.landmarks_per_user),
    )
    while True:
        before = int(kept.sum())
        for side, (least_images, least_others) in enumerate(needed):
            kept &= _enough(images[side], images[1 - side], kept, least_images, least_others)[images[side]]
        if int(kept.sum()) == before:
            return kept


def _enough(
    groups: NDArray[np.int64],
    others: NDArray[np.int64],
    kept: NDArray[np.bool_],
    least_images: int,
    least_others: int,
) -> NDArray[np.bool_]:
    """bool [groups]: which have enough kept images, and enough different `others` among them."""
    count = int(groups.max(initial=-1)) + 1
    width = int(others.max(initial=-1)) + 1
    pairs = np.unique(groups[kept] * width + others[kept])
    images = np.bincount(groups[kept], minlength=count)
    different = np.bincount(pairs // max(1, width), minlength=count)
    enough: NDArray[np.bool_] = (images >= least_images) & (different >= least_others)
    return enough


def leftover_images(
    landmarks: ArrayLike, users: ArrayLike, kept: NDArray[np.bool_], seed: int, each: int = TEST_IMAGES
) -> NDArray[np.int64]:
    """Rows, ascending, of the test split: images of users that train nothing, at most `each` of a landmark.

    hsu2020 4.2: "the test split is created from the leftover images in GLD-v2-clean whose authors do not overlap
    with those in the train split"; 1,835 of 2,028 landmarks have exactly 10, the others have fewer, "due to
    insufficient samples". Which 10 is not stated: they are drawn with `seed`.

    Args:
        landmarks, users: int [n], from 0 on, of all clean images.
        kept: bool [n], the training split, of `kept_images`.

    >>> leftover_images([0, 0, 0, 1], [0, 1, 2, 1], np.array([True, False, False, False]), seed=0, each=1).tolist()
    [2]
    """
    if each < 1:
        raise ConfigError(f"each is {each}, but must be at least 1", where="each")
    shown, owners = Table.of(landmarks).labels, Table.of(users).labels
    free = ~np.isin(owners, owners[kept]) & np.isin(shown, shown[kept])
    rows = np.flatnonzero(free)
    shuffled = rows[streams(seed, 1)[0].permutation(len(rows))]
    by_landmark = shuffled[np.argsort(shown[shuffled], kind="stable")]
    counts = np.bincount(shown[by_landmark], minlength=1)
    rank = np.arange(len(by_landmark)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(by_landmark[rank < each])


def landmarks_user_160k(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: common.GivenSize = 224,
    source: Annotated[
        Literal["auto", "csv", "metadata"],
        Field(
            description="the published lists, or the paper's rules on the metadata; `auto`: the lists if found"
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

    Raises `DataError` if files are not there, are damaged or contradict each other.
    """
    name, height_width = "landmarks-user-160k", common.size_of(size)
    lists, metadata = (patterns[:2] for patterns in CATALOGUE[name].files)
    if source == "csv" or (source == "auto" and (download or not search([lists], root).lacking)):
        return _from_lists(name, locate(name, root, download, [lists]), root, height_width)
    files = [metadata] if source == "metadata" else [lists, metadata]
    return _from_metadata(name, locate(name, root, files=files), root, height_width, seed)


def gld23k(root: Path, download: bool, seed: int, *, size: common.GivenSize = 224) -> Dataset:
    """gld23k: 23,080 photographs of 203 landmarks, by 233 users; a small Landmarks-User-160k.

    The lists are `mini_gld_train_split.csv` and `mini_gld_test.csv` in `root/federated_vision_datasets/gld23k`,
    which `download` fetches; the images lie as for `landmarks-user-160k`. `seed` plays no part.

    Source: TensorFlow Federated, tff.simulation.datasets.gldv2.

    Raises `DataError` if files are not there, are damaged or contradict each other.
    """
    lists = CATALOGUE["gld23k"].files[0][:2]
    return _from_lists("gld23k", locate("gld23k", root, download, [lists]), root, common.size_of(size))


def _from_lists(name: str, lists: tuple[Path, ...], root: Path, size: tuple[int, int]) -> Dataset:
    train, test = read_list(lists[0]), read_list(lists[1], None)
    check_apart(train, test)
    _check_counts(name, train, test)
    classes = tuple(map(str, range(int(train.classes.max()) + 1)))
    layout = _layout(root / FOLDER, train.images)
    splits = [_examples(root, layout, one.images, one.classes, one.users, size) for one in (train, test)]
    return published(name, splits, classes)


def _check_counts(name: str, train: Listing, test: Listing) -> None:
    users = len(set(train.users.tolist())) if train.users is not None else 0
    counts = len(train), users, len(np.unique(train.classes)), len(test)
    facts = CATALOGUE[name]
    published_counts = facts.train, facts.clients, facts.classes, facts.test
    words = ("training images", "users", "landmarks", "test images")
    for word, expected, count in zip(words, published_counts, counts, strict=True):
        # Of gld23k it is not stated whether the published counts include the test split.
        if facts.test is not None and count != expected:
            path = test.path if word == "test images" else train.path
            raise damaged(f"{expected:,} {word} were expected, found {count:,}", path)


def _examples(
    root: Path,
    layout: str,
    images: NDArray[np.str_],
    labels: NDArray[np.int64],
    users: NDArray[np.str_] | None,
    size: tuple[int, int],
) -> Examples:
    names = Paths.of([_file(layout, image) for image in images.tolist()])
    columns = {"image_id": images} | ({} if users is None else {"user_id": users, "client": users})
    return Examples(ImageFiles(root / FOLDER, names, 3, *size), labels, columns)


def _file(layout: str, image: str) -> str:
    return layout.format(*image[:3].ljust(3, "_"), id=image)


def _layout(folder: Path, images: NDArray[np.str_]) -> str:
    """The layout in which most of the first images exist, or the published one if none does."""
    probes = images[:_PROBES].tolist()
    matches = {one: sum((folder / _file(one, image)).is_file() for image in probes) for one in _LAYOUTS}
    return max(matches, key=lambda layout: matches[layout])


def _from_metadata(
    name: str, paths: tuple[Path, ...], root: Path, size: tuple[int, int], seed: int
) -> Dataset:
    clean, attribution = paths
    images, landmarks = read_clean(clean)
    users, authors = read_authors(attribution, images)
    known = users >= 0
    images, landmarks, users = images[known], landmarks[known], users[known]
    kept = kept_images(landmarks, users, RULES)
    if not kept.any():
        raise damaged("no image meets the rules of Hsu et al. 2020, section 4.2", clean)
    left = leftover_images(landmarks, users, kept, seed)
    shown, numbers = np.unique(landmarks[kept], return_inverse=True)
    notes = [f"built from the metadata with seed {seed}, and not compared with the published lists"]
    if not known.all():
        notes.append(f"left out {int((~known).sum()):,} clean images without an author")
    layout = _layout(root / FOLDER, images[kept])
    owners = np.array(authors)[users[kept]]
    train = _examples(root, layout, images[kept], numbers.astype(np.int64), owners, size)
    labels = np.searchsorted(shown, landmarks[left]).astype(np.int64)
    test = _examples(root, layout, images[left], labels, None, size)
    classes = tuple(f"landmark {landmark}" for landmark in shown.tolist())
    return published(name, (train, test), classes, notes=notes, seeded=True)


def read_clean(path: Path) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """(image ids [n], landmark ids [n]) of GLD-v2's train_clean.csv: `landmark_id,images`, the ids between blanks.

    A line can be longer than a CSV reader allows a cell to be. Raises `DataError` with the line.
    """
    images: list[str] = []
    landmarks: list[int] = []
    with reading(path), path.open(encoding="utf-8-sig") as file:
        if next(file, "").strip() != "landmark_id,images":
            raise damaged("the columns are not landmark_id,images", path, 1)
        for number, line in enumerate(file, 2):
            landmark, _, ids = line.partition(",")
            image_ids = ids.split()
            if not (landmark.isdecimal() and image_ids):
                raise damaged("a landmark id and image ids were expected", path, number)
            images += image_ids
            landmarks += [int(landmark)] * len(image_ids)
    twice = len(images) - len(set(images))
    if twice:
        raise damaged(f"{twice} images are listed more than once", path)
    return np.array(images, np.str_), np.array(landmarks, np.int64)


def read_authors(path: Path, images: NDArray[np.str_]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """(int64 [n], which author each image has, -1 for none; the authors), from GLD-v2's train_attribution.csv.

    Its columns are id,url,author,license,title. Raises `DataError` if an image is not in it.
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
        what = f"{len(absent):,} of the {len(images):,} clean images are not in it"
        raise damaged(f"{what}, '{images[absent[0]]}' is the first", path)
    return owners, tuple(numbers)
