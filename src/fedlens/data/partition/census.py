"""The number of examples of each class at each client, in compressed rows, and distances from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.errors import DataError
from fedlens.data.table import Table


@dataclass(frozen=True, eq=False)
class Census:
    """Client k holds `counts[i]` marks of class `columns[i]`, for i in `offsets[k] : offsets[k + 1]`.

    A mark (see `Table`) is the label of an image; each class that the mask or the boxes of an image show, once per
    image; each token of a text that is to be predicted.

    Args:
        classes: the name of each class.
        columns: int32 [m], ascending within a client.
        counts: int64 [m], above 0.
        offsets: int64 [clients + 1].
        sizes: int64 [clients], the examples of each client.
    """

    classes: tuple[str, ...]
    columns: NDArray[np.int32]
    counts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __post_init__(self) -> None:
        fits = len(self.columns) == len(self.counts) and len(self.offsets) == len(self.sizes) + 1
        if not fits or self.offsets[0] != 0 or self.offsets[-1] != len(self.columns):
            raise DataError("the counts of the classes contradict each other")
        if len(self.columns) and not (self.columns.min() >= 0 and self.columns.max() < len(self.classes)):
            raise DataError(f"a count is of a class that is not in 0 .. {len(self.classes) - 1}")

    @classmethod
    def of(
        cls,
        indices: NDArray[np.int64],
        offsets: NDArray[np.int64],
        labels: Table | ArrayLike,
        where: str | None = None,
    ) -> Census:
        """Counts the classes of each client; `Partition.census_of` calls it.

        Client k holds the examples `indices[offsets[k] : offsets[k + 1]]`. `labels` is the table of the training split,
        or its labels. `where` names the dataset in errors.

        Raises `DataError` if there are fewer labels than the indices need.

        >>> census = Census.of(np.array([0, 1, 2]), np.array([0, 2, 3]), [1, 1, 0])
        >>> census.dense().tolist(), census.emd()
        ([[0, 2], [1, 0]], 0.888...)
        """
        table = Table.of(labels)
        if indices.size and indices.max() >= len(table):
            raise DataError(f"the partition points to example {indices.max()} of {len(table)}", where=where)
        sizes = np.diff(offsets)
        owners = np.repeat(np.arange(len(sizes)), sizes)
        each = np.diff(table.offsets)[indices]
        starts = table.offsets[:-1][indices]
        ends = np.cumsum(each)
        places = np.repeat(starts - (ends - each), each) + np.arange(ends[-1] if len(ends) else 0)
        width = max(1, len(table.classes))
        keys, counts = np.unique(np.repeat(owners, each) * width + table.marks[places], return_counts=True)
        rows = np.searchsorted(keys, np.arange(len(sizes) + 1) * width)
        columns = (keys % width).astype(np.int32)
        return cls(table.classes, columns, counts.astype(np.int64), rows, sizes)

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    def owners(self) -> NDArray[np.int64]:
        """int64 [m]: the client of each count."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def dense(self, clients: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """int64 [k, classes]: the counts as a matrix, of all clients or of `clients`."""
        rows = np.arange(len(self)) if clients is None else np.asarray(clients, np.int64)
        matrix = np.zeros((len(rows), len(self.classes)), np.int64)
        for row, client in enumerate(rows):
            part = slice(self.offsets[client], self.offsets[client + 1])
            matrix[row, self.columns[part]] = self.counts[part]
        return matrix

    def totals(self) -> NDArray[np.int64]:
        """int64 [classes]: how many marks of each class all clients hold together."""
        totals = np.zeros(len(self.classes), np.int64)
        np.add.at(totals, self.columns, self.counts)
        return totals

    def classes_per_client(self) -> NDArray[np.int64]:
        """int64 [clients]: how many different classes each client holds."""
        return np.diff(self.offsets)

    def client_emds(self) -> NDArray[np.float64]:
        """float64 [clients]: the earth mover's distance of each client's classes from the population's.

        EMD(q_i, p) = ||q_i - p||_1, in [0, 2], with p = sum_i (n_i / n) q_i (Hsu et al. 2020, section 6.1). q_i is the
        share of each class among the client's marks, n_i its number of examples. NaN for a client without marks;
        the sums are over the others.
        """
        owners, shares, p = self._shares()
        if not len(owners):
            return np.full(len(self), np.nan)
        # ||q - p||_1 = sum over what q has of |q - p| - p, and sum(p) = 1.
        distances = 1.0 + np.bincount(
            owners, np.abs(shares - p[self.columns]) - p[self.columns], minlength=len(self)
        )
        distances[np.diff(self.offsets) == 0] = np.nan
        # Rounding can give distances slightly below 0.
        positive: NDArray[np.float64] = np.maximum(distances, 0.0)
        return positive

    def emd(self) -> float:
        """The non-identicalness of the population: sum_i (n_i / n) EMD(q_i, p) (Hsu et al. 2020, section 6.1)."""
        distances = self.client_emds()
        known = ~np.isnan(distances)
        weights = self.sizes[known]
        return float(distances[known] @ weights / weights.sum()) if weights.sum() else float("nan")

    def _shares(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """(owner of each count, its share of the owner's marks, the population's distribution p)."""
        owners = self.owners()
        marks = np.bincount(owners, self.counts, minlength=len(self))
        shares = self.counts / marks[owners]
        weights = np.where(marks > 0, self.sizes, 0)
        total = weights.sum()
        p = np.bincount(self.columns, shares * weights[owners], minlength=len(self.classes)) / max(1, total)
        return owners, shares, p
