"""Augmentations that need targets with a place in the image: refused for other tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import VOID, Kind
from fedlens.core.measured import Measured
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import ColourJitter, Flip
from fedlens.data.augmentation.augmented import Augmented, Chain
from fedlens.data.augmentation.mosaic import Mosaic
from fedlens.data.augmentation.scale_crop import ScaleCrop
from fedlens.data.dataset import Dataset, Examples
from fedlens.run import build as building
from fedlens.run.build import Built, build
from fedlens.settings.config import plain, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.tasks.task import Task
from fedlens.vision.change import Change, Pieces
from fedlens.vision.moved_targets import moved_masks

LEAST: dict[str, Any] = {
    "rounds": 1,
    "model": "linear",
    "local": {"lr": 0.1, "batch_size": 5},
    "data": {
        "dataset": {"name": "synthetic", "shape": [3, 8, 8], "train": 40, "test": 10},
        "partition": {"name": "iid", "clients": 4},
    },
}


class Pixels(Task):
    """A task on masks, for images of any size."""

    kind: ClassVar[Kind] = "segmentation"
    placed: ClassVar[bool] = True

    def loss(self, outputs: Any, targets: Any, weights: Any = None, normalize: bool = True) -> Tensor:
        return F.cross_entropy(outputs, targets.long(), ignore_index=VOID)

    def measure(self, outputs: Any, targets: Any) -> Measured:
        return Measured({}, {"n": torch.tensor(len(targets))})

    def metrics(self, measured: Measured) -> dict[str, float]:
        return {}

    def move(self, targets: Tensor, change: Change) -> Tensor:
        return moved_masks(targets, change)

    def random_targets(self, n: int, classes: int, input_shape: Any, generator: torch.Generator) -> Tensor:
        return torch.randint(0, classes, (n, *input_shape[1:]), generator=generator, dtype=torch.uint8)


def scenes(path: Path, download: bool, seed: int) -> Dataset:
    """Images whose first channel is their mask plus one."""
    masks = np.random.RandomState(0).randint(0, 3, (24, 10, 14)).astype(np.uint8)
    images = np.repeat(masks[:, None] + 1, 3, axis=1).astype(np.uint8)
    split = Examples(images, masks)
    return Dataset("scenes", split, split, ("a", "b", "c"), (0.0,) * 3, (1 / 255,) * 3, "", "")


def network(input_shape: Any, classes: int) -> nn.Module:
    return nn.Conv2d(3, classes, 1)


def built(augment: Any, tmp_path: Path, **more: Any) -> Built:
    values = {**LEAST, **more}
    values["data"] = {**values["data"], "augment": augment}
    return build(plan(read_config(values), Source(values)), tmp_path, False)


def segmentation(augment: Any, tmp_path: Path, model: Any = network) -> Built:
    data = {"dataset": {"name": scenes}, "partition": {"name": "iid", "clients": 4}}
    return built(augment, tmp_path, data=data, task={"name": Pixels}, model={"name": model})


def joined(images: Tensor, targets: Any, generator: torch.Generator) -> Augmented:
    n, _, height, width = images.shape
    pieces = Pieces(torch.arange(n).flip(0), torch.arange(n), torch.tensor([[0, 0, width, height]] * n), n)
    windows = torch.tensor([[0.0, 0.0, height, width]] * n).unbind(1)
    return Augmented(images.flip(0), targets, Change(*windows, (height, width), pieces=pieces))


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        ("mosaic", "the augmentation 'mosaic' joins parts of several images"),
        (
            ["flip", {"name": "scale-crop", "crop": [4, 6]}],
            "'scale-crop' changes the size of images from 8x8 to 4x6, which needs targets that lie in the image, "
            "and the task is classification",
        ),
        ({"name": lambda: joined}, "'joined' joins parts of several images"),
        ({"name": lambda: lambda x, y, g: (x[:, :, 1:], y)}, "changes the size of images from 8x8 to 7x8"),
    ],
)
def test_a_class_of_a_whole_image_cannot_follow_its_parts(augment: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        built(augment, tmp_path)
    assert "data.augment" in str(caught.value)
    assert "remove it; it is for segmentation and detection" in str(caught.value)


def test_a_scale_crop_of_the_images_own_size_fits_every_task(tmp_path: Path) -> None:
    for table in ({"name": "scale-crop"}, {"name": "scale-crop", "crop": 8}):
        made = built([table, "flip"], tmp_path)
        assert made.client_data.training_shape == (3, 8, 8)
        assert next(made.client_data.data_of(0).batches(5, Rng((0,))))[0].shape == (5, 3, 8, 8)


def test_masks_follow_every_augmentation_of_a_run(tmp_path: Path) -> None:
    crop = {"name": "scale-crop", "crop": [12, 9], "scale": [1, 1]}
    made = segmentation(["mosaic", {"name": "flip", "vertical": True}, crop], tmp_path)
    assert made.client_data.augment == Chain(
        (Mosaic(1.0, (0.25, 0.75)), Flip(0.5, 0.5), ScaleCrop((12, 9), (1.0, 1.0)))
    )
    for pixels, masks in (next(made.client_data.data_of(k).batches(5, Rng((0,)))) for k in range(4)):
        assert pixels.shape == (5, 3, 12, 9)
        first = pixels[:, 0].round().long()
        assert torch.equal(torch.where(first == 0, VOID, first - 1), masks.long())
    assert plain(made.config)["data"]["augment"][2] == {
        "name": "scale-crop",
        "crop": [12, 9],
        "scale": [1.0, 1.0],
    }
    again = segmentation(plain(made.config)["data"]["augment"], tmp_path)
    assert again.client_data.augment == made.client_data.augment


def test_an_image_smaller_than_the_crop_is_one_note_of_the_run(tmp_path: Path) -> None:
    made = segmentation([{"name": "scale-crop", "crop": 12}, "colour-jitter"], tmp_path)
    assert [note for note in made.notes if "crop" in note] == [
        "scale-crop: the images of 10x14 pixels are smaller than the crop of 12x12 (height x width), which is "
        "filled up with 0, in masks with 255 (no class)"
    ]
    assert made.client_data.augment is not None
    assert isinstance(made.client_data.augment.steps[1], ColourJitter)
    fitting = segmentation({"name": "scale-crop", "crop": 10}, tmp_path)
    assert not [note for note in fitting.notes if "crop" in note]


def test_a_later_augmentation_knows_the_size_that_an_earlier_one_makes(tmp_path: Path) -> None:
    shapes = []

    def factory(input_shape: Any) -> Any:
        shapes.append(tuple(input_shape))
        return lambda images, targets, generator: (images, targets)

    segmentation([{"name": "scale-crop", "crop": [6, 7]}, {"name": factory}], tmp_path)
    assert shapes == [(3, 6, 7)]


def test_a_model_is_tried_on_images_of_the_crop_too(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 3, 1)

        def forward(self, images: Tensor) -> Tensor:
            return self.inner(images) + torch.zeros(10, 14)

    with pytest.raises(ConfigError, match=r"cannot take images \[n, 3, 6, 7\]"):
        segmentation({"name": "scale-crop", "crop": [6, 7]}, tmp_path, lambda input_shape, classes: Fixed())


def test_the_memory_of_training_is_that_of_the_crop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    monkeypatch.setattr(
        building, "check_memory", lambda module, model, *more: shapes.append(model.input_shape)
    )
    segmentation({"name": "scale-crop", "crop": [6, 7]}, tmp_path)
    segmentation("flip", tmp_path)
    assert shapes == [(3, 6, 7), (3, 10, 14)]
