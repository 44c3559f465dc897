"""The objects in the images of a batch, as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BoxBatch:
    """The boxes and classes of the objects in n images; the targets of detection.

    Attributes:
        boxes: float32 [m, 4], left, top, right, bottom in pixels.
        labels: int64 [m], the class of each object, from 0 on.
        image: int64 [m], the image that shows it, in ascending order.
        images: n; an image may show no object.

    Raises `ValueError` if the shapes contradict each other.

    >>> two = BoxBatch(torch.tensor([[0.0, 0, 4, 4], [1, 1, 2, 2]]), torch.tensor([3, 5]), torch.tensor([0, 2]), 3)
    >>> len(two), two.take(torch.tensor([2, 1])).image.tolist(), BoxBatch.cat([two, two]).image.tolist()
    (3, [0], [0, 2, 3, 5])
    """

    boxes: Tensor
    labels: Tensor
    image: Tensor
    images: int

    def __post_init__(self) -> None:
        shapes = [list(part.shape) for part in (self.boxes, self.labels, self.image)]
        m = self.boxes.shape[0] if self.boxes.dim() else -1
        if shapes != [[m, 4], [m], [m]]:
            raise ValueError(f"the boxes, labels and images of objects have the shapes {shapes}")

    def __len__(self) -> int:
        """The number of images."""
        return self.images

    def of(self, image: int) -> tuple[Tensor, Tensor]:
        """(boxes float32 [k, 4], labels int64 [k]) of one image."""
        shown = self.image == image
        return self.boxes[shown], self.labels[shown]

    def take(self, at: Tensor, /) -> BoxBatch:
        """The objects of the images at the positions `at`, int64 [k], which may repeat."""
        at = at.to(self.image.device)
        counts = torch.bincount(self.image, minlength=self.images)
        starts = counts.cumsum(0) - counts
        taken = counts[at]
        image = torch.arange(len(at), device=at.device).repeat_interleave(taken)
        inside = torch.arange(len(image), device=at.device) - (taken.cumsum(0) - taken)[image]
        places = starts[at][image] + inside
        return BoxBatch(self.boxes[places], self.labels[places], image, len(at))

    @classmethod
    def cat(cls, parts: Sequence[BoxBatch], /) -> BoxBatch:
        """The objects of several batches as those of one."""
        before = [0]
        for part in parts:
            before.append(before[-1] + len(part))
        image = [part.image + start for part, start in zip(parts, before, strict=False)]
        boxes, labels = torch.cat([p.boxes for p in parts]), torch.cat([p.labels for p in parts])
        return cls(boxes, labels, torch.cat(image), before[-1])

    def to(self, device: Any, *, non_blocking: bool = False) -> BoxBatch:
        """The same on this device."""
        boxes, labels, image = (
            part.to(device, non_blocking=non_blocking) for part in (self.boxes, self.labels, self.image)
        )
        return BoxBatch(boxes, labels, image, self.images)

    def to_payload(self) -> dict[str, Any]:
        """The objects as an operation sends them."""
        return {"boxes": self.boxes, "labels": self.labels, "image": self.image, "images": self.images}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], /) -> BoxBatch:
        """The objects that an operation sent."""
        return cls(payload["boxes"], payload["labels"], payload["image"], int(payload["images"]))
