"""Clients that differ in size alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.data.partition.by_class import owners_of_draws
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.sizes import LAWS, check_minimum, draw_sizes, law_setting
from fedlens.data.table import Table


def quantity(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Annotated[int, Field(ge=1, description="number of clients")],
    sizes: Annotated[
        Literal["log-normal", "power-law", "dirichlet"], Field(description="the law of the sizes")
    ] = "log-normal",
    sigma: Annotated[
        float | None,
        Field(ge=0, allow_inf_nan=False, description="spread of log-normal sizes; 1 if not given"),
    ] = None,
    exponent: Annotated[
        float | None,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="size ~ rank^(-exponent) of power-law sizes; 1 if not given",
        ),
    ] = None,
    alpha: Annotated[
        float | None, Field(ge=0, description="concentration of sizes from Dir(alpha 1); 1 if not given")
    ] = None,
    minimum: Annotated[int, Field(ge=1, description="least examples a client gets")] = 1,
) -> Partition:
    """Sizes are unequal by a law, and every client has the classes in the proportions of the whole.

    The size imbalance of hsu2020 section 5.3 by itself, without its class imbalance. The laws are those of
    `fedlens.data.partition.sizes.draw_sizes`. Where client k has n_k of all n examples and class c has N_c,
    client k gets

        floor(n_k N_c / n) or floor(n_k N_c / n) + 1

    examples of class c: as near to its proportion as whole numbers allow, with every example given to someone.
    `iid` with unequal sizes draws at random instead, so that its small clients are also off in their classes.

    An example with several classes (a mask, boxes, a text) stands for the rarest of them, and examples without
    any class are a class of their own. Nothing is discarded.

    Raises `ConfigError` where there are too few examples, or a setting is given that has no use with this law.

    >>> labels = np.repeat([0, 1], [60, 30])
    >>> p = quantity(labels, 0, clients=3, sizes="power-law")
    >>> sorted(p.class_counts(labels).tolist())
    [[11, 5], [16, 9], [33, 16]]
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
    """int64 [n]: the class of each example, the rarest where it has several; the next number where none."""
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

    Rounding a table to whole numbers so that its sums stay: what is above the rounded-down numbers has whole
    sums too, so there is a table of 0 and 1 with these sums, and giving each client in turn its ones in the
    classes that have most left finds one (Gale and Ryser; the argument is Havel's and Hakimi's). The clients
    come in a random order, and equal classes too.
    """
    n = int(totals.sum())
    left = totals.copy()
    for size, times in zip(*np.unique(sizes, return_counts=True), strict=True):
        left -= times * (size * totals // n)
    rows: list[NDArray[np.int64]] = [totals] * len(sizes)
    for client in stream.permutation(len(sizes)):
        row = sizes[client] * totals // n
        more = int(sizes[client] - row.sum())
        chosen = np.argsort(-(left + stream.random_sample(len(left))), kind="stable")[:more]
        row[chosen] += 1
        left[chosen] -= 1
        rows[client] = np.repeat(np.arange(len(totals)), row)
    return np.concatenate(rows)
