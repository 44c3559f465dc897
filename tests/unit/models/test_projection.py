"""The projection head: where it stands, what it leaves as it was, and bases that do not fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedlens.api import Experiment
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.protocol import ModelSpec
from fedlens.models.projection import last_linear, projection
from fedlens.models.registry import MODELS
from tests.unit.run.test_build import made, planned

HERE = str(Path(__file__))


class Nested(nn.Module):
    """Its last linear layer is two levels down."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(features, 7), nn.ReLU())
        self.top = nn.ModuleDict({"drop": nn.Dropout(), "classes": nn.Sequential(nn.Linear(7, classes))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top["classes"](self.top["drop"](self.body(x)))


def nested(input_shape, classes, *, scale: int = 1) -> nn.Module:
    return Nested(input_shape[1] * input_shape[2], classes)


def bare(input_shape, classes) -> nn.Module:
    return nn.Linear(9, classes)


def convolutional(input_shape, classes) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("base", ["small-cnn", "mlp", "mcmahan-cnn", "hsu-cnn", "linear"])
def test_the_head_stands_between_the_encoder_and_the_last_layer(base: str) -> None:
    plain, headed = (
        ModelSpec(factory, "model", settings, (1, 12, 12), 5, seed=3).build()
        for factory, settings in (
            (MODELS.find(base), {}),
            (projection, {"base": base, "hidden": 30, "width": 20}),
        )
    )
    _, last = last_linear(plain)
    head = headed[-1]
    shapes = [(layer.in_features, layer.out_features) for layer in head if isinstance(layer, nn.Linear)]
    assert shapes == [(last.in_features, 30), (30, 20), (20, 5)]
    assert [type(layer) for layer in head] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    # the encoder is the base's own, weights included, and what is seen by MOON is the head's output
    assert all(
        torch.equal(a, b) for a, b in zip(plain[:-1].parameters(), headed[:-1].parameters(), strict=True)
    )
    _, layer = last_linear(headed)
    assert layer is head[-1]
    x, seen = torch.randn(4, 1, 12, 12), []
    layer.register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    logits = headed(x)
    torch.testing.assert_close(seen[0], head[:3](plain[:-1](x)))
    assert (seen[0].shape, logits.shape) == ((4, 20), (4, 5))


def test_a_last_layer_deep_inside_and_a_model_that_is_one_layer() -> None:
    module = projection((1, 3, 3), 4, base=f"{HERE}:nested", width=6)
    assert last_linear(module)[0] == "top.classes.0.3"
    assert module(torch.randn(2, 1, 3, 3)).shape == (2, 4)
    alone = projection((9,), 4, base={"name": f"{HERE}:bare"}, hidden=8, width=6)
    assert alone(torch.randn(2, 9)).shape == (2, 4)


@pytest.mark.parametrize(
    ("base", "where", "what"),
    [
        ("smal-cnn", "base.name", "unknown model 'smal-cnn'"),
        ({"width": 3}, "base.name", "needs a 'name'"),
        ({"name": 3}, "base.name", "needs a 'name'"),
        ({"name": "small-cnn", "widht": 3}, "base.widht", "unknown setting 'widht'"),
        ({"name": "small-cnn", "width": 0}, "base.width", "at least 1"),
        (f"{HERE}:convolutional", "base.name", "has no linear layer"),
    ],
)
def test_bases_that_do_not_fit_are_refused(base, where: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        projection((1, 8, 8), 4, base=base)
    assert caught.value.where == where
    with pytest.raises(ConfigError, match=what) as caught:
        made(model={"name": "projection", "base": base})
    assert caught.value.where.startswith(f"model.{where}")


def test_the_settings_of_a_run_have_the_whole_table_of_the_base() -> None:
    config = planned(model={"name": "projection", "base": "small-cnn", "width": 64})["model"]
    base = {"name": "small-cnn", **read_settings(MODELS.find("small-cnn"), {}, "model")}
    assert config == {"name": "projection", "base": base, "hidden": 256, "width": 64}
    assert planned(model=config)["model"] == config
    relative = Path(HERE).resolve()
    table = planned(model={"name": "projection", "base": f"{relative}:nested"})["model"]["base"]
    assert table == {"name": f"{relative}:nested", "scale": 1}


def test_a_run_with_a_head_writes_settings_and_a_model_that_can_be_loaded_again(tmp_path) -> None:
    small = {"name": "synthetic", "train": 60, "test": 20, "shape": [1, 4, 4]}
    ran = Experiment(
        rounds=2,
        model={"name": "projection", "base": {"name": "small-cnn", "width": 3}, "hidden": 6, "width": 5},
        algorithm={"name": "moon", "mu": 1.0},
        local={"lr": 0.1},
        data={"dataset": small, "partition": {"name": "iid", "clients": 3}},
    ).run(tmp_path / "run")
    names = set(ran.model.state_dict())
    assert {"6.0.weight", "6.2.weight", "6.3.bias"} <= names
