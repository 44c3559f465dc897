"""FedDANE against bare PyTorch: the tilted loss, its two exchanges, and the optimum where nobody moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.feddane import NAME, feddane, tilt, tilted
from fedlens.algorithms.fedir import reweighted
from fedlens.algorithms.fedprox import fedprox
from fedlens.core.random import Rng
from fedlens.local.rules import LocalContext, Traits, proximal
from tests.identity.gradient_kit import EQUAL, faulty, full_gradient, loaded, rng_at, slots, weighted
from tests.identity.identity_kit import (
    SIZES,
    World,
    bare_client,
    close,
    course,
    mean,
    model,
    parts,
    same,
    world,
)
from tests.identity.test_fedprox import A, B, Squares, point, quadratics

ONE_STEP = {"lr": 0.3, "steps": 1, "batch_size": "all"}
LOCAL = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 4}
FROM = pytest.mark.parametrize("source", ["another", "same"])


def tilt_of(g: dict[str, Tensor], own: dict[str, Tensor], anchor, mu: float):
    """<g - grad F_k(w^t), w - w^t> + mu/2 ||w - w^t||^2, left to autograd."""

    def penalty(module: nn.Module) -> Tensor:
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        linear = sum(((g[n] - own[n]) * (p - anchor[n])).sum() for n, p in named)
        return linear + mu / 2 * sum(((p - anchor[n]) ** 2).sum() for n, p in named)

    return penalty


def bare_round(step, there: World, spec, mu: float, batch: int = 4) -> list[dict[str, Tensor]]:
    """What each slot of the second exchange comes to; `SGD` of torch on the loss with the terms of line 7."""
    anchor = step.before["model"]

    def masked(exchange: int, slot: int, k: int) -> dict[str, Tensor]:
        torch.manual_seed(rng_at(step, exchange, slot, k).seed("torch"))
        return full_gradient(anchor, there.clients[k], spec, batch)

    asked = slots(step, 0)
    g = weighted([masked(0, slot, k) for slot, k in enumerate(asked)], [1] * len(asked))
    return [
        bare_client(
            spec,
            anchor,
            there.clients[k],
            rng_at(step, 1, slot, k),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.5),
            epochs=2,
            batch_size=batch,
            penalty=tilt_of(g, masked(1, slot, k), anchor, mu),
        )
        for slot, k in enumerate(slots(step, 1))
    ]


@FROM
@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_feddane_is_its_algorithm_2_in_bare_pytorch(source: str, mu: float, dropout: float) -> None:
    there, spec = world(), model(dropout=dropout)
    run = course(feddane(parts(there, LOCAL, spec, select=Uniform(3)), mu=mu, gradients_from=source), there)
    for step in run.steps:
        assert len(set(slots(step, 0))) == len(set(slots(step, 1))) == 3
        close(step.after["model"], mean(bare_round(step, there, spec, mu), [1, 1, 1]))


def test_the_two_draws_are_independent_and_both_the_rounds_own() -> None:
    there = world()
    another, both = (
        course(feddane(parts(there, ONE_STEP, select=Uniform(3)), gradients_from=source), there, rounds=12)
        for source in ("another", "same")
    )
    for step, other in zip(another.steps, both.steps, strict=True):
        drawn = Rng((0, "round", step.round, "gradients")).numpy("select").choice(6, 3, replace=False)
        assert slots(step, 0) == tuple(drawn)
        assert slots(step, 1) == slots(other, 1) == slots(other, 0)
    overlaps = [len({*slots(s, 0)} & {*slots(s, 1)}) for s in another.steps]
    assert {1, 2} <= set(overlaps)  # 1.5 on average where the draws know nothing of each other


def test_with_all_clients_one_full_batch_step_is_gradient_descent_on_their_mean_loss() -> None:
    there = world()
    run = course(feddane(parts(there, ONE_STEP, select=Everyone()), mu=5.0), there, rounds=4)
    for step in run.steps:
        x = step.before["model"]
        g = weighted([full_gradient(x, points) for points in there.clients], [1] * 6)
        close(step.after["model"], {n: x[n] - 0.3 * g[n] for n in x})


def test_with_all_clients_of_one_size_it_is_gradient_descent_on_the_pooled_data() -> None:
    there = world(EQUAL)
    run = course(feddane(parts(there, ONE_STEP, select=Everyone()), mu=5.0), there, rounds=10)
    x = run.steps[0].before["model"]
    for _ in range(10):
        g = full_gradient(x, there.pooled())
        x = {n: x[n] - 0.3 * g[n] for n in x}
    close(run.final, x, rtol=1e-10, atol=1e-11)


def test_one_full_batch_step_follows_the_gradients_of_the_first_cohort_alone() -> None:
    there = world()
    run = course(feddane(parts(there, ONE_STEP, select=Uniform(2)), mu=5.0), there, rounds=4)
    for step in run.steps:
        x = step.before["model"]
        g = weighted([full_gradient(x, there.clients[k]) for k in slots(step, 0)], [1, 1])
        close(step.after["model"], {n: x[n] - 0.3 * g[n] for n in x})


def test_the_corrections_of_a_cohort_that_is_asked_twice_sum_to_zero() -> None:
    there = world()
    found: list[list[Tensor]] = []
    made = feddane(parts(there, LOCAL, select=Uniform(4)), gradients_from="same")
    rule = made.train.rule

    def start(context: LocalContext) -> None:
        tilt(context)
        found.append(context.saved[NAME])

    object.__setattr__(rule, "start", start)  # a spy, in this process alone
    course(made, there, rounds=2)
    assert len(found) == 8
    for of_round in (found[:4], found[4:]):
        for leaves in zip(*of_round, strict=True):
            assert float(sum(leaves).abs().max()) < 1e-14 < float(max(t.abs().max() for t in leaves))  # type: ignore[union-attr, arg-type]


def test_the_gradient_is_that_of_the_formula_by_finite_differences() -> None:
    g = torch.Generator().manual_seed(0)
    shapes, mu, h = ((2, 3), (4,), ()), 0.7, 1e-5
    anchor, w, task, linear = (
        [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes] for _ in range(4)
    )
    context = LocalContext(["a", "b", "c"], anchor, {}, {}, 0.1, 1)
    context.saved[NAME] = linear
    terms = [
        after - before
        for after, before in zip(tilted(task, w, context, traits=Traits(proximal=mu)), task, strict=True)
    ]

    def added(at: list[Tensor]) -> float:
        pairs = list(zip(at, anchor, linear, strict=True))
        return float(sum((c * (p - a)).sum() + mu / 2 * ((p - a) ** 2).sum() for p, a, c in pairs))

    for i, tensor in enumerate(w):
        for place in range(tensor.numel()):
            up, down = ([t.clone() for t in w] for _ in range(2))
            up[i].view(-1)[place] += h
            down[i].view(-1)[place] -= h
            slope = (added(up) - added(down)) / (2 * h)
            assert terms[i].reshape(-1)[place].item() == pytest.approx(slope, abs=1e-9)
    assert all(t.abs().min() > 0 for t in terms)


# -- one quadratic a client: F_k(w) = a_k / 2 (w - b_k)^2 ----------------------------------------------------

OPTIMUM = sum(a * b for a, b in zip(A, B, strict=True)) / sum(A)  # of the plain mean of the F_k


def at_optimum(input_shape, classes) -> nn.Module:
    module = point(input_shape, classes)
    module.w.data.fill_(OPTIMUM)
    return module


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_at_the_optimum_of_unlike_quadratics_it_stays_where_fedavg_and_fedprox_move(mu: float) -> None:
    there, local = quadratics(), {"lr": 0.1, "steps": 20, "batch_size": "all"}
    everyone = {"task": Squares(), "select": Everyone(), "aggregate": Mean("uniform")}
    given = parts(there, local, model(factory=at_optimum), **everyone)

    def moved(made) -> float:
        return abs(float(course(made, there, rounds=3).final["w"]) - OPTIMUM)

    assert moved(feddane(given, mu=mu)) < 1e-12
    assert min(moved(fedavg(given)), moved(fedprox(given, mu=0.5))) > 0.02


def test_from_elsewhere_it_comes_to_the_optimum() -> None:
    there, local = quadratics(), {"lr": 0.1, "steps": 5, "batch_size": "all"}
    given = parts(there, local, model(factory=point), task=Squares(), select=Everyone())
    run = course(feddane(given, mu=0.5), there, rounds=60)
    assert float(run.final["w"]) == pytest.approx(OPTIMUM, abs=1e-8)


@pytest.mark.parametrize("mu", [0.0, 0.6])
@pytest.mark.parametrize("steps", [1, 5, 200])
def test_quadratics_against_the_closed_form_with_sampled_clients(mu: float, steps: int) -> None:
    """w_E = w* + (1 - lr (a + mu))^E (w - w*) with w* = w - g / (a + mu), the minimizer of line 7."""
    there, lr = quadratics(), 0.1
    local = {"lr": lr, "steps": steps, "batch_size": "all"}
    made = feddane(parts(there, local, model(factory=point), task=Squares(), select=Uniform(2)), mu=mu)
    for step in course(made, there, rounds=4).steps:
        w = float(step.before["model"]["w"])
        g = sum(A[k] * (w - B[k]) for k in slots(step, 0)) / 2
        best = {k: w - g / (A[k] + mu) for k in slots(step, 1)}
        ends = [b + (1 - lr * (A[k] + mu)) ** steps * (w - b) for k, b in best.items()]
        assert float(step.after["model"]["w"]) == pytest.approx(sum(ends) / 2, rel=1e-11, abs=1e-11)


# -- weights, parts of the model, rules on top ---------------------------------------------------------------


@FROM
def test_clients_with_the_same_data_are_not_corrected(source: str) -> None:
    there = World((world().clients[4],) * 5)
    local = {"lr": 0.2, "steps": 3, "batch_size": "all"}
    dane = course(feddane(parts(there, local, select=Uniform(3)), mu=0.0, gradients_from=source), there)
    close(dane.final, course(fedavg(parts(there, local, select=Uniform(3))), there).final)


def test_weighting_by_examples_weighs_models_and_gradients_alike() -> None:
    there = world()
    given = parts(there, ONE_STEP, select=Uniform(3), aggregate=Mean("examples"))
    for step in course(feddane(given), there).steps:
        x = step.before["model"]
        g = full_gradient(x, there.pooled(slots(step, 0)))
        close(step.after["model"], {n: x[n] - 0.3 * g[n] for n in x})


def test_frozen_weights_stay_and_buffers_are_averaged() -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True, frozen=True)
    local = {**LOCAL, "batch_size": 20}
    run = course(feddane(parts(there, local, spec, select=Uniform(3)), mu=0.4), there)
    for step in run.steps:
        after = dict(step.after["model"])
        assert after.pop("1.num_batches_tracked") == 2 * step.round  # the other gradients count no batch
        close(after, mean(bare_round(step, there, spec, 0.4, batch=20), [1, 1, 1]))
    assert torch.equal(run.final["0.weight"], run.steps[0].before["model"]["0.weight"])


def test_the_mu_of_a_proximal_rule_adds_to_its_own() -> None:
    there = world()
    twice = course(feddane(parts(there, LOCAL, select=Uniform(3), client=proximal(mu=0.5)), mu=0.2), there)
    close(twice.final, course(feddane(parts(there, LOCAL, select=Uniform(3)), mu=0.7), there).final)


@pytest.mark.parametrize("target", ["uniform", "population"])
def test_with_fedir_all_gradients_are_those_of_its_weighted_loss(target: str) -> None:
    there = world()
    given = parts(there, ONE_STEP, select=Fixed((1, 4)), client=reweighted(target=target, normalize=False))
    run = course(feddane(given), there, rounds=2)
    counts = torch.bincount(there.pooled().targets, minlength=3).double()
    p = counts / counts.sum() if target == "population" else torch.full((3,), 1 / 3, dtype=torch.float64)
    x = run.steps[0].before["model"]
    for step in run.steps:
        gradients = []
        for k in (1, 4):
            module, points = loaded(model(), x), there.clients[k]
            share = torch.bincount(points.targets, minlength=3).double() / len(points)
            loss = nn.functional.cross_entropy(module(points.inputs), points.targets, reduction="none")
            ((p / share)[points.targets] * loss).mean().backward()
            gradients.append({n: q.grad for n, q in module.named_parameters()})
        g = weighted(gradients, [1, 1])  # type: ignore[arg-type]
        x = {n: x[n] - 0.3 * g[n] for n in x}
        close(step.after["model"], x)


# -- large cohorts, missing clients, what is counted ---------------------------------------------------------


def test_a_large_cohort_is_reduced_in_blocks_to_the_same_mean() -> None:
    there = world([1 + k % 7 for k in range(75)])
    for step in course(feddane(parts(there, ONE_STEP, select=Uniform(70))), there, rounds=2).steps:
        x = step.before["model"]
        assert len(slots(step, 0)) == 70
        g = weighted([full_gradient(x, there.clients[k]) for k in slots(step, 0)], [1] * 70)
        close(step.after["model"], {n: x[n] - 0.3 * g[n] for n in x})


@pytest.mark.parametrize("nan", [False, True], ids=["silent", "nan"])
@pytest.mark.parametrize("exchange", ["first", "second"])
def test_a_client_that_drops_out_of_one_exchange_is_left_out_of_that_one(exchange: str, nan: bool) -> None:
    there = world()
    made = feddane(parts(there, {**LOCAL, "momentum": 0.5}, select=Fixed((0, 4, 1))))
    (step,) = course(faulty(made, **{exchange: [1]}, nan=nan), there, rounds=1).steps
    assert step.tally.failed == 1
    left = {"first": ((0, 4), (0, 4, 1)), "second": ((0, 4, 1), (0, 4))}[exchange]
    assert (slots(step, 0), slots(step, 1)) == left
    close(step.after["model"], mean(bare_round(step, there, model(), 0.01), [1] * len(left[1])))


@pytest.mark.parametrize("exchange", ["first", "second"])
def test_where_every_client_drops_out_the_model_stays(exchange: str) -> None:
    there = world()
    made = faulty(feddane(parts(there, LOCAL, select=Fixed((0, 1)))), **{exchange: [0, 1]})
    (step,) = course(made, there, rounds=1).steps
    assert same(step.after["model"], step.before["model"])
    assert step.tally.failed == 2


def test_every_gradient_is_counted_as_a_batch_and_the_loss_is_that_of_training() -> None:
    there, local = world(), {"lr": 0.1, "epochs": 2, "batch_size": 4}
    (step,) = course(feddane(parts(there, local, select=Everyone())), there, rounds=1).steps
    assert dict(step.tally.batches) == {k: 4 * -(-n // 4) for k, n in enumerate(SIZES)}
    assert step.tally.sums["examples"] == 2 * sum(SIZES)
    plain, dane = (
        course(made(parts(there, ONE_STEP, select=Everyone())), there, rounds=1).steps[0].tally.sums["loss"]
        for made in (fedavg, feddane)
    )
    assert dane == pytest.approx(plain, rel=1e-12)


def test_the_mean_gradient_is_not_kept() -> None:
    there = world()
    run = course(feddane(parts(there, LOCAL, select=Uniform(3))), there, rounds=2)
    assert run.steps[-1].after["rules"] == {NAME: {}}
