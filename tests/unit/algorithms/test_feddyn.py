"""FedDyn: which settings go, which are refused and why."""

import math
from dataclasses import replace

import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Momentum, ServerSGD
from fedlens.algorithms.client_sampling import Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.feddyn import dynamic, feddyn
from fedlens.algorithms.registry import ALGORITHMS, RULES
from fedlens.algorithms.scaffold import control_variate, scaffold
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.protocol import Client
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from tests.identity.identity_kit import SIZES, model, parts, world

LOCAL = {"lr": 0.1, "epochs": 2}


def test_what_the_paper_fills_and_what_goes_before_it() -> None:
    made = feddyn(parts(world(), LOCAL))
    assert (made.select, made.aggregate, made.server) == (Uniform(), Mean("uniform"), ServerSGD())
    assert made.rule.traits.invariant
    assert made.rule.traits.proximal == 0.1
    made = feddyn(parts(world(), LOCAL, aggregate=Mean("examples"), server=Momentum()))
    assert (made.aggregate, made.server) == (Mean("examples"), Momentum())


STEEP = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.5, "nesterov": True},
    {"momentum": 0.9, "nesterov": True},
]


def goes_astray(lr: float, alpha: float, change) -> bool:
    """Whether the steps along alpha w grow, in bare PyTorch."""
    w = torch.ones(1, dtype=torch.float64)
    optimizer = torch.optim.SGD([w], lr=lr, **change)
    for _ in range(400):
        w.grad = alpha * w
        optimizer.step()
    return not math.isfinite(w.item()) or abs(w.item()) > 1


@pytest.mark.parametrize("change", STEEP, ids=str)
@pytest.mark.parametrize("nearly", [0.97, 1.03])
def test_a_quadratic_term_is_refused_where_it_alone_diverges(change, nearly: float) -> None:
    m = change.get("momentum", 0.0)
    alpha = 5.0
    lr = nearly * 2 * (1 + m) / (1 + 2 * m if change.get("nesterov") else 1) / alpha
    assert goes_astray(lr, alpha, change) == (nearly > 1)
    there = world()
    if nearly < 1:
        assert feddyn(parts(there, LOCAL | change | {"lr": lr}), alpha=alpha).rule.name == "dynamic"
        return
    for make in (
        lambda given: feddyn(parts(there, given), alpha=alpha),
        lambda given: fedavg(parts(there, given, client=dynamic(alpha=alpha))),
    ):
        with pytest.raises(ConfigError, match="diverges") as caught:
            make(LOCAL | change | {"lr": lr})
        assert caught.value.where == "local.lr"
        assert f"below {lr / nearly:g}" in caught.value.hint


@pytest.mark.parametrize(
    "change", [{"optimizer": "adam", "lr": 10.0}, {"clip_norm": 1.0}, {"weight_decay": 0.1}], ids=str
)
def test_any_local_solver_goes(change) -> None:
    assert feddyn(parts(world(), LOCAL | change), alpha=1.0).rule.name == "dynamic"


@pytest.mark.parametrize(("weighting", "at"), [("uniform", 3), ("examples", 3), ("examples", 4)])
def test_normalized_averaging_is_told_of_the_quadratic_term_of_each_client(weighting: str, at: int) -> None:
    """Client 3 has one example and client 4 twelve, where the mean is 35 / 6."""
    there, alpha, share = world(), 1.0, 1.0 if weighting == "uniform" else SIZES[at] / (35 / 6)
    local = {"lr": 0.1, "steps": 3, "batch_size": "all"}
    made = feddyn(parts(there, local), alpha=alpha, weighting=weighting)
    train = replace(made.train, normalized=True)
    payload = {"model": tree_of(model().build()), "lr": 0.1}
    payload |= {"mean_examples": 35 / 6} if weighting == "examples" else {}
    client = Client(at, there.clients[at], {}, Secrets((0,)), {}, torch.device("cpu"))
    own = min(1.0, share) * alpha / share
    expected = sum((1 - 0.1 * own) ** t for t in range(3))
    assert train(payload, client, Rng((0,))).payload["tau"] == pytest.approx(expected, rel=1e-12)


def test_a_client_twice_in_a_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="a client can appear twice") as caught:
        feddyn(parts(world(), LOCAL, select=Fixed((0, 1, 0))))
    assert caught.value.where == "select"


def test_the_rule_is_there_once() -> None:
    with pytest.raises(ConfigError, match="'dynamic' is set twice"):
        feddyn(parts(world(), LOCAL, client=dynamic()))


def test_two_corrections_of_one_drift_are_refused() -> None:
    for make, rule in ((feddyn, control_variate()), (scaffold, dynamic())):
        with pytest.raises(ConfigError, match="both correct a client's drift"):
            make(parts(world(), LOCAL, client=rule))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"alpha": 0}, "alpha"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("inf")}, "alpha"),
        ({"weighting": "size"}, "weighting"),
        ({"mu": 0.1}, "mu"),
    ],
)
def test_wrong_settings_are_refused(settings, where: str) -> None:
    for registry, name, table in ((ALGORITHMS, "feddyn", "algorithm"), (RULES, "dynamic", "client")):
        with pytest.raises(ConfigError) as caught:
            read_settings(registry.find(name), settings, table)
        assert caught.value.where == f"{table}.{where}"
