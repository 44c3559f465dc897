"""FedOpt: Algorithm 2 of Reddi et al. 2021 step by step, and what no server optimizer may touch."""

import math

import pytest
import torch

from fedlens.aggregate.adaptive_server_steps import Adaptive, adagrad, adam, yogi
from fedlens.aggregate.server_steps import SERVERS, momentum
from fedlens.algorithms.client_sampling import Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from tests.covering import covering
from tests.identity.identity_kit import SIZES, close, course, mean, model, parts, same, world
from tests.identity.test_fedavg import SGD, trained
from tests.identity.test_fedavgm import Listening

ALGORITHMS = {"adagrad": fedadagrad, "adam": fedadam, "yogi": fedyogi}
KINDS = pytest.mark.parametrize("kind", ALGORITHMS)


def second(kind: str, v: torch.Tensor, delta: torch.Tensor, beta2: float) -> torch.Tensor:
    """v of Algorithm 2, the sign written as three cases."""
    if kind == "adagrad":
        return v + delta**2
    if kind == "adam":
        return beta2 * v + (1 - beta2) * delta**2
    share = (1 - beta2) * delta**2
    return torch.where(v > delta**2, v - share, torch.where(v < delta**2, v + share, v))


@KINDS
def test_the_recursion_of_algorithm_2_with_sampled_unequal_clients(kind: str) -> None:
    there, settings = world(), {"lr": 0.3, "tau": 0.05, "v0": 0.004}
    beta1, beta2 = (0.0, 0.0) if kind == "adagrad" else (0.8, 0.7)
    betas = {"beta1": beta1} | ({} if kind == "adagrad" else {"beta2": beta2})
    made = ALGORITHMS[kind](parts(there, SGD, select=Uniform(3)), **settings, **betas)
    run = course(made, there, rounds=6)
    w = run.steps[0].before["model"]
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.full_like(value, 0.004) for name, value in w.items()}
    for step in run.steps:
        average = mean(trained(run, step), [SIZES[k] for k in step.cohort])
        delta = {name: average[name] - step.before["model"][name] for name in w}  # the paper's sign
        m = {name: beta1 * m[name] + (1 - beta1) * delta[name] for name in w}
        v = {name: second(kind, v[name], delta[name], beta2) for name in w}
        w = {name: w[name] + 0.3 * m[name] / (torch.sqrt(v[name]) + 0.05) for name in w}
        close(step.after["model"], w, rtol=1e-9, atol=1e-10)
        close(step.after["server"]["v"], v, rtol=1e-9, atol=1e-10)
    assert len({step.cohort for step in run.steps}) > 1


def three_steps(step: Adaptive, deltas=(2.0, -4.0, 1.0)) -> tuple[list[float], list[float], list[float]]:
    """m, v and w after each of the steps, from w = 10."""
    w = {"w": torch.tensor([10.0], dtype=torch.float64)}
    state, seen = step.init(w), []
    for delta in deltas:
        w, state = step.step(w, {"w": torch.tensor([delta], dtype=torch.float64)}, state)
        seen.append((state["m"]["w"].item(), state["v"]["w"].item(), w["w"].item()))
    return tuple(map(list, zip(*seen, strict=True)))


def test_three_steps_of_adagrad_by_hand() -> None:
    m, v, w = three_steps(adagrad(lr=0.5, tau=1.0, v0=5.0))
    assert m == [2.0, -4.0, 1.0]
    assert v == [9.0, 25.0, 26.0]  # 5 + 4, + 16, + 1
    first = 10 - 0.5 * 2 / (3 + 1)
    assert w[:2] == pytest.approx([first, first + 0.5 * 4 / (5 + 1)], rel=1e-14)
    assert w[2] == pytest.approx(w[1] - 0.5 * 1 / (math.sqrt(26) + 1), rel=1e-14)


def test_three_steps_of_adam_by_hand() -> None:
    m, v, w = three_steps(adam(lr=0.5, beta1=0.5, beta2=0.75, tau=1.0))
    # m: 0.5 * 0 + 0.5 * 2; 0.5 * 1 - 0.5 * 4; -0.5 * 1.5 + 0.5 * 1
    assert m == [1.0, -1.5, -0.25]
    # v: 0.75 * 1 + 0.25 * 4; 0.75 * 1.75 + 0.25 * 16; 0.75 * 5.3125 + 0.25
    assert v == [1.75, 5.3125, 4.234375]
    first = 10 - 0.5 * 1 / (math.sqrt(1.75) + 1)
    then = first + 0.5 * 1.5 / (math.sqrt(5.3125) + 1)
    assert w == pytest.approx([first, then, then + 0.5 * 0.25 / (math.sqrt(4.234375) + 1)], rel=1e-14)


def test_three_steps_of_yogi_by_hand() -> None:
    m, v, w = three_steps(yogi(lr=0.5, beta1=0.5, beta2=0.75, tau=1.0, v0=8.0))
    assert m == [1.0, -1.5, -0.25]
    # 8 > 4, so 8 - 0.25 * 4; 7 < 16, so 7 + 0.25 * 16; 11 > 1, so 11 - 0.25 * 1
    assert v == [7.0, 11.0, 10.75]
    first = 10 - 0.5 * 1 / (math.sqrt(7) + 1)
    then = first + 0.5 * 1.5 / (math.sqrt(11) + 1)
    assert w == pytest.approx([first, then, then + 0.5 * 0.25 / (math.sqrt(10.75) + 1)], rel=1e-14)


def test_yogis_v_stays_where_it_equals_the_square_of_the_update() -> None:
    _, v, _ = three_steps(yogi(tau=1.0, v0=4.0), deltas=(2.0, -2.0))
    assert v == [4.0, 4.0]


@pytest.mark.parametrize("step", [adam, yogi])
def test_bias_correction_by_hand_and_only_where_asked_for(step) -> None:
    settings = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "tau": 1.0, "v0": 8.0}
    m, v, plain = three_steps(step(**settings))
    again, also, corrected = three_steps(step(**settings, bias_correction=True))
    assert (m, v) == (again, also)  # what is kept is the same
    w = 10.0
    for t in (1, 2, 3):
        first, size = m[t - 1] / (1 - 0.5**t), v[t - 1] / (1 - 0.75**t)
        w -= 0.5 * first / (math.sqrt(size) + 1)
        assert corrected[t - 1] == pytest.approx(w, rel=1e-14)
    assert corrected[0] != plain[0]


def test_v_starts_at_tau_squared_and_so_the_first_step_is_never_beyond_the_rate() -> None:
    tiny = {"w": torch.tensor([1e-9], dtype=torch.float64)}
    for make in (adagrad, adam, yogi):
        step = make(lr=1.0, tau=1e-3, beta1=0.0)
        assert step.init(tiny)["v"]["w"].item() == 1e-6
        w, _ = step.step({"w": torch.zeros(1, dtype=torch.float64)}, tiny, step.init(tiny))
        # v_0 of 0 with a small tau would give a step of the whole rate
        assert w["w"].item() == pytest.approx(-1e-9 / 2e-3, rel=1e-2)


@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_it_is_torchs_optimizer_on_the_pseudo_gradient_where_the_forms_agree(kind: str) -> None:
    """Adam: with bias correction and a v_0 next to nothing, tau being its eps. Adagrad: as it is."""
    there = world()
    tau = 1e-8 if kind == "adam" else 0.01
    inner = adam(lr=0.05, tau=tau, bias_correction=True) if kind == "adam" else adagrad(lr=0.05, tau=tau)
    server = Listening(inner)
    run = course(fedavg(parts(there, SGD, select=Uniform(3), server=server)), there, rounds=8)
    w = {name: value.clone().requires_grad_() for name, value in run.steps[0].before["model"].items()}
    reference = (
        torch.optim.Adam(w.values(), lr=0.05, betas=(0.9, 0.99), eps=tau)
        if kind == "adam"
        else torch.optim.Adagrad(w.values(), lr=0.05, initial_accumulator_value=tau**2, eps=tau)
    )
    for step, heard in zip(run.steps, server.heard, strict=True):
        for name, value in w.items():
            value.grad = heard[name]
        reference.step()
        close(step.after["model"], {n: v.detach() for n, v in w.items()}, rtol=1e-9, atol=1e-10)


@KINDS
def test_where_v_stays_at_tau_squared_it_is_server_momentum_at_half_the_rate_over_tau(kind: str) -> None:
    there, tau = world(), 1e7
    # m is FedAvgM's v times 1 - beta_1, and sqrt(v) + tau is 2 tau
    settings = {"lr": 0.8 * 2 * tau / (1 - 0.9), "beta1": 0.9, "tau": tau}
    settings |= {} if kind == "adagrad" else {"beta2": 1 - 1e-15}
    adaptive = course(ALGORITHMS[kind](parts(there, SGD, select=Uniform(3)), **settings), there)
    server = momentum(lr=0.8, momentum=0.9)
    plain = course(fedavg(parts(there, SGD, select=Uniform(3), server=server)), there)
    close(adaptive.final, plain.final, rtol=1e-9, atol=1e-10)


@KINDS
def test_the_named_algorithm_is_fedavg_with_that_server_step(kind: str) -> None:
    there = world()
    named = course(ALGORITHMS[kind](parts(there, SGD, select=Uniform(3))), there)
    slot = course(fedavg(parts(there, SGD, select=Uniform(3), server=SERVERS.find(kind)())), there)
    assert same(named.final, slot.final)


def test_the_clients_rate_decays_by_the_local_settings() -> None:
    there = world()
    local = {"lr": 0.2, "steps": 1, "batch_size": "all", "lr_decay": 0.5}
    server = Listening(adam(lr=1e-12))  # the model stays where it is, so updates differ by the rate alone
    made = fedadam(parts(there, local, select=Uniform(len(SIZES)), server=server))
    course(made, there, rounds=3)
    for name, first in server.heard[0].items():
        torch.testing.assert_close(server.heard[2][name], first / 4, rtol=1e-6, atol=1e-12)


# -- what a server optimizer never touches ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "frozen"), covering(list(SERVERS), {"all trained": False, "frozen": True}))
def test_no_server_step_touches_statistics_counters_or_frozen_weights(name: str, frozen: bool) -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True, frozen=frozen)
    made = fedavg(
        parts(there, {**SGD, "batch_size": 20}, spec, select=Uniform(3), server=SERVERS.find(name)())
    )
    run = course(made, there, rounds=15)
    trained_leaves = {n for n, p in spec.build().named_parameters() if p.requires_grad}
    start = run.steps[0].before["model"]
    for step in run.steps:
        for tree in step.after["server"].values():
            assert not isinstance(tree, dict) or set(tree) == trained_leaves
        clients = trained(run, step, spec, batch_size=20)
        average = mean(clients, [len(there.clients[k]) for k in step.cohort])
        for leaf in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(step.after["model"][leaf], average[leaf], rtol=1e-12, atol=1e-13)
        assert step.after["model"]["1.running_var"].min() > 0
        assert step.after["model"]["1.num_batches_tracked"] == 2 * step.round
        assert torch.equal(step.after["model"]["0.weight"], start["0.weight"]) == frozen
    assert not torch.equal(run.final["4.weight"], start["4.weight"])


def test_a_momentum_of_09_on_a_variance_would_drive_it_below_zero() -> None:
    """What the test above is there for: the same step, had it been given the running variance as well."""
    step = momentum(momentum=0.9)
    variance = {"v": torch.ones(1)}
    state, least = step.init(variance), 1.0
    for _ in range(5):
        variance, state = step.step(variance, {"v": variance["v"] - 0.05}, state)
        least = min(least, variance["v"].item())
    assert least < 0
