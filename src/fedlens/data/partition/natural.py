"""Clients given by the data: users, authors, cities, or any other column."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.table import Table, is_missing


@partitioner
def natural(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    column: Annotated[str, Field(description="the column that names the client of each example")] = "client",
    min_examples: Annotated[int, Field(ge=1, description="clients with fewer examples are dropped")] = 1,
    min_classes: Annotated[int, Field(ge=0, description="clients with fewer classes are dropped")] = 0,
    max_clients: Annotated[
        int | None, Field(ge=2, description="keep this number of clients, chosen at random; by default all")
    ] = None,
) -> Partition:
    """One client for each value of a column (hsu2020 section 4: users, authors; chen2022 section 4.2: cities).

    The ids are the values as text, in sorted order: text by code points, numbers by size.

    Discarded: the examples of clients with fewer than `min_examples`, or with marks of fewer than `min_classes`
    different classes (hsu2020 section 4.2 keeps users with 30 images of 5 or more landmarks). Then `max_clients` of
    the remaining clients are chosen at random, and the examples of the others are discarded too. Only this choice uses
    the seed. The partition's `spec` counts the discarded clients and examples under "dropped".

    Raises `ConfigError` if there is no such column, or fewer than two clients remain; `DataError` if values are
    missing (empty text, None, NaN), or all are the same.

    >>> table = Table.of([0, 0, 1, 1, 1], {"city": ["ulm", "bonn", "ulm", "bonn", "kiel"]})
    >>> p = natural(table, 0, column="city", min_examples=2)
    >>> p.ids, p[0].tolist(), p.spec["dropped"]
    (('bonn', 'ulm'), [1, 3], {'clients': 1, 'examples': 1})
    """
    table = Table.of(labels)
    (choosing,) = streams(seed, 1)
    values, owners = _clients(table, column)
    keep = np.bincount(owners, minlength=len(values)) >= min_examples
    if min_classes > 0:
        width = max(1, len(table.classes))
        pairs = np.unique(owners[table.rows] * width + table.marks)
        keep &= np.bincount(pairs // width, minlength=len(values)) >= min_classes
    stay = np.flatnonzero(keep)
    if len(stay) < 2:
        raise ConfigError(
            f"{len(stay)} of the {len(values)} clients in '{column}' have {min_examples} examples of "
            f"{min_classes} classes or more; at least two are needed",
            where="min_classes" if min_classes > 0 else "min_examples",
            hint="take a smaller number",
        )
    if max_clients is not None and max_clients < len(stay):
        stay = np.sort(choosing.permutation(stay)[:max_clients])
    number = np.full(len(values), -1, np.int64)
    number[stay] = np.arange(len(stay))
    owners = number[owners]
    dropped = {"clients": len(values) - len(stay), "examples": int((owners < 0).sum())}
    return Partition.of_owners(owners, list(map(str, values[stay].tolist())), spec={"dropped": dropped})


def _clients(table: Table, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(the sorted different values, the index of each example's value)."""
    given = _plain(table.column(column))
    values, owners = np.unique(given, return_inverse=True)
    missing = [i for i, value in enumerate(values.tolist()) if is_missing(value)]
    if missing:
        faults = np.flatnonzero(np.isin(owners, missing))
        raise DataError(
            f"{len(faults)} of {len(table)} examples have no value in the column '{column}', "
            f"the first of them example {table.where()[faults[0]]}",
            where=table.dataset or None,
            hint="add the values, or remove these examples",
        )
    if len(values) < 2:
        what = (
            f"all {len(table)} examples have the value '{values[0]}'" if len(values) else "there is no value"
        )
        raise DataError(
            f"{what} in the column '{column}', which makes {len(values)} client{'s'[: 1 - len(values)]}",
            where=table.dataset or None,
            hint="set another column, or partition by labels, for example with dirichlet",
        )
    return values, owners.astype(np.int64)


def _plain(column: NDArray[Any]) -> NDArray[Any]:
    """The column as text or numbers: of objects, numbers if all of them are numbers, else text."""
    if column.dtype.kind == "S":
        return np.char.decode(column, "utf-8")
    if column.dtype.kind != "O":
        return column
    items = ["" if is_missing(item) else item for item in column.tolist()]
    if all(isinstance(item, int | float) for item in items):
        return np.array(items)
    return np.array([str(item) for item in items])
