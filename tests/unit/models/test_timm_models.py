"""The networks of timm: the documents' counts, images of any channel count, sizes, settings, and a missing timm."""

from __future__ import annotations

import sys

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.models.head import head_of
from fedlens.models.registry import MODELS
from fedlens.models.timm_models import TIMM_NAMES
from tests.covering import covering
from tests.unit.models.zoo_kit import (
    CONVOLUTIONAL,
    OF_TIMM,
    TRANSFORMERS,
    images,
    made,
    parameters,
    shape_only,
)


@pytest.mark.parametrize(
    ("name", "count", "body", "printed"),
    [
        ("resnet18", 11_689_512, None, None),
        ("resnet34", 21_797_672, None, None),
        ("resnet50", 25_557_032, None, None),
        ("mobilenet-v2", 3_504_872, 2_223_872, None),
        ("mobilenet-v3-large", 5_483_032, 4_202_032, 4.0),
        ("efficientnet-b0", 5_288_548, 4_007_548, 3.8),
        ("vit-b-16", 86_567_656, 85_798_656, 81.8),
        ("vit-tiny", 5_717_416, None, None),
    ],
)
def test_the_counts_with_and_without_the_last_layer_are_those_of_the_documents(
    name: str, count: int, body: int | None, printed: float | None
) -> None:
    module = shape_only(name)
    assert parameters(module) == count
    head = head_of(module, 1000)
    assert head is not None
    without = count - parameters(head.linear)
    assert body in (None, without)
    if printed is not None:  # fedcv's table 3, in units of 2^20
        assert round(without / 2**20, 1) == printed


def test_every_network_of_timm_is_listed_under_a_name_that_timm_has() -> None:
    import timm

    assert set(TIMM_NAMES) == set(OF_TIMM)
    assert set(TIMM_NAMES.values()) <= set(timm.list_models())


@pytest.mark.parametrize(("name", "shape"), covering(CONVOLUTIONAL, [(1, 28, 28), (4, 40, 33)]))
def test_a_convolutional_network_takes_images_of_any_channels_and_size(name: str, shape) -> None:
    with torch.device("meta"):
        assert made(name, shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)
    with pytest.raises(ConfigError, match=f"'{name}' needs images of at least 8x8, but they are 32x7"):
        shape_only(name, (3, 32, 7))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_takes_sides_that_are_multiples_of_16_from_64_on(name: str) -> None:
    for shape in ((1, 64, 96), (3, 224, 224)):
        with torch.device("meta"):
            assert made(name, shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)
    for height, width in ((32, 32), (48, 64), (64, 100), (225, 224)):
        with pytest.raises(ConfigError, match="multiples of 16, from 64x64 on, but they are") as caught:
            shape_only(name, (3, height, width))
        assert f"{height}x{width}" in caught.value.what
        assert caught.value.where == "model.name"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_smaller_patches_make_a_transformer_for_smaller_images(name: str) -> None:
    with torch.device("meta"):
        module = made(name, (3, 32, 40), 7, patch=4)
        assert module(torch.zeros(2, 3, 32, 40)).shape == (2, 7)
    assert module.patch_embed.proj.weight.shape[2:] == (4, 4)
    assert module.pos_embed.shape[1] == 1 + 8 * 10
    with pytest.raises(ConfigError, match="multiples of 4, from 16x16 on, but they are 32x30"):
        shape_only(name, (3, 32, 30), patch=4)


@pytest.mark.parametrize(
    ("name", "setting"), covering(["resnet18", "vit-tiny", "mobilenet-v3-large"], ["dropout", "drop_path"])
)
def test_dropout_and_stochastic_depth_are_off_unless_they_are_set(name: str, setting: str) -> None:
    side = 64 if name == "vit-tiny" else 32
    x = images(4, 1, side, side)
    for share in (0.0, 0.9):
        module = made(name, (1, side, side), **{setting: share}).train()
        torch.nn.init.normal_(head_of(module, 10).linear.weight)
        for layer in module.modules():  # timm starts the last scale of each block at 0
            if isinstance(layer, torch.nn.BatchNorm2d):
                torch.nn.init.ones_(layer.weight)
        with torch.no_grad():
            torch.manual_seed(1)
            one, other = module(x), module(x)
            assert torch.allclose(one, other) == (share == 0.0)
            module.eval()
            assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("name", OF_TIMM)
def test_without_timm_the_name_is_listed_and_building_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert name in dict(MODELS.rows())
    with pytest.raises(ConfigError, match=f"'{name}' needs timm, which is not installed") as caught:
        made(name, (3, 64, 64))
    assert caught.value.hint == "run: pip install 'fedlens[vision]'"


def test_the_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    one = made("mobilenet-v2", (1, 8, 8)).state_dict()
    torch.manual_seed(6)
    other = made("mobilenet-v2", (1, 8, 8)).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
