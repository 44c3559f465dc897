"""ADMM, CEADMM, ICEADMM, LIADMM: the documents' unscaled equations, and where they lead.

The loops here know pi_i and sigma_i as the documents write them, and no code of fedlens but the model's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.algorithms.admm import admm, ceadmm, dual, iceadmm, liadmm
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientStates, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from tests.covering import covering
from tests.identity.identity_kit import (
    EXACT,
    FEATURES,
    SIZES,
    LossOnly,
    Points,
    Step,
    World,
    bare_client,
    close,
    course,
    model,
    parts,
    rng_of,
    same,
    weights_of,
    world,
)

FULL = {"lr": 0.1, "batch_size": "all"}
Vector = dict[str, Tensor]


def gradient(spec, weights: Mapping[str, Tensor], points: Points) -> Vector:
    """grad f_i over all of a client's points, by autograd in bare PyTorch."""
    module = spec.build()
    module.load_state_dict(dict(weights))
    module.train()
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    loss = nn.functional.cross_entropy(module(points.inputs), points.targets)
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def plus(*terms: tuple[float, Mapping[str, Tensor]]) -> Vector:
    return {n: sum(c * t[n] for c, t in terms) for n in terms[0][1]}  # type: ignore[misc]


@dataclass
class Literal:
    """Variables of all clients, as the documents write them: x_i, pi_i, sigma_i, w_i."""

    sigma: list[float]
    w: list[float]
    initial: Vector
    x: dict[int, Vector] = field(default_factory=dict)
    pi: dict[int, Vector] = field(default_factory=dict)

    def of(self, i: int, y: Vector) -> tuple[Vector, Vector]:
        zero = plus((0.0, y))
        return self.x.get(i, y), self.pi.get(i, zero)

    def server(self, clients: Sequence[int]) -> Vector:
        """Eq. 2.16, 3.1: sum sigma_i x_i / sigma + sum pi_i / sigma."""
        total = sum(self.sigma[i] for i in clients)
        zero = plus((0.0, self.initial))
        return plus(
            *[(self.sigma[i] / total, self.x.get(i, self.initial)) for i in clients],
            *[(1 / total, self.pi.get(i, zero)) for i in clients],
        )


def weightings(name: str, clients: Sequence[int]) -> list[float]:
    """w_i for every client, relative to these."""
    share = SIZES if name == "examples" else [1.0] * len(SIZES)
    return [n / sum(share[i] for i in clients) for n in share]


WEIGHTINGS = pytest.mark.parametrize("weighting", ["examples", "uniform"])


# -- LIADMM -------------------------------------------------------------------------------------------------------


@WEIGHTINGS
@pytest.mark.parametrize("gamma", [None, 0.03])
def test_liadmm_is_equations_4_4_to_4_6_with_sampled_clients(weighting: str, gamma: float | None) -> None:
    there = world()
    made = parts(there, FULL, select=Uniform(3), aggregate=Mean(weighting))
    run = course(liadmm(made, gamma=gamma), there, rounds=6)
    step_size = gamma or 0.1
    x: dict[int, Vector] = {}
    pi: dict[int, Vector] = {}
    for step in run.steps:
        y, w = dict(step.before["model"]), weightings(weighting, step.cohort)
        for i in step.cohort:
            # pi_i was kept under the weights of another sample: what stays is pi_i / w_i.
            scaled = pi.get(i, plus((0.0, y)))
            g = gradient(model(), y, there.data_of(i))
            before = plus((w[i], scaled))
            x[i] = plus((1.0, y), (-step_size, g), (-step_size / w[i], before))  # 4.5
            now = plus((1.0, before), (w[i] / step_size, x[i]), (-w[i] / step_size, y))  # 4.6
            close(now, plus((-w[i], g)))
            pi[i] = plus((1 / w[i], now))
        clients = step.cohort
        summed = plus(*[(w[i], x[i]) for i in clients], *[(step_size * w[i], pi[i]) for i in clients])  # 4.4
        close(step.after["model"], summed)
    assert len({step.cohort for step in run.steps}) > 1
    assert len(pi) > 3


@WEIGHTINGS
def test_liadmm_with_all_clients_is_optimistic_gradient_descent(weighting: str) -> None:
    there = world()
    run = course(liadmm(parts(there, FULL, select=Everyone(), aggregate=Mean(weighting))), there, rounds=6)
    w, before = weightings(weighting, range(len(SIZES))), None
    for step in run.steps:
        x = dict(step.before["model"])
        g = plus(*[(w[i], gradient(model(), x, there.data_of(i))) for i in range(len(SIZES))])
        # the first step has no gradient before it: x - 2 gamma g
        moved = plus((2.0, g)) if before is None else plus((2.0, g), (-1.0, before))
        close(step.after["model"], plus((1.0, x), (-0.1, moved)))
        before = g


def test_liadmm_keeps_minus_the_gradient_as_its_dual() -> None:
    there, states = world(), ClientStates()
    run = rounds_of(liadmm(parts(there, FULL, select=Uniform(3))), there, states, 4)
    last = {k: step for step in run for k in step.cohort}
    assert len(last) > 3
    for k, step in last.items():
        g = gradient(model(), step.before["model"], there.data_of(k))
        close(states.get(k)["dual"], plus((-1.0, g)))


def test_liadmm_gamma_is_the_rounds_learning_rate() -> None:
    there = world()
    decayed = {"lr": 0.1, "lr_decay": 0.5, "batch_size": "all"}
    run = course(liadmm(parts(there, decayed, select=Fixed((2,)))), there, rounds=2)
    for step, gamma in zip(run.steps, (0.1, 0.05), strict=True):
        x = step.before["model"]
        g = gradient(model(), x, there.data_of(2))
        before = (
            plus((0.0, g))
            if step.round == 1
            else gradient(model(), run.steps[0].before["model"], there.data_of(2))
        )
        close(step.after["model"], plus((1.0, x), (-2 * gamma, g), (gamma, before)))


def test_liadmm_takes_weight_decay_as_part_of_the_objective() -> None:
    there = world()
    run = course(liadmm(parts(there, FULL | {"weight_decay": 0.3}, select=Fixed((2,)))), there, rounds=1)
    x = run.steps[0].before["model"]
    g = plus((1.0, gradient(model(), x, there.data_of(2))), (0.3, x))
    close(run.final, plus((1.0, x), (-0.2, g)))


def test_liadmm_over_one_batch_takes_the_gradient_of_one_batch() -> None:
    there, local = world(), {"lr": 0.1, "batch_size": 4}
    run = course(liadmm(parts(there, local, select=Fixed((4,))), gradient="batch"), there, rounds=1)
    (step,) = run.steps
    at = torch.randperm(12, generator=rng_of(step, 0).torch("batches"))[:4]
    g = gradient(model(), step.before["model"], there.data_of(4).take(at))
    close(run.final, plus((1.0, step.before["model"]), (-0.2, g)))
    assert [row["examples"] for row in step.tally.per_client] == [4]
    assert step.tally.batches_max == 1


def test_liadmm_by_training_goes_twice_the_update_less_the_one_before() -> None:
    """With local training in the gradient's place: x - gamma (2 Delta / gamma - Delta_before / gamma)."""
    there, local = world(), {"lr": 0.1, "momentum": 0.9, "epochs": 2, "batch_size": 4}
    run = course(liadmm(parts(there, local, select=Uniform(3)), gradient="training"), there, rounds=5)
    before: dict[int, Vector] = {}
    for step in run.steps:
        y, w = step.before["model"], weightings("examples", step.cohort)
        moved = []
        for slot, k in enumerate(step.cohort):
            trained = bare_client(
                model(), y, there.data_of(k), rng_of(step, slot), optimizer=heavy, epochs=2, batch_size=4
            )
            delta = plus((1.0, y), (-1.0, trained))
            moved.append((w[k], plus((2.0, delta), (-1.0, before.get(k, plus((0.0, delta)))))))
            before[k] = delta
        close(step.after["model"], plus((1.0, y), *[(-c, m) for c, m in moved]))


def test_liadmm_by_training_weighs_the_update_before_by_the_rates_where_they_fall() -> None:
    """x - (2 Delta - gamma / gamma_before Delta_before): gamma drops out only where it is constant."""
    there, local = world(), {"lr": 0.1, "lr_decay": 0.5, "batch_size": "all"}
    run = course(liadmm(parts(there, local, select=Everyone()), gradient="training"), there, rounds=3)
    before: dict[int, Vector] = {}
    for step in run.steps:
        y, w, rate = step.before["model"], weightings("examples", step.cohort), 0.1 * 0.5 ** (step.round - 1)
        moved = []
        for slot, k in enumerate(step.cohort):
            trained = bare_client(
                model(),
                y,
                there.data_of(k),
                rng_of(step, slot),
                optimizer=lambda p, lr=rate: torch.optim.SGD(p, lr=lr),
            )
            delta = plus((1.0, y), (-1.0, trained))
            moved.append((w[k], plus((2.0, delta), (-0.5, before.get(k, plus((0.0, delta)))))))
            before[k] = delta
        close(step.after["model"], plus((1.0, y), *[(-c, m) for c, m in moved]))


def heavy(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_liadmm_by_one_full_batch_of_training_is_liadmm() -> None:
    there = world()
    one = course(liadmm(parts(there, FULL | {"steps": 1}, select=Uniform(3)), gradient="training"), there)
    close(one.final, course(liadmm(parts(there, FULL, select=Uniform(3))), there).final)


def test_liadmm_repeated_with_the_model_held_is_a_plain_gradient_step() -> None:
    """Why liadmm has no k_0: the second pass through Eq. 4.5 and 4.6 gives x_i = x, and z_i = x - gamma g."""
    there, gamma = world(), 0.1
    x = dict(model().build().state_dict())
    g, dual_ = gradient(model(), x, there.data_of(2)), plus((0.0, x))
    for again in range(3):
        x_i = plus((1.0, x), (-gamma, g), (-gamma, dual_))
        dual_ = plus((1.0, dual_), (1 / gamma, x_i), (-1 / gamma, x))
        if again:
            close(x_i, x)
    close(plus((1.0, x_i), (gamma, dual_)), plus((1.0, x), (-gamma, g)))


# -- ICEADMM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigmas", "k_0", "absent"), covering(["proportional", "equal"], [1, 3], ["drop", "last"])
)
def test_iceadmm_is_zhou_and_lis_step_unscaled_with_sampled_clients(
    sigmas: str, k_0: int, absent: str
) -> None:
    there, r, rho = world(), 4.0, 0.6
    made = parts(there, FULL, select=Uniform(3))
    run = course(iceadmm(made, sigma=rho, sigmas=sigmas, r=r, k_0=k_0, absent=absent), there, rounds=5)
    everyone = range(len(SIZES))
    w = weightings("examples", everyone)
    sigma = [rho * v for v in w] if sigmas == "proportional" else [rho / len(SIZES)] * len(SIZES)
    literal = Literal(sigma, w, dict(run.steps[0].before["model"]))
    for step in run.steps:
        y = dict(step.before["model"])
        for i in step.cohort:
            x_i, pi_i = literal.of(i, y)
            for _ in range(k_0):
                g = gradient(model(), x_i, there.data_of(i))
                force = plus((sigma[i], x_i), (-sigma[i], y), (w[i], g), (1.0, pi_i))
                x_i = plus((1.0, x_i), (-1 / (w[i] * r + sigma[i]), force))
                pi_i = plus((1.0, pi_i), (sigma[i], x_i), (-sigma[i], y))
            literal.x[i], literal.pi[i] = x_i, pi_i
        close(step.after["model"], literal.server(step.cohort if absent == "drop" else everyone))


def test_iceadmm_over_batches_takes_one_batch_an_iteration() -> None:
    there, local = world(), {"lr": 1.0, "batch_size": 5}
    run = course(
        iceadmm(parts(there, local, select=Fixed((4,))), sigma=0.5, r=2.0, k_0=4, gradient="batch"),
        there,
        rounds=1,
    )
    (step,) = run.steps
    y = x = dict(step.before["model"])
    u, order, batches = plus((0.0, y)), rng_of(step, 0).torch("batches"), []
    while len(batches) < 4:
        batches += torch.randperm(12, generator=order).split(5)
    for at in batches[:4]:
        g = gradient(model(), x, there.data_of(4).take(at))
        x = plus((1.0, x), (-0.5 / 2.5, x), (0.5 / 2.5, y), (-1 / 2.5, g), (-1 / 2.5, u))
        u = plus((1.0, u), (0.5, x), (-0.5, y))
    close(run.final, plus((1.0, x), (2.0, u)))
    assert step.tally.batches_max == 4
    assert step.tally.per_client[0]["examples"] == 5 + 5 + 2 + 5


# -- exact ADMM, on least squares ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Squares(LossOnly):
    """1/2 of the mean squared error of one output."""

    def loss(self, outputs: Tensor, targets: Tensor, weights: None = None, normalize: bool = True) -> Tensor:
        return 0.5 * ((outputs[:, 0] - targets) ** 2).mean()


def line(input_shape: Sequence[int], classes: int) -> nn.Module:
    return nn.Linear(input_shape[0], 1, bias=False).double()


def regression() -> World:
    """Every client's points follow a plane of its own; one has fewer points than features."""
    g = torch.Generator().manual_seed(3)
    made = []
    for k, n in enumerate((9, 20, 6, 13, 2, 30)):
        x = torch.randn(n, FEATURES, generator=g, dtype=torch.float64)
        plane = torch.arange(FEATURES, dtype=torch.float64) + k - 2.5
        made.append(Points(x, x @ plane + 0.1 * torch.randn(n, generator=g, dtype=torch.float64)))
    return World(tuple(made))


LINE = model(factory=line)
TIGHT = {"tolerance": 3e-7, "max_iterations": 200}  # a line search sees no finer than the root of float64's


def moments(there: World) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """H_i and b_i of f_i = 1/2 x'H_i x - b_i'x + const, and the sizes."""
    pairs = [(p.inputs.numpy(), p.targets.numpy()) for p in there.clients]
    return [a.T @ a / len(a) for a, _ in pairs], [a.T @ t / len(a) for a, t in pairs], there.info.sizes


def solution(there: World, w: Sequence[float]) -> np.ndarray:
    """The weighted least-squares solution."""
    h, b, _ = moments(there)
    return np.linalg.solve(
        sum(v * m for v, m in zip(w, h, strict=True)), sum(v * m for v, m in zip(w, b, strict=True))
    )


def vector(tree: Mapping[str, Tensor]) -> np.ndarray:
    return tree["weight"][0].numpy()


def least_squares(there: World, algorithm: Callable[..., Any], select: Any, **settings: Any) -> Any:
    aggregate = settings.pop("aggregate", None)
    made = parts(there, FULL, LINE, task=Squares(), select=select, aggregate=aggregate)
    return algorithm(made, **settings)


@pytest.mark.parametrize(
    ("absent", "sigmas", "weighting", "k_0"),
    covering(["drop", "last"], ["proportional", "equal"], ["examples", "uniform"], [None, 1, 3]),
)
def test_exact_admm_and_ceadmm_are_equations_2_16_and_3_1_to_3_3_with_sampled_clients(
    absent: str, sigmas: str, weighting: str, k_0: int | None
) -> None:
    """k_0 = None is admm; the argmin in closed form, pi_i and sigma_i unscaled."""
    there, rho, everyone = regression(), 0.4, range(6)
    settings = {"sigma": rho, "sigmas": sigmas, "absent": absent, **TIGHT} | (
        {} if k_0 is None else {"k_0": k_0}
    )
    algorithm = least_squares(
        there, admm if k_0 is None else ceadmm, Uniform(3), aggregate=Mean(weighting), **settings
    )
    run = course(algorithm, there, rounds=5)
    h, b, sizes = moments(there)
    w = sizes / sizes.sum() if weighting == "examples" else np.full(6, 1 / 6)
    sigma = rho * w if sigmas == "proportional" else np.full(6, rho / 6)
    initial = vector(run.steps[0].before["model"])
    x, pi = np.tile(initial, (6, 1)), np.zeros((6, FEATURES))
    for step in run.steps:
        y = vector(step.before["model"])
        for i in step.cohort:
            for _ in range(k_0 or 1):
                x[i] = np.linalg.solve(
                    w[i] * h[i] + sigma[i] * np.eye(FEATURES), w[i] * b[i] + sigma[i] * y - pi[i]
                )
                pi[i] += sigma[i] * (x[i] - y)
        there_now = list(step.cohort if absent == "drop" else everyone)
        total = sigma[there_now].sum()
        expected = (sigma[there_now, None] * x[there_now] + pi[there_now]).sum(0) / total
        np.testing.assert_allclose(vector(step.after["model"]), expected, rtol=0, atol=1e-6)
        assert step.tally.sums["unsolved"] == 0
    assert len({step.cohort for step in run.steps}) > 1


@pytest.mark.parametrize(
    ("sigmas", "weighting"),
    [
        ("proportional", "examples"),
        pytest.param("equal", "examples", marks=pytest.mark.nightly),
        ("equal", "uniform"),
    ],
)
def test_exact_admm_converges_to_least_squares_at_the_linear_rate_of_its_iteration(
    sigmas: str, weighting: str
) -> None:
    there, rho, rounds = regression(), 0.6, 40
    algorithm = least_squares(
        there, admm, Everyone(), sigma=rho, sigmas=sigmas, aggregate=Mean(weighting), **TIGHT
    )
    run = course(algorithm, there, rounds=rounds)
    h, _, sizes = moments(there)
    w = sizes / sizes.sum() if weighting == "examples" else np.full(6, 1 / 6)
    best = solution(there, w)
    wrong = [np.linalg.norm(vector(step.after["model"]) - best) for step in run.steps]
    assert wrong[-1] < 1e-3 * wrong[0]
    # one round as a matrix on the stacked (pi_1, ..., pi_m), less its fixed point
    sigma = rho * w if sigmas == "proportional" else np.full(6, rho / 6)
    rate = spectral_radius([v * m for v, m in zip(w, h, strict=True)], sigma)
    assert 0.3 < rate < 0.95
    measured = (wrong[-1] / wrong[14]) ** (1 / (rounds - 15))
    assert measured == pytest.approx(rate, abs=0.03)


def spectral_radius(h: list[np.ndarray], sigma: np.ndarray) -> float:
    """Of (x_i, pi_i) -> the next ones, with b_i = 0: y by Eq. 2.16, then Eq. 3.2 and 3.3."""
    m, d = len(h), FEATURES
    columns = []
    for unit in np.eye(2 * m * d):
        x, pi = unit[: m * d].reshape(m, d), unit[m * d :].reshape(m, d)
        y = (sigma[:, None] * x + pi).sum(0) / sigma.sum()
        new = np.stack([np.linalg.solve(h[i] + sigma[i] * np.eye(d), sigma[i] * y - pi[i]) for i in range(m)])
        columns.append(np.concatenate([new.ravel(), (pi + sigma[:, None] * (new - y)).ravel()]))
    return float(np.abs(np.linalg.eigvals(np.array(columns).T)).max())


@pytest.mark.parametrize(
    ("algorithm", "sigmas", "rounds", "settings"),
    [
        (admm, "proportional", 30, {"sigma": 0.8, **TIGHT}),
        (ceadmm, "equal", 30, {"sigma": 0.8, "k_0": 2, **TIGHT}),
        pytest.param(
            iceadmm, "proportional", 100, {"sigma": 6.0, "r": 6.0, "k_0": 3}, marks=pytest.mark.nightly
        ),
        (iceadmm, "equal", 100, {"sigma": 6.0, "r": 6.0, "k_0": 3}),
    ],
)
def test_at_the_fixed_point_the_duals_sum_to_nothing_and_all_clients_agree(
    algorithm, sigmas: str, rounds: int, settings
) -> None:
    """KKT: sum_i pi_i = 0, x_i = y, pi_i = -w_i grad f_i(y); admm, ceadmm and iceadmm."""
    there, states = regression(), ClientStates()
    made = least_squares(there, algorithm, Everyone(), sigmas=sigmas, **settings)
    run = rounds_of(made, there, states, rounds)
    y, (h, b, sizes) = vector(run[-1].after["model"]), moments(there)
    near = {"rtol": 0, "atol": 1e-3}
    np.testing.assert_allclose(y, solution(there, sizes / sizes.sum()), **near)
    duals = [vector(states.get(k)["dual"]) for k in range(6)]
    np.testing.assert_allclose(sum(n * u for n, u in zip(sizes, duals, strict=True)) / sizes.sum(), 0, **near)
    for k in range(6):
        np.testing.assert_allclose(duals[k], b[k] - h[k] @ y, rtol=0, atol=5e-3)
        assert np.abs(duals[k]).max() > 0.1  # the clients alone would go elsewhere
        if "primal" in states.get(k):
            np.testing.assert_allclose(vector(states.get(k)["primal"]), y, **near)


def test_ceadmm_with_one_local_iteration_is_admm_bit_for_bit() -> None:
    there = world()
    one = course(ceadmm(parts(there, FULL, select=Uniform(3)), k_0=1), there)
    assert same(one.final, course(admm(parts(there, FULL, select=Uniform(3))), there).final)


def test_ceadmm_with_many_local_iterations_is_a_gradient_step_of_rate_1_over_rho() -> None:
    there = regression()
    many = course(least_squares(there, ceadmm, Uniform(3), sigma=4.0, k_0=60, **TIGHT), there, rounds=3)
    h, b, sizes = moments(there)
    for step in many.steps:
        y, share = vector(step.before["model"]), sizes[list(step.cohort)] / sizes[list(step.cohort)].sum()
        g = sum(s * (h[k] @ y - b[k]) for s, k in zip(share, step.cohort, strict=True))
        np.testing.assert_allclose(vector(step.after["model"]), y - g / 4.0, atol=1e-6)


def test_the_exact_solver_meets_its_tolerance_and_says_where_it_does_not() -> None:
    there = world()
    states = ClientStates()
    (step,) = rounds_of(
        admm(parts(there, FULL, select=Uniform(3)), sigma=0.3, tolerance=1e-7, max_iterations=100),
        there,
        states,
        1,
    )
    y = step.before["model"]
    for k in step.cohort:
        u = states.get(k)["dual"]  # 0 + rho (x - y)
        x = plus((1.0, y), (1 / 0.3, u))
        slope = plus((1.0, gradient(model(), x, there.data_of(k))), (1.0, u))
        assert max(float(g.abs().max()) for g in slope.values()) <= 1e-7
        assert max(float(g.abs().max()) for g in u.values()) > 1e-3
    assert step.tally.sums["unsolved"] == 0
    short = course(
        admm(parts(there, FULL, select=Uniform(3)), sigma=0.3, tolerance=1e-7, max_iterations=1), there
    )
    assert [s.tally.sums["unsolved"] for s in short.steps] == [3.0] * 4


# -- local steps on the subproblem --------------------------------------------------------------------------------

SGD = {"lr": 0.2, "epochs": 2, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01}


def bare_sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5, weight_decay=0.01)


@pytest.mark.parametrize("sigmas", ["proportional", "equal"])
@pytest.mark.parametrize("absent", ["drop", "last"])
def test_admm_by_sgd_descends_the_augmented_lagrangian_with_sampled_clients(absent: str, sigmas: str) -> None:
    there, rho = world(), 0.4
    made = parts(there, SGD, select=Uniform(3))
    run = course(admm(made, sigma=rho, sigmas=sigmas, solver="sgd", absent=absent), there, rounds=5)
    everyone = range(len(SIZES))
    w = weightings("examples", everyone)
    sigma = [rho * v for v in w] if sigmas == "proportional" else [rho / len(SIZES)] * len(SIZES)
    literal = Literal(sigma, w, dict(run.steps[0].before["model"]))
    for step in run.steps:
        y = dict(step.before["model"])
        for slot, i in enumerate(step.cohort):
            _, pi_i = literal.of(i, y)

            def penalty(module: nn.Module, i=i, pi_i=pi_i, y=y) -> Tensor:
                named = list(module.named_parameters())
                linear = sum(((p - y[n]) * pi_i[n]).sum() for n, p in named)
                return linear / w[i] + sigma[i] / w[i] / 2 * sum(((p - y[n]) ** 2).sum() for n, p in named)

            x_i = bare_client(
                model(), y, there.data_of(i), rng_of(step, slot),
                optimizer=bare_sgd, epochs=2, batch_size=4, penalty=penalty,
            )  # fmt: skip
            literal.x[i], literal.pi[i] = x_i, plus((1.0, pi_i), (sigma[i], x_i), (-sigma[i], y))
        close(step.after["model"], literal.server(step.cohort if absent == "drop" else everyone))


def test_the_hook_is_the_gradient_of_its_terms_by_finite_differences_and_changes_no_input() -> None:
    from fedlens.local.rules import LocalContext

    g = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (4,), "c": ()}
    anchor, at, task, u = (
        [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes.values()] for _ in range(4)
    )
    kept = [[t.clone() for t in tensors] for tensors in (anchor, at, task, u)]
    context = LocalContext(list(shapes), anchor, {}, {"dual": dict(zip(shapes, u, strict=True))}, 0.1, 1)
    rule, rho, h = dual(sigma=0.7), 0.7, 1e-5
    rule.start(context)
    added = [a - b for a, b in zip(rule.grad(task, at, context), task, strict=True)]

    def terms(point: list[Tensor]) -> float:
        away = [p - y for p, y in zip(point, anchor, strict=True)]
        return float(sum((d * v).sum() + rho / 2 * (d**2).sum() for d, v in zip(away, u, strict=True)))

    for i, tensor in enumerate(at):
        for place in range(tensor.numel()):
            up, down = ([t.clone() for t in at] for _ in range(2))
            up[i].view(-1)[place] += h
            down[i].view(-1)[place] -= h
            slope = (terms(up) - terms(down)) / (2 * h)
            assert added[i].reshape(-1)[place].item() == pytest.approx(slope, abs=1e-8)
    assert all(a.abs().min() > 0 for a in added)
    rule.finish(at, context)
    for now, then in zip((anchor, at, task, u), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


def test_the_table_client_bends_fedavg_into_admm_by_sgd() -> None:
    there = world()
    bent = course(fedavg(parts(there, SGD, select=Uniform(3), client=dual(sigma=0.4))), there)
    assert same(
        bent.final, course(admm(parts(there, SGD, select=Uniform(3)), sigma=0.4, solver="sgd"), there).final
    )


# -- who is in the mean -------------------------------------------------------------------------------------------

KEPT = {
    "admm": lambda p: admm(p, sigma=0.5, absent="last", solver="sgd"),
    "equal": lambda p: admm(p, sigma=0.5, absent="last", sigmas="equal", solver="sgd"),
    "training": lambda p: liadmm(p, gradient="training", absent="last"),
}
SOLVED = {
    "exact": lambda p: admm(p, sigma=0.5, absent="last"),
    "ceadmm": lambda p: ceadmm(p, sigma=0.5, absent="last", k_0=2),
    "iceadmm": lambda p: iceadmm(p, absent="last"),
    "liadmm": lambda p: liadmm(p, absent="last"),
}


@dataclass(frozen=True)
class Faulty:
    """An operation that fails at one client, and gives NaN at another, when it is told to."""

    train: Any
    failing: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()

    def __call__(self, payload, client, rng):
        if client.id in self.failing:
            raise ConnectionError("no answer")
        outcome = self.train(payload, client, rng)
        if client.id in self.broken:
            bad = {n: v * float("nan") for n, v in outcome.payload["update"].items()}
            outcome = outcome._replace(payload={**outcome.payload, "update": bad})
        return outcome


def rounds_of(
    algorithm: Any, there: World, states: ClientStates, rounds: int, failing=(), broken=(), after=None
) -> list[Step]:
    engine, steps = inline(), []
    ops = {**algorithm.ops, "train": Faulty(algorithm.train, failing, broken)}
    engine.open(Program(ops, there, 0), states)
    state = algorithm.init(algorithm.parts.model, there.info)
    try:
        gate = Driver(engine, states)
        for round in range(1, rounds + 1):
            gate.tally = Tally()
            context = RoundContext(round, rounds, there.info, Rng((0, "round", round)))
            new = gate.drive(algorithm.round(state, context), round)
            cohort = tuple(row["client"] for row in gate.tally.per_client)
            steps.append(Step(round, state, new, cohort, gate.tally))
            state = new
            if after is not None:
                after(steps[-1])
    finally:
        engine.close()
    return steps


@pytest.mark.parametrize(("weighting", "name"), covering(["examples", "uniform"], [*KEPT, *SOLVED]))
def test_the_model_is_the_mean_of_all_clients_last_replies_after_every_round_failures_included(
    name: str, weighting: str
) -> None:
    there, states = world(), ClientStates()
    local = SGD if name in KEPT else FULL
    algorithm = (KEPT | SOLVED)[name](parts(there, local, select=Uniform(4), aggregate=Mean(weighting)))
    w = weightings("uniform" if name == "equal" else weighting, range(len(SIZES)))
    initial = algorithm.init(algorithm.parts.model, there.info)["model"]

    def holds(step: Step) -> None:
        sent = [states.get(k).get("sent", initial) for k in range(len(SIZES))]
        close(step.after["model"], plus(*zip(w, sent, strict=True)), rtol=1e-11, atol=1e-12)

    steps = rounds_of(algorithm, there, states, 7, failing=(1,), broken=(4,), after=holds)
    heard = {k for step in steps for k in step.cohort}
    assert heard == {0, 2, 3, 5}
    assert all(not states.get(k) for k in (1, 4))
    assert sum(sum(c.values()) for step in steps for c in step.tally.failures.values()) > 4


@pytest.mark.parametrize("absent", ["drop", "last"])
def test_a_failing_or_refused_client_leaves_client_and_server_as_if_it_had_not_been_drawn(
    absent: str,
) -> None:
    there = world()
    with_them, without = ClientStates(), ClientStates()

    def made(cohort: tuple[int, ...]) -> Any:
        return admm(parts(there, SGD, select=Fixed(cohort)), absent=absent, solver="sgd")

    # the good clients keep their slots: what they draw depends on those
    a = rounds_of(made((0, 3, 1, 4)), there, with_them, 3, failing=(1,), broken=(4,))
    b = rounds_of(made((0, 3)), there, without, 3)
    assert same(a[-1].after["model"], b[-1].after["model"])
    for k in range(len(SIZES)):
        assert with_them.get(k).keys() == without.get(k).keys()
        assert all(same(with_them.get(k)[n], without.get(k)[n]) for n in without.get(k))
    assert not with_them.get(4)


def test_a_round_without_a_good_reply_leaves_the_mean_of_all_as_it_was() -> None:
    there, states = world(), ClientStates()
    algorithm = admm(parts(there, SGD, select=Fixed((1, 4))), absent="last", solver="sgd")
    steps = rounds_of(algorithm, there, states, 2, failing=(1,), broken=(4,))
    assert same(steps[-1].after["model"], steps[0].before["model"])
    assert same(steps[-1].after["rules"]["dual"]["mean"], steps[0].before["rules"]["dual"]["mean"])


def silent(there: World) -> World:
    """The same points at every client, fitted already: each gradient at zero weights is zero."""
    return World(tuple(Points(p.inputs, torch.zeros(len(p), dtype=torch.float64)) for p in there.clients))


@pytest.mark.parametrize(
    ("size", "absent", "weighting"), covering([1, 2, 6], ["drop", "last"], ["examples", "uniform"])
)
def test_where_there_is_nothing_to_learn_no_sample_of_clients_moves_the_model(
    size: int, absent: str, weighting: str
) -> None:
    """With weights over the population and a sum over the sample the model would shrink to |S|/N of itself."""
    there = world()
    made = parts(there, FULL, select=Uniform(size), aggregate=Mean(weighting), task=Nothing())
    for algorithm in (
        liadmm(made, absent=absent),
        iceadmm(made, absent=absent),
        admm(made, absent=absent),
        admm(made, absent=absent, solver="sgd"),
    ):
        run = course(algorithm, there, rounds=3)
        close(run.final, run.steps[0].before["model"])


@dataclass(frozen=True)
class Nothing(LossOnly):
    """A loss that no weight changes."""

    def loss(self, outputs: Tensor, targets: Tensor, weights: None = None, normalize: bool = True) -> Tensor:
        return 0.0 * outputs.sum()


def test_a_server_step_moves_from_the_model_towards_the_mean() -> None:
    there = world()
    for absent in ("drop", "last"):
        made = [parts(there, FULL, select=Uniform(3), server=server) for server in (None, ServerSGD(0.25))]
        whole, part = (course(liadmm(p, absent=absent), there, rounds=1) for p in made)
        start = whole.steps[0].before["model"]
        close(part.final, plus((0.75, start), (0.25, whole.final)))


# -- normalization layers, frozen layers, one example ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "training", "exact", "iceadmm", "liadmm"])
def test_running_statistics_are_averaged_frozen_weights_stay_and_neither_has_variables(name: str) -> None:
    spec = model(norm=True, frozen=True)
    there = world((3, 8, 5, 2, 12, 6))
    local = SGD if name in ("sgd", "training") else FULL
    made = parts(there, local, spec, select=Uniform(3))
    algorithm = {
        "sgd": lambda: admm(made, solver="sgd"),
        "training": lambda: liadmm(made, gradient="training"),
        "exact": lambda: admm(made),
        "iceadmm": lambda: iceadmm(made, k_0=2),
        "liadmm": lambda: liadmm(made),
    }[name]()
    states = ClientStates()
    for step in rounds_of(algorithm, there, states, 3):
        before, after = step.before["model"], step.after["model"]
        assert torch.equal(after["0.weight"], before["0.weight"])
        assert not torch.equal(after["4.bias"], before["4.bias"])
        assert not torch.equal(after["1.running_mean"], before["1.running_mean"])
        assert after["1.running_var"].min() > 0
        if name == "liadmm":  # one pass at the global model
            outputs = [there.data_of(k).inputs @ before["0.weight"].T + before["0.bias"] for k in step.cohort]
            n = [len(o) for o in outputs]
            seen = sum(k / sum(n) * o.mean(0) for k, o in zip(n, outputs, strict=True))
            expected = 0.9 * before["1.running_mean"] + 0.1 * seen
            torch.testing.assert_close(after["1.running_mean"], expected, **EXACT)
    trainable = [n for n, p in spec.build().named_parameters() if p.requires_grad]
    for k in range(6):
        assert all(list(tree) == trainable for tree in states.get(k).values())


def test_the_exact_solver_updates_running_statistics_once_at_its_solution() -> None:
    spec = model(norm=True)
    there, states = world((3, 8, 5, 2, 12, 6)), ClientStates()
    (step,) = rounds_of(admm(parts(there, FULL, spec, select=Fixed((4,))), sigma=0.5), there, states, 1)
    y, u = step.before["model"], states.get(4)["dual"]
    x = {n: y[n] + u[n] / 0.5 for n in u}
    seen = (there.data_of(4).inputs @ x["0.weight"].T + x["0.bias"]).mean(0)
    torch.testing.assert_close(step.after["model"]["1.running_mean"], 0.1 * seen, rtol=1e-9, atol=1e-11)
    assert step.after["model"]["1.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    ("make", "absent"),
    covering({"admm": admm, "ceadmm": ceadmm, "iceadmm": iceadmm, "liadmm": liadmm}, ["drop", "last"]),
)
def test_a_client_with_one_example_takes_part(make, absent: str) -> None:
    there = world()
    run = course(make(parts(there, FULL, select=Fixed((3, 1))), absent=absent), there, rounds=3)
    assert all(step.cohort == (3, 1) for step in run.steps)
    assert all(torch.isfinite(v).all() for v in weights_of(run.final).values())
