"""Writes predicted masks as PNG files, and predicted boxes as a COCO file, in the pixels of the image files."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.base.errors import one_line
from fedlens.core.dataset_info import VOID
from fedlens.data.decoding import Fit, ImageForm, placement
from fedlens.files.atomic_files import create, write_atomically
from fedlens.observers.example_predictions import found_boxes
from fedlens.vision.mask_colors import VOID_COLOR, mask_colors

_NAME = 80  # characters of a file's name in the name of its picture
_NUMBERED = re.compile(r"\d{6,}-.*\.png")

Prediction = Mapping[str, NDArray[Any]]
Size = tuple[int, int]  # width and height of an image file


class Annotations(ABC):
    """What is written of the predictions beside the table; one object for all images of a prediction."""

    @abstractmethod
    def add(self, row: int, image: Path, size: Size, prediction: Prediction) -> None:
        """Takes the prediction of the image in this row, counted from 0. Several threads may call it."""

    @abstractmethod
    def finish(self) -> None:
        """Writes what is left. Raises `RunFailed` if the disk refuses."""


class MaskFiles(Annotations):
    """A PNG file with a palette for each image: a pixel's number is its class, 255 where the model saw no image.

    Args:
        folder: of the files, named by `numbered`.
        fit: how image files are brought to the size of the model's input.
    """

    def __init__(self, folder: Path, fit: Fit, classes: int) -> None:
        self._folder, self._fit = folder, fit
        palette = np.full((256, 3), VOID_COLOR, np.uint8)
        palette[:classes] = mask_colors(classes)
        self._palette = palette.tobytes()

    def add(self, row: int, image: Path, size: Size, prediction: Prediction) -> None:
        picture = Image.fromarray(mask_of_file(prediction["class"].astype(np.uint8), *size, self._fit))
        picture.putpalette(self._palette)
        with open(create(numbered(self._folder, row, image)), "wb") as file:
            picture.save(file, "PNG")

    def finish(self) -> None:
        """All files are written already."""


class CocoFile(Annotations):
    """One JSON file in COCO's format: `images`, `categories`, and `annotations` with a `score`.

    An image's id is its row in predictions.csv, from 1 on; a category's id is the position of the class, from 1 on.
    `bbox` is left, top, width, height in pixels of the image file, as the boxes that `add` takes; see `in_file`.
    """

    def __init__(self, file: Path, classes: Sequence[str]) -> None:
        self._file, self._classes = file, classes
        self._images: dict[int, dict[str, Any]] = {}
        self._objects: dict[int, list[dict[str, Any]]] = {}

    def add(self, row: int, image: Path, size: Size, prediction: Prediction) -> None:
        width, height = size
        boxes = prediction["boxes"]
        sides = boxes[:, 2:] - boxes[:, :2]
        self._images[row] = {"id": row + 1, "file_name": str(image), "width": width, "height": height}
        self._objects[row] = [
            {
                "image_id": row + 1,
                "category_id": int(prediction["labels"][k]) + 1,
                "bbox": [round(float(v), 2) for v in (*boxes[k, :2], *sides[k])],
                "area": round(float(sides[k].prod()), 2),
                "iscrowd": 0,
                "score": round(float(prediction["scores"][k]), 6),
            }
            for k in range(len(boxes))
        ]

    def finish(self) -> None:
        rows = sorted(self._images)
        objects = [each for row in rows for each in self._objects[row]]
        content = {
            "images": [self._images[row] for row in rows],
            "categories": [{"id": k, "name": name} for k, name in enumerate(self._classes, 1)],
            "annotations": [{"id": k, **each} for k, each in enumerate(objects, 1)],
        }
        write_atomically(self._file, (json.dumps(content) + "\n").encode())


def in_file(prediction: Prediction, form: ImageForm, size: Size) -> Prediction:
    """The prediction of one image with its boxes in pixels of the image file; those in the padding alone are left out.

    Args:
        form: of the model's input.
        size: width and height of the file.
    """
    boxes = boxes_of_file(prediction["boxes"], *size, form.width, form.height, form.fit)
    seen = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    kept = {name: prediction[name][seen] for name in ("labels", "scores")}
    return {**prediction, **kept, "boxes": boxes[seen]}


def numbered(folder: Path, row: int, image: Path) -> Path:
    """The PNG file in `folder` of the image in this row, counted from 0.

    >>> numbered(Path("masks"), 4, Path("photos/a.jpg"))
    PosixPath('masks/000005-a.png')
    """
    name = one_line(image.stem[:_NAME].encode(errors="replace").decode())
    return folder / f"{row + 1:06d}-{name.replace(os.sep, '_')}.png"


def is_numbered(name: str) -> bool:
    """Whether `numbered` may have made this name.

    >>> is_numbered("000005-a.png"), is_numbered("a.png")
    (True, False)
    """
    return _NUMBERED.fullmatch(name) is not None


def above(prediction: Prediction, score: float) -> Prediction:
    """The prediction of one image without the boxes below this score, and without rows that have no object."""
    boxes, labels, scores = (prediction[name] for name in ("boxes", "labels", "scores"))
    rows = found_boxes(boxes, labels, scores, score, len(scores))
    return {**prediction, "boxes": boxes[rows], "labels": labels[rows], "scores": scores[rows]}


def mask_of_file(mask: NDArray[np.uint8], width: int, height: int, fit: Fit) -> NDArray[np.uint8]:
    """uint8 [height, width]: a mask [h, w] of the model's input as one of the image file.

    Each pixel of the file takes the class at the place of its centre. Pixels that the crop cut off are 255.

    Args:
        width, height: of the file, in pixels.
        fit: how the file was brought to the size of the mask; see `fedlens.data.decoding.decode`.

    >>> mask_of_file(np.array([[1, 2]], np.uint8), 4, 2, "stretch").tolist()
    [[1, 1, 2, 2], [1, 1, 2, 2]]
    >>> mask_of_file(np.array([[1, 2]], np.uint8), 2, 2, "crop").tolist()
    [[255, 255], [1, 2]]
    """
    h, w = mask.shape
    across, down, left, top = placement(width, height, w, h, fit)
    columns = np.floor((np.arange(width) + 0.5) * across + left).astype(np.int64)
    rows = np.floor((np.arange(height) + 0.5) * down + top).astype(np.int64)
    out = np.full((height, width), VOID, np.uint8)
    inside = ((rows >= 0) & (rows < h)), ((columns >= 0) & (columns < w))
    out[np.ix_(*inside)] = mask[np.ix_(rows[inside[0]], columns[inside[1]])]
    return out


def boxes_of_file(
    boxes: NDArray[np.float32], width: int, height: int, to_width: int, to_height: int, fit: Fit
) -> NDArray[np.float64]:
    """float64 [k, 4]: boxes (left, top, right, bottom) of the model's input in pixels of the image file, cut to it.

    A box that lies in the padding alone becomes one without area.

    Args:
        width, height: of the file; `to_width`, `to_height`: of the model's input.

    >>> boxes_of_file(np.array([[0, 12, 50, 30]], np.float32), 200, 100, 50, 50, "pad").tolist()
    [[0.0, 0.0, 200.0, 72.0]]
    """
    across, down, left, top = placement(width, height, to_width, to_height, fit)
    scale, shift = np.array([across, down] * 2), np.array([left, top] * 2)
    placed: NDArray[np.float64] = np.clip((boxes - shift) / scale, 0.0, np.array([width, height] * 2))
    return placed
