"""YOLOv5 on photographs of blood: the smallest network learns eight images by heart, the others' losses fall."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedlens.data.datasets.bccd import bccd
from fedlens.data.loading import loaded
from fedlens.tasks.detection import Detection, dictionaries
from fedlens.vision.box_batch import BoxBatch
from tests.unit.models.zoo_kit import made

pytestmark = [pytest.mark.real, pytest.mark.nightly]

STEPS, LR = 200, 5e-3


def eight(real_data: Path) -> tuple[Tensor, BoxBatch]:
    """Eight normalized training images of 192x256 with their boxes."""
    if not (real_data / "BCCD").is_dir():
        pytest.skip("no BCCD below FEDLENS_DATA")
    data = loaded(bccd(real_data, False, 0, size=(192, 256)), 2**30)
    images, targets = data.train.tensors().batch(torch.arange(8))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return (images / 255 - mean) / std, targets


def test_the_smallest_network_learns_eight_images_by_heart(real_data: Path) -> None:
    images, targets = eight(real_data)
    module = made("yolov5n", (3, 192, 256), 3).train()
    optimizer = torch.optim.AdamW(module.parameters(), LR)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.zero_grad()
        sum(module(images, dictionaries(targets)).values()).backward()
        optimizer.step()
    task = Detection()
    with torch.no_grad():
        found = module.eval()(images)
    assert task.metrics(task.measure(found, targets))["map50"] > 0.95


@pytest.mark.parametrize("name", ["yolov5s", "yolov5m", "yolov5l", "yolov5x"])
def test_the_losses_of_the_others_fall_over_three_steps(real_data: Path, name: str) -> None:
    """Of boxes and classes. The targets of the objectness rise with the boxes, and its loss with them at first."""
    images, targets = eight(real_data)
    images, targets = images[:2], targets.take(torch.arange(2))
    module = made(name, (3, 192, 256), 3).train()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    boxes, classes = [], []
    for _ in range(4):
        losses = module(images, dictionaries(targets))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        boxes.append(losses["box"].item())
        classes.append(losses["class"].item())
    assert boxes[-1] < boxes[0]
    assert classes[-1] < classes[0]
