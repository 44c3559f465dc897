"""Images of several objects each, assigned by the most frequent object first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.partition.drawing import check_population
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Clients
from fedlens.data.table import Table


@partitioner
def detection_frequency(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    to: Annotated[
        Literal["turns", "fewest", "rest"],
        Field(
            description="the client of the next class: each client in turn; the client with the "
            "fewest images; or each client once and the last client all remaining classes"
        ),
    ] = "turns",
) -> Partition:
    """Repeatedly takes the most frequent class and gives its images to one client.

    The detection partition of fedcv (7.1.2, table 9: COCO, 80 classes, 8 clients): "we calculate the frequency of
    each object in all images (one object is only counted one time even it occurs more than one time on one image)",
    "put the object with the highest frequency into one client", "sort the remaining pictures and repeat". Our
    reading, for t = 0, 1, 2, .. until no image with a class is left:

    1. Count for each class the unassigned images that show it.
    2. Take the class with the highest count; among equal ones, the lowest number.
    3. Give all unassigned images that show it to one client:
       `to = "turns"`: number t mod clients. 80 classes over 8 clients are ten classes each, and very unequal sizes.
       `to = "fewest"`: the one with the fewest images so far; among equal ones, the lowest number. If half of the
       images show one class ("person" in COCO), its client gets no other class, and the others share evenly.
       `to = "rest"`: number min(t, clients - 1), as in FedCV's published code: each client but the last has one class.

    Images without a class go to the client with the fewest images, one after the other. Nothing is discarded. There is
    no random choice: every `seed` gives the same partition. The order of the images has no effect either, except on
    those without a class.

    Raises `ConfigError` if there are too few classes for the clients.

    >>> table = Table.of_sets([[0], [0, 1], [1, 2], [2], [0, 2], []])
    >>> [row.tolist() for row in detection_frequency(table, 0, clients=2)]
    [[0, 1, 4], [2, 3, 5]]
    """
    table = Table.of(labels)
    check_population(len(table), clients)
    chosen = _receiver(to, clients)
    rows_of, classes_of = _incidence(table)
    counts = np.array([len(rows) for rows in rows_of], np.int64)
    owners = np.full(len(table), -1, np.int64)
    sizes = np.zeros(clients, np.int64)
    turn = 0
    while counts.size and counts.max() > 0:
        rows = rows_of[int(counts.argmax())]
        rows = rows[owners[rows] < 0]
        client = chosen(turn, sizes)
        owners[rows] = client
        sizes[client] += len(rows)
        counts -= classes_of(rows)
        turn += 1
    if turn < clients:
        raise ConfigError(
            f"only {turn} of {clients} clients would get images, because each client gets all images of a class",
            where="clients",
            hint=f"take clients = {turn}, or lda-multilabel" if turn else "take iid or quantity",
        )
    _fill_up(owners, sizes)
    return Partition.of_owners(owners, clients)


def _receiver(to: str, clients: int) -> Callable[[int, NDArray[np.int64]], int]:
    """The client that gets the images of a turn's class, given the number of images of each client."""
    ways: dict[str, Callable[[int, NDArray[np.int64]], int]] = {
        "turns": lambda turn, _: turn % clients,
        "fewest": lambda _, sizes: int(sizes.argmin()),
        "rest": lambda turn, _: min(turn, clients - 1),
    }
    return ways[to]


def _incidence(
    table: Table,
) -> tuple[list[NDArray[np.int64]], Callable[[NDArray[np.int64]], NDArray[np.int64]]]:
    """(the examples that show each class, a function that counts the examples of each class among given ones)."""
    width = len(table.classes)
    pairs = np.unique(table.rows * max(1, width) + table.marks)
    rows, marks = np.divmod(pairs, max(1, width))
    starts = np.searchsorted(rows, np.arange(len(table) + 1))
    by_class = np.argsort(marks, kind="stable")
    ends = np.cumsum(np.bincount(marks, minlength=width))
    rows_of = np.split(rows[by_class], ends[:-1])[:width]

    def classes_of(some: NDArray[np.int64]) -> NDArray[np.int64]:
        each = starts[some + 1] - starts[some]
        upto = np.cumsum(each)
        places = np.repeat(starts[some] - (upto - each), each) + np.arange(each.sum())
        return np.bincount(marks[places], minlength=width)

    return rows_of, classes_of


def _fill_up(owners: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Gives each example without an owner, in order, to the client that has the fewest examples at that moment."""
    heap = [(int(size), client) for client, size in enumerate(sizes)]
    heapq.heapify(heap)
    for row in np.flatnonzero(owners < 0):
        size, client = heap[0]
        owners[row] = client
        heapq.heapreplace(heap, (size + 1, client))
