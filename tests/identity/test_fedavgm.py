"""FedAvgM: hsu2019's v = beta v + Delta, w = w - v, plain and with Nesterov's momentum."""

from dataclasses import dataclass, field

import pytest
import torch

from fedlens.aggregate.server_steps import Momentum
from fedlens.algorithms.client_sampling import Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from tests.identity.identity_kit import SIZES, close, course, mean, model, parts, same, weights_of, world
from tests.identity.test_fedavg import SGD, trained

HOW = pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])


@dataclass(frozen=True)
class Listening:
    """A server step that remembers the updates it was given."""

    inner: Momentum
    heard: list = field(default_factory=list)

    def init(self, weights):
        return self.inner.init(weights)

    def step(self, weights, update, state):
        self.heard.append({name: value.clone() for name, value in update.items()})
        return self.inner.step(weights, update, state)


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_without_momentum_it_is_fedavg(lr: float) -> None:
    there = world()
    momentum = course(fedavgm(parts(there, SGD, select=Uniform(3)), momentum=0.0, lr=lr), there)
    plain = course(fedavg(parts(there, SGD, select=Uniform(3)), lr=lr), there)
    assert same(momentum.final, plain.final)


def test_the_recursion_of_the_paper_by_hand() -> None:
    there, beta = world(), 0.7
    run = course(fedavgm(parts(there, SGD, select=Uniform(3)), momentum=beta), there, rounds=5)
    w = run.steps[0].before["model"]
    v = {name: torch.zeros_like(value) for name, value in w.items()}
    for step in run.steps:
        average = mean(trained(run, step), [SIZES[k] for k in step.cohort])
        delta = {name: step.before["model"][name] - average[name] for name in w}
        v = {name: beta * v[name] + delta[name] for name in w}
        w = {name: w[name] - v[name] for name in w}
        close(step.after["model"], w, rtol=1e-10, atol=1e-11)
        close(step.after["server"]["v"], v, rtol=1e-10, atol=1e-11)


@HOW
@pytest.mark.parametrize("lr", [1.0, 0.25])
def test_it_is_torchs_sgd_on_the_pseudo_gradient(nesterov: bool, lr: float) -> None:
    there = world()
    server = Listening(Momentum(lr, 0.9, nesterov))
    run = course(fedavg(parts(there, SGD, select=Uniform(3), server=server)), there, rounds=6)
    named = fedavgm(parts(there, SGD, select=Uniform(3)), momentum=0.9, nesterov=nesterov, lr=lr)
    assert same(course(named, there, rounds=6).final, run.final)

    w = {name: value.clone().requires_grad_() for name, value in run.steps[0].before["model"].items()}
    reference = torch.optim.SGD(w.values(), lr=lr, momentum=0.9, nesterov=nesterov)
    for step, heard in zip(run.steps, server.heard, strict=True):
        for name, value in w.items():
            value.grad = heard[name]
        reference.step()
        close(step.after["model"], {n: v.detach() for n, v in w.items()})


@HOW
def test_nesterov_by_hand_in_two_rounds(nesterov: bool) -> None:
    w, state = {"w": torch.tensor([10.0], dtype=torch.float64)}, None
    step = Momentum(1.0, 0.5, nesterov)
    state = step.init(w)
    w, state = step.step(w, {"w": torch.tensor([4.0], dtype=torch.float64)}, state)
    w, state = step.step(w, {"w": torch.tensor([2.0], dtype=torch.float64)}, state)
    # v: 4, then 0.5 * 4 + 2 = 4. Plain: 10 - 4 - 4. Nesterov: 10 - (4 + 2) - (2 + 2).
    assert w["w"].item() == (0.0 if nesterov else 2.0)


def test_momentum_never_touches_statistics_and_variances_stay_positive() -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True)
    local = {**SGD, "batch_size": 20}
    algorithm = fedavgm(parts(there, local, spec, select=Uniform(3)), momentum=0.9)
    run = course(algorithm, there, rounds=15)
    assert set(run.steps[0].before["server"]["v"]) == set(weights_of(run.final))
    for step in run.steps:
        clients = trained(run, step, spec, batch_size=20)
        average = mean(clients, [len(there.clients[k]) for k in step.cohort])
        for name in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(step.after["model"][name], average[name], rtol=1e-12, atol=1e-13)
        assert step.after["model"]["1.running_var"].min() > 0
        assert step.after["model"]["1.num_batches_tracked"] == 2 * step.round


def test_frozen_parameters_have_no_momentum() -> None:
    there, spec = world(), model(frozen=True)
    run = course(fedavgm(parts(there, SGD, spec, select=Uniform(3)), momentum=0.9), there)
    assert "0.weight" not in run.steps[-1].after["server"]["v"]
    assert torch.equal(run.final["0.weight"], run.steps[0].before["model"]["0.weight"])
