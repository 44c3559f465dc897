"""The recipes say what they are, can be built, and say what their papers say."""

from __future__ import annotations

import pytest

from fedlens import Experiment
from fedlens.experiment.build import plan
from fedlens.experiment.config_source import read_source, recipes

FASHION = [f"fashion-mnist/{a}-{p}" for a in ("fedavg", "fedprox", "centralized") for p in ("iid", "shards")]
CIFAR = ["cifar10/fedavg-dirichlet", "cifar10/fedavgm-dirichlet"]
TABLE_2 = [
    *(
        f"fedcv/table2-cifar100-{m}-{p}"
        for m in ("efficientnet", "mobilenet")
        for p in ("centralized", "a0.1", "a0.5", "a100")
    ),
    *(
        f"fedcv/table2-gld23k-{m}-{p}"
        for m in ("efficientnet", "mobilenet", "vit")
        for p in ("centralized", "natural")
    ),
]
TABLES = [f"fedcv/table{number}" for number in range(11, 16)]
LAPTOP = ["fedcv/cifar100-laptop", "omniglot/drawers"]


def test_they_are_these() -> None:
    assert sorted(recipes()) == sorted(
        ["digits", "digits-centralized", *FASHION, *CIFAR, *TABLE_2, *TABLES, *LAPTOP]
    )


@pytest.mark.parametrize("name", ["digits", *FASHION, *CIFAR, *TABLE_2, *TABLES, *LAPTOP])
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


# Learning rates of He et al. 2021, table 2, by dataset and model: centralized, then the federated rows.
RATES = {
    ("cifar100", "efficientnet"): (0.01, 0.003, 0.01, 0.003),
    ("cifar100", "mobilenet"): (0.01, 0.003, 0.01, 0.003),
    ("gld23k", "efficientnet"): (0.3, 0.1),
    ("gld23k", "mobilenet"): (0.3, 0.03),
    ("gld23k", "vit"): (0.03, 0.03),
}
MODELS = {"efficientnet": "efficientnet-b0", "mobilenet": "mobilenet-v3-large", "vit": "vit-b-16"}


@pytest.mark.parametrize(("dataset", "model"), RATES)
def test_fedcv_table_2(dataset: str, model: str) -> None:
    names = [name for name in TABLE_2 if name.startswith(f"fedcv/table2-{dataset}-{model}-")]
    configs = [Experiment.load(name).config for name in names]
    assert tuple(config.local.lr for config in configs) == RATES[dataset, model]
    for config in configs:
        assert (config.local.momentum, config.local.epochs, config.data.normalize) == (0.9, 1, "half")
        assert config.model == {"name": MODELS[model], "weights": "imagenet"}
        assert config.data.dataset["name"] == dataset
    centralized, *federated = configs
    assert (centralized.algorithm["name"], centralized.local.batch_size, centralized.local.lr_decay) == (
        "centralized",
        256,
        0.97,
    )
    for config in federated:
        assert config.rounds == (8000 if model == "vit" else 4000)
        assert (config.local.batch_size, config.local.lr_decay, config.evaluation.every) == (32, 1.0, 100)
        assert config.select == {"name": "uniform", "clients_per_round": 10}
    if dataset == "cifar100":
        alphas = [config.data.partition["alpha"] for config in federated]
        assert alphas == [0.1, 0.5, 100.0]


def test_the_tables_of_fedcv_are_cells_of_table_2_or_beside_it() -> None:
    lrs = {name: Experiment.load(name).config.local.lr for name in TABLES}
    assert list(lrs.values()) == [0.01, 0.01, 0.1, 0.03, 0.03]
