"""CIFAR-10 and CIFAR-100, in both forms in which they are published: binary records and Python pickles."""

from __future__ import annotations

import codecs
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples, check_labels
from fedlens.data.datasets.cifar_classes import CIFAR10_CLASSES, CIFAR100_CLASSES
from fedlens.data.datasets.missing_files import DAMAGED, missing
from fedlens.data.download import Resource, extract, fetch

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
_UNSEEN = -1  # the group of a class of which no image was read


@dataclass(frozen=True)
class Form:
    """One published form: its folder, the files of the training split in their order, and the test file."""

    folder: str
    train: tuple[str, ...]
    test: str


@dataclass(frozen=True)
class CifarRelease:
    """What is published under a name: both forms, the archive to fetch, and what is known of the images."""

    name: str
    binary: Form
    python: Form
    archive: Resource
    label_bytes: int  # of a binary record; the last one counts
    label_key: str
    group_key: str | None  # of the coarse labels, which in a binary record stand in the first byte
    counts: tuple[int, int]
    classes: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

CIFAR10 = CifarRelease(
    name="cifar10",
    binary=Form("cifar-10-batches-bin", tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin"),
    python=Form("cifar-10-batches-py", _BATCHES, "test_batch"),
    archive=Resource(
        "cifar-10-python.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
        "c58f30108f718f92721af3b95e74349a",
    ),
    label_bytes=1,
    label_key="labels",
    group_key=None,
    counts=(50_000, 10_000),
    classes=CIFAR10_CLASSES,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)

CIFAR100 = CifarRelease(
    name="cifar100",
    binary=Form("cifar-100-binary", ("train.bin",), "test.bin"),
    python=Form("cifar-100-python", ("train",), "test"),
    archive=Resource(
        "cifar-100-python.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
        "eb9058c3a382ffc7106e4002c42a8d85",
    ),
    label_bytes=2,
    label_key="fine_labels",
    group_key="coarse_labels",
    counts=(50_000, 10_000),
    classes=CIFAR100_CLASSES,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def cifar10(root: Path, download: bool, seed: int) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 photographs of 32x32, 10 classes; `seed` plays no part.

    Reads `root/cifar-10-batches-bin`, or else `root/cifar-10-batches-py`; both have the same images in the
    same order. Raises `DataError` where neither is there, or a file is damaged or holds another number of
    images than was published.
    """
    return read_published(CIFAR10, root, download)


def cifar100(root: Path, download: bool, seed: int) -> Dataset:
    """CIFAR-100 with its 100 fine labels: 50,000 + 10,000 photographs of 32x32; `seed` plays no part.

    `Dataset.coarse` is the group of each class, of 20 with five classes each, as the files say it of each
    image. Reads `root/cifar-100-binary`, or else `root/cifar-100-python`; both have the same images in the
    same order. Raises `DataError` where neither is there, a file is damaged or holds another number of images
    than was published, or images of one class are in two groups.
    """
    return read_published(CIFAR100, root, download)


def read_published(what: CifarRelease, root: Path, download: bool) -> Dataset:
    """The dataset `what` below `root`, fetched first where neither form is there and `download` says so."""
    form = _find(what, root)
    if form is None and download:
        extract(fetch(what.archive, root), root, what.python.folder)
        form = _find(what, root)
    if form is None:
        wanted = [
            f"{form.folder}/{{{','.join((*form.train, form.test))}}}" for form in (what.binary, what.python)
        ]
        raise missing(what.name, root, " or ".join(wanted))
    folder = root / form.folder
    coarse = np.full(len(what.classes), _UNSEEN, np.int64)
    return Dataset(
        name=what.name,
        train=_read_split(what, form, [folder / file for file in form.train], what.counts[0], coarse),
        test=_read_split(what, form, [folder / form.test], what.counts[1], coarse),
        classes=what.classes,
        mean=what.mean,
        std=what.std,
        licence="none stated; the author asks for a citation",
        source="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        coarse=None if (coarse == _UNSEEN).any() else coarse,
    )


def _find(what: CifarRelease, root: Path) -> Form | None:
    """The form all of whose files are there: the binary one first, because it needs no unpickling."""
    for form in (what.binary, what.python):
        if all((root / form.folder / file).is_file() for file in (*form.train, form.test)):
            return form
    return None


def _read_split(
    what: CifarRelease, form: Form, paths: list[Path], count: int, coarse: NDArray[np.int64]
) -> Examples:
    """All files of a split, each read straight into its place; the groups of the classes go into `coarse`."""
    each = count // len(paths)
    inputs = np.empty((count, *SHAPE), np.uint8)
    targets = np.empty(count, np.int64)
    for number, path in enumerate(paths):
        part = slice(number * each, (number + 1) * each)
        pixels: NDArray[np.uint8]
        labels: NDArray[Any]
        groups: NDArray[Any] | None
        if form is what.binary:
            records = read_records(path, each, what.label_bytes)
            pixels, labels = records[:, what.label_bytes :], records[:, what.label_bytes - 1]
            groups = records[:, 0] if what.group_key else None
        else:
            batch = read_pickle(path)
            pixels, labels = _pixels(batch, each, path), _labels(batch, what.label_key, each, path)
            grouped = what.group_key if what.group_key and _has(batch, what.group_key) else None
            groups = _labels(batch, grouped, each, path) if grouped else None
        check_labels(labels, len(what.classes), where=str(path))
        inputs[part], targets[part] = pixels.reshape(each, *SHAPE), labels
        if groups is not None:
            _note_groups(coarse, targets[part], groups, path)
    return Examples(inputs, targets)


def _note_groups(
    coarse: NDArray[np.int64], labels: NDArray[np.int64], groups: NDArray[Any], path: Path
) -> None:
    """Writes the group of each class that `labels` has into `coarse`; raises `DataError` where it has two."""
    fresh = coarse[labels] == _UNSEEN
    coarse[labels[fresh]] = groups[fresh]
    wrong = np.flatnonzero(coarse[labels] != groups)
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"record {at} of class {labels[at]} is in the group {groups[at]}, and another one in "
            f"{coarse[labels[at]]}",
            where=str(path),
            hint=DAMAGED,
        )


def read_records(path: Path, count: int, label_bytes: int) -> NDArray[np.uint8]:
    """uint8 [count, label_bytes + 3072]: the records of a binary file.

    A record is `label_bytes` bytes, the last of which is the label (in CIFAR-100 the group stands before it),
    and 3,072 bytes of pixels: all red ones row by row, then green, then blue. Raises `DataError` where the
    file does not hold exactly `count` of them.
    """
    record = label_bytes + PIXELS
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", where=str(path), hint=DAMAGED
        ) from error
    if data.size != count * record:
        whole, rest = divmod(data.size, record)
        found = f"{data.size} bytes, which is {whole} records" + (f" and {rest} bytes" if rest else "")
        raise DataError(
            f"{count * record} bytes were expected, {count} records of {record}, found {found}",
            where=str(path),
            hint=DAMAGED,
        )
    return data.reshape(count, record)


def read_pickle(path: Path) -> object:
    """What is pickled in a file. Nothing in it can run code: only NumPy arrays of numbers are rebuilt from it.

    Raises `DataError` where it asks for anything else, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle fails in every way there is
        reason = str(error) or type(error).__name__
        raise DataError(f"the file cannot be unpickled: {reason}", where=str(path), hint=DAMAGED) from error


def _pixels(batch: object, count: int, path: Path) -> NDArray[np.uint8]:
    pixels = _entry(batch, "data", path)
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (count, PIXELS)):
        raise DataError(
            f"'data' was expected to be uint8 [{count}, {PIXELS}], found {_found(pixels)}",
            where=str(path),
            hint=DAMAGED,
        )
    return pixels


def _labels(batch: object, key: str, count: int, path: Path) -> NDArray[np.int64]:
    labels = _entry(batch, key, path)
    if not (
        isinstance(labels, list) and len(labels) == count and all(type(label) is int for label in labels)
    ):
        raise DataError(
            f"'{key}' was expected to be a list of {count} whole numbers, found {_found(labels)}",
            where=str(path),
            hint=DAMAGED,
        )
    return np.array(labels, np.int64)


def _has(batch: object, key: str) -> bool:
    return isinstance(batch, dict) and (key in batch or key.encode() in batch)


def _entry(batch: object, key: str, path: Path) -> object:
    if isinstance(batch, dict):
        for name in (key, key.encode()):
            if name in batch:
                return batch[name]
    raise DataError(f"the entry '{key}' was expected, found {_found(batch)}", where=str(path), hint=DAMAGED)


def _found(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dictionary of {', '.join(sorted(map(str, value))) or 'nothing'}"
    return (
        f"{type(value).__name__} of length {len(value)}"
        if isinstance(value, (list, str, bytes))
        else type(value).__name__
    )


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds plain NumPy arrays and refuses every other name, so that a file from anywhere is only data."""

    def find_class(self, module: str, name: str) -> Any:  # which `load` calls for each name in the file
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _reconstruct
        if module == "numpy" and name in ("ndarray", "dtype"):
            return np.ndarray if name == "ndarray" else _dtype
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays are allowed")


def _reconstruct(kind: object, shape: object, code: object) -> NDArray[Any]:
    """NumPy's empty array, which the pickle fills afterwards."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("it asks for an array of a special kind")
    return np.ndarray((0,), np.uint8)


def _dtype(code: str, align: object = False, copy: object = False) -> np.dtype[Any]:
    """A plain type of whole numbers; the published files say 0 and 1 where NumPy now wants False and True."""
    found: np.dtype[Any] = np.dtype(code, align=bool(align), copy=bool(copy))
    if found.kind not in "iub":
        raise pickle.UnpicklingError(f"it asks for an array of {found}")
    return found


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 pickles bytes in protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return codecs.latin_1_encode(text)[0]
