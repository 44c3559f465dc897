"""Detectors of torchvision: counts, the same numbers as torchvision's own, and what the adapter changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.ssd import SSD

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.local.settings import LocalSettings
from fedlens.models.registry import MODELS
from fedlens.models.torchvision_detectors import adapted
from fedlens.models.user_models import Instance, UserModel
from fedlens.settings.memory_check import training_memory
from fedlens.settings.single_images import fails_on_one_image
from fedlens.tasks.detection import Detection, dictionaries
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.detector import NoRaw
from tests.unit.models.zoo_kit import made, parameters, shape_only
from tests.unit.tasks.detection_kit import batch

TASK = Detection()
COUNTS = {"ssdlite": 2_234_240, "fasterrcnn-mobilenet": 18_964_879, "retinanet": 32_263_304}
SLOW = {"fasterrcnn-mobilenet", "retinanet"}
NAMES = [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in COUNTS]


def losses(module: nn.Module, images: Tensor, targets: BoxBatch) -> dict[str, Tensor]:
    """The losses by name, with the random numbers of seed 0."""
    torch.manual_seed(0)
    found: dict[str, Tensor] = TASK.outputs(module.train(), images, targets)
    return found


@pytest.mark.parametrize("name", COUNTS)
def test_the_parameters_at_three_classes_are_those_that_are_announced(name: str) -> None:
    assert parameters(shape_only(name, (3, 320, 320), 3)) == COUNTS[name]


def bare(name: str, side: int) -> nn.Module:
    """torchvision's own detector, whose resizing and normalizing leave images of this side as they are."""
    unchanged = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    size = {"min_size": side, "max_size": side}
    factory: Callable[..., nn.Module] = {
        "ssdlite": detection.ssdlite320_mobilenet_v3_large,
        "fasterrcnn-mobilenet": detection.fasterrcnn_mobilenet_v3_large_fpn,
        "retinanet": detection.retinanet_resnet50_fpn,
    }[name]
    more: dict[str, Any] = {} if name == "ssdlite" else size
    if name == "fasterrcnn-mobilenet":
        more |= {"box_score_thresh": 0.001, "box_detections_per_img": 300}
    elif name == "retinanet":
        more |= {"score_thresh": 0.001}
    return factory(weights=None, weights_backbone=None, num_classes=4, **unchanged, **more)


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_boxes_are_those_of_torchvision(name: str) -> None:
    side = 320 if name == "ssdlite" else 64
    module = made(name, (3, side, side), 3)
    own = bare(name, side)
    own.load_state_dict({key.removeprefix("net."): value for key, value in module.state_dict().items()})
    images, targets = batch(2, size=(side, side))
    counted_from_1 = [{"boxes": one["boxes"], "labels": one["labels"] + 1} for one in dictionaries(targets)]
    torch.manual_seed(0)
    expected = own.train()(list(images), counted_from_1)
    got = losses(module, images, targets)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=0)
    with torch.no_grad():
        answers, theirs = module.eval()(images), own.eval()(list(images))
    for one, other in zip(answers, theirs, strict=True):
        known = other["labels"] > 0
        assert torch.equal(one["labels"] + 1, other["labels"][known])
        assert torch.equal(one["boxes"], other["boxes"][known])
        assert torch.equal(one["scores"], other["scores"][known])
        assert len(one["scores"])
    assert TASK.misfit(answers, torch.zeros(2, 3, 64, 64), 3) is None


@pytest.mark.parametrize("name", NAMES)
def test_images_of_any_size_keep_it_and_boxes_stay_inside(name: str) -> None:
    module = made(name, (3, 48, 80), 3).eval()
    with torch.no_grad():
        answers = module(batch(2, size=(48, 80))[0])
    for one in answers:
        if len(one["boxes"]):
            assert one["boxes"].min() >= 0
            assert one["boxes"][:, 2].max() <= 80
            assert one["boxes"][:, 3].max() <= 48


@pytest.mark.parametrize("name", NAMES)
def test_images_without_a_box_train_on_background(name: str) -> None:
    module = made(name, (3, 64, 64), 3)
    images, targets = batch(2)
    nothing = BoxBatch(targets.boxes[:0], targets.labels[:0], targets.image[:0], 2)
    found = losses(module, images, nothing)
    loss = TASK.loss(found, nothing)
    assert torch.isfinite(loss)
    gradients = torch.autograd.grad(
        loss, [p for p in module.parameters() if p.requires_grad], allow_unused=True
    )
    assert all(g is None or torch.isfinite(g).all() for g in gradients)
    assert any(g is not None and g.abs().sum() > 0 for g in gradients)


def test_the_background_of_an_image_without_boxes_does_not_change_other_images() -> None:
    module = made("ssdlite", (3, 64, 64), 3)
    plain = copy.deepcopy(module)
    plain.net.__class__ = SSD
    images, targets = batch(2)
    got, expected = losses(module, images, targets), losses(plain, images, targets)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    first = targets.boxes[targets.image == 0]
    half = BoxBatch(first, targets.labels[: len(first)], targets.image[: len(first)], 2)
    got, expected = losses(module, images, half), losses(plain, images, half)
    assert torch.equal(got["bbox_regression"], expected["bbox_regression"])
    assert got["classification"] > expected["classification"]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_with_group_normalization_on_a_batch_of_one(name: str) -> None:
    module = made(name, (3, 64, 64), 3, prepare={"norm": "group"})
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    loss = TASK.loss(losses(module, *batch(1)), batch(1)[1])
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", COUNTS)
def test_freezing_the_backbone_leaves_the_head_to_train(name: str) -> None:
    module = shape_only(name, (3, 320, 320), 3, prepare={"freeze": "backbone"})
    frozen = {key for key, leaf in module.named_parameters() if not leaf.requires_grad}
    assert frozen
    assert all(key.startswith(f"{module.backbone}.") for key in frozen)
    assert any(
        "head" in key or "roi_heads" in key for key, leaf in module.named_parameters() if leaf.requires_grad
    )


def test_raw_outputs_have_fixed_shapes_and_a_faster_rcnn_says_why_it_has_none() -> None:
    module = made("ssdlite", (3, 64, 64), 3).eval()
    with torch.no_grad():
        found = TASK.graph(module, torch.zeros(2, 3, 64, 64))
    assert set(found) == {"bbox_regression", "cls_logits"}
    assert found["cls_logits"].shape[2] == 4
    with pytest.raises(NoRaw, match="the second stage"):
        made("fasterrcnn-mobilenet", (3, 64, 64), 3).raw(torch.zeros(1, 3, 64, 64))


def test_the_memory_of_a_step_is_counted_without_values() -> None:
    found = training_memory(made("ssdlite", (3, 64, 64), 3), (3, 64, 64), 4, LocalSettings(lr=0.1), TASK, 3)
    assert found is not None
    assert found.step > found.trained > 4 * 2_200_000


def test_one_image_of_few_pixels_fails_under_batch_normalization() -> None:
    def spec(**keys: Any) -> ModelSpec:
        return ModelSpec(
            lambda shape, classes: made("ssdlite", shape, classes, **keys), "own", {}, (3, 64, 64), 3, 0
        )

    assert fails_on_one_image(spec(), TASK)
    assert not fails_on_one_image(spec(prepare={"norm": "group"}), TASK)


def test_small_or_grey_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes colour images from 32x32 on, but they are 1x64x64"):
        made("ssdlite", (1, 64, 64), 3)


# ---- detectors of a user's own


def test_a_function_of_torchvision_gets_the_background_as_a_class() -> None:
    factory = UserModel(detection.ssdlite320_mobilenet_v3_large, "torchvision's")
    module = factory((3, 64, 64), 3, weights_backbone=None)
    assert parameters(module) == COUNTS["ssdlite"]
    assert torch.isfinite(TASK.loss(losses(module, *batch(2)), batch(2)[1]))


def mine(num_classes: int, extra: int = 1) -> nn.Module:
    """A user's function that makes a detector of torchvision."""
    return detection.ssdlite320_mobilenet_v3_large(weights_backbone=None, num_classes=num_classes + extra)


def test_what_a_function_makes_is_adapted_and_a_missing_background_is_said() -> None:
    images = torch.zeros(1, 3, 64, 64)
    assert TASK.misfit(UserModel(mine, "mine")((3, 64, 64), 3).eval()(images), images, 3) is None
    with pytest.raises(
        ConfigError, match="made with num_classes = 3, but the dataset has 3 classes"
    ) as caught:
        UserModel(mine, "mine")((3, 64, 64), 3, extra=0)
    assert "num_classes = 4" in str(caught.value.hint)


def test_an_object_is_adapted_as_a_copy() -> None:
    net = mine(3)
    before = type(net.transform)
    module = Instance.of(net)((3, 64, 64), 3, module="", digest="")
    assert module.training
    assert torch.isfinite(TASK.loss(losses(module, *batch(2)), batch(2)[1]))
    assert type(net.transform) is before


@pytest.mark.parametrize("classes", [3, 4])
def test_fcos_and_retinanet_may_have_no_place_for_the_background(classes: int) -> None:
    with torch.device("meta"):
        for factory in (detection.fcos_resnet50_fpn, detection.retinanet_resnet50_fpn):
            net = factory(weights=None, weights_backbone=None, num_classes=classes)
            assert adapted(net, 3).shift == classes - 3


def test_masks_and_other_networks_are_refused() -> None:
    with torch.device("meta"):
        masks = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4)
    with pytest.raises(ConfigError, match="also predicts masks or keypoints"):
        adapted(masks, 3)
    with pytest.raises(ConfigError, match="Linear is not a FasterRCNN"):
        adapted(nn.Linear(1, 1), 3)


def test_the_table_says_what_they_are_for() -> None:
    for name in COUNTS:
        assert (MODELS.entries[name].task, MODELS.entries[name].licence) == ("detection", "BSD-3-Clause")
