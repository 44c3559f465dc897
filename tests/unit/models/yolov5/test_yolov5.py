"""The YOLOv5 detectors: their counts, images of any size, training and evaluation, and the keys of any model."""

from __future__ import annotations

import pickle
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.models.counts import counted
from fedlens.models.registry import MODELS
from fedlens.models.weights_file import read_weights
from fedlens.models.yolov5 import detector as yolov5
from fedlens.models.yolov5.blocks import PyramidPooling
from fedlens.models.yolov5.detector import STRIDES, Yolov5
from fedlens.models.yolov5.loss import Gains, losses
from tests.unit.models.zoo_kit import images, made, parameters, shape_only

EMPTY = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
TWO = {"boxes": torch.tensor([[4.0, 4, 24, 30], [10, 20, 50, 60]]), "labels": torch.tensor([0, 2])}


def nano(size: int = 64, classes: int = 3, channels: int = 3, **settings: Any) -> Yolov5:
    return made("yolov5n", (channels, size, size), classes, **settings)


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("yolov5n", 3, 1_778_344), ("yolov5s", 3, 7_068_936), ("yolov5s", 80, 7_276_605),
        ("yolov5m", 80, 21_375_645), ("yolov5l", 80, 47_056_765), ("yolov5x", 80, 87_775_965),
    ],
)  # fmt: skip
def test_the_parameters_of_release_4(name: str, classes: int, count: int) -> None:
    assert parameters(shape_only(name, (3, 640, 640), classes)) == count


@pytest.mark.parametrize(
    ("name", "operations", "fedcv"),
    [("yolov5s", 17.0, 17.1), ("yolov5m", 51.2, 51.4), ("yolov5l", 115.3, 115.6), ("yolov5x", 218.6, 219.0)],
)
def test_the_operations_at_640_pixels_are_within_a_percent_of_those_published(
    name: str, operations: float, fedcv: float
) -> None:
    shape = (3, 640, 640)
    found = counted(lambda: MODELS.find(name)(shape, 80), shape)
    assert found.multiply_adds is not None
    assert abs(2 * found.multiply_adds / (operations * 1e9) - 1) < 0.01
    assert abs(2 * found.multiply_adds / (fedcv * 1e9) - 1) < 0.01  # document 002, table 8


def test_batch_normalization_and_activation() -> None:
    layers = [layer for layer in nano().modules() if isinstance(layer, nn.BatchNorm2d)]
    assert layers
    assert {(layer.eps, layer.momentum) for layer in layers} == {(1e-3, 0.03)}
    block = yolov5.Backbone(3, yolov5.Size(0.25, 0.33)).stem.layer.eval()
    x = images(1, 12, 4, 4)
    linear = block.norm(block.conv(x))
    assert torch.allclose(block(x), linear * linear.sigmoid())


def test_pooling_in_a_row_is_pooling_of_5_9_and_13_pixels() -> None:
    block = PyramidPooling(8).eval()
    x = images(2, 8, 20, 17)
    reduced = block.reduce(x)
    pooled = [nn.functional.max_pool2d(reduced, k, 1, k // 2) for k in (5, 9, 13)]
    assert torch.equal(block(x), block.join(torch.cat([reduced, *pooled], 1)))


def test_the_first_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = nano(classes=7)
    monkeypatch.setattr(yolov5, "_raise_biases", lambda *_: None)
    drawn = nano(classes=7)
    for stride, layer, plain in zip(STRIDES, raised.head, drawn.head, strict=True):
        added = (layer.bias - plain.bias).view(3, 12)
        objectness, of_class = log(8 / (640 / stride) ** 2), log(0.6 / (7 - 0.99))
        expected = torch.tensor([0.0] * 4 + [objectness] + [of_class] * 7).expand(3, 12)
        assert torch.allclose(added, expected, atol=1e-5)
        assert torch.equal(layer.weight, plain.weight)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (192, 256), (60, 50), (33, 97), (5, 5)])
def test_images_of_any_size_are_padded_at_the_right_and_at_the_bottom(height: int, width: int) -> None:
    module = nano().eval()
    x = images(2, 3, height, width)
    rows, columns = -(-height // 32), -(-width // 32)
    padded = torch.zeros(2, 3, 32 * rows, 32 * columns)
    padded[:, :, :height, :width] = x
    with torch.no_grad():
        raw, expected, found = module.raw(x), module.raw(padded), module(x)
    for at, (name, outputs) in enumerate(raw.items()):
        assert name == f"stride{STRIDES[at]}"
        assert outputs.shape == (2, 3, rows * 4 // 2**at, columns * 4 // 2**at, 8)
        assert torch.equal(outputs, expected[name])
    for image in found:
        boxes = image["boxes"]
        assert len(boxes) > 0
        assert boxes.min() >= 0
        assert (boxes[:, 2].max(), boxes[:, 3].max()) <= (width, height)
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert set(image["labels"].tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("classes", [1, 3, 80])
def test_training_gives_named_losses_and_evaluation_boxes(classes: int) -> None:
    module = nano(classes=classes)
    boxes = {"boxes": TWO["boxes"], "labels": torch.tensor([0, classes - 1])}
    x = images(2, 3, 64, 64)
    found = module.train()(x, [boxes, EMPTY])
    assert list(found) == ["box", "class", "objectness"]
    assert all(value.shape == () and value > 0 for value in found.values())
    sum(found.values()).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())
    with torch.no_grad():
        detected = module.eval()(x)
    assert [sorted(image) for image in detected] == [["boxes", "labels", "scores"]] * 2
    assert all(len(image["boxes"]) <= 300 for image in detected)


def test_the_losses_are_those_of_its_outputs() -> None:
    torch.manual_seed(0)
    module = nano().train()
    x = images(2, 3, 64, 96)
    outputs = {int(name[6:]): value for name, value in module.raw(x).items()}
    anchors = dict(zip(STRIDES, module.anchors, strict=True))
    expected = losses(outputs, anchors, [TWO, EMPTY], Gains())
    assert module(x, [TWO, EMPTY]) == expected


def test_training_without_targets_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the targets"):
        nano().train()(images(2, 3, 64, 64))


def test_a_client_without_any_box_trains_on_the_background() -> None:
    module = nano().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, told = images(2, 3, 64, 64), []
    for _ in range(3):
        found = module(x, [EMPTY, EMPTY])
        assert (found["box"].item(), found["class"].item()) == (0, 0)
        told.append(found["objectness"].item())
        optimizer.zero_grad()
        sum(found.values()).backward()
        optimizer.step()
    assert told[0] > told[1] > told[2] > 0


def test_weights_of_nan_give_no_boxes() -> None:
    module = nano().eval()
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
        found = module(images(2, 3, 64, 64))
    assert [image["boxes"].shape for image in found] == [(0, 4), (0, 4)]


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_images_of_any_number_of_channels(channels: int) -> None:
    module = nano(channels=channels).train()
    assert sum(module(images(2, channels, 64, 64), [TWO, EMPTY]).values()).isfinite()


@pytest.mark.parametrize("norm", ["group", "layer", "frozen"])
def test_other_normalizations_take_the_place_of_every_batch_normalization(norm: str) -> None:
    module = nano(prepare={"norm": norm})
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    x = images(2, 3, 64, 64)
    alone = module.raw(x[:1])["stride8"]
    assert torch.allclose(module.train().raw(x)["stride8"][:1], alone, atol=1e-5)
    assert sum(module(x, [TWO, EMPTY]).values()).isfinite()


def test_the_anchors_are_settings_and_no_weights() -> None:
    nine = [[float(8 * k), float(4 * k)] for k in range(1, 10)]
    module = nano(anchors=nine)
    assert module.anchors.flatten(0, 1).tolist() == nine
    assert "anchors" not in module.state_dict()
    assert module.double().anchors.dtype == torch.float64
    factory = MODELS.find("yolov5n")
    for wrong in (nine[:8], [[1.0]] * 9, [[1.0, 0.0]] * 9, [[1.0, -1.0]] * 9, 3):
        with pytest.raises(ConfigError, match=r"anchors|0|1"):
            read_settings(factory, {"anchors": wrong}, "model")
    assert read_settings(factory, {"anchors": nine}, "model")["anchors"] == nine


def test_boxes_that_no_anchor_fits_are_noted_with_their_share() -> None:
    module = nano()
    fitting, thin = TWO["boxes"], torch.tensor([[0.0, 0, 60, 1]])
    assert module.notes(fitting) == module.notes(fitting[:0]) == []
    (sentence,) = module.notes(torch.cat([fitting, thin]))
    assert sentence.startswith("33.3% of the 3 training boxes fit none of the anchors")
    assert "model.anchors" in sentence
    assert module.notes(torch.cat([fitting.repeat(50, 1), thin, thin])) == []  # below 2 %


def test_gains_and_suppression_are_settings() -> None:
    x = images(1, 3, 64, 64)
    plain, scaled = (nano(**keys) for keys in ({}, {"box_gain": 0.1, "class_gain": 0.0}))
    a, b = (module.train()(x.repeat(2, 1, 1, 1), [TWO, EMPTY]) for module in (plain, scaled))
    assert b["box"].item() == pytest.approx(2 * a["box"].item())
    assert b["class"].item() == 0
    few = nano(detections=5, score_threshold=0.0, suppression_iou=1.0).eval()
    none = nano(score_threshold=1.0).eval()
    with torch.no_grad():
        assert len(few(x)[0]["boxes"]) == 5
        assert len(none(x)[0]["boxes"]) == 0


def test_a_checkpoint_with_pickled_classes_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "yolov5s.pt"
    with torch.random.fork_rng():
        torch.save({"model": nn.Sequential(nn.Conv2d(1, 1, 1)), "epoch": 3}, path)
    with pytest.raises(
        DataError, match=r"the weights file contains the Python object 'torch\.nn\.modules"
    ) as caught:
        read_weights(path)
    assert "fedlens ran nothing of it" in str(caught.value)
    plain = tmp_path / "old.pt"
    plain.write_bytes(pickle.dumps({"model": Touches(tmp_path / "ran")}))
    with pytest.raises(DataError, match="ran nothing of it"):
        read_weights(plain)
    assert not (tmp_path / "ran").exists()


class Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_the_same_seed_gives_the_same_step() -> None:
    def step() -> Tensor:
        module = nano().train()
        sum(module(images(2, 3, 64, 64), [TWO, TWO]).values()).backward()
        return torch.cat([weight.grad.flatten() for weight in module.parameters()])

    assert torch.equal(step(), step())
