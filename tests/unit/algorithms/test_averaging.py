"""The composer: which slot goes before which, and what a paper's file fills."""

from dataclasses import replace

import pytest

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.optimal_convex import OptimalConvex
from fedlens.aggregate.server_steps import Momentum, ServerSGD
from fedlens.algorithms.averaging import Averaging, averaging
from fedlens.algorithms.centralized import Centralized
from fedlens.algorithms.client_sampling import BySize, Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.algorithms.feddane import feddane
from fedlens.algorithms.feddyn import dynamic, feddyn
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.algorithms.scaffold import scaffold
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.algorithm_base import BareAlgorithm
from fedlens.local.rules import ClientRule, ServerRule, proximal
from tests.identity.identity_kit import IN_TWO_PARTS, parts, world

LOCAL = {"lr": 0.1}


def test_what_each_paper_fills() -> None:
    given = parts(world(), LOCAL)
    assert fedavg(given, lr=0.5).server == ServerSGD(0.5)
    assert fedavgm(given).server == Momentum(1.0, 0.9, False)
    assert fedavgm(given, momentum=0.7, nesterov=True, lr=0.1).server == Momentum(0.1, 0.7, True)
    rule = fedprox(given, mu=0.5).train.rule
    assert (rule.grad.keywords, rule.traits.proximal) == ({"traits": rule.traits}, 0.5)
    assert fedprox(given, mu=0.0).train.rule == ClientRule()
    for algorithm in (fedavg, fedavgm, fedprox):
        made = algorithm(given)
        assert (made.select, made.aggregate) == (Uniform(), Mean())
        assert made.train.rule.grad is None or algorithm is fedprox


def test_a_table_of_the_settings_goes_before_the_paper_and_the_paper_before_the_default() -> None:
    there = world()
    rule = proximal(mu=2.0)
    mine = {"select": Fixed((1,)), "client": rule, "aggregate": Mean("uniform"), "server": Momentum()}
    theirs = {"select": Everyone(), "client": ClientRule(), "aggregate": Mean(), "server": ServerSGD()}
    made = averaging(parts(there, LOCAL, **mine), **theirs)
    assert (made.select, made.train.rule, made.aggregate, made.server) == tuple(mine.values())
    assert made.train.weighting == "uniform"  # the clients say what the aggregate wants
    made = averaging(parts(there, LOCAL), **theirs)
    assert (made.select, made.train.rule, made.aggregate, made.server) == tuple(theirs.values())


def test_a_cohort_beyond_the_population_is_refused_before_anything_starts() -> None:
    there = world()
    made = fedavg(parts(there, LOCAL, select=Uniform(7)))
    with pytest.raises(ConfigError, match="7 clients per round"):
        made.init(made.parts.model, there.info)


STEEP = [
    lambda given: fedprox(given, mu=21.0),
    lambda given: feddane(given, mu=21.0),
    lambda given: fedavg(replace(given, client=proximal(mu=21.0))),
    lambda given: scaffold(replace(given, client=proximal(mu=21.0))),
    lambda given: feddyn(replace(given, client=proximal(mu=11.0)), alpha=10.0),  # their sum is
    lambda given: fedprox(replace(given, client=dynamic(alpha=11.0)), mu=10.0),
]


@pytest.mark.parametrize("make", STEEP)
def test_quadratic_terms_that_make_the_steps_diverge_are_refused_whoever_brings_them(make) -> None:
    with pytest.raises(ConfigError, match="SGD on that term alone diverges") as caught:
        make(parts(world(), LOCAL))
    assert (caught.value.where, "below 0.0952381" in caught.value.hint) == ("local.lr", True)
    make(parts(world(), {"lr": 0.095}))


def test_drawn_by_size_and_weighted_by_size_counts_twice() -> None:
    by_size = {"select": BySize(2)}
    with pytest.raises(ConfigError, match="their size counts twice") as caught:
        fedavg(parts(world(), LOCAL, **by_size))
    assert caught.value.where == "select.name"
    assert fedavg(parts(world(), LOCAL, **by_size, aggregate=Mean("uniform"))).select == BySize(2)
    assert fedavg(parts(world(), {"lr": 0.1, "examples": 5, "batch_size": 5}, **by_size)).select == BySize(2)
    assert fedavg(parts(world([6] * 5), LOCAL, **by_size)).select == BySize(2)  # nothing to count twice


@pytest.mark.parametrize(
    ("select", "hint"),
    [
        (Fixed((1, 1)), "name every client once"),
        (BySize(3), "take at most 2 clients a round"),
        (BySize(2, method="replacement"), "take select.method = 'systematic', and at most 2 clients a round"),
    ],
    ids=str,
)
def test_how_a_client_comes_to_appear_once_is_said(select, hint: str) -> None:
    given = parts(world([2, 2, 3]), LOCAL, select=select)
    with pytest.raises(ConfigError, match="keeps a sum over all clients") as caught:
        feddyn(given)
    assert hint in caught.value.hint
    assert feddyn(replace(given, select=BySize(2))).select == BySize(2)


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


# Those that test at the clients, or whose server trains, compute where their data are.
ON_THE_CPU = {"fedbn", "local-only", "finetune", "centralized"} | IN_TWO_PARTS


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - ON_THE_CPU))
def test_state_and_replies_of_every_algorithm_may_stay_on_a_gpu(name: str) -> None:
    made = ALGORITHMS.find(name, where="algorithm.name")(parts(world(), LOCAL))
    assert made.follows_device


class SumOfOnes(Mean):
    def aggregate(self, answers: object, fields: object = None, ctx: object = None) -> None:
        return None


class Own(ServerSGD):
    def step(self, weights: object, update: object, state: object) -> object:
        return weights, state


class Declared(Own):
    follows_device = True


class Composed(Averaging):
    def round(self, state: object, ctx: object) -> object:
        return super().round(state, ctx)


class OwnCentralized(Centralized):
    def round(self, state: object, ctx: object) -> object:
        return super().round(state, ctx)


def test_server_code_that_does_not_declare_where_it_computes_gets_ordinary_memory() -> None:
    given = parts(world(), LOCAL)
    assert not averaging(given, aggregate=SumOfOnes()).follows_device
    assert not averaging(
        given, aggregate=OptimalConvex("test")
    ).follows_device  # it keeps all replies of a round
    assert not averaging(given, server=Own()).follows_device
    assert averaging(given, server=Declared()).follows_device
    rule = ClientRule(name="mine", finish=lambda parameters, context: ({}, None))
    assert averaging(given, client=rule).follows_device  # nothing of it is at the server
    assert not averaging(given, client=replace(rule, server_rules={"mine": ServerRule()})).follows_device
    assert averaging(
        given, client=replace(rule, server_rules={"mine": ServerRule(follows_device=True)})
    ).follows_device
    made = averaging(given)
    assert not Composed(made.parts, made.select, made.train, made.aggregate, made.server).follows_device
    assert not BareAlgorithm(made).follows_device
    assert not OwnCentralized(given, made.train).follows_device
