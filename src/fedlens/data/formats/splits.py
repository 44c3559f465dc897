"""Training and test splits: given by the data, or drawn per class and client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.diagnostics import Findings
from fedlens.data.partition.drawing import streams

SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}


def split_named(name: str) -> str | None:
    """ "train", "test" or "validation" if `name` is a usual name of it; None for other names.

    >>> split_named("Val"), split_named("cats")
    ('validation', None)
    """
    return SPLITS.get(name.strip().lower())


def splits_of_folders(names: Sequence[str]) -> list[str] | None:
    """The split in the first folder of each path; None if all are "train", which is no split.

    >>> splits_of_folders(["train/a.png", "val/b.png"])
    ['train', 'validation']
    """
    splits = [split_named(name.partition("/")[0]) or "train" for name in names]
    return None if set(splits) == {"train"} else splits


def label_of_class(classes: Sequence[str]) -> dict[str | int, int]:
    """The label of each class name. Raises `ConfigError` if the setting `classes` has a name twice."""
    labels: dict[str | int, int] = {name: label for label, name in enumerate(classes)}
    if len(labels) < len(classes):
        raise ConfigError("a name is in 'classes' twice", where="classes", hint="remove one")
    return labels


def draw_test(
    labels: ArrayLike | None, clients: ArrayLike | None, count: int, share: float, seed: int
) -> NDArray[np.bool_]:
    """bool [count]: which examples are held out as test data, a `share` of each class and client.

    The examples are sorted by class, then client, then at random, and every (1 / share)-th is taken from a random
    start. So each class gives its share to within one example, and so do neighbouring clients of a class together.
    A class keeps at least one training example. At least one example is taken if there are two.

    >>> taken = draw_test([0] * 10 + [1] * 5, None, 15, 0.2, seed=0)
    >>> int(taken[:10].sum()), int(taken[10:].sum())
    (2, 1)
    """
    shuffling, starting = streams(seed, 2)
    by_class = _codes(labels, count)
    order = np.lexsort((shuffling.random_sample(count), _codes(clients, count), by_class))
    steps = np.floor(np.arange(count + 1) * share + starting.random_sample())
    taken = np.zeros(count, bool)
    taken[order[np.diff(steps) >= 1]] = True
    if count > 1 and not taken.any():
        taken[order[-1]] = True
    kept = np.bincount(by_class[~taken], minlength=int(by_class.max(initial=-1)) + 1)
    for missing in np.flatnonzero(kept == 0):
        taken[order[by_class[order] == missing][0]] = False
    return taken


def draw_test_of_sets(
    labels: NDArray[np.uint8], clients: ArrayLike | None, share: float, seed: int
) -> NDArray[np.bool_]:
    """bool [n]: which multi-label examples are held out as test data; `labels` are uint8 [n, classes].

    `draw_test` with the rarest class of each example as its class. Examples without a label are a class of their own.
    Every class that has examples keeps at least one training example.

    >>> labels = np.array([[1, 0], [1, 1]] * 10, np.uint8)
    >>> taken = draw_test_of_sets(labels, None, 0.2, seed=0)
    >>> labels[taken].sum(axis=0).tolist()
    [4, 2]
    """
    counts = labels.sum(axis=0, dtype=np.int64)
    place = np.empty(labels.shape[1], np.int64)
    place[np.argsort(counts, kind="stable")] = np.arange(len(place))
    rarest = np.where(labels, place, len(place)).min(axis=1, initial=len(place))
    taken = draw_test(rarest, clients, len(labels), share, seed)
    for label in np.flatnonzero((counts > 0) & (labels[~taken].sum(axis=0) == 0)):
        if not labels[~taken, label].any():
            taken[np.flatnonzero(labels[:, label])[0]] = False
    return taken


def check_splits(splits: Sequence[str], where: object, findings: Findings) -> None:
    """Adds a problem if no example is in the split 'train', or all are."""
    if "train" not in splits:
        findings.add_whole(where, "no example is in the split 'train'", "move some there")
    elif set(splits) == {"train"}:
        hint = "move some to 'test'; or define no splits, and a share is held out"
        findings.add_whole(where, "every example is in the split 'train', and none in 'test'", hint)


def _codes(values: ArrayLike | None, count: int) -> NDArray[np.int64]:
    if values is None:
        return np.zeros(count, np.int64)
    codes: NDArray[np.int64] = np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)
    return codes
