"""CIFAR-10 and CIFAR-100, in both forms in which they are published: binary records and Python pickles."""

from __future__ import annotations

import codecs
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset, Examples, channel_moments, check_labels
from fedlens.data.datasets.dataset_files import (
    damaged,
    get_again,
    locate,
    published,
    reading,
    split_counts,
)
from fedlens.data.partition.drawing import streams

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
_UNSEEN = -1  # the group of a class of which no image was read

Side = Annotated[
    Literal[32, 16, 8],
    Field(description="pixels per side; 32 is the published size, others are means of 2x2 or 4x4 pixels"),
]

REGIONS = 20
REGIONS_OF_GROUP = 3
CENTRES = (0.4, 0.3, 0.2, 0.1)  # shares of a class's images around each of its centres
REGION_WIDTH = 0.15  # radians per axis: about 1,000 km
CENTRE_WIDTH = 0.05  # about 300 km


@dataclass(frozen=True)
class LabelFormat:
    """How the files of a dataset state the class of an image.

    Args:
        count: the bytes of labels in a binary record. The last one is the class, the first of two the group.
        key: of the classes in a pickle.
        group_key: of the groups (coarse labels) in a pickle.
    """

    count: int
    key: str
    group_key: str | None = None


FORMATS = {
    "cifar10": LabelFormat(1, "labels"),
    "cifar100": LabelFormat(2, "fine_labels", "coarse_labels"),
}


def cifar10(root: Path, download: bool, seed: int, *, size: Side = 32) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 photographs of 32x32, 10 classes; `seed` plays no part.

    With a `size` of 16 or 8 each pixel is the mean of 2x2 or 4x4 published ones, for runs in minutes.

    Reads `root/cifar-10-batches-bin`, or else `root/cifar-10-batches-py`; both have the same images in the
    same order. Raises `DataError` if both are incomplete, or a file is damaged or holds another number of
    images than was published.
    """
    return _read("cifar10", root, download, size)


def cifar100(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: Side = 32,
    places: Annotated[
        Literal["none", "drawn"],
        Field(description="drawn: invented columns `lat` and `lon`, in which classes cluster; see `s2`"),
    ] = "none",
) -> Dataset:
    """CIFAR-100 with its 100 fine labels: 50,000 + 10,000 photographs of 32x32.

    `Dataset.coarse` is the group of each class, one of 20 groups of five classes, as the files state it for
    each image. Reads `root/cifar-100-binary`, or else `root/cifar-100-python`; both have the same images in the
    same order. `size` is that of `cifar10`.

    With places = "drawn" each image has columns `lat` and `lon`, in degrees. They are drawn with `seed`, as
    `drawn_places` states: a stand-in for iNaturalist's coordinates in the partition `s2`. Otherwise `seed` plays no
    part.

    Raises `DataError` if both forms are incomplete, a file is damaged or holds another number of images than was
    published, images of one class are in two groups, or places are drawn and the files state no groups.
    """
    dataset = _read("cifar100", root, download, size)
    return dataset if places == "none" else _with_places(dataset, seed, root)


def _with_places(dataset: Dataset, seed: int, root: Path) -> Dataset:
    if dataset.coarse is None:
        what = "places = 'drawn' needs the group of each class, and the files do not state all of them"
        raise DataError(what, where=str(root), hint=get_again(root))
    splits = (dataset.train, dataset.test)
    labels = np.concatenate([split.targets for split in splits])
    lat, lon = (np.split(one, [len(dataset.train)]) for one in drawn_places(labels, dataset.coarse, seed))
    train, test = (
        replace(split, columns={"lat": lat[at], "lon": lon[at]}) for at, split in enumerate(splits)
    )
    note = "the latitude and longitude of each image are drawn, not published"
    return replace(dataset, train=train, test=test, notes=(*dataset.notes, note), seeded=True)


def _read(name: str, root: Path, download: bool, size: int) -> Dataset:
    facts = CATALOGUE[name]
    train_count, test_count = split_counts(name)
    # The binary form comes first in the catalogue, because it needs no unpickling.
    *train_paths, test_path = locate(name, root, download)
    coarse = np.full(len(facts.labels), _UNSEEN, np.int64)
    train = _read_split(name, train_paths, train_count, coarse)
    test = _read_split(name, [test_path], test_count, coarse)
    dataset = published(name, (train, test), coarse=None if (coarse == _UNSEEN).any() else coarse)
    return dataset if size == SHAPE[1] else _smaller(dataset, size)


def _smaller(dataset: Dataset, size: int) -> Dataset:
    """The same images with `size` pixels per side, the rounded means of blocks, and their moments."""
    block = SHAPE[1] // size
    pixels = block * block

    def smaller(split: Examples) -> Examples:
        blocks = split.inputs.reshape(-1, SHAPE[0], size, block, size, block)
        means = (blocks.sum(axis=(3, 5), dtype=np.uint16) + pixels // 2) // pixels
        return replace(split, inputs=means.astype(np.uint8))

    train, test = smaller(dataset.train), smaller(dataset.test)
    mean, std = channel_moments(train.inputs)
    return replace(dataset, train=train, test=test, mean=mean, std=std, moments_of=len(train))


def _read_split(name: str, paths: list[Path], count: int, coarse: NDArray[np.int64]) -> Examples:
    """All files of a split, each read straight into its place; the groups of the classes go into `coarse`."""
    each = count // len(paths)
    inputs = np.empty((count, *SHAPE), np.uint8)
    targets = np.empty(count, np.int64)
    for number, path in enumerate(paths):
        part = slice(number * each, (number + 1) * each)
        read = _read_binary if path.suffix == ".bin" else _read_python
        pixels, labels, groups = read(path, each, FORMATS[name])
        check_labels(labels, len(coarse), where=str(path))
        inputs[part], targets[part] = pixels.reshape(each, *SHAPE), labels
        if groups is not None:
            _note_groups(coarse, targets[part], groups, path)
    return Examples(inputs, targets)


Batch = tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any] | None]  # pixels, labels, groups


def _read_binary(path: Path, count: int, labels: LabelFormat) -> Batch:
    records = read_records(path, count, labels.count)
    groups = records[:, 0] if labels.group_key else None
    return records[:, labels.count :], records[:, labels.count - 1], groups


def _read_python(path: Path, count: int, labels: LabelFormat) -> Batch:
    batch = read_pickle(path)
    pixels, classes = _pixels(batch, count, path), _labels(batch, labels.key, count, path)
    key = labels.group_key
    has_groups = isinstance(batch, dict) and key is not None and (key in batch or key.encode() in batch)
    return pixels, classes, _labels(batch, key, count, path) if key and has_groups else None


def _note_groups(
    coarse: NDArray[np.int64], labels: NDArray[np.int64], groups: NDArray[Any], path: Path
) -> None:
    """Writes the group of each class in `labels` into `coarse`; raises `DataError` if a class has two groups."""
    fresh = coarse[labels] == _UNSEEN
    coarse[labels[fresh]] = groups[fresh]
    wrong = np.flatnonzero(coarse[labels] != groups)
    if len(wrong):
        at = int(wrong[0])
        label, group, other = labels[at], groups[at], coarse[labels[at]]
        raise damaged(
            f"record {at} of class {label} is in the group {group}, and another one in {other}", path
        )


def read_records(path: Path, count: int, label_bytes: int) -> NDArray[np.uint8]:
    """uint8 [count, label_bytes + 3072]: the records of a binary file.

    A record is `label_bytes` bytes, the last of which is the label (in CIFAR-100 the group stands before it),
    and 3,072 bytes of pixels: all red ones row by row, then green, then blue. Raises `DataError` if the
    file does not hold exactly `count` of them.
    """
    record = label_bytes + PIXELS
    with reading(path):
        data = np.fromfile(path, np.uint8)
    if data.size != count * record:
        whole, rest = divmod(data.size, record)
        found = f"{data.size} bytes, which is {whole} records" + (f" and {rest} bytes" if rest else "")
        expected = f"{count * record} bytes were expected, {count} records of {record}"
        raise damaged(f"{expected}, found {found}", path)
    return data.reshape(count, record)


def read_pickle(path: Path) -> object:
    """The content of a pickle file. Nothing in it can run code: only NumPy arrays of numbers are rebuilt from it.

    Raises `DataError` if it asks for anything else, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise any exception
        reason = str(error) or type(error).__name__
        raise damaged(f"the file cannot be unpickled: {reason}", path) from error


def _pixels(batch: object, count: int, path: Path) -> NDArray[np.uint8]:
    pixels = _entry(batch, "data", path)
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (count, PIXELS):
        return pixels
    raise damaged(f"'data' was expected to be uint8 [{count}, {PIXELS}], found {_described(pixels)}", path)


def _labels(batch: object, key: str, count: int, path: Path) -> NDArray[np.int64]:
    labels = _entry(batch, key, path)
    if isinstance(labels, list) and len(labels) == count and all(type(label) is int for label in labels):
        return np.array(labels, np.int64)
    expected = f"'{key}' was expected to be a list of {count} whole numbers"
    raise damaged(f"{expected}, found {_described(labels)}", path)


def _entry(batch: object, key: str, path: Path) -> object:
    if isinstance(batch, dict):
        for name in (key, key.encode()):
            if name in batch:
                return batch[name]
    raise damaged(f"the entry '{key}' was expected, found {_described(batch)}", path)


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dictionary of {', '.join(sorted(map(str, value))) or 'nothing'}"
    size = f" of length {len(value)}" if isinstance(value, (list, str, bytes)) else ""
    return f"{type(value).__name__}{size}"


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds plain NumPy arrays and refuses every other name, so that an untrusted file is only data."""

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
    """A plain type of whole numbers; the published files have 0 and 1 for False and True."""
    dtype: np.dtype[Any] = np.dtype(code, align=bool(align), copy=bool(copy))
    if dtype.kind not in "iub":
        raise pickle.UnpicklingError(f"it asks for an array of {dtype}")
    return dtype


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 pickles bytes in protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return codecs.latin_1_encode(text)[0]


def drawn_places(
    labels: NDArray[np.int64], groups: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(latitudes [n], longitudes [n]) in degrees, drawn; nothing published says where the images were taken.

    1. 20 regions lie uniformly on the sphere. Region r (from 1 on) is popular in proportion to 1 / r.
    2. A group of classes lives in 3 regions, drawn by their popularity.
    3. A class has 4 centres. Each lies around a region of its group, with a standard deviation of 0.15 radians.
    4. An image lies around one of its class's centres, which have 40, 30, 20 and 10 % of its images. Its displacement
       is 0.05 radians times a Cauchy (t_1) vector, so the places of a class have a heavy tail.

    Args:
        labels: int64 [n], the class of each example.
        groups: int64 [classes], the group of each class.
        seed: of all draws.

    >>> lat, lon = drawn_places(np.array([0, 1, 1]), np.array([0, 0]), seed=0)
    >>> lat.shape, bool((abs(lat) <= 90).all() and (abs(lon) <= 180).all())
    ((3,), True)
    """
    homes, centres, images = streams(seed, 3)
    regions = _unit(homes.standard_normal((REGIONS, 3)))
    popularity = 1 / np.arange(1, REGIONS + 1)
    shape = (int(groups.max()) + 1, REGIONS_OF_GROUP)
    regions_of = homes.choice(REGIONS, shape, p=popularity / popularity.sum())
    home = centres.randint(REGIONS_OF_GROUP, size=(len(groups), len(CENTRES)))
    offsets = REGION_WIDTH * centres.standard_normal((*home.shape, 3))
    centres_of = _unit(regions[regions_of[groups[:, None], home]] + offsets)
    centre = images.choice(len(CENTRES), len(labels), p=CENTRES)
    cauchy = images.standard_normal((len(labels), 3)) / np.abs(images.standard_normal((len(labels), 1)))
    x, y, z = _unit(centres_of[labels, centre] + CENTRE_WIDTH * cauchy).T
    return np.degrees(np.arcsin(z.clip(-1, 1))), np.degrees(np.arctan2(y, x))


def _unit(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The points [..., 3] moved along their rays to the unit sphere."""
    lengths: NDArray[np.float64] = np.linalg.norm(points, axis=-1, keepdims=True)
    return points / lengths
