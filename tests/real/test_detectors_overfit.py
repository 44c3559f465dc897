"""Detectors of torchvision learn: they fit eight real images of blood cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlens.data.datasets.bccd import bccd
from fedlens.data.normalize import normalize
from fedlens.tasks.detection import Detection
from fedlens.vision.box_batch import BoxBatch
from tests.unit.models.zoo_kit import made

pytestmark = [pytest.mark.real, pytest.mark.nightly]
TASK = Detection()
SIZE = (96, 128)


@pytest.fixture(scope="module")
def eight(real_data: Path) -> tuple[Tensor, BoxBatch]:
    """Eight images, normalized, with their boxes."""
    if not (real_data / "BCCD").is_dir():
        pytest.skip("no BCCD below FEDLENS_DATA")
    data, rows = bccd(real_data, False, 0, size=SIZE), np.arange(8)
    images = torch.from_numpy(data.train.inputs.take(rows))
    return normalize(images, data.mean, data.std), data.train.targets.batch(rows)


def losses(module: nn.Module, examples: tuple[Tensor, BoxBatch], steps: int) -> list[float]:
    """The losses of at most so many steps of AdamW; it ends below 5 % of the first."""
    images, targets = examples
    optimizer, seen = torch.optim.AdamW(module.train().parameters(), lr=1e-3), []
    torch.manual_seed(0)
    for _ in range(steps):
        loss = TASK.loss(TASK.outputs(module, images, targets), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        if seen[-1] < 0.05 * seen[0]:
            break
    return seen


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_ssdlite_fits_eight_images(norm: str, eight: tuple[Tensor, BoxBatch]) -> None:
    seen = losses(made("ssdlite", (3, *SIZE), 3, prepare={"norm": norm}), eight, 200)
    assert len(eight[1].boxes) > 100
    assert seen[0] > 5
    assert seen[-1] < 0.05 * seen[0]


@pytest.mark.parametrize("name", ["fasterrcnn-mobilenet", "retinanet"])
def test_the_loss_of_the_others_falls_over_three_steps(name: str, eight: tuple[Tensor, BoxBatch]) -> None:
    seen = losses(made(name, (3, *SIZE), 3), eight, 4)
    assert seen[-1] < seen[0]
