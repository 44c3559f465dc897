"""A small dataset of boxes, and detectors that train on it within a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples, channel_moments
from fedlens.vision.box_batch import BoxBatch

CLASSES = ("bright", "dark")
SIDE, CELLS = 32, 4


def squares(*, n: int = 32, test: int = 12, clients: int = 4, seed: int = 0) -> Dataset:
    """Grey images with up to three bright or dark rectangles; every fifth image has none."""
    draw = np.random.default_rng(seed)
    images = draw.integers(96, 160, (n + test, 3, SIDE, SIDE), np.uint8)
    boxes, labels, counts = [], [], []
    for at in range(n + test):
        k = 0 if at % 5 == 0 else int(draw.integers(1, 4))
        for _ in range(k):
            (left, top), (width, height) = draw.integers(0, 20, 2), draw.integers(7, 12, 2)
            label = int(draw.integers(2))
            images[at, :, top : top + height, left : left + width] = 255 if label == 0 else 0
            boxes.append((left, top, left + width, top + height))
            labels.append(label)
        counts.append(k)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    targets = Boxes(np.array(boxes, np.float32).reshape(-1, 4), np.array(labels), offsets)
    train, held = np.arange(n), np.arange(n, n + test)
    mean, std = channel_moments(images[:n])
    column = np.array([f"client {at % clients}" for at in range(n)])
    return Dataset(
        "squares",
        Examples(images[:n], targets.take(train), {"client": column}),
        Examples(images[n:], targets.take(held)),
        CLASSES,
        mean,
        std,
        "unknown",
        "drawn at random",
    )


class GridDetector(nn.Module):
    """A module of a user's own: a grid of 4x4 cells, each with an objectness, a class and a box.

    It draws from PyTorch's global generator in training, as Faster R-CNN does: cells of background at random.
    """

    def __init__(self, classes: int, threshold: float = 0.0, norm: str = "none") -> None:
        super().__init__()
        widths = ((3, 8), (8, 16), (16, 16))
        layers = [(nn.Conv2d(wide, out, 3, 2, 1), nn.ReLU()) for wide, out in widths]
        self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
        if norm == "batch":
            self.body.append(nn.BatchNorm2d(16))
        self.head = nn.Conv2d(16, 5 + classes, 1)
        self.threshold = threshold

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]] | None = None) -> Any:
        out = self.head(self.body(images)).flatten(2).transpose(1, 2)  # [n, 16, 5 + classes]
        if not self.training:
            cells = torch.arange(CELLS**2, device=images.device)
            centre = (torch.stack([cells % CELLS, cells // CELLS], 1) + 0.5) * SIDE / CELLS
            size = out[..., 1:5].sigmoid() * SIDE
            boxes = torch.cat([centre - size[..., :2] / 2, centre + size[..., 2:] / 2], 2)
            scores = out[..., 0].sigmoid()
            labels = out[..., 5:].argmax(2)
            kept = scores >= self.threshold
            return [
                {"boxes": boxes[at][own], "labels": labels[at][own], "scores": scores[at][own]}
                for at, own in enumerate(kept)
            ]
        assert targets is not None
        wanted = torch.zeros(out.shape[:2], device=out.device)
        boxes_loss = class_loss = out.sum() * 0
        for at, target in enumerate(targets):
            centre = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
            cell = (centre // (SIDE / CELLS)).long().clamp(0, CELLS - 1)
            place = cell[:, 1] * CELLS + cell[:, 0]
            wanted[at, place] = 1
            size = (target["boxes"][:, 2:] - target["boxes"][:, :2]) / SIDE
            boxes_loss = boxes_loss + (out[at, place, 1:5].sigmoid() - size.repeat(1, 2)).abs().sum()
            class_loss = class_loss + F.cross_entropy(out[at, place, 5:], target["labels"], reduction="sum")
        losses = F.binary_cross_entropy_with_logits(out[..., 0], wanted, reduction="none")
        drawn = (torch.rand(wanted.shape, device=out.device) < 0.7) | (wanted > 0)
        n = max(1, sum(len(target["labels"]) for target in targets))
        return {"box": boxes_loss / n, "class": class_loss / n, "object": (losses * drawn).mean()}


def grid_detector(classes: int, threshold: float = 0.0, norm: str = "none") -> nn.Module:
    """The model as a user's own function."""
    return GridDetector(classes, threshold, norm)


def settings(**changed: Any) -> dict[str, Any]:
    """Two rounds of two clients on the squares."""
    return {
        "rounds": 2,
        "data": {"dataset": squares, "partition": {"name": "natural"}},
        "model": grid_detector,
        "local": {"lr": 0.1, "batch_size": 4},
        "select": {"clients_per_round": 2},
        "engine": "inline",
        **changed,
    }


def batch(
    n: int, classes: int = 3, size: tuple[int, int] = (64, 64), seed: int = 0
) -> tuple[Tensor, BoxBatch]:
    """Random images [n, 3, H, W] with two boxes each."""
    draw = torch.Generator().manual_seed(seed)
    height, width = size
    corner = torch.rand(2 * n, 2, generator=draw) * torch.tensor([width, height]) / 2
    boxes = torch.cat([corner, corner + torch.rand(2 * n, 2, generator=draw) * 24 + 8], 1)
    boxes[:, 0::2].clamp_(max=width)
    boxes[:, 1::2].clamp_(max=height)
    labels = torch.randint(classes, (2 * n,), generator=draw)
    images = torch.randn(n, 3, height, width, generator=draw)
    return images, BoxBatch(boxes, labels, torch.arange(n).repeat_interleave(2), n)
