"""The classifier of a model, and `model.bottleneck` before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.models.head import head_of, with_bottleneck
from fedlens.models.registry import MODELS
from tests.contract.contract_kit import nightly_but
from tests.unit.models.zoo_kit import CLASSIFIERS, OF_TIMM, experiment, images, made, parameters, shape_only

PREFIXES = {
    "linear": "1", "mlp": "5", "small-cnn": "6", "mcmahan-cnn": "9", "hsu-cnn": "11", "projection": "6.3",
    "vgg9": "23",
    "resnet20": "linear", "resnet32": "linear", "resnet44": "linear", "resnet56": "linear",
    "gkt-resnet8": "linear", "gkt-resnet56": "linear", "darts-search": "classifier", "darts": "classifier",
    "resnet18": "fc", "resnet34": "fc", "resnet50": "fc", "mobilenet-v2": "classifier",
    "mobilenet-v3-large": "classifier", "efficientnet-b0": "classifier", "vit-b-16": "head", "vit-tiny": "head",
}  # fmt: skip


@pytest.mark.parametrize("name", nightly_but(set(CLASSIFIERS) - {"darts-search"}, CLASSIFIERS))
def test_the_classifier_is_found_in_every_model_and_a_bottleneck_put_before_it(name: str) -> None:
    entry = MODELS.entries[name]
    plain, narrow = (shape_only(name, entry.shape, 37, prepare=keys) for keys in ({}, {"bottleneck": 6}))
    before, after = head_of(plain, 37), head_of(narrow, 37)
    assert before is not None
    assert after is not None
    assert before.prefix == after.prefix == PREFIXES[name]
    features = before.linear.in_features
    assert parameters(narrow) - parameters(plain) == features * 6 + 6 + 6 * 37 + 37 - features * 37 - 37
    held = [leaf for leaf, _ in narrow.named_parameters() if after.holds(leaf)]
    ends = ("bottleneck.weight", "bottleneck.bias", "classifier.weight", "classifier.bias")
    assert held == [f"{after.prefix}.{end}" for end in ends]
    assert [n for n in plain.state_dict() if not before.holds(n)] == [
        n for n in narrow.state_dict() if not after.holds(n)
    ]
    with torch.device("meta"):
        assert narrow.eval()(torch.zeros(2, *entry.shape)).shape == (2, 37)


def test_the_network_of_hsu2020_for_landmarks() -> None:
    """MobileNetV2 with group normalization and 64 features between its 1,280 and the classifier (section 6.5)."""
    module = shape_only("mobilenet-v2", (3, 224, 224), 2028, prepare={"norm": "group", "bottleneck": 64})
    assert parameters(module) == 2_223_872 + (1280 * 64 + 64) + (64 * 2028 + 2028)


def test_the_bottleneck_is_linear_with_nothing_in_between() -> None:
    module = made("resnet20", (1, 8, 8), width=4, prepare={"bottleneck": 3}).eval()
    heard: list[torch.Tensor] = []
    module.linear.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    logits = module(images(5, 1, 8, 8))
    first, second = module.linear
    expected = (heard[0] @ first.weight.T + first.bias) @ second.weight.T + second.bias
    torch.testing.assert_close(logits, expected)


def test_the_rest_of_the_model_starts_from_the_same_weights() -> None:
    plain = made("resnet20", (1, 8, 8), width=4).state_dict()
    narrow = made("resnet20", (1, 8, 8), width=4, prepare={"bottleneck": 3}).state_dict()
    same = [n for n in plain if n in narrow and torch.equal(plain[n], narrow[n])]
    assert same == [n for n in plain if not n.startswith("linear.")]


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU()),
    ],
)
def test_a_model_without_a_linear_classifier_is_refused(module: nn.Module) -> None:
    assert head_of(module, 10) is None
    with pytest.raises(ConfigError, match="no linear layer with 10 outputs, one a class") as caught:
        with_bottleneck(module, 10, 4)
    assert caught.value.where == "model.bottleneck"


def test_a_module_that_is_the_classifier_itself() -> None:
    head = head_of(nn.Linear(4, 3), 3)
    assert head is not None
    assert head.prefix == ""
    assert head.holds("weight")
    module = with_bottleneck(nn.Linear(4, 3, bias=False), 3, 2)
    assert module.classifier.bias is None
    again = head_of(module, 3)
    assert again is not None
    assert again.prefix == ""


@pytest.mark.parametrize("width", [0, -1, 2.5, 10**6])
def test_a_width_that_is_no_number_of_features_is_refused_with_its_key(width: Any, tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment({"name": "resnet20", "bottleneck": width}).run(tmp_path / "run")
    assert "model.bottleneck" in str(caught.value)


def test_a_models_own_setting_of_the_same_name_comes_first(tmp_path) -> None:
    run = experiment({"name": "small-cnn", "norm": "layer"}, rounds=1).run(tmp_path / "run")
    assert run.config["model"] == {"name": "small-cnn", "width": 16, "norm": "layer"}
    assert [layer.num_groups for layer in run.model if isinstance(layer, nn.GroupNorm)] == [1, 1]


def test_every_network_of_timm_has_its_classifier_where_timm_says_it_is() -> None:
    import timm

    from fedlens.models.timm_models import TIMM_NAMES

    for name in OF_TIMM:
        assert timm.get_pretrained_cfg(TIMM_NAMES[name]).classifier == PREFIXES[name]
