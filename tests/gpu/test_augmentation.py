"""Augmentation on a GPU: the pixels, masks and boxes of the processor."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fedlens.api import Experiment
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Augmentation
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.moved_targets import moved_boxes, moved_masks
from tests.contract.test_augmented_scenes import network, scenes
from tests.gpu.conftest import SIMULATED
from tests.gpu.device_kit import agree

SHAPE = (3, 40, 56)
MADE = {name: AUGMENTS.find(name)(SHAPE) for name in AUGMENTS}
MADE["small crop"] = AUGMENTS.find("scale-crop")(SHAPE, crop=(24, 70), scale=(0.2, 3.0))


def augmented(step: Augmentation, device: str) -> list[Tensor]:
    """The images, masks and boxes of a batch, on the processor."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, *SHAPE), generator=draw, dtype=torch.uint8).to(device)
    corners = torch.rand(6, 4, generator=draw) * 20
    boxes = BoxBatch(corners + torch.tensor([0, 0, 20.0, 20]), torch.arange(6), torch.arange(6), 6).to(device)
    result, _, change = step(images, None, torch.Generator().manual_seed(1))
    found = [result]
    if change is not None:
        moved = moved_boxes(boxes, change)
        found += [moved_masks(images[:, 0], change), moved.boxes, moved.labels, moved.image]
    return [part.cpu() for part in found]


@pytest.mark.parametrize("name", MADE)
def test_every_augmentation_has_the_bits_of_the_processor(name: str) -> None:
    here, there = augmented(MADE[name], "cpu"), augmented(MADE[name], "cuda")
    if (
        not SIMULATED
    ):  # whose kernels interpolate in another order, so that a pixel can round to its neighbour
        torch.testing.assert_close(there[0], here[0], rtol=0, atol=1)
        there, here = there[1:], here[1:]
    assert all(torch.equal(*pair) for pair in zip(there, here, strict=True))


def test_scaled_crops_do_not_wait(simgpu: ModuleType) -> None:
    images = torch.zeros(4, *SHAPE, dtype=torch.uint8, device="cuda")
    with simgpu.counted() as counts:
        MADE["small crop"](images, None, torch.Generator().manual_seed(1))
    assert counts["waits"] == 0, counts.at("waits")


def test_a_run_on_scaled_crops_has_the_bits_of_the_processor(tmp_path: Path) -> None:
    runs = []
    for device in ("cpu", "cuda"):
        made = Experiment(
            rounds=1,
            model=network,
            data={
                "dataset": scenes,
                "partition": "natural",
                "augment": {"name": "scale-crop", "crop": [10, 20]},
            },
            local={"lr": 0.1, "epochs": 1, "batch_size": 4},
            engine={"name": "inline", "device": device, "channels_last": False},
            record={"clients": True},
        )
        runs.append(made.run(tmp_path / device))
    agree(runs[1], runs[0], 1e-6)  # losses are summed in another order
