"""A saved partition, or one that another program wrote as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json, read_text
from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.settings import WholePath
from fedlens.data.table import Table
from fedlens.files.regular_file import open_regular

_SHAPE = 'write an object with the examples of each client, counted from 0: {"a": [4, 17], "b": [2]}'


def from_file(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    path: Annotated[
        str, Field(min_length=1, description="a file that 'fedlens partition make' saved; or JSON"), WholePath
    ],
) -> Partition:
    """The saved partition in the file `path`: the same clients with the same examples, in the same order.

    A file that ends in .json has an object with the positions of each client's examples: `{"a": [4, 17], "b": [2]}`.

    The file has positions in the published training split. If a share of it is held out for validation, they are
    translated to the rows of the table, and held-out examples are discarded. A client that loses all its examples
    stays, with none. The `seed` has no effect.

    Ids, features and the order of the examples are kept. If nothing is held out, the partition of the run has the
    digest of the file. `spec` holds the file's digest, and its spec under "of".

    Raises `DataError` if the file does not exist or is damaged, has an example twice, is of another dataset, or was
    made of other data: other classes, or any other difference in the labels and columns of the training split.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "p.npz"
    >>> Partition.of_owners([0, 1, 0, 1], ["a", "b"], spec={"name": "by hand"}).save(file)
    >>> p = from_file(Table.of([5, 5, 6, 6]), 0, path=str(file))
    >>> p.ids, p[0].tolist(), p.spec["of"]
    (('a', 'b'), [0, 2], {'name': 'by hand'})
    """
    table = Table.of(labels)
    total = len(table) if table.total is None else table.total
    file = Path(path).expanduser()
    saved = _of_json(file, total) if file.suffix == ".json" else Partition.load(file)
    _check(saved, table, total, path)
    row = np.full(total, -1, np.int64)
    row[table.where()] = np.arange(len(table))
    rows = row[saved.indices]
    in_table = rows >= 0
    if not in_table.any():
        raise DataError("no example of the partition is left for training", where=path, hint="hold out fewer")
    kept = np.bincount(saved.owners()[in_table], minlength=len(saved))
    return replace(
        saved,
        indices=rows[in_table],
        offsets=np.concatenate([[0], np.cumsum(kept)]),
        spec={"name": "file", "digest": saved.digest, "of": dict(saved.spec)},
        census=None,
    )


def _of_json(path: Path, total: int) -> Partition:
    """The partition in a JSON file: by the id of each client, the positions of its examples among `total`."""
    try:
        with open_regular(path) as file:
            clients = parse_json(read_text(file), _unique)
    except (OSError, ValueError) as error:
        what = f"the partition cannot be read: {error}"
        raise DataError(what, where=str(path), hint=_SHAPE) from error
    if not isinstance(clients, dict) or not all(isinstance(rows, list) for rows in clients.values()):
        raise DataError("it is not an object with a list for each client", where=str(path), hint=_SHAPE)
    owner: dict[int, str] = {}
    for client, rows in clients.items():
        for row in rows:
            if type(row) is not int or not 0 <= row < total:
                what = f"client '{client}' has the example {row!r}, but they are 0 to {total - 1:,}"
                raise DataError(what, where=str(path), hint=_SHAPE)
            if row in owner:
                what = f"the example {row} belongs to client '{owner[row]}' and to client '{client}'"
                raise DataError(what, where=str(path), hint="keep it at one client")
            owner[row] = client
    offsets = np.cumsum([0, *map(len, clients.values())])
    return Partition(tuple(clients), np.array(list(owner), np.int64), offsets, {"name": "json"})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `ValueError` if it has a key twice."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"client '{key}' occurs {count} times")
    return dict(pairs)


def _check(saved: Partition, table: Table, total: int, path: str) -> None:
    if saved.dataset and table.dataset and saved.dataset != table.dataset:
        raise DataError(
            f"the partition was made from '{saved.dataset}', but the dataset is '{table.dataset}'",
            where=path,
            hint="use the dataset that it was made from, or make another partition",
        )
    if saved.indices.size and saved.indices.max() >= total:
        raise DataError(
            f"the partition contains example {saved.indices.max()}, but the dataset has {total} examples",
            where=path,
            hint="use the dataset that it was made from",
        )
    if saved.census is not None and table.dataset and saved.census.classes != table.classes:
        raise DataError(
            f"the classes differ from those that the partition was made from: {_changed(saved.census, table)}",
            where=path,
            hint="make another partition of these data",
        )
    if saved.data and saved.data != table.identity:
        raise DataError(
            "the training examples differ from those that the partition was made from: their number, their order, "
            "or their labels and columns",
            where=path,
            hint="make another partition of these data; if test data are drawn at random, a run draws the same with "
            "the seeds.data that 'fedlens partition make' names",
        )


def _changed(old: Census, table: Table) -> str:
    pairs = zip(old.classes, table.classes, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if first is None:
        return f"there were {len(old.classes)}, and there are {len(table.classes)}"
    return f"'{first[0]}' is now '{first[1]}'"
