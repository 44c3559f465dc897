"""Which form a model takes for stacked clients, and that trying it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlens.core.arithmetic import Arithmetic, Precision
from fedlens.core.modules import module_in
from fedlens.core.protocol import ModelSpec
from fedlens.local.vectorized import model as stacked_model
from fedlens.local.vectorized.model import StackedModel
from tests.unit.local.models_kit import BUILT_IN, built_in

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Linear layers, and something between them that one large batch would do in another way."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.first, self.last = what, nn.Linear(4, 4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.what == "tied":
            x = functional.linear(x, self.first.weight)
        elif self.what == "the weight itself":
            x = x * self.first.weight.norm()
        elif self.what == "a little of the weight":
            x = x + 1e-4 * self.first.weight.norm()
        elif self.what == "insisting on float32":
            x = functional.relu(x).float() @ torch.eye(4)
        elif self.what == "insisting on it, and a little of the weight":
            x = x.float() @ torch.eye(4) + 3e-3 * self.first.weight.norm()
        elif self.what == "mixing":
            x = x - x.mean(0)
        elif self.what == "dropping by itself":
            x = functional.dropout(x, 0.5, self.training)
        elif self.what == "counting":
            self.seen += 1
        elif self.what == "dropout":
            x = self.dropout(x)
        out: Tensor = self.last(x)
        return out


def spec(what: str) -> ModelSpec:
    def factory(input_shape: Sequence[int], classes: int) -> nn.Module:
        return Odd(what)

    return ModelSpec(factory, "odd", {}, (4,), 3, 0)


def stacked(
    what: str, precision: Precision = "fp32", loaded: float | None = None
) -> tuple[StackedModel, dict[Any, Any]]:
    scratch = dict[Any, Any]()
    learner = module_in(spec(what), scratch, CPU, Arithmetic(precision))
    if loaded is not None:
        learner.load({name: torch.full_like(value, loaded) for name, value in learner.trainable.items()})
    return StackedModel(learner, scratch), scratch


WRONG = [
    "tied", "the weight itself", "a little of the weight", "insisting on it, and a little of the weight", "mixing",
    "dropping by itself",
]  # fmt: skip
RIGHT = ["nothing", "dropout", "counting", "insisting on float32"]


@pytest.mark.parametrize("loaded", [None, 0.0, torch.nan])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_form_is_the_models_whatever_its_weights_and_its_precision(
    precision: Precision, loaded: float | None
) -> None:
    assert [what for what in WRONG + RIGHT if stacked(what, precision, loaded)[0].flat] == RIGHT


@pytest.mark.parametrize("seeds", [[0], pytest.param(range(1, 3), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_is_one_large_batch_whatever_its_seed(
    name: str, precision: Precision, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        scratch = dict[Any, Any]()
        learner = module_in(built_in(name, seed), scratch, CPU, Arithmetic(precision))
        assert StackedModel(learner, scratch).flat


@pytest.mark.parametrize(
    ("layers", "flat"),
    [
        (
            [
                nn.Unflatten(1, (1, 2, 2)),
                nn.Conv2d(1, 4, 2, padding=1, padding_mode="circular", stride=2),
                nn.Flatten(),
            ],
            True,
        ),
        (
            [
                nn.Unflatten(1, (1, 2, 2)),
                nn.Conv2d(1, 4, 1),
                nn.GroupNorm(2, 4),
                nn.Dropout2d(),
                nn.Flatten(),
            ],
            True,
        ),
        ([nn.LayerNorm(4), nn.Linear(4, 16), nn.GELU(), nn.Dropout(), nn.LayerNorm(16)], True),
        ([nn.Unflatten(1, (2, 2)), nn.Linear(2, 8), nn.LayerNorm((2, 8)), nn.Flatten()], True),
        ([nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 1), nn.Flatten()], False),
        ([nn.Linear(4, 16), nn.PReLU()], False),
    ],
)
def test_layers_that_are_written_here_are_one_large_batch_and_others_are_not(
    layers: list[nn.Module], flat: bool
) -> None:
    made = ModelSpec(
        lambda shape, classes: nn.Sequential(*deepcopy(layers), nn.Linear(16, classes)),
        "layers",
        {},
        (4,),
        3,
        0,
    )
    scratch = dict[Any, Any]()
    assert StackedModel(module_in(made, scratch, CPU), scratch).flat == flat


def test_running_out_of_memory_is_no_verdict(monkeypatch) -> None:
    def scarce(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(stacked_model, "vmap", scarce)
        scratch = dict[Any, Any]()
        with pytest.raises(torch.OutOfMemoryError):
            StackedModel(module_in(spec("nothing"), scratch, CPU), scratch)
    assert StackedModel(module_in(spec("nothing"), scratch, CPU), scratch).flat


@pytest.mark.parametrize("what", ["nothing", "dropout", "counting"])
def test_the_rest_is_one_large_batch_and_is_tried_once(what: str, monkeypatch) -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    model, scratch = stacked(what)
    assert model.flat
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.learner.rest["seen"]) == 0
    assert "forward" not in model.learner.module.first.__dict__
    monkeypatch.setattr(stacked_model, "alike", lambda *given: pytest.fail("tried again"))
    assert StackedModel(model.learner, scratch).flat


@pytest.mark.parametrize("flat", [True, False])
def test_both_forms_hear_what_enters_the_last_linear_layer(flat: bool) -> None:
    model, _ = stacked("nothing")
    model.flat = flat
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(2, *w.shape, generator=g) for w in model.learner.trainable.values()]
    images = torch.randn(2, 3, 4, generator=g)
    with model.ready([]):
        outputs, features = model.with_features(weights, images)
        assert torch.equal(outputs, model(weights, images))
    assert features is not None
    for k in range(2):
        z = torch.tanh(images[k] @ weights[0][k].T + weights[1][k])
        torch.testing.assert_close(features[k], z)
        torch.testing.assert_close(outputs[k], z @ weights[2][k].T + weights[3][k])


class Turning(nn.Module):
    """What enters its last linear layer lies the other way round in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)).view(-1, 3, 2).transpose(1, 2))
        return out.flatten(1)


@pytest.mark.parametrize("flat", [True, False])
def test_features_may_lie_in_memory_as_they_like(flat: bool) -> None:
    model = ModelSpec(lambda shape, classes: Turning(), "turning", {}, (4,), 4, 0)
    scratch = dict[Any, Any]()
    both = StackedModel(module_in(model, scratch, CPU), scratch)
    assert both.flat
    both.flat = flat
    weights = [torch.stack([w.detach()] * 2) for w in both.learner.trainable.values()]
    images = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    with both.ready([]):
        _, features = both.with_features(weights, images)
    assert features is not None
    z = torch.tanh(both.learner.module.first(images)).view(2, 5, 3, 2).transpose(2, 3).flatten(2)
    torch.testing.assert_close(features, z.detach())


def test_a_forward_pass_leaves_the_modules_own_parameters_in_place() -> None:
    spec = ModelSpec(lambda shape, classes: nn.Linear(4, classes), "one", {}, (4,), 3, 0)
    learner = module_in(spec, {}, torch.device("cpu"))
    before = dict(learner.module.named_parameters())
    model = StackedModel(learner, {})
    weights = [torch.stack([value.detach()] * 2) for value in learner.trainable.values()]
    with model.ready([None, None]):
        model(weights, torch.ones(2, 5, 4))
        with pytest.raises(RuntimeError):
            model(weights, torch.ones(2, 5, 7))
    after = dict(learner.module.named_parameters())
    assert [id(value) for value in after.values()] == [id(value) for value in before.values()]
    assert all(isinstance(value, nn.Parameter) for value in after.values())
