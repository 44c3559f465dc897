"""A partition of features: which part of the images, and which examples, each party of vertical learning holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.parse_text import parse_json
from fedlens.core.dataset_info import Window
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import FORMAT as OF_EXAMPLES
from fedlens.data.partition.partition import Partition, read_npz, string_of, text_of, whole_numbers, write_npz
from fedlens.data.partition.roster import Roster
from fedlens.data.partition.settings import grid_of

FORMAT = "fedlens parties 1"


@dataclass(frozen=True, eq=False)
class FeaturePartition:
    """The window and the examples of each party, in an order of its own.

    Args:
        ids: a unique name for each party.
        rows: int64 [n_k] for each party, positions in the training split; those that all parties have are trained on.
        shapes: the shape (C, h, w) of one input of each party; not part of the digest.
        windows: the window of each party in the images; None if each party has images of its own.
        labels_at: the number of the party that has the labels.
        spec: the settings and the seed that made the partition; not part of the digest.
        dataset: the dataset's name.
        pictures: uint8 [C, H, W], one test image, or one of each party's own, for the page of a run; usually none. Not
            part of the digest.
        names: the id of each example of each party, in the order of `rows`; None means the position as text.

    Raises `DataError` if they contradict each other, a party has an example twice, or no example is held by all.

    >>> p = partition_features(10, (1, 8, 8), seed=0, split="halves", overlap=0.8)
    >>> len(p), p.sizes().tolist(), len(p.shared), p.windows[1]
    (2, [9, 9], 8, Window(top=0, left=4, height=8, width=4))
    """

    ids: tuple[str, ...]
    rows: tuple[NDArray[np.int64], ...]
    shapes: tuple[tuple[int, int, int], ...]
    windows: tuple[Window, ...] | None
    labels_at: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    names: tuple[tuple[str, ...], ...] | None = None
    pictures: tuple[NDArray[np.uint8], ...] = ()

    census = None  # a party has all classes, or none
    features: Mapping[str, NDArray[np.float64]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(whole_numbers(rows, "rows") for rows in self.rows))
        object.__setattr__(self, "spec", dict(self.spec))
        error = self._contradiction()
        if error:
            raise DataError(f"not a valid partition of features: {error}", where=self.dataset or None)

    def _contradiction(self) -> str | None:
        parties = len(self.ids)
        windows = parties if self.windows is None else len(self.windows)
        if not parties == len(self.rows) == len(self.shapes) == windows or len(
            set(map(str, self.ids)) & set(self.ids)
        ) < max(2, parties):
            return (
                "it needs at least two parties with different names, and rows, a shape and a window for each"
            )
        if not 0 <= self.labels_at < parties:
            return f"party {self.labels_at} has the labels, and the last of the parties is {parties - 1}"
        # Of positions, which are compared in a tenth of the time of their texts.
        keys = [rows.tolist() for rows in self.rows] if self.names is None else self.names
        first, *others = held = [set(of_party) for of_party in keys]
        for party, rows, of_party, different in zip(self.ids, self.rows, keys, held, strict=True):
            if not len(rows) == len(of_party) == len(different):
                return f"party '{party}' holds an example twice, or not one id for each example"
        if any(len(shape) != 3 or min(shape) < 1 for shape in self.shapes):
            return "a shape is not (C, h, w)"
        if any(picture.dtype != np.uint8 or picture.ndim != 3 for picture in self.pictures):
            return "a picture is not uint8 [C, H, W]"
        return None if first.intersection(*others) else "no example is held by all parties"

    def __len__(self) -> int:
        """The number of parties."""
        return len(self.ids)

    def sizes(self) -> NDArray[np.int64]:
        """int64 [parties]: how many examples each party holds."""
        return np.array([len(rows) for rows in self.rows], np.int64)

    def trained_sizes(self, clients: Sequence[int]) -> NDArray[np.int64]:
        """int64: on how many examples these parties train together, for each of them."""
        return np.full(len(clients), len(self.shared_by(clients)), np.int64)

    @cached_property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """The id of each example of each party, in the party's order."""
        if self.names is not None:
            return self.names
        return tuple(tuple(map(str, rows.tolist())) for rows in self.rows)

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The ids of the examples that all parties hold, sorted."""
        return self.shared_by(range(len(self)))

    def shared_by(self, parties: Iterable[int]) -> tuple[str, ...]:
        """The ids of the examples that all of these parties hold, sorted."""
        first, *others = (set(self.keys[party]) for party in parties)
        return tuple(sorted(first.intersection(*others)))

    def hold_out(self, share: float, seed: int) -> tuple[FeaturePartition, tuple[str, ...]]:
        """The partition without a share of the examples that all parties hold, and the ids of these.

        Which ones depends on `seed`, the ids and the share; see `fedlens.data.federated.hold_out`. Raises what it does.

        >>> p = partition_features(10, (1, 8, 8), seed=0, split="halves", overlap=0.8)
        >>> rest, held = p.hold_out(0.25, seed=0)
        >>> len(rest.shared), len(held), rest.sizes().tolist()
        (6, 2, [7, 7])
        """
        from fedlens.data.federated import hold_out  # imports torch, and pages read partitions without it

        held = tuple(self.shared[at] for at in hold_out(len(self.shared), share, seed)[1])
        if not held:
            return self, held
        out = frozenset(held)
        stay = [np.array([key not in out for key in keys]) for keys in self.keys]
        rows = tuple(rows[kept] for rows, kept in zip(self.rows, stay, strict=True))
        names = self.names and tuple(
            tuple(compress(names, kept)) for names, kept in zip(self.names, stay, strict=True)
        )
        return replace(self, rows=rows, names=names), held

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal of ids, rows, windows, labels and names; the same on every machine."""
        head = [FORMAT, self.dataset, self.ids, self.windows, self.labels_at, self.names]
        hashed = hashlib.sha256(json.dumps(head, ensure_ascii=True, separators=(",", ":")).encode("ascii"))
        for rows in self.rows:
            hashed.update(np.array([len(rows)], "<i8").tobytes())
            hashed.update(rows.astype("<i8", copy=False).tobytes())
        return hashed.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the partition as an npz file without pickled objects; an error leaves no partial file."""
        names = ("ids", "shapes", "windows", "labels_at", "spec", "dataset", "names")
        head = {name: vars(self)[name] for name in names}
        rows = {f"rows_{k}": rows.astype("<i8", copy=False) for k, rows in enumerate(self.rows)}
        pictures = {f"picture_{k}": picture for k, picture in enumerate(self.pictures)}
        arrays = {"format": text_of(FORMAT), "head": text_of(json.dumps(head)), **rows}
        write_npz(path, arrays, self.digest, pictures)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeaturePartition:
        """Reads what `save` wrote.

        Raises `DataError` if the file is missing, is not a partition of features, or is corrupt.
        """
        return read_npz(path, {FORMAT: cls.read})

    @classmethod
    def read(cls, file: Any) -> FeaturePartition:
        """The partition in the arrays of a file that `save` wrote."""
        head = parse_json(string_of(file["head"]))
        windows = head["windows"] and tuple(Window(*map(int, window)) for window in head["windows"])
        shapes = tuple((int(c), int(h), int(w)) for c, h, w in head["shapes"])
        return cls(
            tuple(head["ids"]),
            tuple(file[f"rows_{k}"] for k in range(len(head["ids"]))),
            shapes,
            windows,
            int(head["labels_at"]),
            head["spec"],
            str(head["dataset"]),
            head["names"] and tuple(map(tuple, head["names"])),
            tuple(file[name] for name in file.files if name.startswith("picture_")),
        )


AnyPartition = Partition | FeaturePartition | Roster


def load_partition(path: str | os.PathLike[str]) -> AnyPartition:
    """The partition in a file, of examples or of features, or the roster in a JSON file.

    Raises `DataError` if the file is missing, is no partition, or is corrupt.
    """
    if Path(path).suffix == ".json":
        return Roster.load(path)
    readers: dict[str, Callable[[Any], Partition | FeaturePartition]] = {
        OF_EXAMPLES: Partition.read,
        FORMAT: FeaturePartition.read,
    }
    return read_npz(path, readers)


def partition_features(
    examples: int,
    shape: tuple[int, ...],
    *,
    seed: int,
    split: str,
    labels_at: int = 0,
    overlap: float = 1.0,
    dataset: str = "",
) -> FeaturePartition:
    """Cuts images into windows, and deals out the examples that not all parties have.

    Of n examples, round(overlap n), drawn at random, are held by all parties; the others go to one party each, in
    turn. The examples of a party are in a random order of its own.

    Args:
        examples: n.
        shape: that of the images, (C, H, W).
        split: "quadrants", "halves", "rows:K" or "columns:K"; windows that cannot be equal differ by one pixel.
        labels_at: the party that has the labels.
        overlap: the share of the examples that all parties have.
        dataset: the dataset's name.

    Raises `ConfigError` if the images are too small for the split, or no example would be held by all.
    """
    (height, width), (down, across) = shape[-2:], grid_of(split)
    if height < down or width < across:
        raise ConfigError(
            f"images of {height} x {width} pixels cannot be cut into {down} x {across} windows",
            where="data.parties.split",
            hint="choose a split with fewer parties, such as 'halves'",
        )
    shared = round(overlap * examples)
    if not shared:
        raise ConfigError(
            f"'overlap' is {overlap}, which is none of {examples:,} examples",
            where="data.parties.overlap",
            hint="set a larger share",
        )
    lines, columns = (
        list(pairwise(k * size // parts for k in range(parts + 1)))
        for size, parts in ((height, down), (width, across))
    )
    windows = tuple(
        Window(top, left, end - top, right - left) for top, end in lines for left, right in columns
    )
    dealing, *orders = streams(seed, 1 + len(windows))
    dealt = dealing.permutation(examples)
    rows = tuple(
        stream.permutation(np.concatenate([dealt[:shared], dealt[shared + k :: len(windows)]]))
        for k, stream in enumerate(orders)
    )
    spec = {"name": "parties", "split": split, "labels_at": labels_at, "overlap": overlap, "seed": seed}
    shapes = tuple((shape[0], window.height, window.width) for window in windows)
    return FeaturePartition(
        tuple(map(str, range(len(windows)))), rows, shapes, windows, labels_at, spec, dataset
    )
