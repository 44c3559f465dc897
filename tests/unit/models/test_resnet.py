"""The CIFAR ResNets: published names and score, shortcuts without parameters, widths and sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.models.resnet import BottleneckBlock, ResidualBlock
from tests.unit.models.zoo_kit import CIFAR_RESNETS, images, made, parameters, shape_only

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet20", 269_722), ("resnet32", 464_154), ("resnet44", 658_586), ("resnet56", 853_018)],
)
def test_the_counts_of_table_6_of_the_paper(name: str, count: int) -> None:
    assert parameters(shape_only(name, (3, 32, 32), 10)) == count
    assert sum(value.dim() == 4 for value in made(name).parameters()) == int(name[6:]) - 1


@pytest.mark.parametrize(
    ("name", "count", "convolutions"), [("gkt-resnet8", 10_586, 8), ("gkt-resnet56", 591_322, 58)]
)
def test_the_networks_of_fedgkt_have_its_counts_and_send_the_same_features(
    name: str, count: int, convolutions: int
) -> None:
    module = made(name)
    assert parameters(module) == count
    assert sum(value.dim() == 4 for value in module.parameters()) == convolutions
    assert module.bn1(module.conv1(images(2, 3, 32, 32))).shape == (2, 16, 32, 32)
    assert module(images(2, 3, 32, 32)).shape == (2, 10)


def test_a_bottleneck_adds_its_projected_input_to_what_three_convolutions_make_of_it() -> None:
    block, plain = BottleneckBlock(4, 2, stride=2).eval(), BottleneckBlock(8, 2, stride=1).eval()
    for layer in (*block.modules(), *plain.modules()):
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.running_mean, -1, 1)
            torch.nn.init.uniform_(layer.running_var, 0.5, 2)
    x = images(2, 4, 7, 6)
    convolution, norm = block.downsample
    shortcut = normalized(norm, torch.conv2d(x, convolution.weight, stride=2))
    assert shortcut.shape == (2, 8, 4, 3)
    torch.testing.assert_close(block(x), torch.relu(branch(block, x, 2) + shortcut))
    assert len(plain.downsample) == 0
    y = images(2, 8, 5, 5)
    torch.testing.assert_close(plain(y), torch.relu(branch(plain, y, 1) + y))


def branch(block: BottleneckBlock, x: Tensor, stride: int) -> Tensor:
    first = torch.relu(normalized(block.bn1, torch.conv2d(x, block.conv1.weight)))
    second = torch.conv2d(first, block.conv2.weight, stride=stride, padding=1)
    return normalized(block.bn3, torch.conv2d(torch.relu(normalized(block.bn2, second)), block.conv3.weight))


@pytest.mark.real
@pytest.mark.parametrize("part", [1000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_the_published_weights_load_by_their_names_and_score_as_published(
    part: int, real_data: Path, resnet20_file: Path
) -> None:
    module = made("resnet20")
    missing, unexpected = module.load_state_dict(load_file(resnet20_file), strict=False)
    assert unexpected == []
    assert all(name.endswith("num_batches_tracked") for name in missing)  # the file has no counters

    raw = np.fromfile(real_data / "cifar-10-batches-bin" / "test_batch.bin", np.uint8).reshape(10_000, 3073)
    picked = np.arange(0, 10_000, 10_000 // part)  # the file is sorted by class
    right = 0
    with torch.inference_mode():
        for rows in np.array_split(raw[picked], max(1, part // 1000)):
            inputs = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
            logits = module.eval()((inputs - MEAN[:, None, None]) / STD[:, None, None])
            right += int((logits.argmax(1).numpy() == rows[:, 0]).sum())
    if part == 10_000:
        assert right == 9173
    else:
        assert abs(right / part - 0.9173) < 0.03


def test_a_shortcut_takes_every_second_pixel_and_pads_channels_with_zeros() -> None:
    block = ResidualBlock(4, 8, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)  # what is left is the shortcut
    x = images(2, 4, 7, 6).abs()
    expected = torch.zeros(2, 8, 4, 3)
    expected[:, 2:6] = x[:, :, ::2, ::2]
    assert torch.equal(block(x), expected)
    assert sum(p.numel() for p in block.parameters()) == 4 * 8 * 9 + 8 * 8 * 9 + 4 * 8


def test_a_block_adds_its_input_to_what_two_convolutions_make_of_it() -> None:
    block = ResidualBlock(4, 4, stride=1).eval()
    x = images(2, 4, 5, 5)
    for bn in (block.bn1, block.bn2):
        torch.nn.init.uniform_(bn.running_mean, -1, 1)
        torch.nn.init.uniform_(bn.running_var, 0.5, 2)
    inner = torch.relu(normalized(block.bn1, torch.conv2d(x, block.conv1.weight, padding=1)))
    outer = normalized(block.bn2, torch.conv2d(inner, block.conv2.weight, padding=1))
    torch.testing.assert_close(block(x), torch.relu(outer + x))


def normalized(bn: torch.nn.BatchNorm2d, x: Tensor) -> Tensor:
    mean, variance = bn.running_mean[:, None, None], bn.running_var[:, None, None]
    return (x - mean) / (variance + bn.eps).sqrt()


def test_width_is_the_channels_of_the_first_stage() -> None:
    module = made("resnet20", width=24)
    stages = [getattr(module, f"layer{k}")[-1].conv2.out_channels for k in (1, 2, 3)]
    assert stages == [24, 48, 96]
    assert module.linear.in_features == 96
    wide, slim = (parameters(shape_only("resnet20", (3, 32, 32), 10, width=w)) for w in (32, 16))
    assert 3.9 < wide / slim < 4
    assert made("resnet20", width=5)(images(2, 3, 16, 16)).shape == (
        2,
        10,
    )  # an odd number of channels to pad


@pytest.mark.parametrize("name", CIFAR_RESNETS)
def test_grey_and_oblong_images_from_8x8_on(name: str) -> None:
    for shape in ((1, 8, 8), (2, 9, 14)):
        assert made(name, shape, width=4)(images(3, *shape)).shape == (3, 10)
    with pytest.raises(ConfigError, match=f"'{name}' needs images of at least 8x8, but they are 7x32"):
        made(name, (3, 7, 32))
