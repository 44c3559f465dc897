"""FedDyn: the bent objective against its formula, h against the clients' linear terms, and the point of rest."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Momentum, ServerSGD
from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.feddyn import dynamic, feddyn
from fedlens.algorithms.fedprox import fedprox
from fedlens.local.rules import ClientRule, LocalContext, proximal
from fedlens.local.settings import LocalSettings
from tests.covering import covering
from tests.identity.drift_kit import (
    COUNTS,
    LINE,
    UNIFORM,
    Seen,
    Squares,
    distances,
    line,
    mean_of,
    optimum,
    quadratics,
    watched,
)
from tests.identity.identity_kit import (
    SIZES,
    Points,
    World,
    close,
    course,
    epoch,
    model,
    parts,
    rng_of,
    same,
    weights_of,
    world,
)

SGD = {"lr": 0.1, "epochs": 2, "batch_size": 4}
N = len(SIZES)
MEAN = sum(SIZES) / N


def kept_by_server(state) -> Mapping[str, Tensor]:
    return state["rules"]["dynamic"]["linear"]


def linears(step: Seen, there: World | None = None) -> list[dict[str, Tensor]]:
    """All clients' linear terms after a round, zero where they have not taken part; times n_k / nbar for `there`."""
    zero = {n: torch.zeros_like(v) for n, v in kept_by_server(step.after).items()}
    found = [step.held[k].get("linear", zero) for k in range(len(step.held))]
    if there is None:
        return found
    sizes = [len(points) for points in there.clients]
    nbar = sum(sizes) / len([n for n in sizes if n])
    return [{name: v * n / nbar for name, v in tree.items()} for n, tree in zip(sizes, found, strict=True)]


def bare(
    spec, tree, points: Points, rng, local, linear, alpha: float, scale: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and the whole state after descending scale (f - <l, w> + alpha/2 |w - x|^2), left to autograd.

    The L2 penalty of the settings is a part of f.
    """
    module = spec.build()
    module.load_state_dict(dict(tree))
    module.train()
    weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
    anchor = {n: p.detach().clone() for n, p in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=local["lr"], momentum=local.get("momentum", 0.0))
    order, decay = rng.torch("batches"), local.get("weight_decay", 0.0)
    torch.manual_seed(rng.seed("torch"))
    for _ in range(local["epochs"]):
        size = len(points) if local["batch_size"] == "all" else local["batch_size"]
        for at in epoch(len(points), size, order):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(points.inputs[at]), points.targets[at])
            for n, w in weights.items():
                loss = loss - (linear[n] * w).sum() + alpha / 2 * ((w - anchor[n]) ** 2).sum()
                loss = loss + decay / 2 * (w**2).sum()
            (scale * loss).backward()
            optimizer.step()
    return {n: w.detach() for n, w in weights.items()}, module.state_dict()


# -- the whole algorithm in bare PyTorch -----------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize(
    "change", [{}, {"momentum": 0.5, "weight_decay": 0.1}], ids=["plain", "momentum-and-decay"]
)
def test_it_is_its_formula_with_sampled_clients(change, weighting: str) -> None:
    """Six rounds of three out of six clients: each descends its bent objective, written down and left to autograd;
    h is the mean of all linear terms, computed from all of them; the model is the clients' mean less h / alpha."""
    there, local, alpha = world(), SGD | change, 0.7
    zero = {n: torch.zeros_like(p) for n, p in model().build().named_parameters()}
    own = dict.fromkeys(range(N), zero)
    p = [n / MEAN if weighting == "examples" else 1.0 for n in SIZES]
    made = feddyn(parts(there, local, select=Uniform(3)), alpha=alpha, weighting=weighting)
    for step in watched(made, there, rounds=6):
        x, ends = step.before["model"], []
        for slot, k in enumerate(step.cohort):
            rng, of_k = rng_of(step, slot), alpha / p[k]
            end, _ = bare(model(), x, there.clients[k], rng, local, own[k], of_k, min(1.0, p[k]))
            own[k] = {n: own[k][n] - of_k * (end[n] - x[n]) for n in end}
            close(step.held[k]["linear"], own[k])
            ends.append(end)
        h = mean_of([{n: p[k] * v for n, v in own[k].items()} for k in range(N)])
        close(kept_by_server(step.after), h)
        close(weights_of(step.after["model"]), {n: v - h[n] / alpha for n, v in mean_of(ends).items()})
    assert min(p) < 0.3 < 1.5 < max(p) or weighting == "uniform"


@pytest.mark.parametrize(
    ("alpha", "steps", "weighting"), covering([0.02, 1.5, 10.0], [1, 7, 80], ["uniform", "examples"])
)
def test_quadratics_against_the_closed_form(alpha: float, steps: int, weighting: str) -> None:
    """w_K = v + (I - lr s (H + a))^K (w - v), with v = (H + a)^-1 (b + l + a w) the minimizer, over six rounds."""
    there, lr = quadratics(), 0.1
    local = {"lr": lr, "steps": steps, "batch_size": "all"}
    p = [n * len(COUNTS) / sum(COUNTS) if weighting == "examples" else 1.0 for n in COUNTS]
    made = parts(there, local, LINE, task=Squares(), select=Uniform(2))
    own, one = [torch.zeros(4, 1).double() for _ in COUNTS], torch.eye(4).double()
    for step in course(feddyn(made, alpha=alpha, weighting=weighting), there, rounds=6).steps:
        x, ends = step.before["model"]["weight"].T, []
        for k in step.cohort:
            points, a, s = there.clients[k], alpha / p[k], min(1.0, p[k])
            h = points.inputs.T @ points.inputs / len(points) + a * one
            side = points.inputs.T @ points.targets / len(points) + own[k] + a * x
            best = torch.linalg.solve(h, side)
            end = best + torch.linalg.matrix_power(one - lr * s * h, steps) @ (x - best)
            own[k] = own[k] - a * (end - x)
            ends.append(end)
        mean = sum(ends) / 2 - sum(q * v for q, v in zip(p, own, strict=True)) / len(p) / alpha
        torch.testing.assert_close(step.after["model"]["weight"].T, mean, rtol=1e-9, atol=1e-10)


# -- the terms by themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 2, 12], ids=["uniform", "few-examples", "many-examples"])
def test_the_gradient_is_that_of_the_penalty_by_finite_differences_and_not_zero(size) -> None:
    g = torch.Generator().manual_seed(0)
    shapes, alpha, step = ((2, 3), (4,), ()), 0.7, 1e-5
    anchor, w, task, linear = (
        [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes] for _ in range(4)
    )
    names = ["a", "b", "c"]
    rule = dynamic(alpha=alpha, weighting="uniform" if size is None else "examples")
    state = {"linear": dict(zip(names, linear, strict=True))}
    payload = {} if size is None else {"mean_examples": 6.0}
    context = LocalContext(names, anchor, payload, state, 0.1, 1, LocalSettings(lr=0.1))
    context.problem = type("Bench", (), {"client": type("Client", (), {"data": range(size or 1)})})
    rule.start(context)
    share = 1.0 if size is None else size / 6
    scale, own = min(1.0, share), alpha / share
    bent = rule.grad(task, w, context)
    added = [a - scale * b for a, b in zip(bent, task, strict=True)]

    def penalty(at: list[Tensor]) -> float:
        terms = zip(at, anchor, linear, strict=True)
        return float(scale * sum((-(c * p).sum() + own / 2 * ((p - a) ** 2).sum()) for p, a, c in terms))

    for i, tensor in enumerate(w):
        for place in range(tensor.numel()):
            up, down = ([t.clone() for t in w] for _ in range(2))
            up[i].view(-1)[place] += step
            down[i].view(-1)[place] -= step
            slope = (penalty(up) - penalty(down)) / (2 * step)
            assert added[i].reshape(-1)[place].item() == pytest.approx(slope, abs=1e-8)
    assert all(a.abs().min() > 1e-3 for a in added)


def test_the_hooks_change_none_of_their_inputs() -> None:
    gradients, w, anchor, linear = ([torch.full((3,), value)] for value in (1.0, 2.0, 3.0, 4.0))
    context = LocalContext(["w"], anchor, {}, {"linear": {"w": linear[0]}}, 0.1, 1)
    rule = dynamic(alpha=0.5)
    rule.start(context)
    rule.grad(gradients, w, context)
    rule.finish(w, context)
    assert [t[0][0] for t in (gradients, w, anchor, linear)] == [1.0, 2.0, 3.0, 4.0]


# -- h -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("select", [Uniform(1), Uniform(4), Everyone()], ids=["one", "four", "all"])
def test_h_is_the_mean_over_all_clients_of_their_linear_terms_after_every_round(weighting, select) -> None:
    there = world()
    made = feddyn(parts(there, SGD, select=select), alpha=0.3, weighting=weighting)
    for step in watched(made, there, rounds=6):
        close(kept_by_server(step.after), mean_of(linears(step, there if weighting == "examples" else None)))
        assert max(v.abs().max() for v in kept_by_server(step.after).values()) > 1e-3


@pytest.mark.parametrize(
    "change", [{"optimizer": "adam", "lr": 0.01}, {"clip_norm": 0.1}, {"stragglers": 0.5}], ids=str
)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_h_is_that_mean_however_clients_solve_their_problem(change, weighting: str) -> None:
    there = world()
    made = feddyn(parts(there, SGD | change, select=Uniform(3)), alpha=0.3, weighting=weighting)
    for step in watched(made, there, rounds=4):
        close(kept_by_server(step.after), mean_of(linears(step, there if weighting == "examples" else None)))


@pytest.mark.parametrize(
    "given",
    [
        {"aggregate": Mean("examples")},
        {"client": ClientRule(name="noting", finish=lambda parameters, context: ({}, {"seen": 1}))},
        {"client": proximal(mu=1.0)},
        {"server": Momentum(0.5, 0.5)},
        {"aggregate": Mean("examples"), "select": Uniform(70)},
    ],
    ids=["by-examples", "noting", "proximal", "momentum", "blocks"],
)
def test_h_is_that_mean_in_every_composition(given) -> None:
    there = world([1 + k % 5 for k in range(75)]) if "select" in given else world()
    local = SGD | {"epochs": 1} if "select" in given else SGD
    made = feddyn(parts(there, local, **{"select": Uniform(3), **given}), alpha=0.3)
    for step in watched(made, there, rounds=3):
        close(kept_by_server(step.after), mean_of(linears(step)))


@pytest.mark.parametrize("fault", ["lost", "update"])
@pytest.mark.parametrize("aggregate", [None, Mean("examples")], ids=["uniform", "by-examples"])
def test_a_missing_or_rejected_reply_leaves_its_linear_term_and_is_not_counted(fault: str, aggregate) -> None:
    there, plan = world(), {2: {0: fault, 3: fault}, 3: {5: fault}, 4: {1: fault, 4: fault}}
    made = feddyn(parts(there, SGD, select=Everyone(), aggregate=aggregate), alpha=0.3)
    run = watched(made, there, rounds=5, faults=plan)
    for earlier, step in pairwise(run):
        out = plan.get(step.round, {})
        assert step.tally.failed == len(out)
        close(kept_by_server(step.after), mean_of(linears(step)))
        for k in range(N):
            assert same(step.held[k]["linear"], earlier.held[k]["linear"]) == (k in out)


def test_a_round_without_a_good_reply_changes_nothing() -> None:
    there, plan = world(), {2: {0: "lost", 3: "update"}}
    run = watched(feddyn(parts(there, SGD, select=Fixed((0, 3)))), there, rounds=2, faults=plan)
    assert same(run[1].before["model"], run[1].after["model"])
    assert same(kept_by_server(run[1].before), kept_by_server(run[1].after))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_clients_that_hold_nothing_are_not_among_the_n(weighting: str) -> None:
    there = world([3, 0, 5, 0, 4])
    run = watched(feddyn(parts(there, SGD, select=Uniform(2)), alpha=0.3, weighting=weighting), there)
    for step in run:
        held = linears(step, there if weighting == "examples" else None)
        close(kept_by_server(step.after), mean_of([v for k, v in enumerate(held) if len(there.clients[k])]))


# -- next to FedAvg and FedProx ----------------------------------------------------------------------------------


def test_the_first_round_of_all_clients_goes_twice_as_far_as_fedprox() -> None:
    there, alpha = world(), 0.7
    given = {"select": Everyone()}
    ours = course(feddyn(parts(there, SGD, **given), alpha=alpha), there, rounds=1).steps[0]
    prox = course(
        fedprox(parts(there, SGD, aggregate=Mean("uniform"), **given), mu=alpha), there, rounds=1
    ).final
    x = ours.before["model"]
    close(ours.after["model"], {n: x[n] + 2 * (prox[n] - x[n]) for n in x})
    assert max((ours.after["model"][n] - prox[n]).abs().max() for n in x) > 1e-3


def test_the_first_round_of_some_clients_goes_further_by_their_share() -> None:
    there, alpha = world(), 0.7
    ours = course(feddyn(parts(there, SGD, select=Uniform(2)), alpha=alpha), there, rounds=1).steps[0]
    given = {"select": Uniform(2), "aggregate": Mean("uniform")}
    prox = course(fedprox(parts(there, SGD, **given), mu=alpha), there, rounds=1).final
    x = ours.before["model"]
    close(ours.after["model"], {n: x[n] + (1 + 2 / N) * (prox[n] - x[n]) for n in x})


def test_with_equal_clients_by_examples_is_uniform() -> None:
    there = world([5, 5, 5, 5])
    runs = [
        course(feddyn(parts(there, SGD, select=Uniform(2)), weighting=w), there).final
        for w in ("uniform", "examples")
    ]
    assert same(*runs)


def test_the_table_client_is_the_algorithms_rule_and_says_by_itself_what_the_mean_says_else() -> None:
    there = world()
    given = {"select": Uniform(3), "aggregate": Mean("uniform")}
    bare_parts, rule = parts(there, SGD, **given), dynamic(alpha=0.3)
    ours = feddyn(bare_parts, alpha=0.3)
    table = fedavg(parts(there, SGD, client=rule, **given))
    close(course(ours, there).final, course(table, there).final)

    def sent(made) -> set[str]:
        return set(made.train.expect(made.parts.spec, 12).fields)

    assert sent(ours) == sent(fedavg(bare_parts))
    assert sent(table) == sent(ours) | {"linear"}
    assert sent(feddyn(parts(there, SGD, aggregate=Mean("examples")))) == sent(table)


# -- quadratics: where it comes to rest ----------------------------------------------------------------------------

LOCAL = {"lr": 0.1, "steps": 10, "batch_size": "all"}


def given_quadratics(there: World, change: Mapping, spec=LINE, **given) -> Parts:
    return parts(there, LOCAL | change, spec, **{"task": Squares(), "select": Uniform(3), **given})


@pytest.mark.parametrize(
    ("weighting", "composed"),
    covering(
        ["uniform", "examples"],
        {
            "exact": ({"steps": 30}, {}),
            "plain": ({}, {}),
            "momentum": ({"momentum": 0.5}, {}),
            "decay": ({"weight_decay": 0.3}, {}),
            "proximal": ({}, {"client": proximal(mu=0.5)}),
            "stragglers": ({"stragglers": 0.5}, {}),
            "by-examples": ({}, {"aggregate": Mean("examples")}),
            "slower": ({}, {"server": ServerSGD(0.7)}),
        },
    ),
)
def test_it_converges_to_the_true_optimum_with_sampled_clients(weighting: str, composed) -> None:
    there, (change, given) = quadratics(), composed
    weights = UNIFORM if weighting == "uniform" else COUNTS
    best = optimum(there, weights, change.get("weight_decay", 0.0))
    made = feddyn(given_quadratics(there, change, **given), alpha=3.0, weighting=weighting)
    far = distances(made, there, 60, best)
    assert far[59] < 3e-4 < 0.1 < far[0]
    assert far[59] < 0.3 * far[39] < 0.1 * far[19]
    other = optimum(there, COUNTS if weighting == "uniform" else UNIFORM, change.get("weight_decay", 0.0))
    assert (best - other).norm() > 0.05


def test_at_the_optimum_with_their_gradients_as_linear_terms_nobody_moves_and_fedavg_does() -> None:
    there = quadratics()
    best = optimum(there, UNIFORM)

    def at_best(input_shape, classes) -> nn.Module:
        module = line(input_shape, classes)
        module.weight.data.copy_(best.T)
        return module

    spec = model(factory=at_best)
    gradients = [p.inputs.T @ (p.inputs @ best - p.targets) / len(p) for p in there.clients]
    known = {k: {"linear": {"weight": g.T.contiguous()}} for k, g in enumerate(gradients)}
    for step in watched(feddyn(given_quadratics(there, {}, spec), alpha=0.5), there, 10, held=known):
        close({"w": step.after["model"]["weight"].T}, {"w": best})
    drifted = distances(fedavg(given_quadratics(there, {}, spec, aggregate=Mean("uniform"))), there, 10, best)
    assert min(drifted) > 0.01


def test_a_large_alpha_is_a_gradient_step_and_a_small_one_the_clients_own_optima() -> None:
    there, (k,) = quadratics(), (4,)
    points, alone = there.clients[k], {"select": Fixed((4,))}
    for alpha, lr, steps in ((1e6, 1e-6, 60), (1e-7, 0.1, 1000)):
        made = feddyn(given_quadratics(there, {"lr": lr, "steps": steps}, **alone), alpha=alpha)
        (step,) = watched(made, there, rounds=1)
        x = step.before["model"]["weight"].T
        moved = -step.held[k]["linear"]["weight"].T / alpha  # w_k - w^t, from l_k
        gradient = points.inputs.T @ (points.inputs @ x - points.targets) / len(points)
        own = optimum(World((points,)), [1.0])
        expected = -gradient / alpha if alpha > 1 else own - x
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=0.0)


def test_clients_of_one_and_of_many_examples_are_both_steady_where_their_weight_is_their_size() -> None:
    """n_k / nbar from 0.02 to 3.9: alpha_k is 63 at the smallest, and lr alpha_k 6; each step alone would overshoot."""
    g, sizes = torch.Generator().manual_seed(1), (1, 2, 60, 200)
    clients = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 4, generator=g, dtype=torch.float64)
        clients.append(Points(x, x @ torch.full((4, 1), float(k)).double()))
    there = World(tuple(clients))
    best, nbar = optimum(there, sizes), sum(sizes) / 4
    assert 0.1 * 1.0 * nbar / 1 > 2
    made = feddyn(given_quadratics(there, {}, select=Uniform(2)), alpha=1.0, weighting="examples")
    far = distances(made, there, 100, best)
    assert max(far) < 10 * far[0]
    assert far[99] < 1e-2 * far[0]


# -- layers that are not trained, and servers that are not plain -----------------------------------------------------


def test_running_statistics_are_averaged_uniformly_and_h_leaves_them_alone() -> None:
    there, spec = world((4, 9, 5, 2, 12, 6)), model(norm=True, frozen=True)
    local, alpha = SGD | {"batch_size": "all", "epochs": 1}, 0.5
    frozen = spec.build().state_dict()["0.weight"]
    names = {n for n, p in spec.build().named_parameters() if p.requires_grad}
    own: dict = {}
    for step in watched(feddyn(parts(there, local, spec, select=Uniform(3)), alpha=alpha), there, rounds=4):
        assert set(kept_by_server(step.after)) == names
        assert "0.weight" not in names
        close(kept_by_server(step.after), mean_of(linears(step)))
        x, ends = step.before["model"], []
        for slot, k in enumerate(step.cohort):
            linear = own.get(k, {n: torch.zeros_like(x[n]) for n in names})
            _, end = bare(spec, x, there.clients[k], rng_of(step, slot), local, linear, alpha)
            own[k] = {n: linear[n] - alpha * (end[n] - x[n]) for n in names}
            ends.append({n: v for n, v in end.items() if "num_batches" not in n})
        mean, h = mean_of(ends), kept_by_server(step.after)
        expected = {n: v - h[n] / alpha if n in names else v for n, v in mean.items()}
        close({n: step.after["model"][n] for n in expected}, expected)
        assert torch.equal(step.after["model"]["0.weight"], frozen)


def test_a_server_table_steps_along_the_mean_update_and_h() -> None:
    there, alpha = world(), 0.5
    plain = watched(feddyn(parts(there, SGD, select=Uniform(3)), alpha=alpha), there, rounds=1)[0]
    made = feddyn(parts(there, SGD, select=Uniform(3), server=Momentum(0.25, 0.5)), alpha=alpha)
    first, second = watched(made, there, rounds=2)
    x, start = weights_of(first.before["model"]), weights_of(plain.after["model"])
    update = {n: x[n] - start[n] for n in x}  # mean Delta + h / alpha
    close(weights_of(first.after["model"]), {n: x[n] - 0.25 * update[n] for n in x})
    close(first.after["server"]["v"], update)
    ends = []
    for slot, k in enumerate(second.cohort):
        own = first.held[k].get("linear", {n: torch.zeros_like(v) for n, v in x.items()})
        rng = rng_of(second, slot)
        ends.append(bare(model(), second.before["model"], there.clients[k], rng, SGD, own, alpha)[0])
    h, at = kept_by_server(second.after), second.before["model"]
    then = {n: at[n] - v + h[n] / alpha for n, v in mean_of(ends).items()}
    close(second.after["server"]["v"], {n: 0.5 * update[n] + then[n] for n in then})
