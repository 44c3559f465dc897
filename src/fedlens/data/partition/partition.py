"""A partition: which example belongs to which client, with the settings and the seed that made it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json
from fedlens.base.summary_text import as_call, as_html, as_text, listed
from fedlens.data.partition.census import Census
from fedlens.data.table import Table
from fedlens.files.regular_file import open_regular

FORMAT = "fedlens partition 1"
_UNREADABLE = (
    OSError,
    MemoryError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class Partition:
    """Compressed rows: client k holds the examples `indices[offsets[k] : offsets[k + 1]]`.

    Args:
        ids: a unique name for each client.
        indices: int64 [m], positions in the training split of the dataset; each at most once.
        offsets: int64 [clients + 1], from 0 to m.
        spec: the name of the partitioner, its settings and its seed; not part of the digest.
        dataset: the name of the dataset that the indices point into.
        features: float64 [clients] by name, the image features of each client (`fedlens.data.shifts`); usually empty.
        data: the identity of the training split (`Table.identity`), if it is known; not part of the digest.
        census: the classes of each client, if they were counted; they follow from the labels, and are not part of
            the digest.

    The arrays are read-only. Raises `DataError` if they contradict each other.

    >>> p = Partition(("a", "b"), np.array([4, 0, 2]), np.array([0, 1, 3]))
    >>> len(p), p[1].tolist(), p.sizes().tolist()
    (2, [0, 2], [1, 2])
    """

    ids: tuple[str, ...]
    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    spec: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    features: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    census: Census | None = None
    data: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "indices", whole_numbers(self.indices, "indices"))
        object.__setattr__(self, "offsets", whole_numbers(self.offsets, "offsets"))
        object.__setattr__(self, "spec", dict(self.spec))
        features = {name: np.asarray(values, np.float64) for name, values in sorted(self.features.items())}
        object.__setattr__(self, "features", features)
        error = _contradiction(self.ids, self.indices, self.offsets)
        for name, values in features.items():
            if values.shape != (len(self.ids),) or not np.isfinite(values).all():
                error = error or f"the feature '{name}' is not one finite number a client"
        if error:
            raise DataError(f"not a valid partition: {error}", where=self.dataset or None)

    @classmethod
    def of_owners(
        cls,
        owners: ArrayLike,
        clients: int | Sequence[str],
        *,
        spec: Mapping[str, Any] | None = None,
        dataset: str = "",
    ) -> Partition:
        """Makes a partition from the client of each example: example i belongs to client `owners[i]`.

        Negative owners leave an example out. `clients` is the number of clients or their ids. The examples of a client
        are in ascending order.

        >>> Partition.of_owners([1, 0, -1, 1], 2)[1].tolist()
        [0, 3]
        """
        owner = np.asarray(owners)
        ids = tuple(map(str, range(clients))) if isinstance(clients, int) else tuple(clients)
        if owner.ndim != 1 or (owner.size and owner.dtype.kind not in "iu"):
            raise DataError(
                f"`owners` must be one integer per example, not {owner.dtype} {list(owner.shape)}"
            )
        if owner.size and owner.max() >= len(ids):
            raise DataError(
                f"`owners` has client {owner.max()}, but `clients` has {len(ids)}, numbered from 0",
                hint="pass the number of clients, or an id for each, as `clients`",
            )
        assigned = np.flatnonzero(owner >= 0)
        clients_of = owner[assigned].astype(np.int64)
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(np.bincount(clients_of, minlength=len(ids)), out=offsets[1:])
        return cls(ids, assigned[np.argsort(clients_of, kind="stable")], offsets, spec or {}, dataset)

    def __repr__(self) -> str:
        return as_text(*self._described())

    def _repr_html_(self) -> str:
        return as_html(*self._described())

    def _described(self) -> tuple[str, list[tuple[str, str]]]:
        """A title, and rows of a name and a value."""
        sizes = self.sizes()
        rows = [
            ("made by", as_call(self.spec) or "unknown"),
            ("clients", f"{len(self):,}: {listed(self.ids)}"),
            ("examples", f"{sizes.sum():,}"),
        ]
        if len(sizes):
            median = f"{np.median(sizes):,.0f}"
            rows.append(("a client", f"{sizes.min():,} to {sizes.max():,} examples, median {median}"))
        if self.census is not None:
            rows.append(("EMD", f"{self.census.emd():.3f}"))
        return f"Partition of '{self.dataset}'", [*rows, ("digest", self.digest[:12])]

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.ids)

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        """The indices of client number `client`: a view."""
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal of dataset, ids, offsets, indices and features; the same on every machine."""
        head = json.dumps([FORMAT, self.dataset, list(self.ids)], ensure_ascii=True, separators=(",", ":"))
        hashed = hashlib.sha256(head.encode("ascii"))
        for array in (self.offsets, self.indices):
            hashed.update(np.array([len(array)], "<i8").tobytes())
            hashed.update(array.astype("<i8", copy=False).tobytes())
        for name, values in self.features.items():
            hashed.update(f"{name}\n".encode())
            hashed.update(values.astype("<f8", copy=False).tobytes())
        return hashed.hexdigest()

    def sizes(self) -> NDArray[np.int64]:
        """int64 [clients]: how many examples each client holds."""
        return np.diff(self.offsets)

    def trained_sizes(self, clients: Sequence[int]) -> NDArray[np.int64]:
        """int64: how many examples each of these clients trains on."""
        return self.sizes()[clients]

    def owners(self) -> NDArray[np.int64]:
        """int64 [m]: the client of each entry of `indices`."""
        return np.repeat(np.arange(len(self)), self.sizes())

    def class_counts(self, labels: NDArray[Any], classes: int | None = None) -> NDArray[np.int64]:
        """int64 [clients, classes]: how many examples of each class each client holds.

        `labels` has one label per example of the training split. Raises `DataError` if it is too short, or if a client
        has a label that is not below `classes`.
        """
        labels = np.asarray(labels)
        if self.indices.size and self.indices.max() >= len(labels):
            raise DataError(
                f"the partition points to example {self.indices.max()} of {len(labels)}", where=self.dataset
            )
        columns = int(labels.max(initial=-1)) + 1 if classes is None else classes
        held = labels[self.indices].astype(np.int64)
        if held.size and not (held.min() >= 0 and held.max() < columns):
            raise DataError(f"the labels are not all in 0 .. {columns - 1}", where=self.dataset)
        cells = np.bincount(self.owners() * columns + held, minlength=len(self) * columns)
        return cells.reshape(len(self), columns)

    def client_emds(self, labels: Table | ArrayLike) -> NDArray[np.float64]:
        """float64 [clients]: the earth mover's distance of each client's classes from the population's.

        See `Census.client_emds`. `labels` is the table of the training split, or its labels.
        """
        return self.census_of(labels).client_emds()

    def emd(self, labels: Table | ArrayLike) -> float:
        """The non-identicalness of the population: sum_i (n_i / n) EMD(q_i, p) (Hsu et al. 2020, section 6.1).

        >>> Partition.of_owners([0, 0, 1, 1], 2).emd(np.array([0, 0, 1, 1]))
        1.0
        """
        return self.census_of(labels).emd()

    def census_of(self, labels: Table | ArrayLike) -> Census:
        """Counts the classes of each client. `labels` is the table of the training split, or its labels."""
        return Census.of(self.indices, self.offsets, labels, self.dataset or None)

    def counted(self, labels: Table | ArrayLike) -> Partition:
        """The same partition with its census, and with the identity of its data."""
        table = Table.of(labels)
        census = self.census_of(table) if table.classes else None  # images may have no labels
        return replace(self, census=census, data=table.identity)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the partition as an npz file without pickled objects; an error leaves no partial file."""
        arrays = {
            "format": text_of(FORMAT),
            "ids": text_of(json.dumps(self.ids)),
            "indices": self.indices.astype("<i8", copy=False),
            "offsets": self.offsets.astype("<i8", copy=False),
            "spec": text_of(json.dumps(self.spec)),
            "dataset": text_of(self.dataset),
        }
        write_npz(path, arrays, self.digest, self._more())

    def _more(self) -> dict[str, Any]:
        """The optional arrays of the file."""
        features = {f"feature_{name}": values for name, values in self.features.items()}
        data = {"data": text_of(self.data)} if self.data else {}
        return features | data | _census_arrays(self.census)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Reads what `save` wrote.

        Raises `DataError` if the file is missing, is not a partition, or is corrupt (the digest is compared).
        """
        return read_npz(path, {FORMAT: cls.read})

    @classmethod
    def read(cls, file: Any) -> Partition:
        """The partition in the arrays of a file that `save` wrote."""
        ids = tuple(parse_json(string_of(file["ids"])))
        spec, dataset = parse_json(string_of(file["spec"])), string_of(file["dataset"])
        features = {
            name.removeprefix("feature_"): file[name] for name in file.files if name.startswith("feature_")
        }
        partition = cls(ids, file["indices"], file["offsets"], spec, dataset, features)
        if "data" in file.files:
            partition = replace(partition, data=string_of(file["data"]))
        if "census_counts" in file.files:
            partition = replace(partition, census=_read_census(file, partition))
        return partition


class _Saved(Protocol):
    """What a file holds: a partition of examples, or of features."""

    @property
    def digest(self) -> str: ...


_Read = TypeVar("_Read", bound=_Saved)


def write_npz(
    path: str | os.PathLike[str],
    arrays: Mapping[str, NDArray[Any]],
    digest: str,
    more: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> None:
    """Writes a partition's arrays, its digest and `more` arrays; an error leaves no partial file.

    Raises `DataError` if the file cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file of a random name: a link that someone planted is never followed.
        with part.open("xb") as file:
            np.savez(file, **arrays, digest=text_of(digest), **more)  # type: ignore[arg-type]
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise DataError(f"the partition cannot be written: {error.strerror}", where=str(path)) from error


def read_npz(path: str | os.PathLike[str], readers: Mapping[str, Callable[[Any], _Read]]) -> _Read:
    """The partition in a file, by the reader of its format.

    Raises `DataError` if the file is missing, is not a partition of these formats, or is corrupt.
    """
    path = Path(path)
    try:
        with open_regular(path) as opened, _npz(opened) as file:
            version = string_of(file["format"])
            if version not in readers:
                known = "' and '".join(readers)
                raise DataError(f"the format is '{version}', but fedlens reads '{known}'")
            partition, digest = readers[version](file), string_of(file["digest"])
    except FileNotFoundError:
        raise DataError("the partition file does not exist", where=str(path)) from None
    except DataError as error:
        raise DataError(error.what, where=str(path), hint=error.hint) from None
    except _UNREADABLE as error:
        raise DataError(f"not a readable partition file: {error}", where=str(path)) from error
    if partition.digest != digest:
        raise DataError(
            f"the partition is corrupt: its digest is {partition.digest}, but the file states {digest}",
            where=str(path),
        )
    return partition


def _npz(opened: BinaryIO) -> Any:
    """The arrays of an npz file. For other files, NumPy's error would be about pickled objects."""
    if not zipfile.is_zipfile(opened):
        raise DataError("not a readable partition file: it is not an npz file")
    opened.seek(0)
    return np.load(opened, allow_pickle=False)


def whole_numbers(array: ArrayLike, name: str) -> NDArray[np.int64]:
    """The numbers as a read-only int64 [n]. Raises `DataError` that names them if they are not whole numbers [n]."""
    given = np.asarray(array)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(
            f"not a valid partition: {name} are {given.dtype} {list(given.shape)}, not whole numbers [n]"
        )
    view = np.ascontiguousarray(given, np.int64).view()
    view.flags.writeable = False
    return view


def _contradiction(
    ids: tuple[str, ...], indices: NDArray[np.int64], offsets: NDArray[np.int64]
) -> str | None:
    if len(offsets) != len(ids) + 1:
        return f"{len(ids)} clients need {len(ids) + 1} offsets, not {len(offsets)}"
    if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        return f"offsets do not go up from 0 to {len(indices)}"
    if not all(isinstance(client, str) for client in ids) or len(set(ids)) < len(ids):
        return "the ids are not all strings, or not all different"
    if len(indices) and indices.min() < 0:
        return f"index {indices.min()} is negative"
    ordered = np.sort(indices)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    return f"example {ordered[twice[0]]} is assigned twice" if len(twice) else None


def _census_arrays(census: Census | None) -> dict[str, NDArray[Any]]:
    if census is None:
        return {}
    return {
        "census_classes": text_of(json.dumps(census.classes)),
        "census_columns": census.columns,
        "census_counts": census.counts,
        "census_offsets": census.offsets,
    }


def _read_census(file: Mapping[str, NDArray[Any]], partition: Partition) -> Census:
    classes = tuple(parse_json(string_of(file["census_classes"])))
    columns, counts, offsets = (file[f"census_{name}"] for name in ("columns", "counts", "offsets"))
    return Census(classes, columns, counts, offsets, partition.sizes())


def text_of(value: str) -> NDArray[np.uint8]:
    """The bytes of a text as an array of a file."""
    return np.frombuffer(value.encode(), np.uint8)


def string_of(array: NDArray[np.uint8]) -> str:
    """The text in an array of a file."""
    return array.tobytes().decode()
