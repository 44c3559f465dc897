"""Each class divided over the clients in proportions from a Dirichlet distribution."""

from __future__ import annotations

import heapq
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.data.partition.by_class import shuffled_by_class
from fedlens.data.partition.dirichlet import distribution_function, log_weights
from fedlens.data.partition.drawing import check_classes, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Alpha, Balance, Clients, Redraws
from fedlens.data.partition.sizes import check_minimum
from fedlens.data.table import Table

_REPAIRABLE = 10  # clients below the minimum: the chance that a new draw has none is then about exp(-10)


@partitioner
def dirichlet_classwise(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    alpha: Alpha,
    minimum: Annotated[int, Field(ge=1, description="minimum number of examples per client")] = 1,
    redraws: Redraws = 20,
    balance: Balance = False,
) -> Partition:
    """Each class c draws proportions p_c ~ Dir(alpha 1) over the K clients, and is divided in these proportions.

    chen2022 section 4.2; the LDA partition of fedcv (section 7.1.2, table 9). In `dirichlet`, each *client* draws a
    distribution over the classes, with concentration alpha / C for each of C classes, and clients have equal sizes.
    Here the concentration is alpha for each client, and sizes are unequal. Nothing is discarded.

    The N_c examples of class c, in a random order, are cut at floor(N_c (p_c1 + ... + p_ck) + u_c), k = 1 .. K.
    The number u_c, uniform in [0, 1), makes each client's expected number exactly N_c p_ck; always rounding
    down (u_c = 0) would favour the same clients in every class wherever N_c is not far above K.

    With `balance`, a client that has n / K examples or more from the classes before gets none of class c, and
    p_c is normalized again over the others; sizes are then closer, and later classes on fewer clients.

    If a client is below `minimum`, everything is drawn again, at most `redraws` times. A draw with more than 10 clients
    below it is the last, because another one would hardly be better. Then the draw with the fewest missing examples
    (the first of equal ones) is repaired: the client farthest below `minimum` gets an example from the largest client,
    of the class that this client has most of, until no client is below. Among equal clients or classes, the lowest
    number goes first. This moves exactly as many examples as were missing, so it always ends.

    Raises `ConfigError` if alpha is negative or NaN, or clients * minimum is above the number of examples.

    >>> labels = np.repeat(np.arange(10), 500)
    >>> p = dirichlet_classwise(labels, 0, clients=10, alpha=0.1)
    >>> len(p.indices), int(p.sizes().min()) >= 1, round(p.emd(labels), 1)
    (5000, True, 1.2)
    """
    classes = check_classes(labels)
    check_minimum(len(classes), clients, minimum)
    shuffling, proportions = streams(seed, 2)
    by_class, counts = shuffled_by_class(classes, shuffling)
    best, missing = None, 0
    for _ in range(redraws + 1):
        drawn = _cut(counts, clients, alpha, balance, proportions)
        lacks = np.maximum(minimum - np.bincount(drawn, minlength=clients), 0)
        if best is None or lacks.sum() < missing:
            best, missing = drawn, int(lacks.sum())
        if missing == 0 or (lacks > 0).sum() > _REPAIRABLE:
            break
    assert best is not None
    owners = np.empty(len(classes), np.int64)
    owners[by_class] = _repair(best, classes[by_class], clients, minimum) if missing else best
    return Partition.of_owners(owners, clients)


def _cut(
    counts: NDArray[np.int64], clients: int, alpha: float, balance: bool, stream: np.random.RandomState
) -> NDArray[np.int64]:
    """int64 [n]: the client of each example, where examples are sorted by class."""
    even, n = np.full(clients, 1 / clients), int(counts.sum())
    sizes = np.zeros(clients, np.int64)
    owners = np.empty(n, np.int64)
    done = 0
    for count in counts[counts > 0]:
        weights = log_weights(even, alpha * clients, stream)
        if balance:
            # As long as examples are left, a client is below n / K, so not all weights are -inf.
            weights[sizes * clients >= n] = -np.inf
        cuts = np.floor(distribution_function(weights) * count + stream.random_sample()).astype(np.int64)
        pieces = np.diff(np.minimum(cuts, count), prepend=0)
        owners[done : done + count] = np.repeat(np.arange(clients), pieces)
        sizes += pieces
        done += count
    return owners


def _repair(
    owners: NDArray[np.int64], classes: NDArray[np.int64], clients: int, minimum: int
) -> NDArray[np.int64]:
    """int64 [n]: the owners after examples were moved until each client has `minimum`, by the rule above.

    The giving client has more than `minimum`: the sum is at least clients * minimum, and another client is below it.
    """
    owners = owners.copy()
    sizes = np.bincount(owners, minlength=clients)
    rows = np.argsort(owners, kind="stable")  # within a client by class
    starts = np.cumsum(sizes) - sizes
    large = [(-int(sizes[k]), int(k)) for k in np.flatnonzero(sizes > minimum)]
    short = [(int(sizes[k]), int(k)) for k in np.flatnonzero(sizes < minimum)]
    heapq.heapify(large)
    heapq.heapify(short)
    by_giver: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = {}
    while short:
        size, taker = heapq.heappop(short)
        negative, giver = large[0]
        if giver not in by_giver:
            rows_of = rows[starts[giver] : starts[giver] + sizes[giver]]
            _, counts = np.unique(classes[rows_of], return_counts=True)
            by_giver[giver] = rows_of, np.cumsum(counts) - counts, counts
        rows_of, firsts, counts = by_giver[giver]
        most = int(counts.argmax())
        counts[most] -= 1
        owners[rows_of[firsts[most] + counts[most]]] = taker
        heapq.heapreplace(large, (negative + 1, giver))
        if size + 1 < minimum:
            heapq.heappush(short, (size + 1, taker))
    return owners
