"""Samples the clients and groups the classes of a large partition for its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition

_LOPSIDED = 4  # the largest bar over the median one, from where on bars are drawn as shares

_FINE = 2000


@dataclass(frozen=True)
class PartitionSample:
    """Some clients, and their marks by class or by group of neighbouring classes.

    Args:
        ids: the clients shown.
        counts: int64 [clients shown, groups], marks.
        sizes: int64 [clients shown], examples.
        labels: the name of each class or group.
        starts: the name of each class, or of the first of each group.
        clients_shown: "all 100 clients", or how many of them and how they were chosen.
        grouping: how the classes were grouped, or empty.
        unit: "examples", or "marks" where an example counts for any number of classes.
    """

    ids: tuple[str, ...]
    counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: tuple[str, ...]
    starts: tuple[str, ...]
    clients_shown: str
    grouping: str
    unit: str

    def shares(self) -> NDArray[np.float64]:
        """float64 [clients shown, groups]: the counts of each client as shares; 0 for an empty client."""
        shares: NDArray[np.float64] = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return shares

    def excerpt(self) -> str:
        """Which clients and classes are shown, line by line; empty if it is all of them."""
        whole = self.clients_shown.startswith(("all", "the one"))
        return "\n".join(filter(None, ["" if whole else self.clients_shown, self.grouping]))

    def even(self) -> bool:
        """Whether every client shown has the same number of marks."""
        return not len(self.counts) or np.ptp(self.counts.sum(axis=1)) == 0

    def lopsided(self) -> bool:
        """Whether the largest clients would dwarf the others."""
        marks = self.counts.sum(axis=1)
        return bool(len(marks)) and float(marks.max()) > _LOPSIDED * max(float(np.median(marks)), 1.0)

    def fine(self) -> bool:
        """Whether the cells of a matrix are so small that pale ones are hard to see."""
        return self.counts.size > _FINE

    def top_share(self) -> float:
        """The end of a matrix's colour scale: the largest share, or twice an even share where that is more."""
        even = 2 / max(len(self.labels), 2)
        return max(float(self.shares().max(initial=0)), even)

    def by_main_class(self) -> PartitionSample:
        """The same sample with the clients sorted by their most frequent class, the purest first."""
        shares = self.shares()
        order = np.lexsort((-shares.max(axis=1, initial=0), shares.argmax(axis=1)))
        ids = tuple(self.ids[k] for k in order)
        return replace(self, ids=ids, counts=self.counts[order], sizes=self.sizes[order])


def sample_partition(partition: Partition, census: Census, clients: int, classes: int) -> PartitionSample:
    """At most `clients` clients by at most `classes` classes.

    More clients are sampled at evenly spaced places in the order of size, the largest first (of position, if all
    sizes are equal). More classes are summed in groups of neighbours.

    >>> p = Partition.of_owners(np.repeat(np.arange(5), [1, 4, 2, 5, 3]), 5).counted(np.zeros(15, int))
    >>> some = sample_partition(p, p.census, 3, 10)
    >>> some.ids, some.sizes.tolist(), some.clients_shown
    (('3', '4', '0'), [5, 3, 1], '3 of 5 clients, evenly spread over the sizes')
    """
    sizes = partition.sizes()
    shown, clients_shown = _clients(sizes, clients)
    groups = min(classes, len(census.classes))
    edges = np.linspace(0, len(census.classes), groups + 1).round().astype(np.int64)
    counts, grouping = census.dense(shown), ""
    names = tuple(name.strip() or f"class {k}" for k, name in enumerate(census.classes))
    labels = starts = names
    if groups < len(names):
        counts = np.add.reduceat(counts, edges[:-1], axis=1)
        labels = tuple(_span(names[a:b]) for a, b in pairwise(edges))
        starts = tuple(names[a] for a in edges[:-1])
        low, high = int(np.diff(edges).min()), int(np.diff(edges).max())
        each = f"{low}" if low == high else f"{low} or {high}"
        grouping = f"{len(names):,} classes in {groups} groups of {each} neighbours"
    ids = tuple(partition.ids[k] for k in shown)
    return PartitionSample(
        ids, counts, sizes[shown], labels, starts, clients_shown, grouping, unit(partition, census)
    )


def unit(partition: Partition, census: Census) -> str:
    """The unit of a census: "examples" if each has one class, else "marks"."""
    single = len(census.counts) == 0 or int(census.counts.sum()) == len(partition.indices)
    return "examples" if single else "marks"


def _clients(sizes: NDArray[np.int64], at_most: int) -> tuple[NDArray[np.int64], str]:
    if len(sizes) <= at_most:
        return np.arange(len(sizes)), "the one client" if len(sizes) == 1 else f"all {len(sizes):,} clients"
    some = f"{at_most} of {len(sizes):,} clients, evenly spread"
    places = np.linspace(0, len(sizes) - 1, at_most).round().astype(np.int64)
    if np.ptp(sizes) == 0:
        return places, some
    return np.argsort(-sizes, kind="stable")[places], f"{some} over the sizes"


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def ranked(values: NDArray[Any], at_most: int = 400) -> tuple[list[int], list[float]]:
    """(ranks from 1 on, values from the largest down), thinned to places evenly spaced on a logarithmic axis.

    >>> ranked(np.array([3, 9, 1]))
    ([1, 2, 3], [9, 3, 1])
    """
    ordered = -np.sort(-values)
    if len(ordered) > at_most:
        places = np.unique(np.geomspace(1, len(ordered), at_most).round().astype(np.int64))
    else:
        places = np.arange(1, len(ordered) + 1)
    return places.tolist(), ordered[places - 1].tolist()
