"""Small data with masks and boxes, and models that learn them in a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlens import Experiment, Result
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import VOID, Dataset, Examples

HEIGHT, WIDTH = 24, 32
CLASSES = ("background", "bright", "dark")


def scenes(
    n: int, seed: int, height: int = HEIGHT, width: int = WIDTH
) -> tuple[np.ndarray, np.ndarray, Boxes]:
    """(images uint8 [n, 3, H, W], masks uint8 [n, H, W], boxes): up to two rectangles, bright or dark, on grey.

    The first row of a mask has no class. Boxes have the class 0 where bright, 1 where dark. The last image is empty.
    """
    rng = np.random.default_rng(seed)
    images = np.full((n, 3, height, width), 120, np.uint8)
    masks, boxes, labels, counts = np.zeros((n, height, width), np.uint8), [], [], []
    for k in range(n):
        found = 0 if k == n - 1 else int(rng.integers(1, 3))
        for _ in range(found):
            top, left = int(rng.integers(0, height // 2)), int(rng.integers(0, width // 2))
            bottom, right = top + height // 3, left + width // 3
            dark = int(rng.integers(0, 2))
            images[k, :, top:bottom, left:right] = 20 if dark else 235
            masks[k, top:bottom, left:right] = 1 + dark
            boxes.append([left, top, right, bottom])
            labels.append(dark)
        counts.append(found)
    masks[:, 0] = VOID
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return (
        images,
        masks,
        Boxes(np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64), offsets),
    )


def _dataset(which: int, classes: Sequence[str], height: int = HEIGHT, width: int = WIDTH) -> Dataset:
    train, test = scenes(24, 0, height, width), scenes(20, 1, height, width)
    splits = [Examples(part[0], part[which]) for part in (train, test)]
    return Dataset("scenes", *splits, tuple(classes), (0.5,) * 3, (0.25,) * 3, "own", "made by a test")


def masks(*args: Any) -> Dataset:
    """Images with masks of three classes."""
    return _dataset(1, CLASSES)


def boxes(*args: Any) -> Dataset:
    """Images with boxes of two classes."""
    return _dataset(2, CLASSES[1:])


def large_boxes(*args: Any) -> Dataset:
    """Images with boxes that are too large to be kept as they are."""
    return _dataset(2, CLASSES[1:], 300, 400)


class Pixels(nn.Module):
    """One linear layer for each pixel; with `broken`, every logit is NaN."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(images)
        return logits


class Spots(nn.Module):
    """Three boxes an image, whose places and scores depend on two weights and the image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.classes = classes

    def forward(self, images: Tensor, targets: Any = None) -> Any:
        if self.training:
            return {"place": ((self.weight - images.mean()) ** 2).sum()}
        h, w = images.shape[2:]
        found = []
        for image in images:
            lift = (self.weight[0] + image.mean()).sigmoid()
            corners = [
                torch.stack([x * w * lift, 0.2 * h * lift, x * w * lift + 0.3 * w, 0.6 * h + 0.1 * h * lift])
                for x in (0.1, 0.4, 0.7)
            ]
            scores = torch.stack([lift, lift * 0.7, lift * 0.2])
            labels = torch.tensor([0, self.classes - 1, 0])
            found.append({"boxes": torch.stack(corners), "labels": labels, "scores": scores})
        return found


class Lost(Spots):
    """Its boxes and scores are NaN."""

    def forward(self, images: Tensor, targets: Any = None) -> Any:
        found = super().forward(images, targets)
        if self.training:
            return found
        return [
            {**one, "boxes": one["boxes"] * torch.nan, "scores": one["scores"] * torch.nan} for one in found
        ]


def pixels(input_shape: Sequence[int], classes: int) -> nn.Module:
    return Pixels(classes)


def spots(input_shape: Sequence[int], classes: int) -> nn.Module:
    return Spots(classes)


def lost(input_shape: Sequence[int], classes: int) -> nn.Module:
    return Lost(classes)


def run(path: Path, data: Any, model: str, more: dict[str, Any] | None = None, **changes: Any) -> Result:
    """A run of four rounds with two clients; `more` are further settings of the data."""
    settings: dict[str, Any] = {
        "rounds": 4,
        "model": f"{__file__}:{model}",
        "local": {"lr": 0.05, "batch_size": 8},
        "data": {"dataset": data, "partition": {"name": "iid", "clients": 2}, **(more or {})},
        "engine": "inline",
        "record": {"images": True},
    }
    return Experiment(**{**settings, **changes}).run(path, report=False)
