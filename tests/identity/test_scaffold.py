"""SCAFFOLD: the control variates against their definition, the means that have to agree, and the point of rest."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Momentum
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.scaffold import control_variate, scaffold, travel
from fedlens.local.rules import ServerRule, proximal
from fedlens.local.settings import LocalSettings
from tests.covering import covering
from tests.identity.drift_kit import (
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

ONE_STEP = {"lr": 0.3, "steps": 1, "batch_size": "all"}
PLAIN = {"lr": 0.1, "epochs": 2, "batch_size": 4}
LOOSE = {"rtol": 1e-10, "atol": 1e-11}
N = len(SIZES)


def variates(step: Seen) -> list[Mapping[str, Tensor]]:
    """All clients' variates after a round; zero where a client has not taken part yet."""
    zero = {n: torch.zeros_like(v) for n, v in server_variate(step.after).items()}
    return [step.held[k].get("variate", zero) for k in range(len(step.held))]


def server_variate(state) -> Mapping[str, Tensor]:
    return state["rules"]["control-variate"]["variate"]


def named_gradient(
    module: nn.Module, inputs: Tensor, targets: Tensor, loss=nn.functional.cross_entropy
) -> dict:
    module.zero_grad()
    loss(module(inputs), targets).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}


def gradient_at(tree, points: Points, decay: float) -> dict[str, Tensor]:
    """The gradient over all examples of a client, its L2 penalty with it."""
    module = model().build()
    module.load_state_dict(dict(tree))
    return {n: g + decay * tree[n] for n, g in named_gradient(module, points.inputs, points.targets).items()}


def bare(spec, tree, points: Points, rng, local, control) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The module after local training with `control` = c - c_i on every gradient, and the gradients before that."""
    module = spec.build()
    module.load_state_dict(dict(tree))
    module.train()
    keys = ("lr", "momentum", "nesterov", "weight_decay")
    settings = {key: local[key] for key in keys if key in local}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], **settings)
    order, seen = rng.torch("batches"), []
    torch.manual_seed(rng.seed("torch"))
    for _ in range(local["epochs"]):
        for at in epoch(len(points), local["batch_size"], order):
            gradient = named_gradient(module, points.inputs[at], points.targets[at])
            with torch.no_grad():
                decay = local.get("weight_decay", 0.0)
                weights = dict(module.named_parameters())
                seen.append({n: g + decay * weights[n] for n, g in gradient.items()})
                for n in gradient:
                    weights[n].grad += control[n]
            optimizer.step()
    return module, seen


def amounts(local, steps: int) -> list[float]:
    """a_t in closed form: how far the gradient of step t has moved the weights by the last one."""
    m, nesterov = local.get("momentum", 0.0), local.get("nesterov", False)
    left = [steps - t for t in range(steps)]
    return [_nesterov(m, j) if nesterov else (1 - m**j) / (1 - m) for j in left]


def _nesterov(m: float, left: int) -> float:
    """What one gradient moves in `left` steps: 1 + m at once, then m^(j + 1) in the j-th step after."""
    return (1 + m) + sum(m ** (j + 1) for j in range(1, left))


# -- the whole algorithm in bare PyTorch -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"momentum": 0.6},
        {"momentum": 0.6, "nesterov": True},
        {"momentum": 0.5, "weight_decay": 0.05},
        {"lr_decay": 0.7},
    ],
    ids=["plain", "momentum", "nesterov", "decay", "lr-decay"],
)
@pytest.mark.parametrize("option", ["I", "II"])
def test_a_variate_is_the_gradient_it_stands_for_and_the_model_the_mean_of_the_clients(
    change, option: str
) -> None:
    """Six rounds of three out of six clients with unequal numbers of steps. Option II's variate against the gradients
    that were taken, weighed; option I's against the gradient at the global model; c against the mean of all."""
    there, local = world(), PLAIN | change
    zero = {n: torch.zeros_like(p) for n, p in model().build().named_parameters()}
    own = dict.fromkeys(range(N), zero)
    made = scaffold(parts(there, local, select=Uniform(3)), option=option, lr=0.8)
    for step in watched(made, there, rounds=6):
        x, c = step.before["model"], mean_of([own[k] for k in range(N)])
        now = {**local, "lr": 0.1 * local.get("lr_decay", 1.0) ** (step.round - 1)}
        close(server_variate(step.before), c, **LOOSE)
        ends = []
        for slot, k in enumerate(step.cohort):
            control = {n: c[n] - own[k][n] for n in c}
            module, seen = bare(model(), x, there.clients[k], rng_of(step, slot), now, control)
            if option == "I":
                own[k] = gradient_at(x, there.clients[k], local.get("weight_decay", 0.0))
            else:
                a = amounts(local, len(seen))
                own[k] = {n: sum(w * g[n] for w, g in zip(a, seen, strict=True)) / sum(a) for n in c}
            close(step.held[k]["variate"], own[k], **LOOSE)
            ends.append({n: p.detach() for n, p in module.named_parameters()})
        moved = mean_of(ends)
        expected = {n: x[n] + 0.8 * (moved[n] - x[n]) for n in moved}
        close(weights_of(step.after["model"]), expected, **LOOSE)
        close(server_variate(step.after), mean_of([own[k] for k in range(N)]), **LOOSE)
    assert len({len(there.clients[k]) for k in range(N)}) == N


def test_with_one_full_batch_step_a_variate_is_the_clients_gradient_and_the_options_are_one() -> None:
    there = world()
    for change in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}):
        local = ONE_STEP | change
        two, one = (
            watched(scaffold(parts(there, local, select=Uniform(2)), option=option), there)
            for option in ("II", "I")
        )
        for a, b in zip(two, one, strict=True):
            for k in a.cohort:
                x, decay = a.before["model"], change.get("weight_decay", 0.0)
                close(a.held[k]["variate"], gradient_at(x, there.clients[k], decay))
                close(a.held[k]["variate"], b.held[k]["variate"])
            close(a.after["model"], b.after["model"])


# -- what the means come to ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("select", [Uniform(1), Uniform(4), Everyone()], ids=["one", "four", "all"])
def test_the_mean_of_all_variates_is_the_servers_after_every_round(option: str, select) -> None:
    there = world()
    run = watched(scaffold(parts(there, PLAIN, select=select), option=option), there, rounds=6)
    for step in run:
        close(server_variate(step.after), mean_of(variates(step)))
        assert max(v.abs().max() for v in server_variate(step.after).values()) > 1e-3


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_means_agree_whatever_the_aggregate_and_in_blocks_of_a_large_cohort(weighting: str) -> None:
    there = world([1 + k % 5 for k in range(75)])
    local = PLAIN | {"epochs": 1}
    given = {"select": Uniform(70), "aggregate": Mean(weighting)}
    for step in watched(scaffold(parts(there, local, **given)), there, rounds=2):
        assert Mean(weighting).reduce(70).block > 1
        close(server_variate(step.after), mean_of(variates(step)))


@pytest.mark.parametrize("fault", ["lost", "update", "variate"])
def test_a_missing_or_rejected_reply_leaves_its_variate_and_is_not_counted(fault: str) -> None:
    there, plan = world(), {2: {0: fault, 3: fault}, 3: {5: fault}, 4: {1: fault, 4: fault}}
    run = watched(scaffold(parts(there, PLAIN, select=Everyone())), there, rounds=5, faults=plan)
    for earlier, step in pairwise(run):
        out = plan.get(step.round, {})
        assert step.tally.failed == len(out)
        close(server_variate(step.after), mean_of(variates(step)))
        for k in range(N):
            assert same(step.held[k]["variate"], earlier.held[k]["variate"]) == (k in out)


def test_a_round_without_a_good_reply_changes_nothing() -> None:
    there, plan = world(), {2: {0: "lost", 3: "variate"}}
    run = watched(scaffold(parts(there, PLAIN, select=Fixed((0, 3)))), there, rounds=2, faults=plan)
    assert same(run[1].before["model"], run[1].after["model"])
    assert same(server_variate(run[1].before), server_variate(run[1].after))
    assert all(same(run[0].held[k]["variate"], run[1].held[k]["variate"]) for k in (0, 3))


def test_clients_that_hold_nothing_are_not_among_the_n() -> None:
    there = world([3, 0, 5, 0, 4])
    run = watched(scaffold(parts(there, PLAIN, select=Uniform(2))), there)
    for step in run:
        held = [v for k, v in enumerate(variates(step)) if len(there.clients[k])]
        assert len(held) == 3
        close(server_variate(step.after), mean_of(held))


# -- FedAvg, where nothing is corrected ------------------------------------------------------------------------


def test_the_first_round_is_uniform_fedavg_bit_for_bit() -> None:
    there, local = world(), PLAIN | {"momentum": 0.5}
    given = {"select": Uniform(3), "aggregate": Mean("uniform")}
    ours = course(scaffold(parts(there, local, select=Uniform(3))), there, rounds=2)
    plain = course(fedavg(parts(there, local, **given)), there, rounds=2)
    assert same(ours.steps[0].after["model"], plain.steps[0].after["model"])
    assert not same(ours.final, plain.final)


def test_variates_that_stay_zero_are_fedavg_bit_for_bit() -> None:
    there, rule = world(), control_variate()
    half = rule.server_rules["control-variate"]
    still = replace(
        rule,
        finish=None,
        expect=None,
        fields={},
        server_rules={"control-variate": ServerRule(half.init, half.shared)},
    )
    ours = course(fedavg(parts(there, PLAIN, select=Uniform(3), client=still)), there)
    assert same(ours.final, course(fedavg(parts(there, PLAIN, select=Uniform(3))), there).final)


def test_the_table_client_is_the_algorithms_rule() -> None:
    there = world()
    given = {"select": Uniform(3), "aggregate": Mean("uniform")}
    ours = course(scaffold(parts(there, PLAIN, select=Uniform(3))), there).final
    assert same(ours, course(fedavg(parts(there, PLAIN, client=control_variate(), **given)), there).final)


# -- quadratics whose curvature and optimum differ from client to client ----------------------------------------


LOCAL = {"lr": 0.1, "steps": 5, "batch_size": "all"}


@pytest.mark.parametrize(
    ("option", "change"),
    covering(
        ["I", "II"],
        {
            "momentum": {"momentum": 0.5},
            "plain": {},
            "nesterov": {"momentum": 0.5, "nesterov": True, "lr": 0.05},
            "decay": {"weight_decay": 0.2},
            "proximal": {"mu": 0.5},
            "stragglers": {"stragglers": 0.5},
            "lr-decay": {"lr_decay": 0.999},
        },
    ),
)
def test_it_converges_linearly_to_the_true_optimum_with_sampled_clients(option: str, change) -> None:
    there, local = quadratics(), LOCAL | {key: value for key, value in change.items() if key != "mu"}
    more = proximal(mu=change["mu"]) if "mu" in change else None
    best = optimum(there, UNIFORM, change.get("weight_decay", 0.0))
    far = distances(
        scaffold(parts(there, local, LINE, task=Squares(), select=Uniform(3), client=more), option=option),
        there,
        80,
        best,
    )
    assert far[79] < 1e-6
    assert far[79] < 3e-3 * far[49] < 1e-5 * far[19]


def test_fedavg_comes_to_rest_elsewhere_and_scaffold_at_the_optimum_stays() -> None:
    there = quadratics()
    best = optimum(there, UNIFORM)

    def at_best(input_shape, classes) -> nn.Module:
        module = line(input_shape, classes)
        module.weight.data.copy_(best.T)
        return module

    spec = model(factory=at_best)
    given = {"task": Squares(), "select": Everyone(), "aggregate": Mean("uniform")}
    drifted = distances(fedavg(parts(there, LOCAL, spec, **given)), there, 30, best)
    assert min(drifted) > 0.01

    gradients = [p.inputs.T @ (p.inputs @ best - p.targets) / len(p) for p in there.clients]
    assert min(g.norm() for g in gradients) > 0.1  # each would leave
    assert sum(gradients).norm() < 1e-12  # type: ignore[union-attr]
    known = {k: {"variate": {"weight": g.T.contiguous()}} for k, g in enumerate(gradients)}
    for option in ("I", "II"):
        made = scaffold(parts(there, LOCAL, spec, task=Squares(), select=Uniform(2)), option=option)
        for step in watched(made, there, rounds=10, held=known):
            close({"w": step.after["model"]["weight"].T}, {"w": best})
            close({"c": step.held[step.cohort[0]]["variate"]["weight"].T}, {"c": gradients[step.cohort[0]]})


def test_the_control_term_has_the_sign_that_pulls_back() -> None:
    """With the sign turned round, a client is pushed along its drift twice as far."""
    there = quadratics()
    best, rule = optimum(there, UNIFORM), control_variate()

    def turned(gradients, parameters, context):
        corrected = rule.grad(gradients, parameters, context)
        return [2 * g - c for g, c in zip(gradients, corrected, strict=True)]  # g - (c - c_i)

    wrong = replace(rule, grad=turned)
    given = {"task": Squares(), "select": Everyone(), "aggregate": Mean("uniform")}
    ours, theirs = (
        distances(fedavg(parts(there, LOCAL, LINE, client=r, **given)), there, 60, best)
        for r in (rule, wrong)
    )
    assert ours[-1] < 1e-3 < 1e-2 < theirs[-1]


def test_a_proximal_term_is_no_part_of_the_variate() -> None:
    """After plain steps with a term mu/2 |y - x|^2, c_i is a mean of gradients of f_i, those of the term aside."""
    there, mu, lr, k = quadratics(), 2.0, 0.1, 4
    local = {"lr": lr, "steps": 6, "batch_size": "all"}
    made = scaffold(parts(there, local, LINE, task=Squares(), select=Fixed((k,)), client=proximal(mu=mu)))
    (step,) = watched(made, there, rounds=1)
    x = step.before["model"]["weight"].T
    points, y, gradients = there.clients[k], x.clone(), []
    for _ in range(6):
        gradients.append(points.inputs.T @ (points.inputs @ y - points.targets) / len(points))
        y = y - lr * (gradients[-1] + mu * (y - x))
    a = [(1 - lr * mu) ** (5 - t) for t in range(6)]
    expected = sum(w * g for w, g in zip(a, gradients, strict=True)) / sum(a)
    close({"c": step.held[k]["variate"]["weight"].T}, {"c": expected})


def test_a_straggler_divides_by_its_own_number_of_steps() -> None:
    there, lr, k = quadratics(), 0.1, 4
    local = {"lr": lr, "steps": 6, "batch_size": "all", "stragglers": 1.0}
    points, own, did = there.clients[k], torch.zeros(4, 1).double(), set()
    for step in watched(scaffold(parts(there, local, LINE, task=Squares(), select=Fixed((k,)))), there, 6):
        x, c = step.before["model"]["weight"].T, server_variate(step.before)["weight"].T
        y, gradients = x.clone(), []
        while not torch.allclose(y, step.after["model"]["weight"].T, rtol=1e-12, atol=1e-12):
            assert len(gradients) < 6
            gradients.append(points.inputs.T @ (points.inputs @ y - points.targets) / len(points))
            y = y - lr * (gradients[-1] - own + c)
        own = sum(gradients) / len(gradients)  # type: ignore[assignment]
        close({"c": step.held[k]["variate"]["weight"].T}, {"c": own}, **LOOSE)
        did.add(len(gradients))
    assert len(did) > 1


def test_travel_keeps_the_sign_of_what_swings_back() -> None:
    local, lr, mu, steps = LocalSettings(lr=0.5, momentum=0.9), 0.5, 1.0, 12
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=lr, momentum=0.9)
    for _ in range(steps):
        w.grad = 1.0 + mu * w.detach()
        optimizer.step()
    assert travel(local, lr, steps, mu) == pytest.approx(float(-w.detach() / lr), rel=1e-12)


# -- layers that are not trained, and servers that are not plain --------------------------------------------------


def test_normalization_and_a_frozen_layer_have_no_variate() -> None:
    there, spec = world((4, 9, 5, 2, 12, 6)), model(norm=True, frozen=True)
    local = PLAIN | {"batch_size": "all", "epochs": 1}
    run = watched(scaffold(parts(there, local, spec, select=Uniform(3))), there, rounds=4)
    frozen = spec.build().state_dict()["0.weight"]
    names = {n for n, p in spec.build().named_parameters() if p.requires_grad}
    for step in run:
        assert set(server_variate(step.after)) == names
        assert "0.weight" not in names
        assert torch.equal(step.after["model"]["0.weight"], frozen)
        close(server_variate(step.after), mean_of(variates(step)))
        moved = []
        for k in step.cohort:
            module = spec.build()
            module.load_state_dict(step.before["model"])
            gradient = named_gradient(module, there.clients[k].inputs, there.clients[k].targets)
            close(step.held[k]["variate"], gradient)
            moved.append(module.state_dict())
        buffers = mean_of([{n: v for n, v in m.items() if "running" in n} for m in moved])
        close({n: step.after["model"][n] for n in buffers}, buffers)


def test_option_one_leaves_the_running_statistics_to_training() -> None:
    there, spec = world((4, 9, 5, 2, 12, 6)), model(norm=True)
    local = PLAIN | {"batch_size": "all", "epochs": 1}
    one, two = (
        course(scaffold(parts(there, local, spec, select=Uniform(3)), option=o), there, rounds=1)
        for o in ("I", "II")
    )
    assert same(one.final, two.final)


def test_server_momentum_moves_the_model_and_not_the_variates() -> None:
    there = world()
    made = scaffold(parts(there, PLAIN, select=Uniform(3), server=Momentum(0.5, 0.9)))
    for step in watched(made, there):
        close(server_variate(step.after), mean_of(variates(step)))
