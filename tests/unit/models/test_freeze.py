"""What `model.freeze` freezes, what stays in evaluation mode, and where features can stand for images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.base.frozen import FrozenSplit, held
from fedlens.core.tree import part, spec_of
from fedlens.models.freeze import blocks, freeze, split
from fedlens.models.head import with_bottleneck
from fedlens.models.simple import linear, small_cnn

SHAPE, CLASSES = (1, 8, 8), 10


class Residual(nn.Module):
    """A network with parts of its own: a stem, stages, a dropout without a module, a classifier."""

    def __init__(self, after: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.drop = nn.Dropout(0.5)
        self.stages = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)])
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.fc = nn.Linear(4, CLASSES)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.stem(x * self.scale))
        for stage in self.stages:
            x = x + stage(x)
        x = nn.functional.dropout(self.norm(x).mean((2, 3)), 0.3, self.training)
        out: torch.Tensor = self.fc(x)
        return out.log_softmax(1) if self.after else out


def trained(module: nn.Module) -> list[str]:
    return [name for name, weight in module.named_parameters() if weight.requires_grad]


def moves(module: nn.Module) -> set[str]:
    """The leaves that two passes in training mode change."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.train()
    for _ in range(2):
        module(torch.randn(4, *SHAPE))
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def test_a_frozen_backbone_is_in_evaluation_mode_whatever_train_says() -> None:
    module = Residual()
    freeze(module, "backbone", CLASSES)
    assert trained(module) == ["fc.weight", "fc.bias"]
    assert moves(module) == set()
    images = torch.randn(3, *SHAPE)
    assert torch.equal(module.train()(images), module(images))  # no dropout either, with a module or without
    assert [name for name, layer in module.named_modules() if layer.training] == ["fc"]
    fixed = {name for name, leaf in spec_of(module).items() if leaf.fixed}
    assert fixed == set(module.state_dict()) - {"fc.weight", "fc.bias"}


def test_the_bottleneck_of_a_frozen_backbone_is_trained() -> None:
    module = with_bottleneck(Residual(), CLASSES, 3)
    freeze(module, "backbone", CLASSES)
    assert {name.rpartition(".")[0] for name in trained(module)} == {"fc.bottleneck", "fc.classifier"}


def test_blocks_are_children_with_parameters_and_containers_are_opened() -> None:
    assert blocks(Residual()) == ["stem.0", "stem.1", "stages.0", "stages.1", "fc"]
    assert blocks(nn.Sequential(nn.Flatten(), Residual())) == [f"1.{name}" for name in blocks(Residual())]
    assert blocks(linear(SHAPE, CLASSES)) == ["1"]


def test_all_but_last_freezes_what_comes_before_and_nothing_after() -> None:
    module = Residual()
    freeze(module, "all-but-last:2", CLASSES)
    assert trained(module) == ["stages.1.weight", "stages.1.bias", "fc.weight", "fc.bias"]
    assert held(module.stem[1])
    assert held(module.drop)
    assert not held(module.norm)  # it comes after a trained block
    assert moves(module) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_names_stand_for_all_that_is_inside_them_and_for_no_longer_names() -> None:
    module = nn.ModuleDict({"layer1": nn.Linear(2, 2), "layer10": nn.Linear(2, 2)})
    freeze(module, ["layer1"], CLASSES)
    assert trained(module) == ["layer10.weight", "layer10.bias"]
    module = Residual()
    freeze(module, ["stem", "norm", "fc.bias"], CLASSES)
    assert moves(module) == set()
    assert "fc.bias" not in trained(module)
    assert "fc.weight" in trained(module)
    assert part(spec_of(module), "buffer") == []


@pytest.mark.parametrize(
    ("what", "says", "hint"),
    [
        (["stemm"], "names 'stemm'", "did you mean 'stem'"),
        (["drop"], "names 'drop'", ""),  # no weights in it
        ([""], "names ''", ""),
        ([], "empty list", ""),
        (["scale", "stem", "stages", "fc"], "every weight", ""),
        ("all-but-last:0", "trains nothing", "take 1 to 4"),
        ("all-but-last:5", "freezes nothing: the model has 5 blocks", "take 1 to 4"),
        ("all-but-last:-1", "must be 'backbone'", ""),
        ("stem", "must be 'backbone'", "write freeze = ['stem']"),
    ],
)
def test_what_cannot_be_frozen_is_refused(what: Any, says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        freeze(Residual(), what, CLASSES)
    assert says in refused.value.what
    assert refused.value.where == "model.freeze"
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize("what", ["backbone", "all-but-last:1"])
def test_a_model_of_one_layer_has_nothing_to_freeze(what: str) -> None:
    with pytest.raises(ConfigError, match="freezes nothing"):
        freeze(linear(SHAPE, CLASSES), what, CLASSES)


def test_a_backbone_needs_a_classifier() -> None:
    with pytest.raises(ConfigError, match="no linear layer with 7 outputs"):
        freeze(Residual(), "backbone", 7)


@pytest.mark.parametrize("what", ["backbone", "all-but-last:1", "all-but-last:2", ["0"]])
def test_features_give_the_outputs_of_images(what: Any) -> None:
    module = small_cnn(SHAPE, CLASSES, norm="batch")
    freeze(module, what, CLASSES)
    made = split(module, SHAPE)
    assert FrozenSplit.of(module) is made
    images = torch.randn(5, *SHAPE)
    features = made.features(images)
    assert not features.requires_grad
    module.eval()
    assert torch.equal(module(features), module(images))
    assert torch.equal(made.plain(images), module(images))


def test_features_of_a_backbone_are_what_enters_the_classifier() -> None:
    module = Residual()
    freeze(module, "backbone", CLASSES)
    assert split(module, SHAPE).features(torch.randn(2, *SHAPE)).shape == (2, 4)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Residual(), ["stages"]),  # trained parts on both sides
        (Residual(), ["fc"]),  # the frozen part comes last
        (Residual(), "all-but-last:2"),  # a stage is added to its own input
        (Residual(after=True), "backbone"),  # more follows the classifier
        (nn.Sequential(nn.Dropout(), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, CLASSES)), ["1"]),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, CLASSES)), ["0"]),
    ],
)
def test_features_are_refused_where_they_cannot_stand_for_images(module: nn.Module, what: Any) -> None:
    """The last two: dropout in front of the frozen layer, and features of the very shape of an image."""
    freeze(module, what, CLASSES)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigError, match="follows its frozen part") as refused:
        split(module, SHAPE)
    assert refused.value.where == "model.cache_features"
    assert FrozenSplit.of(module) is None
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_features_need_a_frozen_part() -> None:
    with pytest.raises(ConfigError, match="nothing is frozen"):
        split(small_cnn(SHAPE, CLASSES), SHAPE)
