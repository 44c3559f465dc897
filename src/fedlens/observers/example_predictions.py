"""Predictions of the same few test images after the first evaluated, the best and the last round: `examples.npz`.

Reading the file needs NumPy alone, so that a report is written without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedlens.files.arrays_file import Arrays, named, parts_of, read_arrays, write_arrays
from fedlens.files.atomic_files import refused

FORMAT = "fedlens-examples-1"
EXAMPLES = 8
PIXELS = 1_200_000  # bytes of all images: as PNG in base64 they take less than 1.7 MB of a page
BOXES = 100  # of an image, those with the highest scores
LOWEST = 0.05  # score of a box that is kept
STAGES = ("first", "best", "last")  # the first evaluated round, the best and the last one

Annotates = Literal["masks", "boxes"]


@dataclass(frozen=True, eq=False)
class ExamplePredictions:
    """The predictions of n test images after up to three rounds. Arrays are named as `fedlens.tasks.task.Task.predict`.

    Args:
        annotates: what the predictions are: "masks", or "boxes".
        classes: the names of the classes.
        index: int64 [n], the positions of the images in the test data.
        images: uint8 [n, C, h, w], C = 1 or 3; smaller than the test images if those are large.
        truth: of masks `class`, uint8 [n, h, w], 255 for a pixel without a class; of boxes `boxes`, float32 [m, 4], in
            pixels of `images`, `labels`, int64 [m], and `image`, int64 [m], counted from 0.
        answers: the same by stage ("first", "best", "last"), of boxes with `scores`, float32 [m].
        rounds: the round of each stage.
    """

    annotates: Annotates
    classes: tuple[str, ...]
    index: NDArray[np.int64]
    images: NDArray[np.uint8]
    truth: Arrays
    answers: Mapping[str, Arrays] = field(default_factory=dict)
    rounds: Mapping[str, int] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the file atomically. Raises `RunFailed` if the disk refuses."""
        about = {"annotates": self.annotates, "classes": list(self.classes), "rounds": dict(self.rounds)}
        arrays: dict[str, NDArray[Any]] = {"index": self.index, "images": self.images}
        arrays |= named("truth", self.truth)
        for stage, answer in self.answers.items():
            arrays |= named(stage, answer)
        write_arrays(path, FORMAT, about, arrays)

    @classmethod
    def read(cls, path: Path) -> ExamplePredictions:
        """Reads what `write` wrote. Raises `RunDirectoryError` if the file is missing or corrupt."""
        return read_arrays(path, FORMAT, _checked)


def _checked(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> ExamplePredictions:
    """Raises `ValueError` for arrays that do not belong together."""
    index, images = arrays["index"], arrays["images"]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or not images.size:
        raise ValueError("the values of 'images' are not valid")
    if index.dtype != np.int64 or index.shape != images.shape[:1]:
        raise ValueError("the values of 'index' are not valid")
    annotates: Annotates = "boxes" if about["annotates"] == "boxes" else "masks"
    classes, truth = tuple(map(str, about["classes"])), parts_of("truth", arrays)
    rounds = {stage: int(about["rounds"][stage]) for stage in STAGES if stage in about["rounds"]}
    answers = {stage: parts_of(stage, arrays) for stage in rounds}
    for name, given in {"truth": truth, **answers}.items():
        fits = _masks_fit if annotates == "masks" else _boxes_fit
        if not fits(given, images.shape, len(classes), scored=name != "truth"):
            raise ValueError(f"the values of '{name}' are not valid")
    return ExamplePredictions(annotates, classes, index, images, truth, answers, rounds)


def _masks_fit(given: Arrays, images: tuple[int, ...], classes: int, scored: bool) -> bool:
    mask = given["class"]
    return mask.dtype == np.uint8 and mask.shape == (images[0], *images[2:])


def _boxes_fit(given: Arrays, images: tuple[int, ...], classes: int, scored: bool) -> bool:
    boxes, labels, image = given["boxes"], given["labels"], given["image"]
    m = len(labels)
    shapes = boxes.shape == (m, 4) and labels.shape == image.shape == (m,)
    kinds = labels.dtype == image.dtype == np.int64 and boxes.dtype == np.float32
    if not (shapes and kinds and np.isfinite(boxes).all()):
        return False
    inside = ((image >= 0) & (image < images[0])).all() and ((labels >= 0) & (labels < classes)).all()
    score = given["scores"] if scored else np.zeros(m)
    return bool(inside) and score.shape == (m,) and bool(np.isfinite(score).all())


def remove_examples(path: Path) -> None:
    """Removes the file at `path`, if it exists. Raises `RunFailed` if the disk refuses.

    >>> remove_examples(Path("no such file"))
    """
    try:
        with suppress(FileNotFoundError):
            path.unlink()
    except OSError as error:
        raise refused(error, f"the run directory without {path.name}", path) from error


def spread_evenly(examples: int, most: int = EXAMPLES) -> NDArray[np.int64]:
    """The positions of k = min(examples, most) examples, spread evenly: floor(j examples / k), j = 0 .. k - 1.

    >>> spread_evenly(100).tolist(), spread_evenly(3).tolist()
    ([0, 12, 25, 37, 50, 62, 75, 87], [0, 1, 2])
    """
    count = min(examples, most)
    return np.array([j * examples // count for j in range(count)], np.int64)


def scaled_mask(mask: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
    """uint8 [height, width]: a mask of any integers [H, W] by the nearest neighbour; negative ids become 255.

    >>> scaled_mask(np.array([[1, 1, 2, 2], [1, 1, 2, 2]]), 1, 2).tolist()
    [[1, 2]]
    """
    rows = (2 * np.arange(height) + 1) * mask.shape[0] // (2 * height)
    columns = (2 * np.arange(width) + 1) * mask.shape[1] // (2 * width)
    return np.where(mask < 0, 255, mask).astype(np.uint8)[np.ix_(rows, columns)]


def found_boxes(
    boxes: NDArray[Any], classes: NDArray[Any], scores: NDArray[Any], lowest: float, most: int
) -> NDArray[np.int64]:
    """The rows of the objects in a prediction of one image, at most `most`, the highest score first.

    Rows without an object (score 0), below the score `lowest`, or with coordinates that are not finite are left out.

    >>> boxes = np.array([[0, 0, 4, 4], [0, 0, 2, 2], [0, 0, np.nan, 2], [0, 0, 0, 0]], np.float32)
    >>> found_boxes(boxes, np.array([1, 0, 1, 0]), np.array([0.2, 0.9, 0.8, 0.0]), 0.1, 10).tolist()
    [1, 0]
    """
    good = (
        np.isfinite(boxes).all(axis=1)
        & np.isfinite(scores)
        & (scores >= lowest)
        & (scores > 0)
        & (classes >= 0)
    )
    rows = np.flatnonzero(good)
    return rows[np.argsort(-scores[rows], kind="stable")][:most].astype(np.int64)
