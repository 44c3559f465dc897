"""Draws of examples class by class: the class of each draw, and the example of that class."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Distribution = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def shuffled_by_class(
    classes: NDArray[np.int64], stream: np.random.RandomState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(positions int64 [n], counts int64 [C]): the examples by class, in a random order within each class."""
    order = stream.permutation(len(classes))
    return order[np.argsort(classes[order], kind="stable")], np.bincount(classes)


def owners_of_draws(
    classes: NDArray[np.int64],
    drawn: NDArray[np.int64],
    clients: NDArray[np.int64],
    stream: np.random.RandomState,
) -> NDArray[np.int64]:
    """int64 [n]: the owner of each example, -1 for none.

    Draw i is of class `drawn[i]` for client `clients[i]`: the j-th draw of a class, by any client, gets the j-th
    example of that class in a random order. No class may be drawn more often than it has examples.

    >>> owners_of_draws(np.array([1, 1, 0]), np.array([1, 0]), np.array([5, 6]), np.random.RandomState(0)).tolist()
    [-1, 5, 6]
    """
    by_class, counts = shuffled_by_class(classes, stream)
    starts = np.cumsum(counts) - counts
    used = np.bincount(drawn, minlength=len(counts))
    positions = np.arange(len(drawn)) + np.repeat(starts - (np.cumsum(used) - used), used)
    owners = np.full(len(classes), -1, np.int64)
    owners[by_class[positions]] = clients[np.argsort(drawn, kind="stable")]
    return owners


def draw_classes(
    left: NDArray[np.int64], uniform: NDArray[np.float64], distribution: Distribution
) -> NDArray[np.int64]:
    """int64 [k]: the class of each draw, one for each number in `uniform`; subtracts them from `left`, int64 [C].

    `distribution(alive)` gives the cumulative probabilities of the classes `alive`, which have examples left
    (ascending). They change only when a class is exhausted, so all draws are made at once, and those after an
    exhaustion again.
    """
    drawn = np.empty(len(uniform), np.int64)
    done = 0
    while done < len(uniform):
        alive = np.flatnonzero(left)
        picks = np.searchsorted(distribution(alive), uniform[done:], side="right")
        picked = np.bincount(picks, minlength=len(alive))
        upto = len(picks)
        for over in np.flatnonzero(picked >= left[alive]):
            upto = min(upto, int(np.flatnonzero(picks == over)[left[alive[over]] - 1]) + 1)
        left[alive] -= np.bincount(picks[:upto], minlength=len(alive))
        drawn[done : done + upto] = alive[picks[:upto]]
        done += upto
    return drawn
