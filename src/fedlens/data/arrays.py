"""A dataset from arrays or tensors in memory: images, or texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.core.dataset_info import VOID
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
    vocabulary: int | None = None,
) -> Dataset:
    """Makes a dataset of images or texts in memory, for a function of your own that `data.dataset` names.

    Args:
        images: uint8 [n, H, W, C], [n, C, H, W] or [n, H, W], from 0 to 255: an array, a tensor or nested lists. Texts:
            whole numbers [n, T], tokens from 0 on.
        labels: one class an image: [n], whole numbers from 0 on, or names, which `classes` puts in order. Several
            classes an image (multi-label): [n, classes] of 0 and 1 (or booleans), or for each image a list or a set of
            names, which may be empty. A class for each pixel (segmentation): masks [n, H, W] of whole numbers, 255 for
            a pixel without a class. Of texts one class a text, or [n, T], the class of each token; -1 for none.
        test_images, test_labels: the test data, in the same form.
        classes: the name of each class. By default the numbers, or the names in alphabetical order.
        clients: [n], the client of each training image, for the partition `natural`.
        layout: where the channels are; `auto` takes the axis with 1, 3 or 4 values.
        name: the name in the report.
        seeded: whether the data depend on the data seed.
        vocabulary: of texts, the number of different tokens. By default one more than the largest id in the training
            and test texts; state it if the model is to know tokens that do not occur. With labels [n, T] and without
            `classes`, each token is a class.

    Raises `DataError` if shapes, types or lengths do not fit.

    >>> images = np.zeros((4, 8, 8, 3), np.uint8)
    >>> made = dataset(images[:3], ["cat", "dog", "cat"], images[3:], ["dog"])
    >>> made.classes, made.input_shape, made.train.targets
    (('cat', 'dog'), (3, 8, 8), array([0, 1, 0]))
    >>> several = dataset(images[:3], [["cat"], [], ["dog", "cat"]], images[3:], [["dog"]])
    >>> several.kind, several.train.targets.tolist()
    ('multi-label', [[1, 0], [0, 0], [1, 1]])
    >>> texts = dataset([[0, 3], [2, 1]], ["good", "bad"], [[0, 1]], ["good"], vocabulary=5)
    >>> texts.kind, texts.classes, texts.vocabulary
    ('language', ('bad', 'good'), 5)
    """
    if _is_text(images, vocabulary):
        tokens, held_tokens = _tokens(images, "images"), _tokens(test_images, "test_images")
        return _texts(tokens, labels, held_tokens, test_labels, classes, clients, name, seeded, vocabulary)
    train_images, held_images = (
        _images(given, layout, what) for given, what in ((images, "images"), (test_images, "test_images"))
    )
    train, held = (
        _label_array(given, what) for given, what in ((labels, "labels"), (test_labels, "test_labels"))
    )
    names = _default_classes(train, held) if classes is None else tuple(map(str, classes))
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
        moments_of=len(train_images),
    )


def _is_text(given: Any, vocabulary: int | None) -> bool:
    """Whether the inputs are texts, [n, T]. Bytes may be images whose rows were joined: these need a vocabulary."""
    if vocabulary is not None:
        return True
    array = _array(given)
    return array.ndim == 2 and array.dtype.kind in "iu" and array.dtype != np.uint8


def _tokens(given: Any, what: str) -> NDArray[Any]:
    """int32 or int64 [n, T]."""
    tokens = _array(given)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"`{what}` are {tokens.dtype} {list(tokens.shape)}, but texts must be whole numbers [n, T]",
            where="fedlens.dataset",
            hint="pad texts to one length; for images leave `vocabulary` out",
        )
    return tokens.astype(np.int32 if tokens.max(initial=0) < 2**31 else np.int64)


def _texts(
    tokens: NDArray[Any],
    labels: Any,
    held_tokens: NDArray[Any],
    held_labels: Any,
    classes: Sequence[str] | None,
    clients: Any,
    name: str,
    seeded: bool,
    vocabulary: int | None,
) -> Dataset:
    train, held = _array(labels), _array(held_labels)
    size = vocabulary or 1 + int(max(tokens.max(initial=0), held_tokens.max(initial=0)))
    if classes is not None:
        names = tuple(map(str, classes))
    elif train.ndim == 2:
        names = tuple(map(str, range(size)))
    else:
        names = _default_classes(train, held)
    columns = {} if clients is None else {"client": _array(clients)}
    targets, held_targets = (
        _labels(given, names, what) if given.ndim == 1 else _targets(given, what)
        for given, what in ((train, "labels"), (held, "test_labels"))
    )
    return Dataset(
        name,
        Examples(tokens, targets, columns),
        Examples(held_tokens, held_targets),
        names,
        (),
        (),
        "unknown",
        "made by a function of the user",
        seeded=seeded,
        vocabulary=size,
    )


def _targets(given: NDArray[Any], what: str) -> NDArray[np.int64]:
    """int64 [n, T]."""
    if given.dtype.kind not in "iu":
        raise DataError(
            f"`{what}` are {given.dtype} {list(given.shape)}, but must be whole numbers [n, T], -1 for none",
            where="fedlens.dataset",
        )
    return given.astype(np.int64)


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


def _default_classes(train: NDArray[Any], held: NDArray[Any]) -> tuple[str, ...]:
    """The names in alphabetical order, or the numbers."""
    if train.dtype.kind in "OUS":
        return tuple(sorted({name for label in (*train, *held) for name in _names(label)}))
    if train.ndim != 2:
        used = [labels[labels != VOID] if labels.ndim == 3 else labels for labels in (train, held)]
        return tuple(map(str, range(1 + max(int(labels.max(initial=0)) for labels in used))))
    if train.shape[1] == 1:
        raise DataError(
            f"`labels` have the shape {list(train.shape)}: one class an image, or one class that it may have?",
            where="fedlens.dataset",
            hint="pass labels.ravel() for one class an image, or name the class: classes=['defect']",
        )
    return tuple(map(str, range(train.shape[1])))


def _label_array(given: Any, what: str) -> NDArray[Any]:
    """The labels as an array; lists of names, one list an image, as objects."""
    if isinstance(given, Sequence) and not isinstance(given, str) and any(map(_is_collection, given)):
        named = (isinstance(name, str) for label in given if _is_collection(label) for name in label)
        if any(named) or not any(map(_size, given)):
            several = np.empty(len(given), object)
            several[:] = [frozenset(_names(label)) for label in given]
            return several
        try:
            return np.asarray(given)
        except ValueError:
            raise DataError(
                f"`{what}` have rows of different lengths",
                where="fedlens.dataset",
                hint="for several classes an image pass [n, classes] of 0 and 1, or lists of names",
            ) from None
    return _array(given)


def _is_collection(label: Any) -> bool:
    return isinstance(label, Sequence | Set | np.ndarray) and not isinstance(label, str | bytes)


def _size(label: Any) -> int:
    return len(label) if _is_collection(label) else 1


def _names(label: Any) -> Iterable[str]:
    """The names of one image's classes."""
    return map(str, label) if _is_collection(label) else (str(label),)


def _labels(given: NDArray[Any], classes: tuple[str, ...], what: str) -> NDArray[Any]:
    """int64 [n], one class an image; uint8 [n, classes], several; or uint8 [n, H, W], masks."""
    if given.dtype.kind in "OUS":
        number = {name: at for at, name in enumerate(classes)}
        unknown = next((name for label in given for name in _names(label) if name not in number), None)
        if unknown is not None:
            raise DataError(
                f"`{what}` name a class '{unknown}' that is not in `classes`", where="fedlens.dataset"
            )
        if any(map(_is_collection, given)):
            several = np.zeros((len(given), len(classes)), np.uint8)
            for row, label in enumerate(given):
                several[row, [number[name] for name in _names(label)]] = 1
            return several
        return np.array([number[str(label)] for label in given], dtype=np.int64)
    if given.dtype.kind not in "iub":
        raise DataError(
            f"`{what}` are {given.dtype}, but must be whole numbers or names", where="fedlens.dataset"
        )
    if given.ndim == 2:
        return _several(given, classes, what)
    if given.ndim == 3:
        return _masks(given, what)
    return given.astype(np.int64)


def _masks(given: NDArray[Any], what: str) -> NDArray[np.uint8]:
    """Masks uint8 [n, H, W] from whole numbers; `Dataset` compares them with the classes."""
    if given.size and (given.min() < 0 or given.max() > VOID):
        wrong = given.min() if given.min() < 0 else given.max()
        raise DataError(
            f"`{what}` are masks {list(given.shape)} with the id {wrong}, but ids must be 0 to {VOID}",
            where="fedlens.dataset",
            hint=f"{VOID} is a pixel without a class",
        )
    return given.astype(np.uint8)


def _several(given: NDArray[Any], classes: tuple[str, ...], what: str) -> NDArray[np.uint8]:
    """Multi-label targets uint8 [n, classes] from whole numbers or booleans."""
    form = f"`{what}` have the shape {list(given.shape)}"
    one_class = "for one class an image pass whole numbers [n]: labels.ravel() or labels.argmax(1)"
    if given.shape[1] != len(classes):
        raise DataError(
            f"{form}, but `classes` has {len(classes)} names", where="fedlens.dataset", hint=one_class
        )
    if given.size and (given.min() < 0 or given.max() > 1):
        wrong = given.max() if given.max() > 1 else given.min()
        raise DataError(
            f"{form} and a value {wrong}; labels [n, classes] must be 0 or 1",
            where="fedlens.dataset",
            hint=one_class,
        )
    return given.astype(np.uint8)
