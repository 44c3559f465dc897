"""Runs on mosaics and crops of scenes with masks: the same bits on both engines, however far batches are read ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlens.api import Experiment
from fedlens.data.dataset import Dataset, Examples
from tests.contract.contract_kit import outcome

pytestmark = pytest.mark.usefixtures("quick_workers")


class Network(nn.Module):
    """Two convolutions, and the largest activation of the image in every pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.first(images).relu()
        return self.last(inner + inner.amax((2, 3), keepdim=True))


def network(input_shape: Any, classes: int) -> nn.Module:
    return Network(classes)


def scenes(*, seed: int = 0) -> Dataset:
    """Twenty images whose mask is their brightness; the last client has a single one."""
    draw = np.random.RandomState(0)
    images = draw.randint(0, 256, (20, 3, 12, 16)).astype(np.uint8)
    masks = (images[:, 0] // 86).astype(np.uint8)
    train = Examples(images, masks, {"client": np.array([f"c{min(k // 7, 2)}" for k in range(19)] + ["c3"])})
    return Dataset("scenes", train, Examples(images, masks), ("a", "b", "c"), (0.5,) * 3, (0.3,) * 3, "", "")


def test_mosaics_and_crops_have_the_same_bits_on_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlens.data.client_datasets._AHEAD", 0)  # small batches are read ahead too
    augment, runs = ["mosaic", {"name": "scale-crop", "crop": [10, 20]}, "flip"], []
    for name, engine, prefetch in (
        ("one", "inline", 0),
        ("ahead", "inline", 3),
        ("two", {"name": "processes", "workers": 2}, 1),
    ):
        made = Experiment(
            rounds=2,
            model=network,
            data={"dataset": scenes, "partition": "natural", "augment": augment, "prefetch": prefetch},
            local={"lr": 0.1, "epochs": 2, "batch_size": 4},
            engine=engine,
            record={"clients": True},
        )
        runs.append(made.run(tmp_path / name))
    assert runs[0].metrics[-1]["test_mean_iou"] > 0
    assert all(outcome(run) == outcome(runs[0]) for run in runs[1:])
