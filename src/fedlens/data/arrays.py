"""A dataset from arrays or tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.dataset import Dataset, Examples, channel_moments

Layout = Literal["auto", "channels-first", "channels-last"]
_CHANNELS = (1, 3, 4)


def dataset(
    images: Any,
    labels: Any,
    test_images: Any,
    test_labels: Any,
    *,
    classes: Sequence[str] | None = None,
    clients: Any = None,
    layout: Layout = "auto",
    name: str = "arrays",
    seeded: bool = False,
) -> Dataset:
    """Makes a dataset of images in memory, for a function of your own that `data.dataset` names.

    Args:
        images: uint8 [n, H, W, C], [n, C, H, W] or [n, H, W], from 0 to 255: an array, a tensor or nested lists.
        labels: [n], whole numbers from 0 on; or names, which `classes` puts in order.
        test_images, test_labels: the test data, in the same form.
        classes: the name of each class. By default the numbers, or the names in alphabetical order.
        clients: [n], the client of each training image, for the partition `natural`.
        layout: where the channels are; `auto` takes the axis with 1, 3 or 4 values.
        name: the name in the report.
        seeded: whether the data depend on the data seed.

    Raises `DataError` if shapes, types or lengths do not fit.

    >>> images = np.zeros((4, 8, 8, 3), np.uint8)
    >>> made = dataset(images[:3], ["cat", "dog", "cat"], images[3:], ["dog"])
    >>> made.classes, made.input_shape, made.train.targets
    (('cat', 'dog'), (3, 8, 8), array([0, 1, 0]))
    """
    train_images, held_images = (
        _images(given, layout, what) for given, what in ((images, "images"), (test_images, "test_images"))
    )
    train, held = _array(labels), _array(test_labels)
    if classes is not None:
        names = tuple(map(str, classes))
    elif train.dtype.kind in "OUS":
        names = tuple(sorted({str(label) for label in (*train, *held)}))
    else:
        names = tuple(map(str, range(1 + int(max(train.max(initial=0), held.max(initial=0))))))
    columns = {} if clients is None else {"client": _array(clients)}
    mean, std = channel_moments(train_images)
    return Dataset(
        name,
        Examples(train_images, _labels(train, names, "labels"), columns),
        Examples(held_images, _labels(held, names, "test_labels")),
        names,
        mean,
        tuple(deviation or 1.0 for deviation in std),
        "unknown",
        "made by a function of the user",
        seeded=seeded,
    )


def _array(given: Any) -> NDArray[Any]:
    return np.asarray(given.detach().cpu() if type(given).__module__.startswith("torch") else given)


def _images(given: Any, layout: Layout, what: str) -> NDArray[np.uint8]:
    images = _array(given)
    if images.dtype != np.uint8:
        raise DataError(
            f"`{what}` are {images.dtype}{_range(images)}, but must be uint8 from 0 to 255",
            where="fedlens.dataset",
            hint=_as_bytes(images),
        )
    if images.ndim == 3:
        return np.ascontiguousarray(images[:, None])
    if images.ndim != 4:
        raise DataError(
            f"`{what}` have the shape {list(images.shape)}, but must be [n, H, W, C], [n, C, H, W] or [n, H, W]",
            where="fedlens.dataset",
        )
    first, last = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
    if layout == "auto" and first == last:
        why = "either axis could be the channels" if first else "neither axis is 1, 3 or 4 channels"
        raise DataError(
            f"`{what}` have the shape {list(images.shape)}: {why}",
            where="fedlens.dataset",
            hint="set layout='channels-first' or layout='channels-last'",
        )
    if layout == "channels-last" or (layout == "auto" and last):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images)


def _bounds(images: NDArray[Any]) -> tuple[float, float] | None:
    """The least and the largest value; None if they are no finite real numbers."""
    if images.size == 0 or images.dtype.kind not in "iuf":
        return None
    least, largest = float(images.min()), float(images.max())
    return (least, largest) if math.isfinite(least) and math.isfinite(largest) else None


def _range(images: NDArray[Any]) -> str:
    bounds = _bounds(images)
    return "" if bounds is None else f" from {bounds[0]:g} to {bounds[1]:g}"


def _as_bytes(images: NDArray[Any]) -> str:
    """How to write these images as bytes."""
    bounds = _bounds(images)
    if bounds is None or bounds[0] < 0:
        return "shift and scale them to 0 to 255, then round and convert: images.round().astype('uint8')"
    if images.dtype.kind in "iu" and bounds[1] <= 255:
        return "convert them: images.astype('uint8')"
    if bounds[1] <= 1:
        return "for values from 0 to 1: (255 * images).round().astype('uint8')"
    if bounds[1] > 255:
        return f"for values from 0 to {bounds[1]:g}: (images * (255 / {bounds[1]:g})).round().astype('uint8')"
    return (
        f"for values from 0 to {bounds[1]:g}: (images * (255 / {bounds[1]:g})).round().astype('uint8'); for values "
        "from 0 to 255: images.round().astype('uint8')"
    )


def _labels(given: NDArray[Any], classes: tuple[str, ...], what: str) -> NDArray[np.int64]:
    if given.dtype.kind in "OUS":
        number = {name: at for at, name in enumerate(classes)}
        unknown = next((str(label) for label in given if str(label) not in number), None)
        if unknown is not None:
            raise DataError(
                f"`{what}` name a class '{unknown}' that is not in `classes`", where="fedlens.dataset"
            )
        return np.array([number[str(label)] for label in given], dtype=np.int64)
    if given.dtype.kind not in "iub":
        raise DataError(
            f"`{what}` are {given.dtype}, but must be whole numbers or names", where="fedlens.dataset"
        )
    return given.astype(np.int64)
