"""FedNova's slots: what it fills, and what it refuses."""

import pytest

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.normalized import Normalized
from fedlens.aggregate.server_steps import Momentum, ServerSGD
from fedlens.algorithms.fednova import fednova
from fedlens.base.errors import ConfigError
from fedlens.local.rules import ClientRule, Solved, proximal
from tests.identity.identity_kit import parts, world

LOCAL = {"lr": 0.1}


def test_what_it_fills_and_what_a_table_replaces() -> None:
    made = fednova(parts(world(), LOCAL), tau_eff=4.0, lr=0.5)
    assert (made.aggregate, made.server) == (Normalized("examples", 4.0), ServerSGD(0.5))
    assert made.train.normalized
    mine = Normalized("uniform")
    made = fednova(parts(world(), LOCAL, aggregate=mine, server=Momentum(), client=proximal(mu=0.2)))
    assert (made.aggregate, made.server, made.train.rule.traits.proximal) == (mine, Momentum(), 0.2)
    assert made.train.weighting == "uniform"


def test_another_aggregate_would_undo_it() -> None:
    with pytest.raises(ConfigError, match="FedNova defines the aggregate") as caught:
        fednova(parts(world(), LOCAL, aggregate=Mean()))
    assert caught.value.where == "aggregate.name"


def test_updates_that_are_no_sum_of_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match="adam takes none") as caught:
        fednova(parts(world(), LOCAL | {"optimizer": "adam"}))
    assert caught.value.where == "local.optimizer"
    solver = ClientRule(name="exact", solve=lambda context: Solved([], 0.0, 0, 0))
    with pytest.raises(ConfigError, match="a local solver takes none"):
        fednova(parts(world(), LOCAL, client=solver))
