"""FedNova: normalized averaging at partial participation, where it is FedAvg, and where it ends on quadratics."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.normalized import Normalized
from fedlens.aggregate.server_steps import Momentum
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fednova import fednova
from fedlens.algorithms.fedprox import fedprox
from fedlens.core.protocol import ModelSpec
from fedlens.local.rules import proximal
from tests.identity.identity_kit import (
    SIZES,
    Course,
    Points,
    World,
    bare_client,
    close,
    course,
    mean,
    model,
    parts,
    rng_of,
    same,
    world,
)
from tests.identity.test_fedprox import COUNTS, A, B, Squares, point, quadratics

LR = 0.2
LOCAL = {"lr": LR, "epochs": 2, "batch_size": 4}  # 2, 4, 4, 2, 6, 4 steps
SOLVERS = {
    "sgd": {},
    "momentum": {"momentum": 0.5},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "proximal": {"mu": 0.7},
    "momentum and proximal": {"momentum": 0.5, "mu": 0.7},
}


def length(steps: int, solver: dict) -> float:
    """||a||_1: how far torch's SGD goes, in units of the rate, on a gradient of 1 in one step, for each step."""
    settings, total = dict(solver), 0.0
    mu = settings.pop("mu", 0.0)
    for at in range(steps):
        w = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=LR, **settings)
        for step in range(steps):
            w.grad = (1.0 if step == at else 0.0) + mu * w.detach()
            optimizer.step()
        total += abs(w.item()) / LR
    return total


def steps_of(n: int) -> int:
    return 2 * -(-n // 4)


def bare(run: Course, step, solver: dict, spec=None) -> list[dict]:
    """What each slot of a round comes to in bare PyTorch, the proximal term left to autograd."""
    settings = dict(solver)
    mu, anchor = settings.pop("mu", 0.0), step.before["model"]

    def penalty(module: nn.Module) -> torch.Tensor:
        return mu / 2 * sum(((p - anchor[n]) ** 2).sum() for n, p in module.named_parameters())

    return [
        bare_client(
            spec or model(),
            anchor,
            run.there.data_of(k),
            rng_of(step, slot),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR, **settings),
            epochs=2,
            batch_size=4,
            penalty=penalty if mu else None,
        )
        for slot, k in enumerate(step.cohort)
    ]


def direction(run: Course, step, solver: dict, weights=None) -> tuple[dict, float]:
    """sum_k p_k (w^t - w_k) / ||a_k||_1 and sum_k p_k ||a_k||_1, with p_k over the round's clients."""
    start = step.before["model"]
    weights = weights or [SIZES[k] for k in step.cohort]
    lengths = [length(steps_of(SIZES[k]), solver) for k in step.cohort]
    moved = [
        {n: (start[n] - t[n]) / a for n in start}
        for t, a in zip(bare(run, step, solver), lengths, strict=True)
    ]
    total = sum(weights)
    return mean(moved, weights), sum(w * a for w, a in zip(weights, lengths, strict=True)) / total


def made(there: World, solver: dict, select, **rest):
    local, settings = dict(LOCAL), dict(solver)
    mu = settings.pop("mu", 0.0)
    rule = {"client": proximal(mu=mu)} if mu else {}
    return fednova(parts(there, local | settings, select=select, **rule), **rest)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_update_is_the_normalized_average_over_the_sample(solver: str) -> None:
    there, how = world(), SOLVERS[solver]
    run = course(made(there, how, Uniform(3)), there)
    for step in run.steps:
        d, tau_eff = direction(run, step, how)
        start = step.before["model"]
        close(step.after["model"], {n: start[n] - tau_eff * d[n] for n in start})
    assert len({step.cohort for step in run.steps}) == 4
    assert len({steps_of(SIZES[k]) for step in run.steps for k in step.cohort}) > 1


def test_a_single_client_is_taken_as_it_is_whatever_its_share_of_the_population() -> None:
    """tau_eff d = ||a|| (w - w_k) / ||a||. With weights of the whole population it would be p_k (w - w_k) p_k ..."""
    there = world()
    run = course(made(there, {}, Uniform(1)), there)
    for step in run.steps:
        (end,) = bare(run, step, {})
        close(step.after["model"], end)


@pytest.mark.parametrize("select", [Uniform(3), Everyone()], ids=["three", "all"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_with_equal_steps_it_is_fedavg(select, weighting) -> None:
    there, local = world(), {"lr": LR, "momentum": 0.5, "steps": 5, "batch_size": 4}
    nova = fednova(parts(there, local, select=select, aggregate=Normalized(weighting)))
    plain = fedavg(parts(there, local, select=select, aggregate=Mean(weighting)))
    close(course(nova, there).final, course(plain, there).final, rtol=1e-11, atol=1e-12)


def test_with_equal_steps_and_a_proximal_term_it_is_fedprox() -> None:
    there, local = world(), {"lr": LR, "steps": 5, "batch_size": 4}
    nova = fednova(parts(there, local, select=Uniform(3), client=proximal(mu=2.0)))
    prox = fedprox(parts(there, local, select=Uniform(3)), mu=2.0)
    close(course(nova, there).final, course(prox, there).final, rtol=1e-11, atol=1e-12)


def test_with_uneven_steps_it_is_not_fedavg() -> None:
    there = world()
    nova = course(fednova(parts(there, LOCAL, select=Uniform(3))), there).final
    plain = course(fedavg(parts(there, LOCAL, select=Uniform(3))), there).final
    assert max((nova[n] - plain[n]).abs().max() for n in nova) > 1e-3


def test_with_steps_in_proportion_to_the_examples_it_is_fedavg_with_uniform_weights() -> None:
    """p_k / tau_k is then the same for all; the server's rate is left, which a number for tau_eff makes equal."""
    there, local = world((4, 8, 4, 12, 8, 4)), {"lr": LR, "epochs": 1, "batch_size": 4}
    (step,) = course(fednova(parts(there, local, select=Fixed((0, 1, 3)))), there, rounds=1).steps
    uniform = fedavg(parts(there, local, select=Fixed((0, 1, 3)), aggregate=Mean("uniform")))
    (plain,) = course(uniform, there, rounds=1).steps
    # of 4, 8 and 12 examples: p = 1/6, 1/3, 1/2 and tau = 1, 2, 3, so p / tau = 1/6, and tau_eff = 14/6
    start = step.before["model"]
    for name, value in step.after["model"].items():
        moved = start[name] - plain.after["model"][name]
        torch.testing.assert_close(start[name] - value, 14 / 6 * 3 / 6 * moved, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tau_eff", [1.0, 7.5])
def test_a_number_for_tau_eff_takes_the_place_of_the_mean(tau_eff: float) -> None:
    there = world()
    run = course(made(there, {}, Uniform(3), tau_eff=tau_eff), there)
    for step in run.steps:
        d, _ = direction(run, step, {})
        start = step.before["model"]
        close(step.after["model"], {n: start[n] - tau_eff * d[n] for n in start})


def test_server_momentum_is_the_server_slot() -> None:
    there, how = world(), {"momentum": 0.5}
    algorithm = fednova(parts(there, LOCAL | how, select=Uniform(3), server=Momentum(0.9, 0.8)))
    run = course(algorithm, there, rounds=5)
    v = {n: torch.zeros_like(t) for n, t in run.final.items()}
    for step in run.steps:
        d, tau_eff = direction(run, step, how)
        v = {n: 0.8 * v[n] + tau_eff * d[n] for n in v}
        start = step.before["model"]
        close(step.after["model"], {n: start[n] - 0.9 * v[n] for n in v}, rtol=1e-10, atol=1e-11)


def test_clients_that_do_partial_work_are_divided_by_the_steps_they_did() -> None:
    there, local = world(), {"lr": LR, "steps": 6, "batch_size": "all", "stragglers": 1.0}
    run = course(fednova(parts(there, local, select=Uniform(3))), there, rounds=3)
    asked = {"lr": LR, "steps": 6, "batch_size": "all"}
    for step in run.steps:
        batches = [int(row["batches"]) for row in step.tally.per_client]
        assert all(1 <= b < 6 for b in batches)
        start, moved = step.before["model"], []
        for k, steps in zip(step.cohort, batches, strict=True):
            alone = replace(parts(there, asked | {"steps": steps}, select=Fixed((k,))), model=Held(start))
            (one,) = course(fedavg(alone), there, rounds=1).steps
            moved.append({n: (start[n] - one.after["model"][n]) / steps for n in start})
        weights = [SIZES[k] for k in step.cohort]
        tau_eff = sum(n * b for n, b in zip(weights, batches, strict=True)) / sum(weights)
        d = mean(moved, weights)
        close(step.after["model"], {n: start[n] - tau_eff * d[n] for n in start}, rtol=1e-11, atol=1e-12)


def test_a_refused_client_counts_neither_in_the_mean_nor_in_tau_eff() -> None:
    there = world()
    bad = Points(there.clients[4].inputs * float("nan"), there.clients[4].targets)
    broken = World((*there.clients[:4], bad, there.clients[5]))
    with_it = course(fednova(parts(broken, LOCAL, select=Fixed((1, 3, 4)))), broken, rounds=2)
    without = course(fednova(parts(there, LOCAL, select=Fixed((1, 3)))), there, rounds=2)
    assert with_it.steps[0].tally.failures.keys() == {4}
    assert same(with_it.final, without.final)


@pytest.mark.parametrize("size", [64, 100])
def test_a_large_cohort_is_reduced_in_blocks_to_the_same_sum(size: int) -> None:
    there = world([1 + k % 7 for k in range(size + 3)])
    local = {"lr": LR, "epochs": 1, "batch_size": 2}
    (step,) = course(fednova(parts(there, local, select=Uniform(size))), there, rounds=1).steps
    start, moved, sizes = step.before["model"], [], [len(there.clients[k]) for k in step.cohort]
    steps = [-(-n // 2) for n in sizes]
    for slot, k in enumerate(step.cohort):
        end = bare_client(
            model(),
            start,
            there.data_of(k),
            rng_of(step, slot),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
            batch_size=2,
        )
        moved.append({n: (start[n] - end[n]) / steps[slot] for n in start})
    tau_eff = sum(n * s for n, s in zip(sizes, steps, strict=True)) / sum(sizes)
    d = mean(moved, sizes)
    close(step.after["model"], {n: start[n] - tau_eff * d[n] for n in start})


def test_running_statistics_are_averaged_and_not_normalized() -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True, frozen=True)
    local = {**LOCAL, "batch_size": 20}
    runs = [
        course(make(parts(there, local, spec, select=Uniform(3))), there, 1) for make in (fednova, fedavg)
    ]
    nova, plain = (run.final for run in runs)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "0.weight"):
        assert torch.equal(nova[name], plain[name])
    assert torch.equal(nova["0.weight"], runs[0].steps[0].before["model"]["0.weight"])


# -- one quadratic a client: F_k(w) = a_k / 2 (w - b_k)^2, every batch of a client with the same gradient --------

EPOCHS = 4
STEPS = [EPOCHS * -(-n // 2) for n in COUNTS]  # 4, 16, 8, 12
SHARES = [n / sum(COUNTS) for n in COUNTS]
OPTIMUM = sum(p * a * b for p, a, b in zip(SHARES, A, B, strict=True)) / sum(
    p * a for p, a in zip(SHARES, A, strict=True)
)
# what FedAvg minimizes as its rate goes to 0: the clients weighed by p_k tau_k
INCONSISTENT = sum(p * t * a * b for p, t, a, b in zip(SHARES, STEPS, A, B, strict=True)) / sum(
    p * t * a for p, t, a in zip(SHARES, STEPS, A, strict=True)
)


def fixed_point(lr: float, nova: bool) -> float:
    """Where sum_k m_k (w - b_k) = 0. tau_k steps take w - b_k to (1 - lr a_k)^tau_k (w - b_k), so
    m_k = p_k (1 - (1 - lr a_k)^tau_k), over tau_k for FedNova."""
    m = [p * (1 - (1 - lr * a) ** t) / (t if nova else 1) for p, a, t in zip(SHARES, A, STEPS, strict=True)]
    return sum(x * b for x, b in zip(m, B, strict=True)) / sum(m)


class Held(ModelSpec):
    """A model of these initial weights."""

    def __init__(self, tree, spec=None) -> None:
        super().__init__(**vars(spec or model()))
        vars(self).update(tree=tree, spec=spec or model())

    def build(self, initial: bool = True) -> nn.Module:
        module = self.spec.build()
        module.load_state_dict(dict(self.tree))
        return module


def on_quadratics(make, lr: float, rounds: int, start: float = 4.0) -> list[float]:
    """w after each round, all clients taking part, with uneven steps."""
    there, local = quadratics(), {"lr": lr, "epochs": EPOCHS, "batch_size": 2}
    held = Held({"w": torch.tensor(start, dtype=torch.float64)}, model(factory=point))
    algorithm = make(parts(there, local, held, task=Squares(), select=Everyone()))
    return [float(step.after["model"]["w"]) for step in course(algorithm, there, rounds).steps]


@pytest.mark.parametrize("lr", [0.3, 0.1, 0.01])
@pytest.mark.parametrize("make", [fednova, fedavg])
def test_on_quadratics_a_round_moves_along_the_closed_form_and_its_fixed_point_stays(make, lr: float) -> None:
    nova = make is fednova
    tau_eff = sum(p * t for p, t in zip(SHARES, STEPS, strict=True)) if nova else 1.0
    m = [p * (1 - (1 - lr * a) ** t) / (t if nova else 1) for p, a, t in zip(SHARES, A, STEPS, strict=True)]
    expected = 4.0 - tau_eff * sum(x * (4.0 - b) for x, b in zip(m, B, strict=True))
    assert on_quadratics(make, lr, 1)[0] == pytest.approx(expected, rel=1e-12)
    still = fixed_point(lr, nova)
    assert on_quadratics(make, lr, 2, still)[-1] == pytest.approx(still, rel=1e-12)


@pytest.mark.parametrize("make", [fednova, fedavg])
def test_on_quadratics_it_converges_to_its_own_fixed_point(make) -> None:
    assert on_quadratics(make, 0.1, 40)[-1] == pytest.approx(fixed_point(0.1, make is fednova), rel=1e-9)


def test_only_fednova_reaches_the_optimum_as_the_rate_goes_to_zero() -> None:
    rates = (1e-2, 1e-3, 1e-4, 1e-5)
    errors = [abs(fixed_point(lr, True) - OPTIMUM) for lr in rates]
    assert errors[0] > 0.01  # at a rate above zero it is not the optimum
    ratios = [a / b for a, b in pairwise(errors)]
    assert ratios[1:] == pytest.approx([10, 10], rel=0.02)  # in proportion to the rate
    assert errors[-1] < 1e-3 * abs(OPTIMUM)
    missed = [abs(fixed_point(lr, False) - OPTIMUM) for lr in rates]
    assert fixed_point(1e-6, False) == pytest.approx(INCONSISTENT, rel=1e-4)
    assert min(missed[1:]) > 0.9 * abs(INCONSISTENT - OPTIMUM) > 0.1


def test_at_a_small_rate_the_course_itself_tells_the_two_apart() -> None:
    lr = 1e-3
    for make, goal in ((fednova, OPTIMUM), (fedavg, INCONSISTENT)):
        end = on_quadratics(make, lr, 3, fixed_point(lr, make is fednova))[-1]
        assert end == pytest.approx(goal, abs=0.01)
    assert abs(OPTIMUM - INCONSISTENT) > 0.1
