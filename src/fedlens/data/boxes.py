"""The objects of images: boxes and their classes, in compressed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError

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
