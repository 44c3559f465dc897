"""The composer: which slot goes before which, and what a paper's file fills."""

import pytest

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server import Momentum, Plain
from fedlens.algorithms import ALGORITHMS
from fedlens.algorithms.averaging import averaging
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.selecting import Everyone, Fixed, Uniform
from fedlens.core.errors import ConfigError
from fedlens.core.registry import read_settings
from fedlens.local.rules import ClientRule, proximal
from tests.identity.identity_kit import parts, world

LOCAL = {"lr": 0.1}


def test_what_each_paper_fills() -> None:
    given = parts(world(), LOCAL)
    assert fedavg(given, lr=0.5).server == Plain(0.5)
    assert fedavgm(given).server == Momentum(1.0, 0.9, False)
    assert fedavgm(given, momentum=0.7, nesterov=True, lr=0.1).server == Momentum(0.1, 0.7, True)
    assert fedprox(given, mu=0.5).train.rule.grad.keywords == {"mu": 0.5}
    assert fedprox(given, mu=0.0).train.rule == ClientRule()
    for algorithm in (fedavg, fedavgm, fedprox):
        made = algorithm(given)
        assert (made.select, made.aggregate) == (Uniform(), Mean())
        assert made.train.rule.grad is None or algorithm is fedprox


def test_a_table_of_the_settings_goes_before_the_paper_and_the_paper_before_the_default() -> None:
    there = world()
    rule = proximal(mu=2.0)
    mine = {"select": Fixed((1,)), "client": rule, "aggregate": Mean("uniform"), "server": Momentum()}
    theirs = {"select": Everyone(), "client": ClientRule(), "aggregate": Mean(), "server": Plain()}
    made = averaging(parts(there, LOCAL, **mine), **theirs)
    assert (made.select, made.train.rule, made.aggregate, made.server) == tuple(mine.values())
    assert made.train.weighting == "uniform"  # the clients say what the aggregate wants
    made = averaging(parts(there, LOCAL), **theirs)
    assert (made.select, made.train.rule, made.aggregate, made.server) == tuple(theirs.values())


def test_a_cohort_beyond_the_population_is_refused_before_anything_starts() -> None:
    there = world()
    made = fedavg(parts(there, LOCAL, select=Uniform(7)))
    with pytest.raises(ConfigError, match="7 clients a round"):
        made.init(made.parts.model, there.info)


@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("fedavg", {"lr": 0}, "algorithm.lr"),
        ("fedavgm", {"momentum": 1.0}, "algorithm.momentum"),
        ("fedavgm", {"beta": 0.9}, "algorithm.beta"),
        ("fedprox", {"mu": -0.1}, "algorithm.mu"),
        ("fedprox", {"mu": "strong"}, "algorithm.mu"),
        ("centralized", {"lr": 1.0}, "algorithm.lr"),
    ],
)
def test_wrong_settings_are_refused(name: str, settings, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(ALGORITHMS.find(name), settings, "algorithm")
    assert caught.value.where == where


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedprox"])
@pytest.mark.parametrize("setting", ["lr", "momentum", "mu"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_setting_takes_what_is_not_a_finite_number(name: str, setting: str, value: float) -> None:
    with pytest.raises(ConfigError):
        read_settings(ALGORITHMS.find(name), {setting: value}, "algorithm")
