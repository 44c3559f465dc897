"""A distribution over groups of classes for each client, and one over the classes of each group."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.partition.by_class import draw_classes, owners_of_draws
from fedlens.data.partition.dirichlet import distribution_function, log_weights
from fedlens.data.partition.drawing import equal_size, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Clients, Size
from fedlens.data.table import Table


@partitioner
def pachinko(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    alpha: Annotated[
        float,
        Field(
            ge=0,
            description="concentration over the coarse classes: 0 gives one per client, inf an even distribution",
        ),
    ] = 0.1,
    beta: Annotated[
        float, Field(ge=0, description="concentration over the classes of each coarse class")
    ] = 10.0,
    size: Size = None,
) -> Partition:
    """Each client draws a distribution over coarse groups, and for each group one over its fine classes.

    Pachinko allocation (Li and McCallum 2006) as Reddi et al. 2021 use it for CIFAR-100, which fedcv table 16
    lists: there 500 clients of 100 examples, alpha = 0.1 and beta = 10. With G groups, group g of F_g classes,

        theta_k ~ Dir(alpha 1_G),   phi_kg ~ Dir(beta 1_{F_g}),

    both symmetric: alpha is the concentration of *each* group (in `dirichlet`, alpha is divided by the number
    of classes). Clients are filled one after another, example by example: a group from theta_k, a class of it
    from phi_kg, and an unassigned example of it. An exhausted class leaves phi_kg, an exhausted
    group leaves theta_k, and the remaining ones are normalized again:

        P(c) = theta_k(g) / sum_{h with examples left} theta_k(h)
             * phi_kg(c) / sum_{d in g with examples left} phi_kg(d).

    So the other classes of the same group replace an exhausted class, not those of other groups.

    The groups are `Table.coarse`. Discarded, at random within the classes: the examples beyond `clients * size`. By
    default `size` is the number of examples divided by `clients`, rounded down.

    Raises `ConfigError` if the classes have no groups, alpha or beta is negative or NaN, or there are too few
    examples; `DataError` if the groups do not fit the classes.

    >>> table = Table.of(np.arange(600) % 6, coarse=np.array([0, 0, 0, 1, 1, 1]))
    >>> p = pachinko(table, 0, clients=4, alpha=0.0, size=50)
    >>> p.class_counts(table.coarse[table.labels]).tolist()
    [[0, 50], [0, 50], [0, 50], [50, 0]]
    """
    table = Table.of(labels)
    classes, groups = table.labels, _groups(table)
    each = equal_size(size, len(classes), clients)
    shuffling, of_groups, of_classes, drawing = streams(seed, 4)
    by_group = np.argsort(groups, kind="stable")
    left = np.bincount(classes, minlength=len(groups))[by_group]
    ordered = groups[by_group]
    even_groups = np.full(int(ordered[-1]) + 1, 1 / (ordered[-1] + 1))
    even_classes = np.full(len(groups), 1 / len(groups))
    drawn = np.empty((clients, each), np.int64)
    for row in drawn:
        theta = log_weights(even_groups, alpha * len(even_groups), of_groups)
        # Normalized within a group, these are a draw for each group.
        phi = log_weights(even_classes, beta * len(even_classes), of_classes)
        row[:] = draw_classes(left, drawing.random_sample(each), partial(two_levels, theta, phi, ordered))
    owners = owners_of_draws(classes, by_group[drawn.ravel()], np.repeat(np.arange(clients), each), shuffling)
    return Partition.of_owners(owners, clients, spec={"size": each})


def two_levels(
    theta: NDArray[np.float64],
    phi: NDArray[np.float64],
    groups: NDArray[np.int64],
    alive: NDArray[np.int64],
) -> NDArray[np.float64]:
    """[a]: the cumulative P of the equation above, for the classes `alive` that have examples left.

    Args:
        theta: [G], logarithms of numbers in proportion to theta_k.
        phi: [C], logarithms of numbers in proportion to phi_kg for each class; the scale of a group is its own.
        groups: [C], the group of each class, ascending.
        alive: int64 [a], ascending.

    >>> groups = np.array([0, 0, 1, 1])
    >>> two_levels(np.log([0.2, 0.8]), np.log([1.0, 3.0, 5.0, 5.0]), groups, np.array([0, 1, 3])).round(9).tolist()
    [0.05, 0.2, 1.0]
    """
    members, phi = groups[alive], phi[alive]
    firsts = np.flatnonzero(np.diff(members, prepend=-1))
    counts = np.diff(firsts, append=len(members))
    peaks = np.repeat(np.maximum.reduceat(phi, firsts), counts)
    sums = np.repeat(np.add.reduceat(np.exp(phi - peaks), firsts), counts)
    return distribution_function(theta[members] + phi - peaks - np.log(sums))


def _groups(table: Table) -> NDArray[np.int64]:
    """int64 [classes]: the group of each class, from 0 on without gaps."""
    if table.coarse is None:
        raise ConfigError(
            f"the classes of {table.dataset or 'this dataset'} have no coarse classes",
            where="partition",
            hint="use a dataset with coarse classes such as cifar100, or another partition such as dirichlet",
        )
    if len(table.coarse) != len(table.classes):
        raise DataError(
            f"{len(table.coarse)} coarse classes are given for {len(table.classes)} classes",
            where=table.dataset or None,
        )
    _, groups = np.unique(table.coarse, return_inverse=True)
    return groups.astype(np.int64)
