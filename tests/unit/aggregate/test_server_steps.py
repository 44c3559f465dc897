"""Server steps are pure: new weights, new state, inputs as they were."""

import pytest
import torch

from fedlens.aggregate.server_steps import SERVERS, Momentum, ServerSGD, momentum
from fedlens.base.errors import ConfigError

STEPS = [ServerSGD(), ServerSGD(0.3), Momentum(), Momentum(0.5, 0.7), Momentum(1.0, 0.9, nesterov=True)]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_changes_none_of_its_inputs(step) -> None:
    weights, update = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    state = step.init(weights)
    for _ in range(2):
        before = {name: t.clone() for name, t in state.get("v", {}).items()}
        new, later = step.step(weights, update, state)
        assert torch.equal(weights["w"], torch.ones(3))
        assert torch.equal(update["w"], torch.full((3,), 2.0))
        assert all(torch.equal(state["v"][n], t) for n, t in before.items())
        assert new["w"].data_ptr() not in (weights["w"].data_ptr(), update["w"].data_ptr())
        state = later


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_first_step_goes_against_the_update(step) -> None:
    weights = {"w": torch.zeros(1, dtype=torch.float64)}
    new, _ = step.step(weights, {"w": torch.ones(1, dtype=torch.float64)}, step.init(weights))
    first = step.lr * (1 + getattr(step, "momentum", 0.0) * getattr(step, "nesterov", False))
    assert new["w"].item() == pytest.approx(-first)


def test_momentum_comes_to_the_effective_rate() -> None:
    """lr / (1 - beta), hsu2019's effective learning rate, for an update that stays the same."""
    step, weights = Momentum(0.1, 0.9), {"w": torch.zeros(1, dtype=torch.float64)}
    state = step.init(weights)
    for _ in range(300):
        before = weights["w"].item()
        weights, state = step.step(weights, {"w": torch.ones(1, dtype=torch.float64)}, state)
    assert before - weights["w"].item() == pytest.approx(0.1 / (1 - 0.9))


def test_the_table_and_what_it_refuses() -> None:
    assert SERVERS.find("plain")(lr=2.0) == ServerSGD(2.0)
    assert SERVERS.find("momentum")(lr=2.0, momentum=0.5, nesterov=True) == Momentum(2.0, 0.5, True)
    with pytest.raises(ConfigError, match="nesterov needs a momentum"):
        momentum(momentum=0.0, nesterov=True)
