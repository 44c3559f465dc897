"""Clients that differ only in size."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.data.partition.by_class import owners_of_draws
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.settings import Clients, Exponent, Sigma
from fedlens.data.partition.sizes import LAWS, check_minimum, draw_sizes, law_setting
from fedlens.data.table import Table


def quantity(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    sizes: Annotated[
        Literal["log-normal", "power-law", "dirichlet"], Field(description="distribution of the sizes")
    ] = "log-normal",
    sigma: Sigma = None,
    exponent: Exponent = None,
    alpha: Annotated[
        float | None, Field(ge=0, description="concentration of sizes from Dir(alpha 1); by default 1")
    ] = None,
    minimum: Annotated[int, Field(ge=1, description="minimum number of examples per client")] = 1,
) -> Partition:
    """Unequal sizes by a law, and the class proportions of the population at every client.

    The size imbalance of hsu2020 section 5.3 without its class imbalance. The laws are those of
    `fedlens.data.partition.sizes.draw_sizes`. If client k has n_k of all n examples and class c has N_c, client k gets

        floor(n_k N_c / n) or ceil(n_k N_c / n)

    examples of class c: exactly its proportion if that is a whole number, and otherwise one of the two nearest.
    Every example is assigned. `iid` with unequal sizes draws at random instead, so the classes of its small clients
    differ from the population's too.

    An example with several classes (a mask, boxes, a text) counts for the rarest of them, and examples without any
    class are a separate class. Nothing is discarded.

    Raises `ConfigError` if there are too few examples, or a setting is given that this law does not use.

    >>> labels = np.repeat([0, 1], [60, 30])
    >>> p = quantity(labels, 0, clients=3, sizes="power-law")
    >>> sorted(p.class_counts(labels).tolist())
    [[10, 6], [17, 8], [33, 16]]
    """
    table = Table.of(labels)
    check_minimum(len(table), clients, minimum)
    own = law_setting(sizes, {"sigma": sigma, "exponent": exponent, "alpha": alpha})
    shuffling, drawing, dealing = streams(seed, 3)
    parameter = own[LAWS[sizes][0]]
    each = draw_sizes(len(table), clients, sizes, drawing, parameter=parameter, minimum=minimum)
    kinds = _kinds(table)
    drawn = _proportional(np.bincount(kinds), each, dealing)
    owners = owners_of_draws(kinds, drawn, np.repeat(np.arange(clients), each), shuffling)
    spec = {"name": "quantity", "clients": clients, "sizes": sizes, **own, "minimum": minimum, "seed": seed}
    return Partition.of_owners(owners, clients, spec=spec)


def _kinds(table: Table) -> NDArray[np.int64]:
    """int64 [n]: the class of each example, or the rarest of several; the next unused number if it has none."""
    if table.single:
        return table.labels
    totals = np.bincount(table.marks, minlength=len(table.classes))
    by_rarity = np.argsort(totals, kind="stable")
    rank = np.argsort(by_rarity, kind="stable")
    kinds = np.full(len(table), len(totals), np.int64)
    some = np.flatnonzero(np.diff(table.offsets))
    if len(some):
        kinds[some] = by_rarity[np.minimum.reduceat(rank[table.marks], table.offsets[some])]
    return kinds


def _proportional(
    totals: NDArray[np.int64], sizes: NDArray[np.int64], stream: np.random.RandomState
) -> NDArray[np.int64]:
    """int64 [n]: the class of each draw, client after client, sizes[k] of them for client k.

    This rounds a table to whole numbers and keeps its sums and its whole cells. The fractions above the rounded-down
    cells have whole sums, so a table of 0 and 1 with the same sums exists that is 0 in all whole cells (a flow with
    whole capacities has a whole solution; Bacharach 1966). The clients come in a random order, and each puts its ones
    into the classes that lag most behind their share so far, equal ones in a random order. `_settle` corrects the
    remaining differences in the sums of the classes.
    """
    n, width = int(totals.sum()), len(totals)
    more = np.zeros((len(sizes), width), bool)
    lag = np.zeros(width, np.int64)  # in units of 1 / n, so that all of it is whole
    for client in stream.permutation(len(sizes)):
        above = sizes[client] * totals % n
        lag += above
        urgent = np.where(above > 0, lag + stream.random_sample(width), -np.inf)
        chosen = np.argsort(-urgent, kind="stable")[: int(above.sum()) // n]
        more[client, chosen] = True
        lag[chosen] -= n
    _settle(more, lag // n, totals, sizes)
    rows = [
        np.repeat(np.arange(width), size * totals // n + row) for size, row in zip(sizes, more, strict=True)
    ]
    return np.concatenate(rows)


def _settle(
    more: NDArray[np.bool_], lacks: NDArray[np.int64], totals: NDArray[np.int64], sizes: NDArray[np.int64]
) -> None:
    """Moves ones within rows of `more` [clients, classes] until class c has `lacks[c]` more; negative is fewer.

    Each step follows a shortest path from a class with too many ones to a class with too few: a client that has a one
    in the first class, and could have one in the second, moves it there, and so on. Such a path exists until all sums
    are right, because a table with these sums exists.
    """
    n = int(totals.sum())
    lacks = lacks.copy()
    kinds, kind = np.unique(sizes, return_inverse=True)
    could = (kinds[:, None] * totals % n > 0)[kind] if lacks.any() else more
    while lacks.any():
        came: dict[int, tuple[int, int]] = {}  # by class: the class before it on the path, and who moves
        seen = lacks < 0
        queue = np.flatnonzero(seen).tolist()
        for source in queue:
            holders = np.flatnonzero(more[:, source])
            free = could[holders] & ~more[holders]
            for target in np.flatnonzero(free.any(axis=0) & ~seen).tolist():
                came[target] = source, int(holders[free[:, target].argmax()])
                queue.append(target)
            seen |= free.any(axis=0)
            if (lacks[seen] > 0).any():
                break
        at = int(np.flatnonzero(seen & (lacks > 0))[0])
        lacks[at] -= 1
        while at in came:
            source, client = came[at]
            more[client, at], more[client, source] = True, False
            at = source
        lacks[at] += 1
