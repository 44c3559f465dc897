"""Datasets: two splits of examples, and the facts about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.threads import map_threads
from fedlens.core.dataset_info import VOID, DatasetInfo, Kind
from fedlens.data.boxes import Boxes
from fedlens.data.decoding import ImageForm
from fedlens.data.diagnostics import OnError
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.lazy_images import LazyImages
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = 4096  # images per pass, so that temporaries stay in cache


@dataclass(frozen=True, eq=False)
class Examples:
    """One split: inputs, and a target for each of them.

    | kind | inputs | targets |
    |---|---|---|
    | classification | uint8 [n, C, H, W], 0 to 255, or `ImageFiles` | int64 [n], the class, from 0 on |
    | multi-label | the same | uint8 [n, classes], 1 for each class of the image, else 0 |
    | unlabelled | the same, or other `LazyImages` | uint8 [n, 0] |
    | segmentation | the same | uint8 [n, H, W], the class of each pixel, 255 for none; or `ImageFiles` of masks |
    | detection | the same | `Boxes` |
    | language | int16, int32 or int64 [n, T], tokens | int64 [n], or int64 [n, T], the tokens to predict, -1 for none |

    Args:
        columns: further columns by name: [n] of strings or numbers. `client` assigns examples to clients.
        names: those of the image files, if the images were decoded from files.
        device: the device that batches are moved to; None leaves them on the device of the examples.

    Readers return arrays or files. For training, `tensors` turns the arrays into tensors.

    Raises `DataError` if shapes, types or lengths do not fit.

    >>> split = Examples(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]))
    >>> len(split), split.kind
    (2, 'classification')
    """

    inputs: Any  # an array, a tensor or ImageFiles
    targets: Any  # an array, a tensor, ImageFiles or Boxes
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    names: Paths | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        inputs, targets = self.inputs, self.targets
        if self.kind == "language":
            if not _dtype(inputs).startswith("int"):
                raise DataError(f"the tokens are {_found(inputs)}, but must be integers [n, T]")
            if _dtype(targets) != "int64":
                raise DataError(f"the targets are {_found(targets)}, but must be int64 [n] or [n, T]")
        elif _dtype(inputs) != "uint8" or len(inputs.shape) != 4:
            raise DataError(f"the images are {_found(inputs)}, but must be uint8 [n, C, H, W]")
        if self.kind == "segmentation":
            if _dtype(targets) != "uint8":
                raise DataError(f"the masks are {_found(targets)}, but must be uint8 [n, H, W]")
            if targets.shape[1:] != inputs.shape[2:]:
                raise DataError(f"the masks are {_found(targets)}, and the images {_found(inputs)}")
        elif self.kind == "multi-label":
            if _dtype(targets) != "uint8":
                raise DataError(
                    f"the labels are {_found(targets)}, but must be int64 [n], or uint8 [n, classes] of 0 and 1"
                )
        elif self.kind == "classification" and (_dtype(targets) != "int64" or targets.ndim != 1):
            raise DataError(f"the labels are {_found(targets)}, but must be int64 [n]")
        if len(inputs) != len(targets):
            what = "labels" if self.kind in ("classification", "multi-label") else "targets"
            thing = "texts" if self.kind == "language" else "images"
            raise DataError(f"there are {len(inputs)} {thing} and {len(targets)} {what}")
        for name, column in self.columns.items():
            if len(column) != len(inputs):
                raise DataError(f"the column '{name}' has {len(column)} values for {len(inputs)} examples")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def kind(self) -> Kind:
        """The task that the examples are for, from the form of their targets."""
        if isinstance(self.targets, Boxes):
            return "detection"
        if isinstance(self.targets, LazyImages) or self.targets.ndim == 3:
            return "segmentation"
        if len(self.inputs.shape) == 2:
            return "language"
        if self.targets.ndim == 2:
            return "multi-label" if self.targets.shape[1] else "unlabelled"
        return "classification"

    def take(self, rows: NDArray[Any]) -> Examples:
        """The examples at the positions `rows`, int64 [k]."""
        inputs = self.inputs.subset(rows) if isinstance(self.inputs, LazyImages) else self.inputs[rows]
        if isinstance(self.targets, LazyImages):
            targets: Any = self.targets.subset(rows)
        else:
            targets = self.targets.take(rows) if isinstance(self.targets, Boxes) else self.targets[rows]
        return Examples(inputs, targets, {name: column[rows] for name, column in self.columns.items()})

    def tensors(self) -> Examples:
        """The examples for training: tensors that share the memory of the arrays, without the columns.

        Read-only arrays are copied, because PyTorch has no read-only tensors.
        """
        return Examples(_tensor(self.inputs), _tensor(self.targets), names=self.names)

    @property
    def files(self) -> Paths | None:
        """The names of the image files, by position; None if the images come from no files of their own."""
        return self.inputs.files if isinstance(self.inputs, ImageFiles) else self.names

    @property
    def values(self) -> int:
        """The number of values of one input."""
        return prod(self.inputs.shape[1:])

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Any, Any]:
        """(inputs, targets) at the positions `index`, int64 [k], copied; boxes as `BoxBatch`. Needs `tensors`.

        With a generator, images that are drawn change from batch to batch. Their inputs may be [k, views, C, H, W].
        """
        if not isinstance(self.inputs, LazyImages):  # once, for inputs and targets
            index = _on(self.inputs.device, index)
        return self._moved(_batch(self.inputs, index, generator), _batch(self.targets, index))

    def stretch(self, start: int, stop: int) -> tuple[Any, Any]:
        """(inputs, targets) from `start` to before `stop`: views if they are in memory. Needs `tensors`."""
        return self._moved(_stretch(self.inputs, start, stop), _stretch(self.targets, start, stop))

    @property
    def lazy(self) -> bool:
        """Whether reading a batch decodes files or draws images."""
        return isinstance(self.inputs, LazyImages) or isinstance(self.targets, LazyImages)

    @property
    def changing(self) -> bool:
        """Whether images are drawn anew for every batch of a training step."""
        return isinstance(self.inputs, LazyImages) and self.inputs.changing

    def targets_at(self, at: Tensor | slice) -> Any:
        """The targets at these positions, int64 [k] or a slice. Needs `tensors`."""
        part = self.targets
        found = _stretch(part, at.start, at.stop) if isinstance(at, slice) else _batch(part, at)
        return self._moved(None, found)[1]

    def on(self, device: torch.device, room: int) -> Examples:
        """The same tensors for training on `device`: kept there if they take at most `room` bytes.

        Otherwise each batch is moved when it is read.
        """
        parts = (self.inputs, self.targets)
        if any(isinstance(part, LazyImages | Boxes) for part in parts) or sum(p.nbytes for p in parts) > room:
            return replace(self, device=device)
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device), device=device)

    def _moved(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Both on the device, but for boxes: in CPU memory they are counted without waiting."""
        return (inputs, targets) if self.device is None else _uploaded((inputs, targets), self.device)

    def feed(self, hashed: hashlib._Hash) -> None:
        """Updates a hash with the bytes in memory; for files, with their names and contents."""
        for part in (self.inputs, self.targets):
            if isinstance(part, LazyImages):
                hashed.update(part.fingerprint().encode())
                continue
            for array in (part.boxes, part.labels, part.offsets) if isinstance(part, Boxes) else (part,):
                plain = np.ascontiguousarray(array)
                hashed.update(f"torch.{plain.dtype} {plain.shape}\n".encode())
                hashed.update(plain.data)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset, in memory or in image files.

    Args:
        name: as in the registry.
        train, test: the published splits, in the published order.
        classes: the name of each class; a label is a position in it.
        mean, std: of the training images scaled to [0, 1], one number per channel; empty for text.
        licence, source: shown in the report.
        coarse: int64 [classes], the group of each class, if classes have groups.
        notes: sentences on what the reader left out or corrected.
        chosen: settings of the reader that it chose from the data, because the user left them out, by name; they
            are written into the run's config.toml.
        seeded: whether the data or the choice of the test examples depend on the data seed.
        on_error: "skip" leaves out images that cannot be decoded later, "stop" stops the run; None if the reader
            has no such setting.
        read_as: how image files become such images, if they are no longer in files; see `form`.
        vocabulary: the number of different tokens of texts: ids are 0 to `vocabulary` - 1. By default one more than the
            largest id in both splits. None for images.
        at_sites: whether the training examples are at sites; none is here then.
        parties: of data of several parties (`fedlens.data.vertical.party_files`), that of each; None is this one.
        moments_of: the number of training images that `mean` and `std` were computed of; 0 if they were stated.

    Raises `DataError` if a label has no class, a token is not in the vocabulary, or the splits differ in shape.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    source: str
    coarse: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()
    on_error: OnError | None = None
    seeded: bool = False
    chosen: Mapping[str, Any] = field(default_factory=dict)
    read_as: ImageForm | None = None
    vocabulary: int | None = None
    moments_of: int = 0
    at_sites: bool = False
    parties: tuple[Dataset | None, ...] = ()

    def __post_init__(self) -> None:
        if self.train.kind != self.test.kind:
            raise DataError(
                f"the training split is for {self.train.kind}, the test split for {self.test.kind}",
                where=self.name,
            )
        for split, examples in (("train", self.train), ("test", self.test)):
            if isinstance(examples.targets, Boxes):
                check_labels(examples.targets.labels, len(self.classes), where=f"{self.name}, {split}")
            elif self.kind == "classification" and isinstance(examples.targets, np.ndarray):
                check_labels(examples.targets, len(self.classes), where=f"{self.name}, {split}")
            elif self.kind == "multi-label" and isinstance(examples.targets, np.ndarray):
                check_label_sets(examples.targets, len(self.classes), where=f"{self.name}, {split}")
            elif self.kind == "segmentation" and isinstance(examples.targets, np.ndarray):
                check_masks(examples.targets, len(self.classes), where=f"{self.name}, {split}")
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            shapes = f"{list(self.train.inputs.shape[1:])} and {list(self.test.inputs.shape[1:])}"
            what = "texts" if self.kind == "language" else "images"
            raise DataError(f"the {what} of the two splits have shapes {shapes}", where=self.name)
        if self.kind == "language":
            vocabulary = self.vocabulary or inferred_vocabulary(self.train, self.test)
            object.__setattr__(self, "vocabulary", vocabulary)
            for split, examples in (("train", self.train), ("test", self.test)):
                check_tokens(examples, vocabulary, len(self.classes), where=f"{self.name}, {split}")
        if self.kind != "language" and not len(self.mean) == len(self.std) == self.input_shape[0]:
            raise DataError("mean and std must have one number per channel", where=self.name)

    @property
    def kind(self) -> Kind:
        """The task that the data are for."""
        return self.train.kind

    @property
    def of_parties(self) -> tuple[Dataset, ...]:
        """The dataset of each party; none if the data are not of several parties."""
        return tuple(self if party is None else party for party in self.parties)

    @property
    def splits(self) -> list[Examples]:
        """The training and test splits of this dataset, and of those of other parties."""
        return [split for each in self.of_parties or (self,) for split in (each.train, each.test)]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image, or (T,) of one text."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def form(self) -> ImageForm | None:
        """The form of the images, by which other image files can be decoded for the same model; None for text.

        Images that were published as arrays have no rule for files: these are cropped to their size and turned upright.
        """
        inputs = self.train.inputs
        if self.read_as is not None or self.kind == "language":
            return self.read_as
        if isinstance(inputs, ImageFiles):
            return ImageForm(inputs.channels, inputs.height, inputs.width, inputs.fit, inputs.upright)
        channels, height, width = self.input_shape
        return ImageForm(channels, height, width)

    @property
    def info(self) -> DatasetInfo:
        """The facts that tasks and models may ask for."""
        text = self.kind == "language"
        splits = (self.train, self.test)
        return DatasetInfo(
            self.name,
            self.kind,
            self.classes,
            self.input_shape,
            self.vocabulary,
            tuple(self.train.targets.shape[1:]) if text else (),
            text and any(bool((split.targets < 0).any()) for split in splits),
        )

    def table(self) -> Table:
        """The table of the training split for partitioners. Masks in files are decoded for it."""
        marks, offsets = marks_of(self.train)
        masks = self.train.targets  # those in memory were checked with the dataset
        if isinstance(masks, ImageFiles) and marks.max(initial=0) >= len(self.classes):
            row = int(np.searchsorted(offsets, np.argmax(marks), side="right")) - 1
            raise _beyond(f"the mask has the id {marks.max()}", len(self.classes), str(masks.path(row)))
        return Table(
            marks,
            offsets,
            self.classes,
            self.train.columns,
            self.coarse,
            single=_one_each(self.train),
            located=self.kind in ("segmentation", "detection"),
            dataset=self.name,
            origin="" if self.train.files is None else self.train.files.digest,
        )


def refuse_features(dataset: Dataset, partition: Partition) -> None:
    """Raises `ConfigError` if a partition of texts changes brightness, blur, rotation or noise per client."""
    if partition.features and dataset.kind == "language":
        raise ConfigError(
            f"'{dataset.name}' is text, which has no brightness, blur, rotation or noise",
            where="data.partition",
        )


def _one_each(examples: Examples) -> bool:
    """Whether each example has one class; a text may have none."""
    targets = examples.targets
    return isinstance(targets, np.ndarray) and targets.ndim == 1 and targets.min(initial=0) >= 0


def marks_of(examples: Examples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(marks int64 [m], offsets int64 [n + 1]): the classes of each example; see `Table`."""
    targets = examples.targets
    if _one_each(examples):
        return targets, np.arange(len(targets) + 1)
    if isinstance(targets, np.ndarray) and examples.kind == "language":
        given = targets.reshape(len(targets), -1) >= 0
        return targets[targets >= 0], np.concatenate([[0], np.cumsum(given.sum(axis=1))])
    if examples.kind == "multi-label":
        rows, classes = np.nonzero(targets)
        return classes, np.searchsorted(rows, np.arange(len(targets) + 1))
    if isinstance(targets, Boxes):
        rows = np.repeat(np.arange(len(targets)), np.diff(targets.offsets))
        width = int(targets.labels.max(initial=0)) + 1
        keys = np.unique(rows * width + targets.labels)
        return keys % width, np.searchsorted(keys, np.arange(len(targets) + 1) * width)
    if isinstance(targets, np.ndarray):
        shown = [_shown(mask) for mask in targets]
    else:
        shown = map_threads(lambda at: _shown(targets.decode(at)), range(len(targets)))
    offsets = np.cumsum([0, *map(len, shown)])
    return np.concatenate([*shown, np.empty(0, np.int64)]).astype(np.int64), offsets


def _shown(mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The classes in a mask, without void."""
    counts = np.bincount(mask.ravel(), minlength=VOID + 1)
    return np.flatnonzero(counts[:VOID])


def _dtype(array: Any) -> str:
    """The name of the dtype of an array or tensor."""
    return str(array.dtype).removeprefix("torch.")


def _found(array: Any) -> str:
    return f"{getattr(array, 'dtype', type(array).__name__)} {list(getattr(array, 'shape', []))}"


def _tensor(array: Any) -> Any:
    """A tensor that shares the memory of an array; anything else unchanged."""
    import torch  # here, because listing and partitioning data start without PyTorch

    if not isinstance(array, np.ndarray):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _batch(part: Any, index: Tensor, generator: torch.Generator | None = None) -> Any:
    if isinstance(part, LazyImages):
        rows = index.numpy()
        return _tensor(part.views(rows) if generator is None else part.draw(rows, generator))
    if isinstance(part, Boxes):
        return part.batch(index.numpy())
    return part.index_select(0, _on(part.device, index))


def _on(device: torch.device, index: Tensor) -> Tensor:
    # Asked here, for every batch, because to import and call what copies takes longer than a copy of nothing.
    return index if index.device == device else _uploaded(index, device)


def _uploaded(value: Any, device: torch.device) -> Any:
    # Here, because listing and partitioning start without PyTorch.
    from fedlens.core.device_copies import uploaded

    return uploaded(value, device)


def _stretch(part: Any, start: int, stop: int) -> Any:
    if isinstance(part, LazyImages):
        return _tensor(part.views(np.arange(start, min(stop, len(part)))))
    if isinstance(part, Boxes):
        return part.batch(np.arange(start, min(stop, len(part))))
    return part[start:stop]


def check_labels(labels: NDArray[Any], classes: int, where: str) -> None:
    """Raises `DataError` if a label is not in 0 .. classes - 1."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        wrong = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise DataError(f"label {labels[wrong]} of record {wrong} is not in 0 .. {classes - 1}", where=where)


def check_tokens(texts: Examples, vocabulary: int, classes: int, where: str) -> None:
    """Raises `DataError` if a token is not in the vocabulary, or a target is neither a class nor -1."""
    for values, least, end, what in (
        (texts.inputs, 0, vocabulary, "token"),
        (texts.targets, -1, classes, "target"),
    ):
        if not isinstance(values, np.ndarray) or not values.size:
            continue
        if values.min() < least or values.max() >= end:
            text, *position = np.argwhere((values < least) | (values >= end))[0].tolist()
            at = f"text {text}" + "".join(f", position {place}" for place in position)
            wrong = values[(text, *position)]
            size = f"the vocabulary of {end}" if what == "token" else f"{end} classes"
            raise DataError(f"{what} {wrong} of {at} is not in {least} .. {end - 1}, {size}", where=where)


def inferred_vocabulary(*splits: Examples) -> int:
    """One more than the largest id of a token, at least 1."""
    return 1 + max(int(split.inputs.max()) if len(split) else 0 for split in splits)


def check_masks(masks: NDArray[np.uint8], classes: int, where: str) -> None:
    """Raises `DataError` if a pixel of the masks [n, H, W] is neither a class nor 255."""
    for row, mask in enumerate(masks):
        # Unsigned numbers wrap around: the classes come after the ids beyond them, and 255 after those.
        if classes < VOID and (mask - np.uint8(classes) < VOID - classes).any():
            wrong = mask[(mask >= classes) & (mask != VOID)]
            raise _beyond(f"mask {row} has the id {wrong[0]} in {len(wrong)} pixels", classes, where)


def _beyond(what: str, classes: int, where: str) -> DataError:
    """The error for a mask with an id beyond the classes."""
    return DataError(
        f"{what}, but ids must be 0 to {classes - 1}, or {VOID} for a pixel without a class",
        where=where,
        hint="name all classes, or write the masks with other ids",
    )


def check_label_sets(labels: NDArray[np.uint8], classes: int, where: str) -> None:
    """Raises `DataError` if multi-label targets are not [n, classes] of 0 and 1."""
    if labels.shape[1] != classes:
        raise DataError(f"the labels have {labels.shape[1]} columns for {classes} classes", where=where)
    if labels.max(initial=0) > 1:
        row, column = (int(at[0]) for at in np.nonzero(labels > 1))
        raise DataError(
            f"label {column} of record {row} is {labels[row, column]}, but must be 0 or 1", where=where
        )


def channel_moments(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of `images` [n, C, H, W], scaled to [0, 1].

    Sums are exact integers, so the numbers do not depend on the machine.

    >>> channel_moments(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    channels = images.shape[1]
    total, squares = np.zeros(channels, np.int64), np.zeros(channels, np.int64)
    for start in range(0, len(images), _BLOCK):
        block = images[start : start + _BLOCK].astype(np.uint16)
        total += block.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += np.square(block).sum(axis=(0, 2, 3), dtype=np.int64)
    count = images.size // channels
    mean = total / count
    variance = squares / count - np.square(mean)
    return tuple(float(m) / 255 for m in mean), tuple(float(s) / 255 for s in np.sqrt(variance))
