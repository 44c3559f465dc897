"""Drawn masks and boxes of three clients, all of them or those of one, and a model that a site approves by its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from fedlens.data.dataset import Dataset, Examples, channel_moments
from tests.unit.tasks.detection_kit import squares

CLIENTS = ("a", "b", "c")
SIZE = (12, 16)


def convolutions(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Logits for each pixel."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, classes, 3, padding=1)
    )


def boxes(*, client: str = "") -> Dataset:
    """Boxes of bright and dark squares."""
    data = squares(n=30)
    column = np.array([CLIENTS[k % 3] for k in range(30)])
    return of_client(replace(data, train=replace(data.train, columns={"client": column})), client)


def masks(*, client: str = "") -> Dataset:
    """Discs, and masks with a border without a class."""
    draw = np.random.default_rng(0)
    rows, columns = np.indices(SIZE)
    centres, radii = draw.uniform(4, 10, (36, 2)), draw.uniform(3, 5, 36)
    disc = np.hypot(rows - centres[:, :1, None], columns - centres[:, 1:, None]) < radii[:, None, None]
    images = (draw.integers(0, 60, (36, 1, *SIZE)) + 130 * disc[:, None]).astype(np.uint8)
    ids = disc.astype(np.uint8)
    ids[:, :, 0] = 255
    column = np.array([CLIENTS[k % 3] for k in range(30)])
    mean, std = channel_moments(images[:30])
    train, test = Examples(images[:30], ids[:30], {"client": column}), Examples(images[30:], ids[30:])
    data = Dataset("discs", train, test, ("ground", "disc"), mean, std, "unknown", "drawn at random")
    return of_client(data, client)


def of_client(data: Dataset, client: str) -> Dataset:
    """The examples of one client. Client b numbers and names the classes otherwise."""
    if not client:
        return data
    train: Any = data.train.take(np.flatnonzero(data.train.columns["client"] == client))
    if client != "b":
        return replace(data, train=train)
    if isinstance(train.targets, np.ndarray):
        turned: Any = np.where(train.targets < 255, 1 - train.targets, 255).astype(np.uint8)
    else:
        turned = replace(train.targets, labels=1 - train.targets.labels)
    names = tuple(f"the {name}" for name in reversed(data.classes))
    return replace(data, train=replace(train, targets=turned), classes=names)
