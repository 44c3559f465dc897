"""||a||_1 against the closed forms of Wang et al. 2020, against autograd, and against torch's own SGD."""

import pytest
import torch

from fedlens.local.settings import LocalSettings
from fedlens.local.training import effective_steps

STEPS = (1, 2, 3, 7, 20)
SOLVERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.7, "nesterov": True},
    "proximal": {"mu": 0.4},
    "momentum and proximal": {"momentum": 0.9, "mu": 0.4},
    "nesterov and proximal": {"momentum": 0.5, "nesterov": True, "mu": 2.0},
    "proximal beyond 1 / lr": {"mu": 14.0},  # 1 - lr mu is -0.4: the signs of a alternate
}
LR = 0.1
EVERY = pytest.mark.parametrize("solver", SOLVERS)


def ours(solver: str, steps: int) -> float:
    settings = dict(SOLVERS[solver])
    mu = settings.pop("mu", 0.0)
    return effective_steps(LocalSettings(lr=1.0, **settings), LR, steps, mu)


def impulse(solver: str, steps: int, at: int) -> float:
    """How far torch's SGD goes in units of the rate where the task's gradient is 1 in step `at`, and else 0."""
    settings = dict(SOLVERS[solver])
    mu = settings.pop("mu", 0.0)
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=LR, **settings)
    for step in range(steps):
        w.grad = (1.0 if step == at else 0.0) + mu * w.detach()
        optimizer.step()
    return -w.item() / LR


@EVERY
@pytest.mark.parametrize("steps", STEPS)
def test_it_is_the_sum_of_what_torchs_sgd_makes_of_each_gradient(solver: str, steps: int) -> None:
    a = [impulse(solver, steps, at) for at in range(steps)]
    assert ours(solver, steps) == pytest.approx(sum(map(abs, a)), rel=1e-12)


@EVERY
def test_it_is_the_norm_of_the_derivative_by_autograd(solver: str) -> None:
    settings, steps = SOLVERS[solver], 9
    m, mu = settings.get("momentum", 0.0), settings.get("mu", 0.0)
    g = torch.randn(
        steps, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    w, velocity = torch.tensor(3.0, dtype=torch.float64), 0.0
    for t in range(steps):
        direction = g[t] + mu * (w - 3.0)
        velocity = m * velocity + direction
        w = w - LR * (direction + m * velocity if "nesterov" in settings else velocity)
    (slopes,) = torch.autograd.grad(w, g)
    assert ours(solver, steps) == pytest.approx(slopes.abs().sum().item() / LR, rel=1e-12)


@pytest.mark.parametrize("steps", STEPS)
def test_the_closed_forms_of_the_paper(steps: int) -> None:
    assert ours("sgd", steps) == steps
    m = 0.9  # [tau - m (1 - m^tau) / (1 - m)] / (1 - m)
    assert ours("momentum", steps) == pytest.approx(
        (steps - m * (1 - m**steps) / (1 - m)) / (1 - m), rel=1e-12
    )
    shrink = LR * 0.4  # [1 - (1 - eta mu)^tau] / (eta mu)
    assert ours("proximal", steps) == pytest.approx((1 - (1 - shrink) ** steps) / shrink, rel=1e-12)


def test_the_rate_matters_with_a_proximal_term_and_weight_decay_never() -> None:
    """Weight decay is part of the objective, so of the gradients; the proximal term is part of the solver."""
    local = LocalSettings(lr=9.0, momentum=0.5)
    assert effective_steps(local, 0.1, 5) == effective_steps(local, 0.01, 5)
    assert effective_steps(local, 0.1, 5, 1.0) < effective_steps(local, 0.01, 5, 1.0)
    decayed = LocalSettings(lr=9.0, momentum=0.5, weight_decay=0.1)
    assert effective_steps(decayed, 0.1, 5) == effective_steps(local, 0.1, 5)
