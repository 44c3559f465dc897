"""The table of examples that partitioners read: their classes and columns of values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.errors import ConfigError, DataError, nearest


@dataclass(frozen=True, eq=False)
class Table:
    """One row per example, without the images.

    A *mark* is one class of an example. A classified image has one mark, its label; a multi-label image one for each
    of its labels. An image with a mask or with boxes has one mark for each class in it, regardless of how often it
    occurs. A text has one mark for each token to predict.

    Args:
        marks: int64 [m], the marks of the examples, example after example.
        offsets: int64 [n + 1]; example i has the marks `marks[offsets[i] : offsets[i + 1]]`.
        classes: the name of each class.
        columns: further columns by name: [n] of strings or numbers.
        coarse: int64 [classes], the group of each class, if classes have groups (CIFAR-100).
        single: whether each example has exactly one mark *because* it is classified.
        positions: int64 [n], the positions of the examples in the training split; None means 0 to n - 1.
        dataset: the dataset's name.
        total: how many examples the training split has.
        origin: a digest of the names of the files; it distinguishes examples with the same labels.
        full_identity: the identity of the whole training split, if the rows are only a part of it.
        located: whether the examples are images whose targets have positions in the image, as masks and boxes do;
            None means that they do unless `single`.

    Raises `DataError` if the lengths do not fit.

    >>> table = Table.of([0, 1, 1])
    >>> len(table), table.labels.tolist(), table.classes
    (3, [0, 1, 1], ('0', '1'))
    """

    marks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    classes: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    coarse: NDArray[np.int64] | None = None
    single: bool = True
    positions: NDArray[np.int64] | None = None
    dataset: str = ""
    total: int | None = None
    origin: str = ""
    full_identity: str | None = None
    located: bool | None = None

    def __post_init__(self) -> None:
        n = len(self.offsets) - 1
        for name, column in self.columns.items():
            if len(column) != n:
                raise DataError(f"the column '{name}' has {len(column)} values for {n} examples")
        if self.single and n != len(self.marks):
            raise DataError(f"{n} examples have {len(self.marks)} labels")

    @classmethod
    def of(
        cls, labels: Table | ArrayLike, columns: Mapping[str, ArrayLike] | None = None, **more: Any
    ) -> Table:
        """A table of labels, one whole number per example; a table is returned unchanged.

        Raises `DataError` if they are not whole numbers from 0 on.
        """
        if isinstance(labels, Table):
            return labels
        array = np.asarray(labels)
        if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
            raise DataError(
                f"the labels are {array.dtype} {list(array.shape)}, but must be integers [n] of at least 0"
            )
        array = array.astype(np.int64, copy=False)
        names = tuple(map(str, range(int(array.max(initial=-1)) + 1)))
        given = {name: np.asarray(column) for name, column in (columns or {}).items()}
        settings: dict[str, Any] = {"classes": names, "columns": given} | more
        return cls(array, np.arange(len(array) + 1), **settings)

    @classmethod
    def of_sets(cls, sets: list[list[int]], classes: int | None = None, **more: Any) -> Table:
        """A table of examples with several classes each.

        >>> Table.of_sets([[0, 2], [], [1]]).marks.tolist()
        [0, 2, 1]
        """
        marks = np.array([mark for marks in sets for mark in marks], np.int64)
        offsets = np.cumsum([0, *map(len, sets)])
        count = int(marks.max(initial=-1)) + 1 if classes is None else classes
        settings: dict[str, Any] = {"classes": tuple(map(str, range(count))), "single": False} | more
        return cls(marks, offsets, **settings)

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.offsets) - 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The labels, so that partitioners for arrays accept a table."""
        return self.labels.astype(dtype or np.int64, copy=bool(copy))

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [n]: the class of each example. Raises `ConfigError` if examples have none, or may have several."""
        if not self.single and not self.classes:
            raise ConfigError(
                f"the examples of '{self.dataset or 'this dataset'}' have no labels to partition by",
                hint="choose iid, quantity or natural",
            )
        if not self.single:
            raise ConfigError(
                f"the examples of '{self.dataset or 'this dataset'}' have several classes each, not one",
                hint="take one for several classes: iid, quantity, natural, lda-multilabel, detection-frequency",
            )
        return self.marks

    @property
    def turnable(self) -> bool:
        """Whether an image may be rotated without its target: if targets have no positions in the image."""
        return self.single if self.located is None else not self.located

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [m]: the example of each mark."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def identity(self) -> str:
        """SHA-256 in hexadecimal of the whole training split, in which the indices of a partition count.

        It covers the marks, the names of the files, and the columns `client` and `image_id`. Other columns only
        describe the examples: adding one to a table does not change the data.
        """
        if self.full_identity is not None:
            return self.full_identity
        naming = [name for name in ("client", "image_id") if name in self.columns]
        head = json.dumps([len(self), len(self.marks), self.origin, naming])
        hashed = hashlib.sha256(head.encode())
        for part in (self.marks, self.offsets):
            hashed.update(part.astype("<i8", copy=False).tobytes())
        for name in naming:
            # As text: NumPy's own form of strings is as wide as the longest one.
            hashed.update("\0".join(map(str, self.columns[name].tolist())).encode())
        return hashed.hexdigest()

    def column(self, name: str, where: str = "column") -> NDArray[Any]:
        """[n]: a column. Raises `ConfigError` with the nearest right name if it does not exist.

        `where` is the setting that names it.
        """
        if name in self.columns:
            return self.columns[name]
        hint = nearest(name, self.columns) if self.columns else "take a partition by labels, say dirichlet"
        raise ConfigError(f"{self.dataset or 'the dataset'} has no column '{name}'", where=where, hint=hint)

    def where(self) -> NDArray[np.int64]:
        """int64 [n]: the position of each row in the training split."""
        return np.arange(len(self)) if self.positions is None else self.positions

    def take(self, rows: NDArray[Any]) -> Table:
        """The table of the examples `rows`, int64 [k], in that order."""
        # The cost does not depend on the rows that are not taken: a partition may take thousands of small parts.
        rows = np.asarray(rows, np.int64)
        starts = self.offsets[rows]
        counts = self.offsets[rows + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(counts)])
        places = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
        return Table(
            self.marks[places],
            offsets,
            self.classes,
            {name: column[rows] for name, column in self.columns.items()},
            self.coarse,
            self.single,
            rows if self.positions is None else self.positions[rows],
            self.dataset,
            len(self) if self.total is None else self.total,
            self.origin,
            self.identity,
            self.located,
        )


def is_missing(value: Any) -> bool:
    """Whether this is None, NaN, NaT (which are not equal to themselves), or empty or blank text.

    >>> [is_missing(value) for value in (None, float("nan"), " ", "nan", 0)]
    [True, True, True, False, False]
    """
    if isinstance(value, str | bytes):
        return not value.strip()
    return value is None or bool(value != value)


def missing(column: NDArray[Any]) -> NDArray[np.bool_]:
    """bool [n]: which values of a column are missing."""
    if column.dtype.kind in "iub":
        return np.zeros(len(column), bool)
    return np.array([is_missing(value) for value in column.tolist()], bool)


def unit_numbers(
    columns: Mapping[str, NDArray[Any]], unit: str | None, where: str = "privacy.column"
) -> dict[str, NDArray[np.int64]]:
    """The number of the value of each example in the column `unit`, int64 [n] by its name; {} without a unit.

    `where` is the setting that names it.

    Raises `ConfigError` if the column does not exist, and `DataError` for an empty cell.

    >>> unit_numbers({"patient": np.array(["b", "a", "b"])}, "patient")
    {'patient': array([1, 0, 1])}
    """
    if unit is None:
        return {}
    if unit not in columns:
        hint = nearest(unit, columns) if columns else "add a table with this column to the data"
        raise ConfigError(f"the training examples have no column '{unit}'", where=where, hint=hint)
    if (empty := missing(columns[unit])).any():
        what = f"{empty.sum():,} training examples have no '{unit}', the first of them at position {empty.argmax():,}"
        raise DataError(what, where=where, hint="fill in the column, or leave these examples out")
    return {unit: np.unique(columns[unit], return_inverse=True)[1].astype(np.int64)}


def numbers(column: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [n]: the column as numbers, also from text; NaN for other values.

    >>> numbers(np.array(["-33.9", "north", ""])).tolist()
    [-33.9, nan, nan]
    """
    if column.dtype.kind in "fiu":
        return column.astype(np.float64)
    if column.dtype.kind not in "USO":
        return np.full(len(column), np.nan)
    return np.array([_number(value) for value in column.tolist()], np.float64)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
