"""Optimal convex aggregation (chen2022, Eq. 5): its gradient by autograd, and optima that are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.convex_combination import ModelMatrix
from fedlens.core.measured import Measured
from fedlens.core.modules import Loadable, module_in
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import Rng
from fedlens.data.client_datasets import ClientDatasets
from fedlens.tasks.classification import Classification
from fedlens.tasks.detection import Detection
from fedlens.tasks.optimal_weights import (
    OptimalWeights,
    WeightCandidate,
    combine_gradient,
    optimal_weights,
    weight_gradient,
)
from fedlens.tasks.segmentation import Segmentation
from tests.identity.identity_kit import CLASSES, FEATURES, LossOnly, Points, model, world
from tests.unit.tasks.detection_kit import GridDetector
from tests.unit.tasks.detection_kit import squares as boxes

CPU = torch.device("cpu")
RNG = Rng((0, "weights"))


class Squares(LossOnly):
    """The mean squared error of one output: with a linear model, a quadratic in the weights of a combination."""

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        return (outputs[:, 0] - targets).square().mean()

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        squares = (outputs[:, 0] - targets).square().sum().double()
        return Measured({"loss": squares, "examples": torch.tensor(len(targets))})

    def metrics(self, measured: Measured) -> dict[str, float]:
        return {"loss": float(measured.sums["loss"]) / int(measured.sums["examples"])}


def linear(input_shape: Any, classes: int) -> nn.Module:
    return nn.Linear(input_shape[0], 1)


def learner_of(spec: ModelSpec) -> Loadable:
    return module_in(spec, {}, CPU)


def drawn(learner: Loadable, count: int, spread: float = 1.0) -> list[dict[str, Tensor]]:
    """Models whose floating-point leaves are drawn; of a variance, positive ones."""
    g = torch.Generator().manual_seed(3)

    def leaf(name: str, value: Tensor) -> Tensor:
        new = torch.randn(value.shape, generator=g, dtype=torch.float64) * spread
        return (new.abs() + 0.5 if name.endswith("var") else new).to(value.dtype)

    state = learner.module.state_dict()
    return [{name: leaf(name, value) for name, value in state.items()} for _ in range(count)]


def squares(optimum: list[float], count: int = 60) -> tuple[Loadable, Points, list[dict[str, Tensor]]]:
    """Models of a linear regression whose targets are those of the combination with the weights `optimum`."""
    learner = learner_of(ModelSpec(linear, "linear", {}, (FEATURES,), 1, 0))
    models = drawn(learner, len(optimum))
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
    best = ModelMatrix(models).combined(torch.tensor(optimum))
    return learner, Points(x, (x @ best["weight"].T + best["bias"])[:, 0]), models


def searched(
    learner: Loadable, data: Points, models: list[dict[str, Tensor]], task: Any = None, **more: Any
) -> OptimalWeights:
    settings = {"lr": 1.0, "rng": RNG, "epochs": 60, "batch_size": 20, **more}
    average = settings.pop("average", torch.full((len(models),), 1 / len(models)))
    return optimal_weights(task or Squares(), learner, data, ModelMatrix(models), average, **settings)


@pytest.mark.parametrize("norm", [False, True])
def test_the_gradient_is_that_of_autograd_through_the_combination(norm: bool) -> None:
    learner, task = learner_of(model(norm=norm)), Classification()
    models, data = drawn(learner, 4), world().pooled()
    matrix, z = ModelMatrix(models), torch.tensor([0.3, -1.0, 0.5, 0.0])
    learner.load(matrix.combined(z.softmax(0)))
    learner.module.eval()
    gradient = weight_gradient(task, learner, matrix, data.inputs, data.targets)

    wide, trainable = z.double().requires_grad_(), set(learner.trainable)
    weights = wide.softmax(0)
    fixed = weights.detach()
    tree = {
        name: sum(
            w * m[name].double() for w, m in zip(weights if name in trainable else fixed, models, strict=True)
        )
        for name, value in models[0].items()
        if value.is_floating_point()
    }
    outputs = torch.func.functional_call(learner.module, tree, (data.inputs,))
    loss = task.loss(outputs, data.targets)
    by_weight, by_z = torch.autograd.grad(loss, (weights, wide))
    torch.testing.assert_close(gradient.double(), by_weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(combine_gradient(z.softmax(0), gradient).double(), by_z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimum", [[0.7, 0.2, 0.1], [0.25, 0.25, 0.5], [0.6, 0.4]])
def test_it_finds_the_optimum_of_a_quadratic_inside_the_simplex(optimum: list[float]) -> None:
    found = searched(*squares(optimum))
    torch.testing.assert_close(found.weights, torch.tensor(optimum).double(), rtol=0, atol=2e-3)
    assert found.best.loss is not None
    assert found.best.loss < 1e-4


def test_an_optimum_outside_of_the_simplex_is_approached_at_its_border() -> None:
    learner, data, models = squares([1.4, -0.4])
    found = searched(learner, data, models)
    grid = torch.linspace(0, 1, 1001)
    matrix = ModelMatrix(models)
    losses = [
        float(Squares().loss(data.inputs @ tree["weight"].T + tree["bias"], data.targets))
        for tree in matrix.combinations(torch.stack([grid, 1 - grid], 1))
    ]
    assert losses.index(min(losses)) == 1000  # all weight on the first
    assert found.weights[0] > 0.99


def test_several_starts_find_the_optimum_of_a_logistic_regression() -> None:
    there = world((40, 40))
    spec = model(factory=lambda shape, classes: nn.Linear(FEATURES, CLASSES))
    learner, data = learner_of(spec), there.pooled()
    data = Points(data.inputs.float(), data.targets)
    models = drawn(learner, 3, spread=0.7)
    models[1] = {name: 3 * value for name, value in models[1].items()}
    found = searched(learner, data, models, _Likelihood(), starts=2)
    steps = [(a / 50, b / 50) for a in range(51) for b in range(51 - a)]
    points = torch.tensor([[a, b, 1 - a - b] for a, b in steps]).clamp(min=0)
    losses = [
        float(nn.functional.cross_entropy(data.inputs @ t["weight"].T + t["bias"], data.targets))
        for t in ModelMatrix(models).combinations(points)
    ]
    assert found.best.loss == pytest.approx(min(losses), abs=2e-3)
    assert found.average.loss is not None
    assert found.average.loss > min(losses) + 0.02


class _Likelihood(Classification):
    """Cross-entropy without a score, so that the loss decides."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "score", None)


def test_the_order_of_the_models_does_not_matter() -> None:
    learner, data, models = squares([0.7, 0.2, 0.1])
    one = searched(learner, data, models, starts=1)
    other = searched(learner, data, [models[2], models[0], models[1]], starts=1)
    torch.testing.assert_close(one.weights, other.weights[[1, 2, 0]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("lr", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("scored", [True, False])
def test_it_is_never_worse_than_the_average_and_stays_on_the_simplex(lr: float, scored: bool) -> None:
    learner = learner_of(model(norm=True))
    data, task = world().pooled(), Classification() if scored else _Likelihood()
    average = torch.tensor([5.0, 1.0, 2.0])
    for models in (drawn(learner, 3), drawn(learner, 3, spread=1e4)):
        found = searched(learner, data, models, task, lr=lr, epochs=2, average=average)
        assert found.best.rank >= found.average.rank
        assert found.gain >= 0
        assert len(found.candidates) == 4
        torch.testing.assert_close(found.average.weights, average.double() / 8)
        for candidate in found.candidates:
            assert bool((candidate.weights >= 0).all())
            assert float(candidate.weights.sum()) == pytest.approx(1, abs=1e-9)


def test_the_search_ends_at_its_last_finite_step() -> None:
    learner, data, models = squares([0.5, 0.5])
    models[0] = {name: value * 1e30 for name, value in models[0].items()}
    found = searched(learner, data, models, average=torch.tensor([0.0, 1.0]))
    assert found.weights.tolist() == [0, 1]
    assert all(bool(candidate.weights.isfinite().all()) for candidate in found.candidates)


def test_one_model_has_the_weight_1_without_a_search() -> None:
    learner, data, models = squares([1.0])
    found = searched(learner, data, models)
    assert found.weights.tolist() == [1]
    assert len(found.candidates) == 1
    assert (found.gain, found.distance) == (0, 0)


def test_the_same_seed_gives_the_same_bits_and_another_one_other_starts() -> None:
    learner, data, models = squares([0.7, 0.2, 0.1])
    found = [searched(learner, data, models, epochs=1, rng=Rng((seed,))).candidates for seed in (1, 1, 2)]
    first, again, other = (torch.stack([c.weights for c in candidates]) for candidates in found)
    assert torch.equal(first, again)
    assert not torch.allclose(first[2:], other[2:], atol=1e-3)


def modes_of(learner: Loadable, name: str) -> set[bool]:
    """Whether this layer was in training mode, in the calls that follow."""
    modes = set[bool]()
    learner.module.get_submodule(name).register_forward_hook(lambda layer, *_: modes.add(layer.training))
    return modes


def test_statistics_are_combined_and_never_those_of_a_batch() -> None:
    learner = learner_of(model(norm=True))
    learner.module.train()
    models, modes = drawn(learner, 2), modes_of(learner, "1")
    found = searched(learner, world().pooled(), models, Classification(), epochs=1, starts=1)
    held = learner.module.state_dict()
    last = ModelMatrix(models).combined(found.candidates[-1].weights)
    for name in ("1.running_mean", "1.running_var", "0.weight"):
        torch.testing.assert_close(held[name], last[name])
    assert modes == {False}


def test_what_is_no_number_ranks_last() -> None:
    weights = torch.tensor([1.0])
    nan, low = WeightCandidate(weights, math.nan, math.nan), WeightCandidate(weights, 0.1, 9.0)
    assert OptimalWeights([nan, low]).best is low
    assert OptimalWeights([low, nan]).best is low


def test_the_statistics_of_a_detector_are_not_those_of_a_batch_either() -> None:
    spec = ModelSpec(
        lambda shape, classes: GridDetector(classes, norm="batch"), "grid", {}, (3, 32, 32), 2, 0
    )
    learner, dataset = learner_of(spec), boxes(n=8, test=6)
    dataset = replace(dataset, train=dataset.train.tensors(), test=dataset.test.tensors())
    data = ClientDatasets(dataset, torch.arange(8), np.array([0, 8])).data_of("@test")
    start, modes = learner.module.state_dict(), modes_of(learner, "body.6")
    models = [
        {n: v + 0.1 * d[n] if v.is_floating_point() else v for n, v in start.items()}
        for d in drawn(learner, 2)
    ]
    found = searched(learner, data, models, Detection(classes=2), epochs=2, starts=1, lr=0.1)
    assert found.best.rank >= found.average.rank
    assert found.candidates[1].weights[0] != 0.5  # it has moved
    assert modes == {False}


def test_masks_have_optimal_weights_too() -> None:
    g = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 16, 16, generator=g)
    spec = ModelSpec(lambda shape, classes: nn.Conv2d(3, classes, 1), "conv", {}, (3, 16, 16), 2, 0)
    learner = learner_of(spec)
    models = drawn(learner, 3)
    best = ModelMatrix(models).combined(torch.tensor([1.0, 0.0, 0.0]))
    masks = nn.functional.conv2d(images, best["weight"], best["bias"]).argmax(1)
    found = searched(learner, Points(images, masks), models, Segmentation(), epochs=20)
    assert found.weights[0] > 0.5
    assert found.gain > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"average": torch.ones(3)}, "the average has 3 weights, but there are 2 models"),
        ({"starts": 0}, "0 starts leave nothing to search"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        searched(*squares([0.5, 0.5]), **changes)
    learner, data, models = squares([0.5, 0.5])
    with pytest.raises(ConfigError, match="no example"):
        searched(learner, data.take(torch.arange(0)), models)
