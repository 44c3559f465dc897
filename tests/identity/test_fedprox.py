"""FedProx: the proximal term, its gradient, and its closed form on quadratics."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import nn

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import BySize, Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.moon import contrastive
from fedlens.base.errors import ConfigError
from fedlens.local.chain import chain
from fedlens.local.rules import ClientRule, LocalContext, Traits, plain, proximal, proximal_grad
from tests.identity.identity_kit import (
    SIZES,
    LossOnly,
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
from tests.identity.test_fedavg import SGD, bare_sgd


def visit_at(anchor: list[torch.Tensor]) -> LocalContext:
    return LocalContext([str(i) for i in range(len(anchor))], anchor, {}, {}, 0.1, 1)


def test_mu_of_zero_is_fedavg_bit_for_bit() -> None:
    there = world()
    prox = course(fedprox(parts(there, SGD, select=Uniform(3)), mu=0.0), there)
    plain = course(fedavg(parts(there, SGD, select=Uniform(3))), there)
    assert same(prox.final, plain.final)


def test_the_term_itself_at_mu_of_zero_changes_no_bit() -> None:
    from functools import partial

    there = world()
    rule = ClientRule(grad=partial(proximal_grad, traits=Traits(proximal=0.0)))
    prox = course(fedavg(parts(there, SGD, select=Uniform(3), client=rule)), there)
    assert same(prox.final, course(fedavg(parts(there, SGD, select=Uniform(3))), there).final)


@pytest.mark.parametrize("mu", [0.01, 3.0])
def test_local_training_descends_the_loss_and_the_penalty(mu: float) -> None:
    there = world()
    run = course(fedprox(parts(there, SGD, select=Uniform(3)), mu=mu), there)
    for step in run.steps:
        anchor = step.before["model"]

        def penalty(module: nn.Module, anchor=anchor) -> torch.Tensor:
            return mu / 2 * sum(((p - anchor[n]) ** 2).sum() for n, p in module.named_parameters())

        clients = [
            bare_client(
                model(),
                anchor,
                there.data_of(k),
                rng_of(step, slot),
                optimizer=bare_sgd,
                epochs=2,
                batch_size=4,
                penalty=penalty,
            )
            for slot, k in enumerate(step.cohort)
        ]
        close(step.after["model"], mean(clients, [SIZES[k] for k in step.cohort]))


def test_the_gradient_is_that_of_the_penalty_by_finite_differences() -> None:
    g = torch.Generator().manual_seed(0)
    anchor, w, task = (
        [torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((2, 3), (4,), ())]
        for _ in range(3)
    )
    rule, mu, h = proximal(mu=0.7), 0.7, 1e-5
    added = [a - b for a, b in zip(rule.grad(task, w, visit_at(anchor)), task, strict=True)]

    def penalty(at: list[torch.Tensor]) -> float:
        return float(mu / 2 * sum(((p - a) ** 2).sum() for p, a in zip(at, anchor, strict=True)))

    for i, tensor in enumerate(w):
        for place in range(tensor.numel()):
            up, down = ([t.clone() for t in w] for _ in range(2))
            up[i].view(-1)[place] += h
            down[i].view(-1)[place] -= h
            slope = (penalty(up) - penalty(down)) / (2 * h)
            assert added[i].reshape(-1)[place].item() == pytest.approx(slope, abs=1e-9)
    assert all(a.abs().min() > 0 for a in added)


def test_the_hook_changes_none_of_its_inputs() -> None:
    gradients, w, anchor = ([torch.full((3,), value)] for value in (1.0, 2.0, 3.0))
    proximal(mu=0.5).grad(gradients, w, visit_at(anchor))
    assert (gradients[0][0], w[0][0], anchor[0][0]) == (1.0, 2.0, 3.0)


def test_the_penalty_is_nothing_in_the_first_step_and_something_in_the_second() -> None:
    there = world()
    finals = {}
    for steps in (1, 2):
        local = {"lr": 0.2, "steps": steps, "batch_size": "all"}
        for name, algorithm in (("prox", fedprox), ("avg", fedavg)):
            setting = {"mu": 1.0} if name == "prox" else {}
            made = algorithm(parts(there, local, select=Fixed((1, 4))), **setting)
            finals[name, steps] = course(made, there, rounds=1).final
    close(finals["prox", 1], finals["avg", 1])
    difference = max((finals["prox", 2][n] - finals["avg", 2][n]).abs().max() for n in finals["avg", 2])
    assert difference > 1e-4


# -- one quadratic a client: F_k(w) = a_k / 2 |w - b_k|^2 ----------------------------------------------------


@dataclass(frozen=True)
class Squares(LossOnly):
    """1/2 of the mean squared error."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((outputs - targets) ** 2).mean()


class Point(nn.Module):
    """One weight; the output is it, seen through the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(4.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def point(input_shape, classes) -> nn.Module:
    return Point()


A, B = (0.5, 2.0, 1.0, 0.25), (-3.0, 1.0, 5.0, 2.0)
COUNTS = (2, 7, 3, 5)


def quadratics() -> World:
    points = []
    for a, b, n in zip(A, B, COUNTS, strict=True):
        x = torch.full((n,), a**0.5, dtype=torch.float64)
        points.append(Points(x, x * b))
    return World(tuple(points))


@pytest.mark.parametrize("mu", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("steps", [1, 5, pytest.param(400, marks=pytest.mark.nightly)])
def test_quadratics_against_the_closed_form_with_sampled_clients(mu: float, steps: int) -> None:
    """w_E = w* + (1 - lr (a + mu))^E (w - w*), with w* = (a b + mu w) / (a + mu), the minimizer of h_k."""
    there, lr = quadratics(), 0.1
    local = {"lr": lr, "steps": steps, "batch_size": "all"}
    made = fedprox(parts(there, local, model(factory=point), task=Squares(), select=Uniform(2)), mu=mu)
    run = course(made, there, rounds=4)
    for step in run.steps:
        w = float(step.before["model"]["w"])
        ends = []
        for k in step.cohort:
            best = (A[k] * B[k] + mu * w) / (A[k] + mu)
            ends.append(best + (1 - lr * (A[k] + mu)) ** steps * (w - best))
        weights = [COUNTS[k] for k in step.cohort]
        expected = sum(n * end for n, end in zip(weights, ends, strict=True)) / sum(weights)
        assert float(step.after["model"]["w"]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_larger_mu_holds_the_client_closer() -> None:
    there = quadratics()
    local = {"lr": 0.1, "steps": 50, "batch_size": "all"}
    moved = []
    for mu in (0.0, 1.0, 10.0):
        algorithm = fedprox(
            parts(there, local, model(factory=point), task=Squares(), select=Fixed((0,))), mu=mu
        )
        (step,) = course(algorithm, there, rounds=1).steps
        moved.append(abs(float(step.after["model"]["w"] - step.before["model"]["w"])))
    assert moved[0] > 2 * moved[1] > 4 * moved[2] > 0


def test_the_table_client_bends_fedavg_into_fedprox() -> None:
    there = world()
    prox = course(fedprox(parts(there, SGD, select=Uniform(3)), mu=0.5), there).final
    bent = course(fedavg(parts(there, SGD, select=Uniform(3), client=proximal(mu=0.5))), there).final
    assert same(prox, bent)


def test_the_rule_that_makes_an_algorithm_is_neither_undone_nor_doubled() -> None:
    there = world()
    with pytest.raises(ConfigError, match="'plain' has no effect"):
        fedprox(parts(there, SGD, client=plain()), mu=0.5)
    with pytest.raises(ConfigError, match="'proximal' is set twice"):
        fedprox(parts(there, SGD, client=proximal(mu=0.5)), mu=0.5)
    two = chain(contrastive(mu=1.0), proximal(mu=0.5))  # a list of rules hides none of them
    with pytest.raises(ConfigError, match="'proximal' is set twice"):
        fedprox(parts(there, SGD, client=two), mu=0.5)
    assert fedprox(parts(there, SGD, client=proximal(mu=0.0)), mu=0.5).rule.traits.proximal == 0.5


def test_the_proximal_term_is_inside_the_clipping() -> None:
    there, mu, bound = world(), 5.0, 0.05
    local = {"lr": 0.5, "steps": 4, "batch_size": "all", "clip_norm": bound}
    run = course(fedprox(parts(there, local, select=Fixed((4,))), mu=mu), there, rounds=1)
    (step,) = run.steps
    anchor, module, points = step.before["model"], model().build(), there.clients[4]
    for _ in range(4):
        module.zero_grad()
        loss = nn.functional.cross_entropy(module(points.inputs), points.targets)
        penalty = mu / 2 * sum(((p - anchor[n]) ** 2).sum() for n, p in module.named_parameters())
        (loss + penalty).backward()
        nn.utils.clip_grad_norm_(module.parameters(), bound)
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.5 * p.grad
    close(step.after["model"], module.state_dict())


# -- ghaemi2022 Algorithm 2: K clients drawn by p_k, averaged with 1/K ---------------------------------------


def alone(there: World, local, k: int, mu: float) -> dict[str, torch.Tensor]:
    """w_k after one round of client k by itself."""
    return course(fedprox(parts(there, local, select=Fixed((k,))), mu=mu), there, rounds=1).final


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_algorithm_2_is_sum_p_k_w_k_in_expectation_over_its_draws(mu: float) -> None:
    there, local = world((3, 8, 1)), {"lr": 0.3, "steps": 3, "batch_size": "all"}
    sizes = (3, 8, 1)
    made = fedprox(parts(there, local), mu=mu, scheme="algorithm-2")
    assert made.select == BySize(method="replacement")
    expectation = {
        name: torch.zeros_like(value) for name, value in made.parts.model.build().state_dict().items()
    }
    for pair in product(range(3), repeat=2):
        chance = sizes[pair[0]] * sizes[pair[1]] / 12**2
        after = course(replace(made, select=Fixed(pair)), there, rounds=1).final
        expectation = {n: value + chance * after[n] for n, value in expectation.items()}
    ends = [alone(there, local, k, mu) for k in range(3)]
    close(expectation, mean(ends, sizes))


@pytest.mark.parametrize("method", ["replacement", "systematic"])
def test_algorithm_2_averages_with_one_over_k_whatever_the_sizes(method: str) -> None:
    there = world()
    select = BySize(3, method=method)
    run = course(fedprox(parts(there, SGD, select=select), mu=0.0, scheme="algorithm-2"), there)
    for step in run.steps:
        clients = [
            bare_client(
                model(),
                step.before["model"],
                there.data_of(k),
                rng_of(step, slot),
                optimizer=bare_sgd,
                epochs=2,
                batch_size=4,
            )
            for slot, k in enumerate(step.cohort)
        ]
        assert len(step.cohort) == 3
        close(step.after["model"], mean(clients, [1, 1, 1]))


def test_algorithm_2_at_mu_of_zero_is_not_fedavg_but_where_all_clients_have_one_size() -> None:
    for sizes, alike in ((SIZES, False), ((4, 4, 4, 4), True)):
        there = world(sizes)
        select = Fixed((0, 1, 3))
        made = replace(fedprox(parts(there, SGD), mu=0.0, scheme="algorithm-2"), select=select)
        plain = course(fedavg(parts(there, SGD, select=select)), there)
        ours = course(made, there)
        gap = max((ours.final[n] - plain.final[n]).abs().max() for n in plain.final)
        assert (gap < 1e-13) == alike


def test_what_is_at_odds_with_algorithm_2_is_refused() -> None:
    there = world()
    for select in (Uniform(3), Fixed((0, 1)), Everyone()):
        with pytest.raises(ConfigError, match="draws clients with p_k") as caught:
            fedprox(parts(there, SGD, select=select), scheme="algorithm-2")
        assert caught.value.where == "select.name"
    with pytest.raises(ConfigError, match="averages with 1/K") as caught:
        fedprox(parts(there, SGD, aggregate=Mean("examples")), scheme="algorithm-2")
    assert caught.value.where == "aggregate.weighting"
    fedprox(parts(there, SGD, aggregate=Mean("uniform"), select=BySize(2)), scheme="algorithm-2")
