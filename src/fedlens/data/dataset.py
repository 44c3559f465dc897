"""What a reader of images hands over: two splits of 8-bit images with labels, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError

_BLOCK = 4096  # images a pass: the temporaries stay in cache and small beside the data


@dataclass(frozen=True, eq=False)
class Examples:
    """One split: images, and a class for each.

    Args:
        inputs: uint8 [n, C, H, W], 0 to 255.
        targets: int64 [n], from 0 on.

    Raises `DataError` where shapes, types or lengths do not fit.

    >>> len(Examples(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1])))
    2
    """

    inputs: NDArray[np.uint8]
    targets: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.inputs.dtype != np.uint8 or self.inputs.ndim != 4:
            found = f"{self.inputs.dtype} {list(self.inputs.shape)}"
            raise DataError(f"the images are {found}, and have to be uint8 [n, C, H, W]")
        if self.targets.dtype != np.int64 or self.targets.ndim != 1:
            found = f"{self.targets.dtype} {list(self.targets.shape)}"
            raise DataError(f"the labels are {found}, and have to be int64 [n]")
        if len(self.inputs) != len(self.targets):
            raise DataError(f"there are {len(self.inputs)} images and {len(self.targets)} labels")

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory.

    Args:
        name: as in the registry.
        train, test: the published splits, in the published order.
        classes: the name of each class; a label is a position in it.
        mean, std: of the training images scaled to [0, 1], one number a channel.
        licence, source: for the report, and for whoever passes the data on.

    Raises `DataError` where a label has no class, or the splits do not have the same image shape.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    source: str

    def __post_init__(self) -> None:
        for split, examples in (("train", self.train), ("test", self.test)):
            check_labels(examples.targets, len(self.classes), where=f"{self.name}, {split}")
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            shapes = f"{list(self.train.inputs.shape[1:])} and {list(self.test.inputs.shape[1:])}"
            raise DataError(f"the images of the two splits have shapes {shapes}", where=self.name)
        if not len(self.mean) == len(self.std) == self.input_shape[0]:
            raise DataError("mean and std need one number a channel", where=self.name)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.train.inputs.shape[1:]
        return channels, height, width


def check_labels(labels: NDArray[Any], classes: int, where: str) -> None:
    """Raises `DataError` where a label is not in 0 .. classes - 1."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        wrong = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise DataError(f"label {labels[wrong]} of record {wrong} is not in 0 .. {classes - 1}", where=where)


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
