"""Models cut into parts: the parts together are the model to the bit, and what cannot be cut is refused by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import random_state_kept
from fedlens.models.freeze import freeze
from fedlens.models.registry import MODELS
from fedlens.models.stages import choices, cut, stages
from tests.unit.models.zoo_kit import CLASSIFIERS, OF_TIMM, TRANSFORMERS, images, made


def shape_for(name: str) -> tuple[int, ...]:
    """A small image that the model takes."""
    if name in TRANSFORMERS:
        return (3, 224, 224)
    return (3, 64, 64) if name in OF_TIMM else MODELS.entries[name].shape


def passed(parts: list[nn.Module], inputs: Tensor, training: bool) -> dict[str, Tensor]:
    """The output, the gradient of each weight, and the buffers after a pass through the parts, one after another.

    Between two parts the tensor is copied, as it is when it is sent. Its value must not change after that.
    """
    with random_state_kept():
        torch.manual_seed(0)
        sent, ends = [inputs], []
        for module in parts:
            module.train(training).zero_grad()
            ends.append(module(sent[-1]))
            sent.append(ends[-1].detach().clone().requires_grad_())
        kept = [end.detach().clone() for end in ends]
        gradient = torch.sin(torch.arange(ends[-1].numel(), dtype=torch.float32)).reshape(ends[-1].shape)
        for end, start in zip(reversed(ends), reversed(sent[:-1]), strict=True):
            end.backward(gradient)
            gradient = start.grad
    assert all(torch.equal(end, copy) for end, copy in zip(ends, kept, strict=True))
    grads = {f"{n} slope": p.grad for m in parts for n, p in m.named_parameters() if p.grad is not None}
    return {"out": ends[-1].detach(), **grads, **{n: b.clone() for m in parts for n, b in m.named_buffers()}}


def same(name: str, *cuts: str, **settings) -> None:
    shape = shape_for(name)
    inputs = images(3, *shape)
    for training in (True, False):
        whole = made(name, shape, **settings)
        parts = cut(made(name, shape, **settings), cuts)
        assert len(parts) == len(cuts) + 1
        assert {n for own in parts for n in own.state_dict()} == set(whole.state_dict())
        expected, found = passed([whole], inputs, training), passed(parts, inputs, training)
        assert expected.keys() == found.keys()
        different = [key for key, value in expected.items() if not torch.equal(value, found[key])]
        assert not different, (cuts, training, different)


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("mlp", ["1"]),
        ("small-cnn", ["0"]),
        ("resnet20", ["bn1"]),  # the ReLU after it works in place
        ("resnet20", ["conv1"]),
        ("resnet20", ["layer2.0"]),
        ("resnet20", ["layer1", "layer3.1"]),
        ("projection", ["6.0"]),
    ],
)
def test_the_parts_are_the_model_to_the_bit(name: str, cuts: list[str]) -> None:
    same(name, *cuts)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if name != "linear"])
def test_every_classification_model_can_be_cut(name: str) -> None:
    found = choices(made(name, shape_for(name)))
    assert found
    # ViT-B/16 is the largest by far, and ViT-Tiny has the same layers.
    few = found[len(found) // 2 :][:1] if name == "vit-b-16" else found[:: max(1, len(found) // 4)]
    for one in few:
        same(name, one)


def test_a_model_of_one_layer_cannot_be_cut() -> None:
    assert choices(made("linear", (1, 8, 8))) == []


def test_parts_by_specs_start_from_the_weights_of_the_whole_model() -> None:
    model = ModelSpec(MODELS.find("resnet20"), "resnet20", {}, (3, 16, 16), 10, seed=3)
    whole, parts = model.build().state_dict(), [part.build() for part in stages(model, "layer1", "layer2")]
    names = [list(part.state_dict()) for part in parts]
    assert sum(map(len, names)) == len(whole)
    assert all(not set(one) & set(other) for one, other in pairwise(names))
    assert all(torch.equal(value, whole[n]) for part in parts for n, value in part.state_dict().items())


def test_a_part_has_the_frozen_leaves_that_it_holds() -> None:
    def frozen(module: nn.Module, spec: ModelSpec) -> nn.Module:
        freeze(module, ["1"], 10)
        return module

    model = ModelSpec(MODELS.find("mlp"), "mlp", {}, (1, 8, 8), 10, seed=0, wrapper=frozen)
    fixed = {name: value for name, value in model.build().state_dict().items() if name.startswith("1.")}
    lower, upper = stages(replace(model, fixed=fixed), "3")
    assert list(lower.fixed) == ["1.weight", "1.bias"]
    assert not upper.fixed
    assert [n for n, p in lower.build().named_parameters() if p.requires_grad] == ["3.weight", "3.bias"]


class Around(nn.Module):
    """Two layers with something between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.scale if self.how == "leaf" else x)
        if self.how == "mode":
            y = functional.dropout(y, 0.5, self.training)
        elif self.how == "values":
            y = y if y.sum() > 0 else -y
        elif self.how == "shortcut":
            y = y * self.scale + x
        elif self.how == "by name":
            y = y * self.get_parameter("scale")
        elif self.how == "twice":
            y = self.first(y)
        return self.second(y) * (self.scale if self.how == "leaf" else 1)


@pytest.mark.parametrize(
    ("module", "cuts", "says"),
    [
        (nn.Sequential(Around("mode")), ["0.first"], r"the layer '0' \(Around\) reads `training`"),
        (nn.Sequential(Around("values")), ["0.first"], r"the layer '0' \(Around\) decides by"),
        (Around("values"), ["first"], r"the model \(Around\) decides by"),
        (nn.Sequential(Around("shortcut")), ["0.first"], "'0' also takes its input"),
        (Around("by name"), ["first"], r"\(Around\) cannot be traced: `scale` is not an nn.Parameter"),
        (Around("leaf"), ["first"], "leaf 'scale' is used before and after"),
        (Around("twice"), ["first"], "calls 'first' 2 times"),
        (made("resnet20", (3, 8, 8)), ["layer1.1.bn1"], "'layer1.1' also takes the output of 'layer1.0'"),
        (made("resnet20", (3, 8, 8)), ["layer4"], "no layer 'layer4'"),
        (made("resnet20", (3, 8, 8)), ["linear"], "a part without a weight to train"),
        (made("mlp", (1, 8, 8)), ["0"], "a part without a weight to train"),
        (made("mlp", (1, 8, 8)), ["3", "1"], "not in the order"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(module: nn.Module, cuts: list[str], says: str) -> None:
    training = module.training
    with pytest.raises(ConfigError, match=says) as caught:
        cut(module, cuts)
    assert caught.value.where == "algorithm.cut"
    if "no layer" in says:
        assert "layer3" in caught.value.hint
    assert module.training is training  # the modules are as they were


def test_a_layer_that_reads_its_mode_may_stand_beside_the_cut() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Around("mode"))
    parts = cut(net, ["0"])
    assert not parts[1].eval().get_submodule("1").training
    x = torch.ones(2, 4)
    assert torch.equal(parts[1](parts[0](x)), net.eval()(x))
