"""Training and test splits: given by the data, or drawn per class and client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """ "train", "test" or "validation", whichever `name` is a usual name of; None where it is none.

    >>> split_named("Val"), split_named("cats")
    ('validation', None)
    """
    return SPLITS.get(name.strip().lower())


def draw_test(
    labels: ArrayLike | None, clients: ArrayLike | None, count: int, share: float, seed: int
) -> NDArray[np.bool_]:
    """bool [count]: which examples are held out as test data, a `share` of them, of each class and client alike.

    The examples are sorted by class, then client, in random order within, and every (1 / share)-th is taken
    from a random start. So each class gives its share to within one example, and so does each client of a
    class over neighbouring ones. A class keeps at least one example to train on; at least one example is
    taken where there are two.

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


def check_splits(splits: Sequence[str], where: object, findings: Findings) -> None:
    """Adds to `findings` a split that is named and has no examples to train on or to test with."""
    have = set(splits)
    if "train" not in have:
        findings.add(where, "no example is in the split 'train'", "put some there", example=False)
    elif len(have) == 1:
        findings.add(
            where,
            "every example is in the split 'train', and none in 'test'",
            "put some there; or name no splits, and a share is held out",
            example=False,
        )


def _codes(values: ArrayLike | None, count: int) -> NDArray[np.int64]:
    if values is None:
        return np.zeros(count, np.int64)
    codes: NDArray[np.int64] = np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)
    return codes
