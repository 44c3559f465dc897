"""The confusion matrix of a report: classes in a readable order, many classes in groups, the most confused pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLUSTERED_ABOVE = 30  # classes; fewer stay in their order
_CELLS = 200  # rows of a heat map; more classes share one


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """A confusion matrix as it is drawn.

    Args:
        counts: int64 [rows, rows], truth in rows and answers in columns.
        members: the classes of each row and column, positions in the list of classes.
        clustered: whether the rows are in clustered order.
    """

    counts: NDArray[np.int64]
    members: Sequence[Sequence[int]]
    clustered: bool

    @classmethod
    def of(cls, confusion: NDArray[np.int64]) -> ConfusionMatrix:
        """The matrix of all classes: above 30 in clustered order, above 200 in groups of neighbouring classes.

        >>> ConfusionMatrix.of(np.eye(1000, dtype=np.int64)).counts.shape
        (200, 200)
        """
        classes = len(confusion)
        clustered = classes > CLUSTERED_ABOVE
        order = clustered_order(confusion) if clustered else list(range(classes))
        each = math.ceil(classes / _CELLS)
        starts = list(range(0, classes, each))
        counts = confusion[np.ix_(order, order)]
        if each > 1:
            counts = np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)
        return cls(counts, [order[start : start + each] for start in starts], clustered)

    @property
    def shares(self) -> NDArray[np.float64]:
        """float64 [rows, rows]: the share of each answer among the examples of a row; 0 in a row without examples."""
        return row_shares(self.counts)


def row_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts divided by the sum of their row, 0 in an empty row.

    >>> row_shares(np.array([[3, 1], [0, 0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    return shares


def clustered_order(confusion: NDArray[np.int64]) -> list[int]:
    """The classes in an order in which classes that are confused with each other are neighbours.

    Average linkage on the distance 1 - s / max s, where s is the symmetrized matrix of shares, (P + P^T) / 2.

    >>> confusion = np.diag([9, 9, 9, 9])
    >>> confusion[0, 2] = confusion[3, 1] = 5
    >>> clustered_order(confusion)
    [0, 2, 1, 3]
    """
    from scipy.cluster.hierarchy import leaves_list, linkage  # here, because most pages do not need it
    from scipy.spatial.distance import squareform

    shares = row_shares(confusion)
    similar = (shares + shares.T) / 2
    np.fill_diagonal(similar, 0.0)
    largest = similar.max(initial=0.0)
    if len(confusion) < 3 or largest == 0.0:
        return list(range(len(confusion)))
    distances = 1.0 - similar / largest
    np.fill_diagonal(distances, 0.0)
    order: list[int] = leaves_list(linkage(squareform(distances), "average")).tolist()
    return order


def confused_pairs(confusion: NDArray[np.int64], most: int) -> list[tuple[int, int, int]]:
    """(truth, answer, count) of the most frequent confusions, the most frequent first; equal ones by class.

    >>> confused_pairs(np.array([[5, 2, 0], [7, 1, 0], [0, 2, 9]]), 2)
    [(1, 0, 7), (0, 1, 2)]
    """
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    truths, answers = wrong.nonzero()
    counts = wrong[truths, answers]
    order = np.lexsort((answers, truths, -counts))[:most]
    return [(int(truths[k]), int(answers[k]), int(counts[k])) for k in order]
