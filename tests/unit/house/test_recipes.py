"""The recipes say what they are, can be built, and say what their papers say."""

from __future__ import annotations

import pytest

from fedlens import Experiment
from fedlens.experiment.build import plan
from fedlens.experiment.config_source import read_source, recipes

FASHION = [f"fashion-mnist/{a}-{p}" for a in ("fedavg", "fedprox", "centralized") for p in ("iid", "shards")]
CIFAR = ["cifar10/fedavg-dirichlet", "cifar10/fedavgm-dirichlet"]


def test_they_are_these() -> None:
    assert sorted(recipes()) == sorted(["digits", "digits-centralized", *FASHION, *CIFAR])


@pytest.mark.parametrize("name", ["digits", *FASHION, *CIFAR])
def test_a_recipe_says_what_it_is_and_every_setting_is_right(name: str) -> None:
    first, second, *_ = recipes()[name].read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    assert first.endswith(".")
    assert second == "#", "the first comment line is the whole description"
    config = plan(Experiment.load(name).config, read_source(name)).config
    assert config.name == name.replace("/", "-"), "the runs of a recipe lie under its name"


@pytest.mark.parametrize("name", FASHION)
def test_ghaemi2022(name: str) -> None:
    config = Experiment.load(name).config
    local = config.local
    assert (local.batch_size, local.lr, local.momentum) == (128, 0.05, 0.9)
    assert config.data.partition["clients"] == 100
    if "centralized" in name:
        assert config.rounds * (local.epochs or 1) == 10
    else:
        assert (config.rounds, local.epochs, config.select) == (80, 10, {"name": "uniform", "fraction": 0.1})
    if "fedprox" in name:
        assert config.algorithm == {"name": "fedprox", "mu": 3.0}


@pytest.mark.parametrize("name", CIFAR)
def test_hsu2019(name: str) -> None:
    config = Experiment.load(name).config
    local = config.local
    assert (local.batch_size, local.epochs, local.weight_decay, local.lr_decay) == (64, 1, 0.004, 1.0)
    assert config.data.partition == {"name": "dirichlet", "clients": 100, "alpha": 0.1}
    assert config.select == {"name": "uniform", "fraction": 0.1}
    assert local.lr in [a * 10.0**e for e in (-4, -3, -2, -1) for a in (1, 3)]


def test_fedavgm_and_fedavg_have_the_same_effective_rate() -> None:
    fedavg, fedavgm = (Experiment.load(name).config for name in CIFAR)
    beta = fedavgm.algorithm["momentum"]
    assert fedavgm.algorithm == {"name": "fedavgm", "momentum": 0.9, "nesterov": True, "lr": 1.0}
    assert fedavgm.local.lr / (1 - beta) == pytest.approx(fedavg.local.lr)
