"""Model specs, the federation, and client states."""

import numpy as np
import torch
from torch import nn

from fedlens.core.modules import loadable, module_in
from fedlens.core.protocol import Ask, Client, FederationInfo, ModelSpec
from fedlens.core.random import Secrets
from fedlens.core.tree import tree_of


def noisy(input_shape, classes, *, width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.BatchNorm1d(width), nn.Linear(width, classes))


def spec(seed: int = 0) -> ModelSpec:
    return ModelSpec(noisy, "noisy", {"width": 4}, (2,), 3, seed)


def test_the_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = tree_of(spec().build())
    torch.manual_seed(2)
    second = tree_of(spec().build())
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert first["0.weight"].shape == (4, 2)
    assert not torch.equal(first["0.weight"], spec(seed=1).build()[0].weight)


def test_building_leaves_the_global_stream_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    spec().build()
    assert torch.equal(torch.rand(3), expected)


def test_a_module_is_built_once_and_loaded_again_and_again() -> None:
    scratch, own = {}, spec()
    client = Client(0, None, {}, Secrets((0,)), scratch, torch.device("cpu"))
    learner = loadable(own, client)
    assert loadable(own, client) is learner
    assert module_in(own, scratch, client.device) is learner
    assert loadable(own, client, "twin") is not learner
    assert loadable(spec(seed=3), client) is not learner
    assert set(learner.trainable) | set(learner.rest) == set(learner.module.state_dict())
    tree = {name: torch.full_like(value, 2) for name, value in learner.module.state_dict().items()}
    learner.load(tree)
    assert all((value == 2).all() for value in learner.module.state_dict().values())
    tree["0.weight"].zero_()
    assert (learner.module[0].weight == 2).all()  # a copy, not a view
    learner.load({"0.bias": torch.zeros(4)})
    assert (learner.module[0].bias == 0).all()
    assert (learner.module[0].weight == 2).all()


def test_a_frozen_weight_is_loaded_but_not_trained() -> None:
    def frozen(input_shape, classes) -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight.requires_grad_(False)
        return module

    learner = module_in(ModelSpec(frozen, "frozen", {}, (2,), 2, 0), {}, torch.device("cpu"))
    assert list(learner.trainable) == ["bias"]
    assert list(learner.rest) == ["weight"]


def test_the_federation_knows_who_can_take_part() -> None:
    info = FederationInfo(np.array([3, 0, 7, 0, 1]), 10, (1, 8, 8))
    assert info.clients == 5
    assert info.eligible.tolist() == [0, 2, 4]
    assert info.largest == 7


def test_the_defaults_of_an_ask() -> None:
    ask = Ask("train", [])
    assert (ask.order, ask.deadline, ask.reduce, dict(ask.shared)) == ("request", None, None, {})
