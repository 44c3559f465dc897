"""How hsu2020 makes a federated dataset of Google Landmarks v2: its filter rules, and its test split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.partition.drawing import streams
from fedlens.data.table import Table

TEST_IMAGES = 10


@dataclass(frozen=True)
class Rules:
    """What hsu2020 4.2 asks of landmarks and users: at least so many."""

    images_per_landmark: int = 30
    users_per_landmark: int = 10
    images_per_user: int = 30
    landmarks_per_user: int = 5


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
