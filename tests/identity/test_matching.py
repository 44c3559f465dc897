"""The matching of FedMA: copies of a network come back, shrinkage, growth, and assignments against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens import Experiment, load_result
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import tree_of
from fedlens.local.matching import (
    Matched,
    UnitPrior,
    assign,
    cheapest,
    gains,
    layer_in,
    match,
    match_layer,
    match_models,
    mean_rows,
    named,
    narrow,
    widen_inputs,
)
from fedlens.models.chains import chain_layers, resize, widths
from fedlens.models.prepare import Preparation
from fedlens.models.simple import mlp, small_cnn

CLASSES = 10
FLAT = 1e9  # of sigma0: the prior says nothing


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = [20, 50, 30, CLASSES]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def convolutional(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Conv2d(6, 9, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(36, 12), nn.Dropout(), nn.ReLU(), nn.Linear(12, CLASSES),
    ).double().eval()  # fmt: skip


NETWORKS = {"mlp": (perceptron, (20,)), "cnn": (convolutional, (1, 10, 10))}


def images(shape: Sequence[int]) -> Tensor:
    return torch.randn(200, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def copies(
    module: nn.Module, number: int, noise: float = 1e-6
) -> tuple[list[dict[str, Tensor]], list[list[Tensor]]]:
    """Copies with permuted units and noise, and which unit of the network each unit of a copy is."""
    draw, names, trees, orders = torch.Generator().manual_seed(2), chain_layers(module), [], []
    for _ in range(number):
        orders.append([torch.randperm(width, generator=draw) for width in widths(module)])
        tree = narrow(tree_of(module), names, orders[-1])
        trees.append({
            name: value + noise * torch.randn(value.shape, generator=draw, dtype=value.dtype)
            for name, value in tree.items()
        })  # fmt: skip
    return trees, orders


def grown(module: nn.Module, matched: Matched) -> nn.Module:
    names = chain_layers(module)
    resize(module, [len(matched.tree[f"{name}.weight"]) for name in names[:-1]])
    module.load_state_dict(matched.tree)
    return module


@pytest.mark.parametrize("gamma", [1.0, 8 / 7], ids=["one", "J / (J - 1)"])
@pytest.mark.parametrize("which", NETWORKS)
def test_copies_of_a_network_come_back_as_that_network(which: str, gamma: float) -> None:
    make, shape = NETWORKS[which]
    module, names = make(), chain_layers(make())
    trees, orders = copies(module, 8)
    for sigma0 in (1.0, FLAT):
        if sigma0 == FLAT and gamma > 1:
            continue  # a new unit costs as much there as the match
        matched = match(trees, names, UnitPrior(gamma=gamma, sigma0=sigma0))
        for own, order in zip(matched.units, orders, strict=True):
            for units, permutation, first in zip(own, order, orders[0], strict=True):
                assert torch.equal(first[units], permutation)
    matched = match(trees, names, UnitPrior(gamma=1.0, sigma0=FLAT))
    with torch.no_grad():
        expected = module(images(shape))
        torch.testing.assert_close(
            grown(make(1), matched)(images(shape)), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


def test_the_mean_of_copies_is_at_chance_where_their_match_is_as_good_as_they_are() -> None:
    draw = torch.Generator().manual_seed(4)
    centres = torch.randn(CLASSES, 20, generator=draw, dtype=torch.float64)
    labels = torch.arange(500) % CLASSES
    points = centres[labels] + torch.randn(500, 20, generator=draw, dtype=torch.float64) / 2
    module = perceptron()
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(60):
        adam.zero_grad()
        nn.functional.cross_entropy(module(points), labels).backward()
        adam.step()

    def accuracy(tree: dict[str, Tensor]) -> float:
        found = torch.func.functional_call(module, tree, (points,)).argmax(1)
        return float((found == labels).double().mean())

    trees, _ = copies(module, 8)
    mean = {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}
    assert accuracy(tree_of(module)) > 0.98
    assert accuracy(mean) < 0.15  # of ten classes
    matched = match(trees, chain_layers(module), UnitPrior(gamma=1.0, sigma0=FLAT))
    assert accuracy(matched.tree) == accuracy(tree_of(module))


@pytest.mark.parametrize(("number", "hidden"), [(2, [53, 33]), (4, [65, 45])])
def test_a_large_gamma_lets_copies_grow(number: int, hidden: list[int]) -> None:
    module = mlp((1, 8, 8), CLASSES)
    resize(module, [50, 30])
    trees, _ = copies(module, number)
    names = chain_layers(module)
    matched = match(trees, names, UnitPrior(gamma=7.0))
    assert [len(matched.tree[f"{name}.weight"]) for name in names[:-1]] == hidden
    for own in matched.units:  # no two units of a client are one
        assert [len(units.unique()) for units in own] == [50, 30]


def test_growth_bounds_the_width() -> None:
    module = mlp((1, 8, 8), CLASSES)
    resize(module, [50, 30])
    trees, _ = copies(module, 4)
    for growth, least, most in ((1.0, [50, 30], [50, 30]), (1.06, [51, 30], [53, 31])):
        matched = match(trees, chain_layers(module), UnitPrior(growth=growth))
        found = [len(matched.tree[f"{name}.weight"]) for name in chain_layers(module)[:-1]]
        assert all(a <= b <= c for a, b, c in zip(least, found, most, strict=True))


def test_growth_is_of_the_number_as_it_is_written() -> None:
    """1.15 * 100 is 114.99999999999999 in floating point."""
    draw = torch.Generator().manual_seed(7)
    vectors = [torch.randn(100, 4, generator=draw) for _ in range(3)]
    units = assign(vectors, UnitPrior(gamma=1e9, growth=1.15))
    assert len(torch.cat(units).unique()) == 115


@pytest.mark.parametrize(
    "wrong", [{"sigma": 0.0}, {"sigma0": -1.0}, {"gamma": 0.0}, {"passes": -1}, {"growth": 0.5}]
)
def test_a_prior_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        UnitPrior(**wrong)


@pytest.mark.parametrize(("sigma", "sigma0"), [(1.0, 1.0), (0.5, 2.0), (3.0, 1.0)])
@pytest.mark.parametrize("number", [1, 3])
def test_n_equal_units_come_back_times_n_by_n_and_the_ratio_of_variances(
    number: int, sigma: float, sigma0: float
) -> None:
    layer = layer_in(tree_of(perceptron()), "0")
    merged, units = match_layer([layer] * number, UnitPrior(sigma, sigma0, gamma=number / max(number - 1, 1)))
    for leaf, value in layer.items():
        torch.testing.assert_close(
            merged[leaf], value * number / (number + sigma / sigma0), rtol=1e-12, atol=0
        )
    assert all(torch.equal(own, torch.arange(50)) for own in units)


@pytest.mark.parametrize("which", NETWORKS)
def test_the_layers_behind_a_wider_one_compute_the_same_function(which: str) -> None:
    """Of its own units, wherever they are among others: behind convolutions, a flattening and linear layers."""
    make, shape = NETWORKS[which]
    module, draw = make(), torch.Generator().manual_seed(6)
    names, tree = chain_layers(module), tree_of(module)
    for at, name in enumerate(names[:-1]):
        here = [len(tree[f"{n}.weight"]) for n in names[:-1]]
        width = here[at] + 4
        units = torch.randperm(width, generator=draw)[: here[at]]
        wide = {}
        for leaf, value in layer_in(tree, name).items():
            wide[leaf] = torch.randn(width, *value.shape[1:], generator=draw, dtype=value.dtype)
            wide[leaf][units] = value
        behind = widen_inputs(layer_in(tree, names[at + 1]), units, width)
        changed = make(1)
        resize(changed, [*here[:at], width, *here[at + 1 :]])
        changed.load_state_dict({**tree, **named(wide, name), **named(behind, names[at + 1])})
        with torch.no_grad():
            torch.testing.assert_close(changed(images(shape)), module(images(shape)), rtol=1e-12, atol=1e-12)


def test_units_that_differ_in_their_biases_alone_are_told_apart() -> None:
    """Matching that ignores a permuted layer's biases pairs them at random."""
    weight = torch.ones(4, 3, dtype=torch.float64)
    bias = torch.tensor([3.0, -3.0, 1.0, -1.0], dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    layers = [{"weight": weight, "bias": bias}, {"weight": weight, "bias": bias[order]}]
    merged, (_, units) = match_layer(layers, UnitPrior(gamma=1.0, sigma0=FLAT))
    assert torch.equal(units, order)
    torch.testing.assert_close(merged["bias"], bias, rtol=1e-8, atol=0)


def log_posterior(units: Tensor, prior: UnitPrior) -> float:
    """Twice the log density of units of one global unit at its best value, and of that value, less constants."""
    best = units.sum(0) / (len(units) + prior.sigma / prior.sigma0)
    return float(-(units - best).square().sum() / prior.sigma - best.square().sum() / prior.sigma0)


def test_gains_are_differences_of_the_posterior_and_each_assignment_is_as_cheap_as_brute_force() -> None:
    draw, prior = torch.Generator().manual_seed(3), UnitPrior(0.7, 1.3, gamma=2.5)
    for count in range(1, 7):
        own = torch.randn(count, 4, generator=draw, dtype=torch.float64)
        others = [torch.randn(1 + k % 3, 4, generator=draw, dtype=torch.float64) for k in range(4)]
        sums = torch.stack([units.sum(0) for units in others])
        members = torch.tensor([len(units) for units in others])
        new = max(count - 4, 2)
        found = gains(own, sums, members, 5, new, prior)
        for l, w in enumerate(own):  # noqa: E741
            fixed = float(w.square().sum()) / prior.sigma
            for i, units in enumerate(others):
                joined = log_posterior(torch.cat([units, w[None]]), prior) - log_posterior(units, prior)
                odds = 2 * log(len(units) / (5 - len(units)))
                assert found[l, i] == pytest.approx(joined + fixed + odds, rel=1e-9)
            for k in range(new):
                alone = log_posterior(w[None], prior) + 2 * log(prior.gamma / 5 / (k + 1))
                assert found[l, 4 + k] == pytest.approx(alone + fixed, rel=1e-9)
        least = min(
            sum(-float(found[row, column]) for row, column in enumerate(columns))
            for columns in permutations(range(found.shape[1]), count)
        )
        chosen = cheapest(-found)
        assert len(chosen.unique()) == count
        assert -float(found[torch.arange(count), chosen].sum()) == pytest.approx(least, rel=1e-12)


def test_later_passes_improve_what_the_first_has_matched() -> None:
    draw = torch.Generator().manual_seed(8)
    vectors = [torch.randn(6, 3, generator=draw, dtype=torch.float64) for _ in range(5)]
    first, last = (assign(vectors, UnitPrior(gamma=1.0, passes=passes)) for passes in (0, 5))

    def objective(units: list[Tensor]) -> float:
        prior = UnitPrior()
        every, at = torch.cat(vectors), torch.cat(units)
        return sum(log_posterior(every[at == unit], prior) for unit in at.unique())

    assert objective(last) > objective(first)


def test_the_last_layer_is_averaged_by_the_examples_of_each_class() -> None:
    draw = torch.Generator().manual_seed(5)
    layers = [
        {"weight": torch.randn(3, 4, generator=draw), "bias": torch.randn(3, generator=draw)}
        for _ in range(2)
    ]
    kept = {"weight": torch.full((3, 4), 7.0), "bias": torch.full((3,), 8.0)}
    found = mean_rows(layers, torch.tensor([[6, 0, 0], [2, 5, 0]]), kept)
    for leaf, like in found.items():
        torch.testing.assert_close(like[0], 0.75 * layers[0][leaf][0] + 0.25 * layers[1][leaf][0])
        assert torch.equal(like[1], layers[1][leaf][1])
        assert torch.equal(like[2], kept[leaf][2])


def test_models_of_two_runs_are_matched(tmp_path: Path) -> None:
    """Whose files come from runs of other widths: the wider one's extra units have no partner."""
    models = []
    for at, hidden in enumerate(([6, 5], [8, 5])):
        made = Experiment(
            rounds=1,
            seed=at,
            model={"name": "mlp", "hidden_widths": hidden},
            data={"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
            local={"lr": 0.1},
        )
        made.run(tmp_path / str(at), report=False)
        models.append(load_result(tmp_path / str(at)).model)
    one = match_models(models, UnitPrior(growth=1.0))
    assert widths(one) == [8, 5]
    assert widths(models[0]) == [6, 5]
    with pytest.raises(ConfigError, match="different layers"):
        match_models([models[0], small_cnn((1, 8, 8), 10)])


@pytest.mark.parametrize(
    ("other", "leaf"),
    [
        (nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), "0.weight"),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), "2.weight"),
        (nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)), "0.bias"),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double(), "0.weight"),
    ],
    ids=["inputs", "classes", "bias", "dtype"],
)
def test_models_of_other_forms_are_refused_by_the_name_of_a_leaf(other: nn.Module, leaf: str) -> None:
    one = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=f"'{leaf}' has another shape or dtype in model 1"):
        match_models([one, other])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.first(x))


class Tied(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Recurrent(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[0])


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (small_cnn((1, 8, 8), 3, norm="group"), "'1' (GroupNorm)"),
        (Residual(), "'first' (Linear) takes more|'add'"),
        (Recurrent(), "'first' (LSTM)"),
        (Tied(), "'last.weight' is the same weights"),
        (
            nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)),
            "'0' (Conv2d) has groups",
        ),
        (
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 2)),
            "'1' (Linear) takes the output of a convolution",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 2)), "'1' (Softmax)"),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(4, 2)), "'1' (Flatten)"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(False)), "'1.weight' is not trained"),
    ],
)
def test_a_model_that_is_no_chain_is_refused_by_the_name_of_its_module(module: nn.Module, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chain_layers(module)
    assert any(part in str(refused.value) for part in why.split("|"))


def test_hidden_widths_are_those_of_the_model() -> None:
    spec = ModelSpec(
        small_cnn, "small-cnn", {"width": 4}, (1, 8, 8), 10, 0, Preparation(hidden_widths=[5, 7])
    )
    found = spec.build()
    assert widths(found) == [5, 7]
    assert found(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), spec.build().parameters(), strict=True))
    plain = ModelSpec(small_cnn, "small-cnn", {"width": 4}, (1, 8, 8), 10, 0)
    with pytest.raises(
        ConfigError, match="hidden_widths has 1 numbers, but the model has 2 hidden layers: 0, 3"
    ):
        ModelSpec(small_cnn, "small-cnn", {}, (1, 8, 8), 10, 0, Preparation(hidden_widths=[5])).build()
    same = ModelSpec(
        small_cnn, "small-cnn", {"width": 4}, (1, 8, 8), 10, 0, Preparation(hidden_widths=[4, 8])
    )
    for a, b in zip(plain.build().parameters(), same.build().parameters(), strict=True):
        assert torch.equal(a, b)
