"""Mime and MimeLite against bare PyTorch: the server's optimizer at the clients, with sampled, unequal clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedir import reweighted
from fedlens.algorithms.mime import mime, mimelite
from fedlens.local.rules import proximal
from tests.identity.gradient_kit import faulty, full_gradient, gradient, loaded, rng_at, slots, weighted
from tests.identity.identity_kit import (
    SIZES,
    Points,
    World,
    close,
    course,
    epoch,
    mean,
    model,
    parts,
    same,
    world,
)

LR = 0.3
ONE_STEP = {"lr": LR, "steps": 1, "batch_size": "all"}
LOCAL = {"lr": 0.2, "epochs": 2, "batch_size": 4}
# With every setting unlike its usual value, so that one that is not heeded shows.
BASES: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"beta": 0.7},
    "adam": {"beta": 0.6, "beta2": 0.8, "eps": 0.3, "v0": 0.5},
    "adagrad": {"eps": 0.2, "v0": 0.4},
}
EVERY_BASE = pytest.mark.parametrize("base", BASES)
Statistics = Mapping[str, Mapping[str, Tensor]]


def step_of(base: str, g: Tensor, m: Tensor | float, v: Tensor | float) -> Tensor:
    """U(g; s), written out once more."""
    if base == "sgd":
        return g
    if base == "momentum":
        return 0.3 * g + 0.7 * m
    if base == "adam":
        return (0.4 * g + 0.6 * m) / (v**0.5 + 0.3)
    return g / (v**0.5 + 0.2)


def first(base: str) -> tuple[float, float]:
    return 0.0, {"adam": 0.5, "adagrad": 0.4}.get(base, 0.0)


def after(base: str, g: Tensor, m: Tensor | float, v: Tensor | float) -> tuple[Any, Any]:
    """V(g, s), written out once more."""
    if base == "sgd":
        return m, v
    if base == "momentum":
        return 0.3 * g + 0.7 * m, v
    if base == "adam":
        return 0.4 * g + 0.6 * m, 0.2 * g * g + 0.8 * v
    return m, v + g * g


def statistics(state: Any, name: str = "mime") -> Statistics:
    found: Statistics = state["rules"][name]["statistics"]
    return found


def of(kept: Statistics, name: str, base: str) -> tuple[Any, Any]:
    """m and v of one leaf, before U or V."""
    m, v = first(base)
    return (kept["m"][name] if "m" in kept else m), (kept["v"][name] if "v" in kept else v)


# -- the server's optimizer ----------------------------------------------------------------------------------


@EVERY_BASE
@pytest.mark.parametrize("select", [Uniform(3), Fixed((1, 1, 4))], ids=["three", "twice"])
def test_mime_with_one_full_batch_step_is_the_optimizer_on_the_sampled_objective(base: str, select) -> None:
    there = world()
    run = course(mime(parts(there, ONE_STEP, select=select), optimizer=base, **BASES[base]), there, rounds=5)
    x = {n: v.clone() for n, v in run.steps[0].before["model"].items()}
    kept = {n: first(base) for n in x}
    for step in run.steps:
        assert slots(step, 0) == slots(step, 1)
        c = weighted([full_gradient(x, there.clients[k]) for k in slots(step, 0)], [1, 1, 1])
        for n in x:
            x[n] = x[n] - LR * step_of(base, c[n], *kept[n])  # with the statistics of the rounds before
            kept[n] = after(base, c[n], *kept[n])
        close(step.after["model"], x)
        found = statistics(step.after)
        assert set(found) == {"momentum": {"m"}, "adam": {"m", "v"}, "adagrad": {"v"}}.get(base, set())
        for at, name in enumerate("mv"):
            if name in found:
                close(found[name], {n: kept[n][at] for n in x})


@pytest.mark.parametrize("algorithm", [mime, mimelite])
@pytest.mark.parametrize("base", ["momentum", "adam"])
def test_clients_with_the_same_data_take_the_steps_of_one_optimizer_with_fixed_statistics(
    algorithm, base: str
) -> None:
    one = world().clients[4]
    there = World((one,) * 5)
    local = {"lr": LR, "steps": 4, "batch_size": "all"}
    made = algorithm(parts(there, local, select=Uniform(3)), optimizer=base, **BASES[base])
    run = course(made, there, rounds=3)
    x = {n: v.clone() for n, v in run.steps[0].before["model"].items()}
    kept = {n: first(base) for n in x}
    for step in run.steps:
        at_x = full_gradient(x, one)
        for _ in range(4):
            g = full_gradient(x, one)
            x = {n: x[n] - LR * step_of(base, g[n], *kept[n]) for n in x}
        kept = {n: after(base, at_x[n], *kept[n]) for n in x}
        close(step.after["model"], x, rtol=1e-11, atol=1e-12)


# -- several steps on batches --------------------------------------------------------------------------------


def mime_client(step, slot: int, k: int, c, base: str, there: World, spec) -> dict[str, Tensor]:
    """Two modules, one draw of dropout masks for both, and the batches of `LOCAL`."""
    at_x, at_y = loaded(spec, step.before["model"]), loaded(spec, step.before["model"])
    rng, points = rng_at(step, 1, slot, k), there.clients[k]
    order = rng.torch("batches")
    torch.manual_seed(rng.seed("torch"))
    for _ in range(2):
        for at in epoch(len(points), 4, order):
            masks = torch.get_rng_state()
            there_g = gradient(at_x, points.inputs[at], points.targets[at])
            torch.set_rng_state(masks)
            here = gradient(at_y, points.inputs[at], points.targets[at])
            with torch.no_grad():
                for n, p in at_y.named_parameters():
                    m, v = of(statistics(step.before), n, base)
                    p -= 0.2 * step_of(base, here[n] - there_g[n] + c[n], m, v)
    return at_y.state_dict()


def asked_gradients(step, exchange: int, there: World, spec) -> list[dict[str, Tensor]]:
    """Each slot's full gradient, in batches of 4, under the dropout masks of its own seed."""
    found = []
    for slot, k in enumerate(slots(step, exchange)):
        torch.manual_seed(rng_at(step, exchange, slot, k).seed("torch"))
        found.append(full_gradient(step.before["model"], there.clients[k], spec, batch=4))
    return found


@EVERY_BASE
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mime_is_its_algorithm_1_in_bare_pytorch(base: str, dropout: float) -> None:
    there, spec = world(), model(dropout=dropout)
    made = mime(parts(there, LOCAL, spec, select=Uniform(3)), optimizer=base, **BASES[base])
    for step in course(made, there).steps:
        c = weighted(asked_gradients(step, 0, there, spec), [1, 1, 1])
        clients = [mime_client(step, slot, k, c, base, there, spec) for slot, k in enumerate(slots(step, 1))]
        close(step.after["model"], mean(clients, [1, 1, 1]))
        for n in c:
            m, v = of(statistics(step.before), n, base)
            expected = dict(zip("mv", after(base, c[n], m, v), strict=True))
            for name, tree in statistics(step.after).items():
                torch.testing.assert_close(tree[n], expected[name], rtol=1e-12, atol=1e-13)


def lite_client(step, slot: int, k: int, base: str, there: World, spec) -> dict[str, Tensor]:
    module = loaded(spec, step.before["model"])
    rng, points = rng_at(step, 0, slot, k), there.clients[k]
    order = rng.torch("batches")
    torch.manual_seed(rng.seed("torch"))
    for _ in range(2):
        for at in epoch(len(points), 4, order):
            g = gradient(module, points.inputs[at], points.targets[at])
            with torch.no_grad():
                for n, p in module.named_parameters():
                    m, v = of(statistics(step.before, "mimelite"), n, base)
                    p -= 0.2 * step_of(base, g[n], m, v)
    return module.state_dict()


@pytest.mark.parametrize("base", ["momentum", "adam", "adagrad"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mimelite_is_its_algorithm_1_in_bare_pytorch(base: str, dropout: float) -> None:
    there, spec = world(), model(dropout=dropout)
    made = mimelite(parts(there, LOCAL, spec, select=Uniform(3)), optimizer=base, **BASES[base])
    for step in course(made, there).steps:
        clients = [lite_client(step, slot, k, base, there, spec) for slot, k in enumerate(slots(step, 0))]
        close(step.after["model"], mean(clients, [1, 1, 1]))
        g = weighted(asked_gradients(step, 0, there, spec), [1, 1, 1])
        for n in g:
            m, v = of(statistics(step.before, "mimelite"), n, base)
            expected = dict(zip("mv", after(base, g[n], m, v), strict=True))
            for name, tree in statistics(step.after, "mimelite").items():
                torch.testing.assert_close(tree[n], expected[name], rtol=1e-12, atol=1e-13)


def test_mimelite_with_sgd_is_fedavg_with_uniform_weights_bit_for_bit() -> None:
    there = world()
    lite = course(mimelite(parts(there, LOCAL, select=Uniform(3)), optimizer="sgd"), there)
    plain = course(fedavg(parts(there, LOCAL, select=Uniform(3), aggregate=Mean("uniform"))), there)
    assert same(lite.final, plain.final)
    assert lite.steps[-1].tally.bytes_up == plain.steps[-1].tally.bytes_up


@pytest.mark.parametrize("algorithm", [mime, mimelite])
def test_the_server_learning_rate_scales_the_update_alone(algorithm) -> None:
    there = world()
    one, half = (
        course(algorithm(parts(there, LOCAL, select=Uniform(3)), lr=lr), there, 1).steps[0]
        for lr in (1.0, 0.5)
    )
    before = one.before["model"]
    close(half.after["model"], {n: (before[n] + one.after["model"][n]) / 2 for n in before})
    name = algorithm.__name__
    assert same(statistics(one.after, name)["m"], statistics(half.after, name)["m"])


# -- weights, parts of the model, rules on top ---------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [mime, mimelite])
def test_weighting_by_examples_weighs_models_and_gradients_alike(algorithm) -> None:
    there = world()
    given = parts(there, ONE_STEP, select=Uniform(3), aggregate=Mean("examples"))
    run = course(algorithm(given, beta=0.7), there)
    x = run.steps[0].before["model"]
    m = {n: torch.zeros_like(v) for n, v in x.items()}
    for step in run.steps:
        pooled = full_gradient(x, there.pooled(slots(step, 0)))  # what the mean by examples comes to
        x = {n: x[n] - LR * (0.3 * pooled[n] + 0.7 * m[n]) for n in x}
        m = {n: 0.3 * pooled[n] + 0.7 * m[n] for n in x}
        close(step.after["model"], x)
        close(statistics(step.after, algorithm.__name__)["m"], m)


@pytest.mark.parametrize("algorithm", [mime, mimelite])
def test_statistics_are_of_trainable_weights_and_buffers_are_averaged(algorithm) -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True, frozen=True)
    local = {"lr": 0.2, "epochs": 2, "batch_size": 20}
    run = course(algorithm(parts(there, local, spec, select=Uniform(3)), beta=0.7), there)
    weights = {"0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    for step in run.steps:
        before, cohort = step.before["model"], slots(step, 0)
        c = weighted([full_gradient(before, there.clients[k], spec) for k in cohort], [1, 1, 1])
        kept = statistics(step.before, algorithm.__name__)["m"]
        clients = []
        for k in cohort:
            at_x, at_y, points = loaded(spec, before), loaded(spec, before), there.clients[k]
            for _ in range(2):
                g = gradient(at_y, points.inputs, points.targets)
                g_x = gradient(at_x, points.inputs, points.targets)
                with torch.no_grad():
                    for n, p in at_y.named_parameters():
                        if n in weights:
                            bent = g[n] - g_x[n] + c[n] if algorithm is mime else g[n]
                            p -= 0.2 * (0.3 * bent + 0.7 * kept[n])
            clients.append(at_y.state_dict())
        found = dict(step.after["model"])
        assert found.pop("1.num_batches_tracked") == 2 * step.round  # the other gradients count no batch
        close(found, mean(clients, [1, 1, 1]))
        assert set(statistics(step.after, algorithm.__name__)["m"]) == weights
        close(statistics(step.after, algorithm.__name__)["m"], {n: 0.3 * c[n] + 0.7 * kept[n] for n in c})
    assert same({"w": run.final["0.weight"]}, {"w": run.steps[0].before["model"]["0.weight"]})


def test_a_proximal_rule_comes_on_top_of_the_step() -> None:
    there = world()
    local = {"lr": LR, "steps": 2, "batch_size": "all"}
    made = mime(parts(there, local, select=Fixed((4,)), client=proximal(mu=0.9)), beta=0.7)
    (step,) = course(made, there, rounds=1).steps
    x, points = step.before["model"], there.clients[4]
    one = {n: x[n] - LR * 0.3 * g for n, g in full_gradient(x, points).items()}
    two = {n: one[n] - LR * (0.3 * g + 0.9 * (one[n] - x[n])) for n, g in full_gradient(one, points).items()}
    close(step.after["model"], two)


@pytest.mark.parametrize("target", ["uniform", "population"])
@pytest.mark.parametrize("algorithm", [mime, mimelite])
def test_with_fedir_all_gradients_are_those_of_its_weighted_loss(algorithm, target: str) -> None:
    there = world()
    given = parts(there, ONE_STEP, select=Uniform(3), client=reweighted(target=target, normalize=False))
    run = course(algorithm(given, beta=0.7), there, rounds=3)
    counts = torch.bincount(there.pooled().targets, minlength=3).double()
    p = counts / counts.sum() if target == "population" else torch.full((3,), 1 / 3, dtype=torch.float64)

    def of_client(tree, points: Points) -> dict[str, Tensor]:
        module = loaded(model(), tree)
        share = torch.bincount(points.targets, minlength=3).double() / len(points)
        w = (p / share)[points.targets]
        losses = torch.nn.functional.cross_entropy(module(points.inputs), points.targets, reduction="none")
        (w * losses).mean().backward()
        return {n: q.grad for n, q in module.named_parameters()}

    x = run.steps[0].before["model"]
    m = {n: torch.zeros_like(v) for n, v in x.items()}
    for step in run.steps:
        cohort = [row["client"] for row in step.tally.per_client if "loss" in row]
        assert len(cohort) == 3
        c = weighted([of_client(x, there.clients[k]) for k in cohort], [1, 1, 1])
        x = {n: x[n] - LR * (0.3 * c[n] + 0.7 * m[n]) for n in x}
        m = {n: 0.3 * c[n] + 0.7 * m[n] for n in x}
        close(step.after["model"], x)


# -- large cohorts, missing clients, what is counted ---------------------------------------------------------


@pytest.mark.parametrize("algorithm", [mime, mimelite])
def test_a_large_cohort_is_reduced_in_blocks_to_the_same_mean(algorithm) -> None:
    there = world([1 + k % 7 for k in range(75)])
    run = course(algorithm(parts(there, ONE_STEP, select=Uniform(70)), beta=0.7), there, rounds=2)
    first_round, second = run.steps
    assert len(slots(second, 0)) == 70
    x = second.before["model"]
    c = weighted([full_gradient(x, there.clients[k]) for k in slots(second, 0)], [1] * 70)
    m = statistics(first_round.after, algorithm.__name__)["m"]
    close(second.after["model"], {n: x[n] - LR * (0.3 * c[n] + 0.7 * m[n]) for n in x})


@pytest.mark.parametrize("nan", [False, True], ids=["silent", "nan"])
@pytest.mark.parametrize("exchange", ["first", "second"])
def test_a_client_that_drops_out_of_one_exchange_is_left_out_of_that_one(exchange: str, nan: bool) -> None:
    there = world()
    made = mime(parts(there, ONE_STEP, select=Fixed((0, 1, 4))), beta=0.7)
    (step,) = course(faulty(made, **{exchange: [1]}, nan=nan), there, rounds=1).steps
    x = step.before["model"]
    left = (0, 4) if exchange == "first" else (0, 1, 4)
    c = weighted([full_gradient(x, there.clients[k]) for k in left], [1] * len(left))
    (reason,) = step.tally.failures[1]
    assert reason.startswith("update holds NaN or Inf" if nan else "ConnectionError: no answer")
    assert step.tally.failed == 1
    assert (slots(step, 0), slots(step, 1)) == (left, (0, 1, 4) if exchange == "first" else (0, 4))
    close(step.after["model"], {n: x[n] - LR * 0.3 * c[n] for n in x})
    close(statistics(step.after)["m"], {n: 0.3 * c[n] for n in x})


def test_a_dropped_client_of_mimelite_is_in_neither_the_model_nor_the_statistics() -> None:
    there = world([3, 8, 0, 5])  # client 2 has nothing to train on
    run = course(mimelite(parts(there, ONE_STEP, select=Fixed((0, 1, 2, 3)))), there)
    without = course(mimelite(parts(there, ONE_STEP, select=Fixed((0, 1, 3)))), there)
    for step, other in zip(run.steps, without.steps, strict=True):
        assert step.tally.failed == 1
        assert slots(step, 0) == slots(other, 0) == (0, 1, 3)
        assert same(step.after["model"], other.after["model"])
        assert same(statistics(step.after, "mimelite")["m"], statistics(other.after, "mimelite")["m"])


@pytest.mark.parametrize("exchange", ["first", "second"])
def test_where_every_client_drops_out_model_and_statistics_stay(exchange: str) -> None:
    there = world()
    made = mime(parts(there, ONE_STEP, select=Fixed((0, 1))), beta=0.7)
    broken = faulty(made, **{exchange: [0, 1]})
    (step,) = course(broken, there, rounds=1).steps
    assert same(step.after["model"], step.before["model"])
    assert same(statistics(step.after)["m"], statistics(step.before)["m"])
    assert step.tally.failed == 2


def test_every_gradient_is_counted_as_a_batch_and_the_loss_is_that_of_training() -> None:
    there, local = world(), {"lr": 0.1, "epochs": 2, "batch_size": 4}
    everyone = {"select": Everyone()}
    full = [-(-n // 4) for n in SIZES]
    for algorithm, work in ((mime, lambda b: b + 2 * 2 * b), (mimelite, lambda b: b + 2 * b)):
        (step,) = course(algorithm(parts(there, local, **everyone)), there, rounds=1).steps
        assert dict(step.tally.batches) == {k: work(b) for k, b in enumerate(full)}
        assert step.tally.sums["examples"] == 2 * sum(SIZES)
    # In one step from the global model, the loss is FedAvg's.
    losses = [
        course(algorithm(parts(there, ONE_STEP, **everyone)), there, rounds=1).steps[0].tally.sums["loss"]
        for algorithm in (fedavg, mime, mimelite)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) == pytest.approx(losses[2], rel=1e-12)


def test_what_is_kept_is_no_more_than_the_statistics() -> None:
    there = world()
    for algorithm, name in ((mime, "mime"), (mimelite, "mimelite")):
        run = course(algorithm(parts(there, LOCAL, select=Uniform(3)), optimizer="adam"), there, rounds=2)
        assert {n: set(s) for n, s in run.steps[-1].after["rules"][name].items()} == {
            "statistics": {"m", "v"}
        }


def test_the_round_leaves_the_state_that_it_was_given_untouched() -> None:
    there = world()
    made = mime(parts(there, LOCAL, select=Uniform(3)), optimizer="adam")
    run, again = course(made, there), course(made, there)
    for step, other in zip(run.steps, again.steps, strict=True):
        assert same(step.before["model"], other.before["model"])
        for name in "mv":
            assert same(statistics(step.before)[name], statistics(other.before)[name])
