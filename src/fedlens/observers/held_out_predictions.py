"""The last model's predictions of the images that clients hold out, in the file `held_out.npz` of a run directory.

Reading it needs NumPy alone, so that a report is written without PyTorch. Which labels they contradict is found by
confident learning (Northcutt et al. 2021, arXiv 1911.00068).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.files.arrays_file import read_arrays, rewrite_without_images, write_arrays

FORMAT = "fedlens-held-out-1"
MOST = 100_000  # images of a run
PICTURED = 48  # images whose pixels are kept


@dataclass(frozen=True, eq=False)
class HeldOutPredictions:
    """The predictions of the n images that the measured clients hold out, by the model that each client would use.

    Args:
        round: the round of the model.
        classes: the names of the classes.
        clients: the names of the clients.
        offsets: int64 [clients + 1]; client k has the rows `offsets[k]` to before `offsets[k + 1]`.
        index: int64 [n], the positions of the images in the training split.
        label: int64 [n].
        confidence: float32 [n], the probability of the label.
        top: int64 [n, k], the most probable classes; `scores`: float32 [n, k], their probabilities in falling order.
        files: the names of the image files, [n], or empty.
        pictured: int64 [p], the rows with an image; `images`: uint8 [p, C, h, w], smaller than the originals if those
            are large, or None.
    """

    round: int
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    offsets: NDArray[np.int64]
    index: NDArray[np.int64]
    label: NDArray[np.int64]
    confidence: NDArray[np.float32]
    top: NDArray[np.int64]
    scores: NDArray[np.float32]
    files: tuple[str, ...] = ()
    pictured: NDArray[np.int64] | None = None
    images: NDArray[np.uint8] | None = None

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """int64 [n]: the client of each row, as a position in `clients`."""
        return np.repeat(np.arange(len(self.clients)), np.diff(self.offsets))

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """bool [n]: whether the most probable class is the label."""
        return np.equal(self.top[:, 0], self.label)

    @cached_property
    def contradictions(self) -> Contradictions:
        """What the model says against the labels; see `fedlens.observers.held_out_predictions`."""
        return contradictions(self.label, self.confidence, self.top, self.scores, len(self.classes))

    def write(self, path: Path) -> None:
        """Writes the file atomically. Raises `RunFailed` if the disk refuses.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "held_out.npz"
        >>> rows = np.array([0, 1]), np.array([0, 1]), np.array([0.75, 0.25], np.float32)
        >>> top = np.array([[0, 1], [0, 1]]), np.array([[0.75, 0.25]] * 2, np.float32)
        >>> HeldOutPredictions(9, ("cat", "dog"), ("mercy",), np.array([0, 2]), *rows, *top).write(path)
        >>> HeldOutPredictions.read(path).right.tolist()
        [True, False]
        """
        names = ("round", "classes", "clients", "files")
        about = {"round": self.round, **{name: list(vars(self)[name]) for name in names[1:]}}
        arrays = {name: value for name, value in vars(self).items() if name in _ARRAYS and value is not None}
        write_arrays(path, FORMAT, about, arrays)

    @classmethod
    def read(cls, path: Path) -> HeldOutPredictions:
        """Reads what `write` wrote. Raises `RunDirectoryError` if the file is missing or corrupt."""
        return read_arrays(path, FORMAT, _checked)


_ROWS = {"index": "i", "label": "i", "confidence": "f", "top": "i", "scores": "f"}  # the kind of each array
_ARRAYS = {"offsets", *_ROWS, "pictured", "images"}


def remove_held_out_images(path: Path) -> None:
    """Rewrites the file at `path` without its images, if it has any; a corrupt file is removed.

    Raises `RunFailed` if the disk refuses.

    >>> remove_held_out_images(Path("no such file"))
    """

    def without(kept: HeldOutPredictions) -> HeldOutPredictions | None:
        return None if kept.images is None else replace(kept, pictured=None, images=None)

    rewrite_without_images(path, HeldOutPredictions.read, without)


def _checked(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> HeldOutPredictions:
    """Raises `ValueError` for arrays that do not belong together."""
    classes, clients, files = (tuple(map(str, about[name])) for name in ("classes", "clients", "files"))
    n, offsets = len(arrays["index"]), arrays["offsets"]
    wrong = [
        name
        for name, kind in _ROWS.items()
        if arrays[name].dtype.kind != kind
        or arrays[name].shape[:1] != (n,)
        or arrays[name].ndim != (2 if name in ("top", "scores") else 1)
    ]
    for name in ("label", "top"):
        wrong += [name] if ((arrays[name] < 0) | (arrays[name] >= len(classes))).any() else []
    for name in ("confidence", "scores"):
        wrong += [] if np.isfinite(arrays[name]).all() else [name]
    wrong += (
        [] if arrays["top"].shape == arrays["scores"].shape and arrays["top"].shape[1:] > (0,) else ["top"]
    )
    ends = offsets.dtype.kind == "i" and offsets.shape == (len(clients) + 1,)
    ends = ends and offsets[0] == 0 and offsets[-1] == n and bool((np.diff(offsets) >= 0).all())
    wrong += [] if ends else ["offsets"]
    wrong += [] if len(files) in (0, n) else ["files"]
    images, pictured = arrays.get("images"), arrays.get("pictured")
    if images is not None or pictured is not None:
        wrong += [] if _pictures_fit(images, pictured, n) else ["images"]
    if wrong:
        raise ValueError(f"the values of '{wrong[0]}' are not valid")
    return HeldOutPredictions(
        round=int(about["round"]),
        classes=classes,
        clients=clients,
        offsets=offsets,
        **{name: arrays[name] for name in _ROWS},
        files=files,
        pictured=pictured,
        images=images,
    )


def _pictures_fit(images: NDArray[Any] | None, pictured: NDArray[Any] | None, n: int) -> bool:
    if images is None or pictured is None or images.dtype != np.uint8 or images.ndim != 4 or not images.size:
        return False
    inside = pictured.dtype == np.int64 and pictured.shape == images.shape[:1]
    return images.shape[1] in (1, 3) and inside and bool(((pictured >= 0) & (pictured < n)).all())


def most_suspicious(predictions: HeldOutPredictions, most: int = PICTURED) -> NDArray[np.int64]:
    """The rows that the model contradicts with the largest margins, at most `most`; of equal margins, the first."""
    margins = predictions.contradictions.margins
    order = np.lexsort((np.arange(len(margins)), -margins))
    return order[: min(most, int((margins > 0).sum()))]


@dataclass(frozen=True, eq=False)
class Contradictions:
    """What a model says against the label of each of n examples.

    Attributes:
        classes: int64 [n], the class that it suggests instead; the label itself where it does not contradict.
        margins: float64 [n], the probability of that class less the probability of the label; 0 without contradiction.
    """

    classes: NDArray[np.int64]
    margins: NDArray[np.float64]


def thresholds(
    labels: NDArray[np.int64], confidence: NDArray[np.floating], classes: int
) -> NDArray[np.float64]:
    """float64 [classes]: the mean probability of class j over the examples labelled j, Eq. 2; inf without examples.

    Args:
        labels: int64 [n].
        confidence: [n], the probability of each example's label.
        classes: the number of classes.

    >>> thresholds(np.array([0, 0, 1]), np.array([0.5, 0.75, 0.25]), 3).tolist()
    [0.625, 0.25, inf]
    """
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, confidence, minlength=classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def contradictions(
    labels: NDArray[np.int64],
    confidence: NDArray[np.floating],
    top: NDArray[np.integer],
    scores: NDArray[np.floating],
    classes: int,
) -> Contradictions:
    """The examples off the diagonal of the confident joint, each with its normalized margin.

    An example with label i counts for class j if p(j) >= t_j and, of all classes l with p(l) >= t_l, p(j) is the
    largest (Eq. 1). It is off the diagonal if j is not i; its margin is p(j) - p(i) (section 3.2, prune by noise rate).
    Of equal probabilities the first in `top` counts. If only the k most probable classes are given, an example of which
    none of them reaches its threshold is not contradicted: its other classes have probabilities below 1 / (k + 1).

    Args:
        labels: int64 [n].
        confidence: [n], the probability of each label.
        top, scores: [n, k], the most probable classes, and their probabilities in falling order.
        classes: the number of classes.

    >>> p = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]])
    >>> labels = np.array([0, 0, 1, 1])
    >>> order = np.argsort(-p, axis=1)
    >>> found = contradictions(labels, p[range(4), labels], order, np.take_along_axis(p, order, 1), 2)
    >>> found.classes.tolist(), found.margins.round(3).tolist()  # t = (0.8, 0.45)
    ([0, 0, 1, 0], [0.0, 0.0, 0.0, 0.8])
    """
    reached = scores >= thresholds(labels, confidence, classes)[top]
    first = reached.argmax(axis=1)
    rows = np.arange(len(labels))
    counted = np.where(reached.any(axis=1), top[rows, first], labels).astype(np.int64)
    margins = np.where(counted == labels, 0.0, scores[rows, first].astype(np.float64) - confidence)
    return Contradictions(counted, margins)
