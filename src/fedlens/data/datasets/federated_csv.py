"""Published lists of images, `user_id,image_id,class[,label]`, and the partitions that they are."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fedlens.base.errors import DataError, nearest
from fedlens.data.datasets.dataset_files import damaged, get_again, reading
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.settings import WholePath
from fedlens.data.table import Table

NOBODY = "NA"  # the user of an image that a split of TensorFlow Federated leaves out
_CORRECT = "correct the list, or get it again"
BLOCK = 10_000
BLOCKS = (1, 3, 2, 0, 4)  # the data_batch, counted from 0, of each block in the CIFAR-10 lists of 2020


@dataclass(frozen=True, eq=False)
class Listing:
    """A list of images, in the order of its file.

    Args:
        path: the file.
        images: str [n], all different.
        classes: int64 [n], from 0 on.
        users: str [n], the user of each image; None in a test list.
        labels: str [n], the class in the source dataset, if the file states it (hsu2020's iNaturalist lists).
        lines: int64 [n], the line of each row in the file.
    """

    path: Path
    images: NDArray[np.str_]
    classes: NDArray[np.int64]
    users: NDArray[np.str_] | None
    labels: NDArray[np.str_] | None
    lines: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.images)


def read_list(path: Path, user: str | None = "user_id") -> Listing:
    """Reads a published list; `user` is the column with the user of an image, None for a test list.

    Rows whose user is "NA" are left out: TensorFlow Federated has several splits in one file, a column each.
    A byte-order mark is ignored. Raises `DataError` with the file and the line if the list cannot be
    read, lacks a column, has an empty cell or a class that is no whole number, or names an image twice.
    """
    needed = ["image_id", "class", *([user] if user else [])]
    header = read_header(path)
    names = [*needed, *(["label"] if "label" in header else [])]
    rows = list(read_rows(path, names))
    if not rows:
        raise damaged("the list has no rows", path)
    lines = np.array([line for line, _ in rows], np.int64)
    columns = dict(zip(names, zip(*(cells for _, cells in rows), strict=True), strict=True))
    for name in needed:
        if "" in columns[name]:
            raise damaged(f"the cell of '{name}' is empty", path, int(lines[columns[name].index("")]))
    classes = whole_numbers(path, lines, "class", columns["class"])
    owners = np.array(columns[user]) if user else None
    labels = np.array(columns["label"]) if "label" in columns else None
    listing = Listing(path, np.array(columns["image_id"]), classes, owners, labels, lines)
    if owners is not None and (owners == NOBODY).any():
        listing = _only(listing, owners != NOBODY)
    _no_duplicates(listing)
    return listing


def _only(listing: Listing, kept: NDArray[np.bool_]) -> Listing:
    if not kept.any():
        raise damaged(f"every row has the user '{NOBODY}'", listing.path)
    users, labels = (None if part is None else part[kept] for part in (listing.users, listing.labels))
    return Listing(
        listing.path, listing.images[kept], listing.classes[kept], users, labels, listing.lines[kept]
    )


def read_header(path: Path) -> list[str]:
    """The names of the columns of a CSV file. Raises `DataError` if it cannot be read or is empty."""
    return next(_parsed(path))[1]


def read_rows(path: Path, names: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, cells of the columns `names`) of each row of a CSV file with a header; blank lines are passed over.

    Raises `DataError` with the line if a column is missing or a row has too few or too many cells.
    """
    rows = _parsed(path)
    _, header = next(rows)
    for name in names:
        if name not in header:
            raise DataError(
                f"there is no column '{name}', but {', '.join(map(repr, header))}",
                where=f"{path}, line 1",
                hint=nearest(name, header),
            )
    wanted = [header.index(name) for name in names]
    for line, cells in rows:
        if len(cells) != len(header):
            if not cells:
                continue
            raise damaged(
                f"the row has {len(cells)} cells, and the header {len(header)}", path, line, _CORRECT
            )
        yield line, tuple([cells[at] for at in wanted])


def _parsed(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every row, the header first."""
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            for cells in rows:
                yield rows.line_num, cells
            if not rows.line_num:
                raise damaged("the file is empty", path)
        except csv.Error as error:
            raise damaged(f"line {rows.line_num} is not valid CSV: {error}", path) from error


def whole_numbers(path: Path, lines: NDArray[np.int64], name: str, cells: Sequence[str]) -> NDArray[np.int64]:
    """int64 [n]: the cells as numbers from 0 on. Raises `DataError` with the line of one that is none."""
    wrong = next((k for k, cell in enumerate(cells) if not (cell.isdecimal() and len(cell) < 19)), None)
    if wrong is not None:
        what = f"'{name}' is '{cells[wrong]}', but must be a whole number >= 0"
        raise damaged(what, path, int(lines[wrong]), _CORRECT)
    return np.array(list(map(int, cells)), np.int64)


def _no_duplicates(listing: Listing) -> None:
    order = np.argsort(listing.images, kind="stable")
    again = np.flatnonzero(listing.images[order][1:] == listing.images[order][:-1])
    if len(again):
        one, two = order[again[0]], order[again[0] + 1]
        what = f"the image '{listing.images[one]}' is listed in lines {listing.lines[one]} and {listing.lines[two]}"
        more = f", and {len(again) - 1} more are listed twice" if len(again) > 1 else ""
        raise damaged(what + more, listing.path, hint=_CORRECT)


def check_apart(train: Listing, test: Listing) -> None:
    """Raises `DataError` if an image is in both lists: a model would be tested on what it was shown."""
    shared = np.intersect1d(train.images, test.images)
    if len(shared):
        raise DataError(
            f"{len(shared)} images are in both lists, '{shared[0]}' is the first",
            where=f"{train.path}, {test.path}",
            hint=get_again(test.path),
        )


def in_order(names: NDArray[np.str_]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """(the different names, int64 [n] the position of each): in the order of numbers if all are, else of text.

    >>> in_order(np.array(["10", "9", "10"]))
    (('9', '10'), array([1, 0, 1]))
    """
    different, which = np.unique(names, return_inverse=True)
    unique = [str(name) for name in different]
    if all(name.isdecimal() for name in unique):
        order = sorted(range(len(unique)), key=lambda k: (int(unique[k]), unique[k]))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return tuple(unique[k] for k in order), place[which]
    return tuple(unique), which.astype(np.int64)


def federated_csv(
    table: Table | ArrayLike,
    seed: int,
    *,
    path: Annotated[
        str, Field(min_length=1, description="the CSV file: user_id,image_id,class[,...]"), WholePath
    ],
    id_order: Annotated[
        Literal["as-is", "cifar10-blocks"],
        Field(description="what image_id numbers: the training split, or CIFAR-10's blocks of 2020"),
    ] = "as-is",
) -> Partition:
    """The population that a published list describes: each user a client with the images listed for them.

    An image is identified by the column `image_id` of the dataset, if it has one, and else by its position in
    the training split. Clients are in the order of their ids, by number if all ids are numbers; `seed`
    plays no part. Discarded: images that the list does not name, rows of the list whose user is "NA", and images
    of the list that are held out for validation, with a client who has no other.

    hsu2020's CIFAR-10 lists of 2020 count in another order ("cifar10-blocks"): their blocks of 10,000 are
    data_batch 2, 4, 3, 1 and 5, so that the position is [1, 3, 2, 0, 4][image_id // 10000] * 10000 +
    image_id % 10000. Those of January 2022, in `cifar10_v1.1.zip`, are said to be corrected ("as-is").

    Source: github google-research, federated_vision_datasets.

    Raises `DataError` if the list cannot be read, names an image that the dataset does not have, or gives
    one another class than the dataset does. If images are identified by `image_id` and some are held out
    for validation, held-out images cannot be told from missing ones: it is an error if more are missing than are
    held out, and fewer missing ones are treated as held out.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("user_id,image_id,class\\n7,2,1\\n10,0,0\\n7,1,1\\n")
    ...     file.flush()
    ...     found = federated_csv([0, 1, 1, 0], 0, path=file.name)
    >>> found.ids, found[0].tolist(), found[1].tolist()
    (('7', '10'), [1, 2], [0])
    """
    table = Table.of(table)
    listing = read_list(Path(path).expanduser())
    rows = _rows_of(table, listing, id_order)
    _check_classes(table, listing, rows)
    assert listing.users is not None
    here = rows >= 0
    if not here.any():
        raise DataError("none of the images in the list is in the training data", where=path)
    ids, users = in_order(listing.users[here])
    owners = np.full(len(table), -1, np.int64)
    owners[rows[here]] = users
    spec = {"name": "federated-csv", "path": path, "id_order": id_order, "seed": seed}
    return Partition.of_owners(owners, ids, spec=spec)


def _rows_of(table: Table, listing: Listing, id_order: str) -> NDArray[np.int64]:
    """int64 [rows of the list]: the row of each image in the table, or -1 if it is held out."""
    if id_order == "as-is" and "image_id" in table.columns:
        known = table.columns["image_id"].astype(str)
        order = np.argsort(known)
        at = order[np.searchsorted(known, listing.images, sorter=order).clip(max=len(order) - 1)]
        rows = np.where(known[at] == listing.images, at, -1)
        _none_lacking(listing, rows < 0, table)
        return rows
    positions = whole_numbers(listing.path, listing.lines, "image_id", listing.images.tolist())
    total = len(table) if table.total is None else table.total
    count = len(BLOCKS) * BLOCK if id_order == "cifar10-blocks" else total
    if id_order == "cifar10-blocks" and total != count:
        raise DataError(
            f"the training split has {total} images, and CIFAR-10's {count}",
            where=table.dataset or None,
            hint='take id_order = "as-is"',
        )
    _none_lacking(listing, positions >= count, None)
    if id_order == "cifar10-blocks":
        positions = np.array(BLOCKS)[positions // BLOCK] * BLOCK + positions % BLOCK
    row_of = np.full(total, -1, np.int64)
    row_of[table.where()] = np.arange(len(table))
    return row_of[positions]


def _none_lacking(listing: Listing, absent: NDArray[np.bool_], table: Table | None) -> None:
    """Raises `DataError` if more images of the list are `absent`, bool [n], than `table` has held out."""
    held = 0 if table is None or table.total is None else table.total - len(table)
    count = int(absent.sum())
    if count <= held:
        return
    first = int(absent.argmax())
    what = f"the dataset has no image '{listing.images[first]}', nor {count - 1} others of the list"
    if held:
        what = (
            f"the dataset lacks at least {count - held} images of the list: {count} are not found, "
            f"'{listing.images[first]}' is the first, and {held} are held out"
        )
    raise DataError(
        what,
        where=f"{listing.path}, line {listing.lines[first]}",
        hint="use the dataset that the list was made for",
    )


def _check_classes(table: Table, listing: Listing, rows: NDArray[np.int64]) -> None:
    """A list that counts in another order agrees with the labels in about one of C images."""
    if not table.single:
        return
    here = np.flatnonzero(rows >= 0)
    wrong = here[table.labels[rows[here]] != listing.classes[here]]
    if len(wrong):
        first = wrong[0]
        raise DataError(
            f"{len(wrong)} of {len(here)} images have another class in the list than in the dataset: image "
            f"'{listing.images[first]}' is {listing.classes[first]} in the list, and in the dataset "
            f"{table.labels[rows[first]]}",
            where=f"{listing.path}, line {listing.lines[first]}",
            hint="use the other id_order, or the dataset that the list was made for",
        )
