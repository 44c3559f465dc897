"""The objects of images: boxes and their classes, in compressed rows, and moved to pixels of the decoded image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.data.decoding import Fit, placement

if TYPE_CHECKING:
    from fedlens.vision.box_batch import BoxBatch


@dataclass(frozen=True, eq=False)
class Boxes:
    """Image i shows the objects `offsets[i] : offsets[i + 1]`.

    Args:
        boxes: float32 [m, 4], left, top, right, bottom in pixels of the decoded image.
        labels: int64 [m], the class of each object, from 0 on.
        offsets: int64 [n + 1], from 0 to m.

    Raises `DataError` if the arrays contradict each other.

    >>> two = Boxes(np.array([[0, 0, 4, 4]], np.float32), np.array([1]), np.array([0, 1, 1]))
    >>> len(two), two.labels_of(0).tolist(), two.labels_of(1).tolist()
    (2, [1], [])
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.boxes.dtype != np.float32 or self.boxes.shape != (len(self.labels), 4):
            form = f"{self.boxes.dtype} {list(self.boxes.shape)}"
            raise DataError(f"the boxes are {form}, but must be float32 [{len(self.labels)}, 4]")
        ends = len(self.offsets) and self.offsets[0] == 0 and self.offsets[-1] == len(self.labels)
        if not ends or (np.diff(self.offsets) < 0).any():
            raise DataError(f"the offsets of the boxes do not go up from 0 to {len(self.labels)}")

    def __len__(self) -> int:
        """The number of images."""
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """The bytes of the three arrays, as `nbytes` of an array."""
        return self.boxes.nbytes + self.labels.nbytes + self.offsets.nbytes

    def boxes_of(self, image: int) -> NDArray[np.float32]:
        """float32 [k, 4]: the boxes of one image; a view."""
        return self.boxes[self.offsets[image] : self.offsets[image + 1]]

    def labels_of(self, image: int) -> NDArray[np.int64]:
        """int64 [k]: the classes of one image's objects; a view."""
        return self.labels[self.offsets[image] : self.offsets[image + 1]]

    def batch(self, rows: NDArray[Any]) -> BoxBatch:
        """The objects of the images at the positions `rows`, int64 [k], as tensors."""
        import torch  # here, because listing and partitioning data start without PyTorch

        from fedlens.vision.box_batch import BoxBatch

        taken = self.take(rows)
        image = np.repeat(np.arange(len(taken)), np.diff(taken.offsets))
        boxes, labels = torch.from_numpy(taken.boxes), torch.from_numpy(taken.labels)
        return BoxBatch(boxes, labels, torch.from_numpy(image), len(taken))

    def take(self, rows: NDArray[Any]) -> Boxes:
        """The objects of the images at the positions `rows`, int64 [k]."""
        rows = np.asarray(rows, np.int64)
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        places = np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Boxes(self.boxes[places], self.labels[places], offsets)


@dataclass(frozen=True, eq=False)
class Placed:
    """Boxes in pixels of the decoded images, and the number of those that were left out.

    Args:
        boxes: the remaining objects.
        kept: bool [m], which of the given objects remain.
        empty: how many objects had no area in their image.
        cropped: how many have their centre outside the crop.
    """

    boxes: Boxes
    kept: NDArray[np.bool_]
    empty: int
    cropped: int

    def notes(self, split: str) -> tuple[str, ...]:
        """Sentences on the objects that were left out."""
        empty = f"{split}, objects left out because their box has no area in the image: {self.empty:,}"
        cropped = f"{split}, objects left out because the crop cuts their centre off: {self.cropped:,}"
        return (*[empty] * bool(self.empty), *[cropped] * bool(self.cropped))


def placed(given: Boxes, sizes: NDArray[Any], height: int, width: int, fit: Fit) -> Placed:
    """The boxes `given`, in pixels of the files, moved to images decoded as `height` x `width`.

    A box is first cut off at the edges of its image, and left out if it has no area then. With `fit` "crop" an object
    stays if the centre of its box does, so that a sliver at the edge is no object, and its box is cut off at the edges
    of the crop. "pad" and "stretch" keep every object.

    Args:
        sizes: int [n, 2], width and height of the image in each file.

    >>> tall = Boxes(np.array([[0, 0, 10, 4], [2, 6, 6, 14]], np.float32), np.array([3, 5]), np.array([0, 2]))
    >>> placed(tall, np.array([[10, 20]]), 10, 10, "pad").boxes.boxes.tolist()
    [[2.0, 0.0, 7.0, 2.0], [3.0, 3.0, 5.0, 7.0]]
    >>> cut = placed(tall, np.array([[10, 20]]), 10, 10, "crop")
    >>> cut.boxes.boxes.tolist(), cut.boxes.labels.tolist()
    ([[2.0, 1.0, 6.0, 9.0]], [5])
    >>> cut.notes("train")
    ('train, objects left out because the crop cuts their centre off: 1',)
    """
    rows = np.repeat(np.arange(len(given)), np.diff(given.offsets))
    inside = _cut(given.boxes.astype(np.float64), sizes[rows])
    x_scale, y_scale, x_shift, y_shift = _placements(sizes, height, width, fit)[rows].T
    scale, shift = np.stack([x_scale, y_scale], 1), np.stack([x_shift, y_shift], 1)
    moved = inside * np.tile(scale, 2) + np.tile(shift, 2)
    seen = _cut(moved, np.array([width, height])).astype(np.float32)
    centres = (moved[:, :2] + moved[:, 2:]) / 2
    centred = ((centres >= 0) & (centres < [width, height])).all(axis=1)
    # Checked on the result: a box far thinner than a pixel may lose its area only by rounding there.
    kept = centred & _has_area(seen)
    cropped = ~centred & _has_area(inside)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=len(given)))])
    boxes = Boxes(seen[kept], given.labels[kept], offsets.astype(np.int64))
    return Placed(boxes, kept, int((~kept & ~cropped).sum()), int(cropped.sum()))


def _placements(sizes: NDArray[Any], height: int, width: int, fit: Fit) -> NDArray[np.float64]:
    """float64 [n, 4]: `placement` of each image, computed once per image size."""
    distinct, which = np.unique(sizes.reshape(-1, 2), axis=0, return_inverse=True)
    each = [placement(int(w), int(h), width, height, fit) for w, h in distinct]
    placements: NDArray[np.float64] = np.array(each, np.float64).reshape(-1, 4)[which.reshape(-1)]
    return placements


def _cut(boxes: NDArray[np.float64], size: NDArray[Any]) -> NDArray[np.float64]:
    """The boxes cut off at 0 and at `size`, [2] or [m, 2]: width and height."""
    edge = np.concatenate([size, size], axis=-1)
    cut: NDArray[np.float64] = np.clip(boxes, 0, edge)
    return cut


def _has_area(boxes: NDArray[Any]) -> NDArray[np.bool_]:
    across, down = (boxes[:, 2:] > boxes[:, :2]).T
    has_area: NDArray[np.bool_] = across & down
    return has_area
