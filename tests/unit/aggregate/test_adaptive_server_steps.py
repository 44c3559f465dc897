"""Adaptive server steps: pure, positive, and what they refuse."""

import pytest
import torch

from fedlens.aggregate.adaptive_server_steps import Adaptive, adagrad, adam, yogi
from fedlens.aggregate.server_steps import SERVERS
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings

MAKERS = pytest.mark.parametrize("make", [adagrad, adam, yogi])
STEPS = pytest.mark.parametrize(
    "step", [adagrad(), adagrad(beta1=0.5), adam(), adam(bias_correction=True), yogi(), yogi(v0=2.0)], ids=str
)


@STEPS
def test_a_step_changes_none_of_its_inputs(step: Adaptive) -> None:
    weights, update = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    state = step.init(weights)
    for count in (1, 2):
        before = {kind: state[kind]["w"].clone() for kind in ("m", "v")}
        new, later = step.step(weights, update, state)
        assert torch.equal(weights["w"], torch.ones(3))
        assert torch.equal(update["w"], torch.full((3,), 2.0))
        assert all(torch.equal(state[kind]["w"], t) for kind, t in before.items())
        assert (state["steps"], later["steps"]) == (count - 1, count)
        assert new["w"].data_ptr() not in (weights["w"].data_ptr(), update["w"].data_ptr())
        assert (new["w"] < weights["w"]).all()  # against the update
        state = later


@STEPS
def test_it_keeps_the_type_of_the_weights(step: Adaptive) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.float64)}
    new, state = step.step(weights, weights, step.init(weights))
    for tree in (new, state["m"], state["v"]):
        assert {n: t.dtype for n, t in tree.items()} == {"a": torch.float32, "b": torch.float64}


@STEPS
def test_v_is_never_negative_and_no_step_is_infinite(step: Adaptive) -> None:
    g = torch.Generator().manual_seed(0)
    weights = {"w": torch.zeros(1000)}
    state = step.init(weights)
    for round in range(60):
        size = 10.0 ** (round % 7 - 5)  # from 1e-5 to 10, so that Yogi's v goes both ways
        update = {"w": size * torch.randn(1000, generator=g) * (torch.rand(1000, generator=g) < 0.5)}
        weights, state = step.step(weights, update, state)
        assert state["v"]["w"].min() > 0
        assert weights["w"].isfinite().all()


@MAKERS
def test_a_v0_below_tau_squared_is_refused_with_both_numbers(make) -> None:
    with pytest.raises(ConfigError, match=r"v0 is 9e-07, but .* tau\^2 = 1e-06") as caught:
        make(v0=9e-7)
    assert caught.value.where == "v0"
    assert make(v0=1e-6).init({"w": torch.zeros(1)})["v"]["w"].item() == pytest.approx(1e-6)
    assert make(v0=0.01, tau=0.1).v0 == 0.01  # 0.1 ** 2 is 0.010000000000000002
    assert make(v0=3.0, tau=0.1).init({"w": torch.zeros(2)})["v"]["w"].tolist() == [3.0, 3.0]


@MAKERS
def test_defaults_are_the_papers(make) -> None:
    step = make()
    assert (step.tau, step.v0, step.bias_correction) == (1e-3, None, False)
    assert step.beta1 == (0.0 if make is adagrad else 0.9)
    assert make is adagrad or step.beta2 == 0.99


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0}, {"beta1": 1.0}, {"beta1": -0.1}, {"tau": 0}, {"tau": float("inf")}, {"v0": 0}, {"eps": 1}],
)
def test_settings_out_of_range_are_refused_by_their_key(name: str, wrong) -> None:
    (key,) = wrong
    with pytest.raises(ConfigError) as caught:
        read_settings(SERVERS.find(name), wrong, "server")
    assert caught.value.where == f"server.{key}"


def test_adagrad_has_nothing_that_it_would_ignore() -> None:
    for key in ("beta2", "bias_correction"):
        with pytest.raises(ConfigError, match=f"unknown setting '{key}'"):
            read_settings(SERVERS.find("adagrad"), {key: 0.5}, "server")
