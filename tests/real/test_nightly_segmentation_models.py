"""The networks for segmentation learn: the smallest fit eight frames of CamVid, of the others the loss falls.

`pytest -m nightly tests/real/test_nightly_segmentation_models.py`; about ten minutes of one core.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlens.data.datasets.camvid import camvid
from fedlens.models.registry import MODELS
from fedlens.tasks.segmentation import Segmentation

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(3600)]

CLASSES, FRAMES = 11, 8
TASK = Segmentation()


def frames(root: Path, size: tuple[int, int], n: int = FRAMES) -> tuple[Tensor, Tensor]:
    """Normalized images [n, 3, H, W] and masks [n, H, W] of frames from all of the training drives."""
    if not (root / "CamVid").is_dir():
        pytest.skip("'CamVid' is not below FEDLENS_DATA")
    train = camvid(root, False, 0, size=list(size)).train
    images, masks = train.batch(torch.arange(n) * (len(train) // n))
    pixels = images.float() / 255
    mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
    return (pixels - mean) / std, masks


def network(name: str, backbone: str, atrous: str | None, size: tuple[int, int]) -> nn.Module:
    torch.manual_seed(0)
    settings = {"backbone": backbone, **({} if atrous is None else {"atrous": atrous})}
    made: nn.Module = MODELS.find(name)((3, *size), CLASSES, **settings)
    return made.train()


def steps(module: nn.Module, images: Tensor, masks: Tensor, count: int, rate: float) -> list[float]:
    """The losses of so many steps of Adam on all images at once; the rate falls linearly over the last half."""
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    losses = []
    for step in range(count):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 2 * (count - step) / count)
        loss = TASK.loss(module(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "atrous", "size", "least"),
    [
        ("unet", None, (64, 80), 0.95),
        # Its last layer has a quarter of the height and the width: the true masks, averaged over 4x4 pixels and
        # enlarged again, have a mean IoU of 0.79, because posts and signs are thinner than that.
        ("deeplabv3plus", "plain", (128, 160), 0.79),
    ],
    ids=["unet", "deeplabv3plus"],
)
def test_the_smallest_of_each_family_fits_eight_frames(
    name: str, atrous: str | None, size: tuple[int, int], least: float, real_data: Path
) -> None:
    images, masks = frames(real_data, size)
    module = network(name, "mobilenet-v2", atrous, size)
    losses = steps(module, images, masks, 300, 2e-3)
    with torch.no_grad():
        found = TASK.metrics(TASK.measure(module.eval()(images), masks))
    assert losses[0] > 1.5
    assert found["loss"] < 0.05 * losses[0], (losses[-1], found)
    assert found["mean_iou"] > least, found


@pytest.mark.parametrize(
    ("name", "backbone", "atrous"),
    [
        ("unet", "resnet18", None),
        ("unet", "resnet34", None),
        ("unet", "resnet50", None),
        ("unet", "resnet101", None),
        ("deeplabv3plus", "mobilenet-v2", "separable"),
        ("deeplabv3plus", "resnet18", "plain"),
        ("deeplabv3plus", "resnet34", "plain"),
        ("deeplabv3plus", "resnet50", "separable"),
        ("deeplabv3plus", "resnet101", "separable"),
        ("deeplabv3plus", "resnet101", "plain"),
    ],
)
def test_the_loss_of_the_others_falls_over_three_steps(
    name: str, backbone: str, atrous: str | None, real_data: Path
) -> None:
    images, masks = frames(real_data, (64, 80), 4)
    losses = steps(network(name, backbone, atrous, (64, 80)), images, masks, 4, 1e-4)
    assert losses[3] < losses[0], losses
