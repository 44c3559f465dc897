"""MOON: the contrastive term by hand and by finite differences, and whose model it is that a client compares with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.normalized import Normalized
from fedlens.algorithms.client_sampling import Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.moon import contrast, contrastive, moon
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientDataSource, ClientStates, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.local.rules import proximal
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
    rng_of,
    same,
    world,
)
from tests.identity.test_fedavg import SGD

Tree = dict[str, Tensor]
MU, T = 3.0, 0.5


# -- the term itself ---------------------------------------------------------------------------------------------


def test_the_loss_of_two_images_by_hand() -> None:
    z = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64)
    z_glob = torch.tensor([[4.0, 3.0], [0.0, 2.0]], dtype=torch.float64)
    z_prev = torch.tensor([[5.0, 0.0], [-7.0, 0.0]], dtype=torch.float64)
    # similarities: (12 + 12) / 25 = 0.96 and 15 / 25 = 0.6; then 0 and -1
    first = -math.log(math.exp(0.96 / T) / (math.exp(0.96 / T) + math.exp(0.6 / T)))
    other = -math.log(math.exp(0.0) / (math.exp(0.0) + math.exp(-1.0 / T)))
    assert contrast(z, z_glob, z_prev, T).item() == pytest.approx((first + other) / 2, rel=1e-14)


def test_a_colder_temperature_sharpens_it_and_scales_of_features_do_not_matter() -> None:
    z, there, last = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert contrast(z, there, last, 0.5).item() == pytest.approx(
        contrast(9 * z, there / 7, 2 * last, 0.5).item()
    )
    assert contrast(z, z, -z, 0.1).item() == pytest.approx(math.log1p(math.exp(-20)), rel=1e-6)


def test_with_the_global_model_for_a_previous_one_it_is_the_constant_log_2_without_gradient() -> None:
    z, there = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z.requires_grad_()
    loss = contrast(z, there, there, T)
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(math.log(2))
    assert gradient.abs().max() < 1e-16


# -- a client in bare PyTorch ---------------------------------------------------------------------------------------


def features(module: nn.Module, x: Tensor) -> Tensor:
    """What enters the last layer of the kit's net."""
    return module[:-1](x)


def l_con(module: nn.Module, there: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
    """Eq. 3 as it is printed, the similarities written out."""

    def sim(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    z = features(module, x)
    with torch.no_grad():
        z_glob, z_prev = features(there, x), features(last, x)
    near, far = torch.exp(sim(z, z_glob) / T), torch.exp(sim(z, z_prev) / T)
    return -torch.log(near / (near + far)).mean()


def loaded(spec, tree, train: bool = False) -> nn.Module:
    module = spec.build()
    module.load_state_dict(dict(tree))
    return module.train(train)


def bare_moon(spec, tree, points: Points, rng: Rng, last: Tree | None, *, epochs: int, size: int) -> Tree:
    """The state_dict after local training with l_sup + mu l_con."""
    module = loaded(spec, tree, train=True)
    there, before = loaded(spec, tree), None if last is None else loaded(spec, last)
    sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.2, momentum=0.5)
    order = rng.torch("batches")
    for _ in range(epochs):
        for at in epoch(len(points), size, order):
            x, y = points.inputs[at], points.targets[at]
            sgd.zero_grad()
            # one forward pass, so that running statistics move once
            caught = {}
            handle = module[-1].register_forward_pre_hook(
                lambda layer, given, to=caught: to.update(z=given[0])
            )
            loss = nn.functional.cross_entropy(module(x), y)
            handle.remove()
            if before is not None:
                constant = Constant(caught["z"])
                loss = loss + MU * l_con(constant, there, before, x)
            loss.backward()
            sgd.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Constant:
    """A module whose features are there already."""

    def __init__(self, z: Tensor) -> None:
        self.z = z

    def __getitem__(self, at: slice):
        return lambda x: self.z


@pytest.mark.parametrize(
    ("sizes", "size", "net"),
    [(SIZES, 4, {}), ((4, 8, 5, 2, 12, 7), 20, {"norm": True, "frozen": True})],
    ids=["plain", "batch norm and a frozen layer"],
)
def test_local_training_is_that_of_the_paper_and_the_previous_model_is_the_clients_own_last(
    sizes: Sequence[int], size: int, net: dict
) -> None:
    there, spec = world(sizes), model(**net)
    local = {**SGD, "batch_size": size}
    run = course(moon(parts(there, local, spec, select=Uniform(3)), mu=MU, temperature=T), there, rounds=6)
    last: dict[int, Tree] = {}
    contexts = []
    for step in run.steps:
        ends = []
        for slot, k in enumerate(step.cohort):
            end = bare_moon(
                spec,
                step.before["model"],
                there.clients[k],
                rng_of(step, slot),
                last.get(k),
                epochs=2,
                size=size,
            )
            ends.append(end)
            contexts.append(k in last)
        last |= dict(zip(step.cohort, ends, strict=True))
        expected = mean(ends, [sizes[k] for k in step.cohort])
        got = {n: step.after["model"][n] for n in expected}
        close(got, expected, rtol=1e-10, atol=1e-11)
    assert True in contexts
    assert False in contexts
    # some client came back after a round that it was not in: what it compares with is older than the global model
    rounds = [[step.round for step in run.steps if k in step.cohort] for k in range(6)]
    assert any(b - a > 1 for there_in in rounds for a, b in pairwise(there_in))


def test_the_step_is_the_gradient_of_the_formula_by_finite_differences_and_it_is_not_zero() -> None:
    there, spec, lr = world(), model(), 0.1
    local = {"lr": lr, "steps": 1, "batch_size": "all"}
    points = there.clients[4]
    plain = course(fedavg(parts(there, local, spec, select=Fixed((4,)))), there, rounds=2)
    run = course(moon(parts(there, local, spec, select=Fixed((4,))), mu=MU, temperature=T), there, rounds=2)
    first = run.steps[0]
    assert same(first.after["model"], plain.steps[0].after["model"])  # no term in the first visit
    # Full participation of one: the last model is the global one, so the term vanishes. Another one is needed.
    close(run.final, plain.final)
    moved = moved_by(there, spec, local, points)
    w_glob, w_prev, step = moved
    glob, prev = loaded(spec, w_glob), loaded(spec, w_prev)

    def objective(name: str, place: int, by: float, mu: float) -> float:
        tree = {n: t.clone() for n, t in w_glob.items()}
        tree[name].view(-1)[place] += by
        module = loaded(spec, tree)
        sup = nn.functional.cross_entropy(module(points.inputs), points.targets)
        return float((sup + mu * l_con(module, glob, prev, points.inputs)).detach())

    h, terms = 1e-5, []
    for name, value in w_glob.items():
        for place in range(value.numel()):
            slope, without = (
                (objective(name, place, h, mu) - objective(name, place, -h, mu)) / (2 * h) for mu in (MU, 0.0)
            )
            assert step[name].view(-1)[place].item() / lr == pytest.approx(slope, abs=1e-8)
            terms.append(slope - without)
    assert len(terms) == 43
    assert sum(abs(t) > 1e-4 for t in terms) == 25  # weights and biases before the last layer, all of them


def moved_by(there: World, spec, local, points: Points) -> tuple[Tree, Tree, Tree]:
    """The global model, a client's previous one, and how far one step takes it: client 4 in rounds 1 and 3."""
    algorithm = moon(parts(there, local, spec, select=Turns(((4,), (0, 1), (4,)))), mu=MU, temperature=T)
    run = course(algorithm, there, rounds=3)
    own, _, third = run.steps
    step = {n: third.before["model"][n] - t for n, t in third.after["model"].items()}
    return third.before["model"], own.after["model"], step


@dataclass(frozen=True)
class Turns:
    """Other clients each round."""

    turns: tuple[tuple[int, ...], ...]

    def cohort(self, ctx: RoundContext) -> list[int]:
        return list(self.turns[ctx.round - 1])

    def size(self, federation) -> int:
        return len(self.turns[0])


# -- what it is beside the others -----------------------------------------------------------------------------------


def test_mu_of_zero_is_fedavg_bit_for_bit() -> None:
    there = world()
    zero = course(moon(parts(there, SGD, select=Uniform(3)), mu=0.0), there)
    assert same(zero.final, course(fedavg(parts(there, SGD, select=Uniform(3))), there).final)


def test_a_first_visit_is_fedavgs_bit_for_bit_and_a_second_one_is_not() -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True, dropout=0.5)
    local = {**SGD, "batch_size": 20}
    turns = Turns(((0, 1), (2, 3), (0, 4)))
    mine = course(moon(parts(there, local, spec, select=turns)), there, rounds=3)
    plain = course(fedavg(parts(there, local, spec, select=turns)), there, rounds=3)
    assert same(mine.steps[1].after["model"], plain.steps[1].after["model"])
    assert not same(mine.final, plain.final)


def test_the_models_to_compare_with_draw_no_random_numbers_and_move_no_statistics() -> None:
    """A term of next to no weight leaves everything as in FedAvg, dropout masks and running statistics included."""
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True, dropout=0.5)
    local = {**SGD, "batch_size": 20}
    tiny = course(moon(parts(there, local, spec, select=Uniform(3)), mu=1e-14), there, rounds=5)
    plain = course(fedavg(parts(there, local, spec, select=Uniform(3))), there, rounds=5)
    close(tiny.final, plain.final, rtol=1e-9, atol=1e-10)


def test_it_is_the_client_rule_and_rules_come_on_top() -> None:
    there = world()
    named = course(moon(parts(there, SGD, select=Uniform(3)), mu=MU, temperature=0.3), there)
    rule = contrastive(mu=MU, temperature=0.3)
    slot = course(fedavg(parts(there, SGD, select=Uniform(3), client=rule)), there)
    assert same(named.final, slot.final)
    both = course(moon(parts(there, SGD, select=Uniform(3), client=proximal(mu=0.5)), mu=MU), there)
    assert not same(both.final, course(moon(parts(there, SGD, select=Uniform(3)), mu=MU), there).final)
    nova = course(moon(parts(there, SGD, select=Uniform(3), aggregate=Normalized()), mu=MU), there)
    assert all(t.isfinite().all() for t in nova.final.values())


# -- what a client keeps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spoiling(ClientDataSource):
    """A federation where one client's images are broken in one of its visits, so that its reply is refused."""

    inner: World
    client: int
    context: int
    seen: list[int] = field(default_factory=list)

    @property
    def info(self):
        return self.inner.info

    def data_of(self, client: int | str) -> Points:
        points = self.inner.data_of(client)
        if client != self.client:
            return points
        self.seen.append(1)
        broken = len(self.seen) == self.context
        return Points(points.inputs * float("nan"), points.targets) if broken else points


def test_a_refused_or_absent_client_keeps_its_older_model_and_an_accepted_one_the_newer() -> None:
    spec = model(norm=True, frozen=True)
    there = Spoiling(world([4, 8, 5, 2, 12, 7]), client=4, context=2)
    local = {**SGD, "batch_size": 20}
    turns = Turns(((4, 1), (0, 1), (4, 0), (4, 1)))
    algorithm = moon(parts(there, local, spec, select=turns), mu=MU, temperature=T)
    engine, states = inline(), ClientStates()
    engine.open(Program(algorithm.ops, there, 0), states)
    gate, state = Driver(engine, states), algorithm.init(spec, there.info)
    kept: list[dict[int, Tree]] = []
    refused = []
    for round in range(1, 5):
        before = state["model"]
        state = gate.drive(
            algorithm.round(state, RoundContext(round, 4, there.info, Rng((0, "round", round)))), round
        )
        now = {
            k: {n: t.clone() for n, t in states.get(k)["previous"].items()}
            for k in (0, 1, 4)
            if states.get(k)
        }
        kept.append(now)
        refused.append({k: list(reasons) for k, reasons in gate.tally.failures.items()})
        gate.tally = Tally()
    engine.close()
    assert [sorted(now) for now in kept] == [[1, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4]]
    assert refused == [{}, {}, {4: ["update holds NaN or Inf"]}, {}]
    assert same(kept[0][4], kept[1][4])  # absent
    assert same(kept[1][4], kept[2][4])  # refused
    assert not same(kept[2][4], kept[3][4])
    assert not same(kept[0][1], kept[1][1])
    # the weights it ended with and its own running statistics; the frozen layer is in the global model
    assert set(kept[3][4]) == set(spec.build().state_dict()) - {"0.weight"}
    expected = bare_moon(
        spec,
        before,
        there.inner.clients[4],
        Rng((0, "op", 4, 0, 0, 4)),
        {**before, **kept[2][4]},
        epochs=2,
        size=20,
    )
    close(kept[3][4], {n: expected[n] for n in kept[3][4]}, rtol=1e-10, atol=1e-11)


def test_a_client_with_one_example_has_a_term_like_any_other() -> None:
    there = world()
    assert SIZES[3] == 1
    run = course(moon(parts(there, SGD, select=Turns(((3, 0), (1, 2), (3, 0)))), mu=MU), there, rounds=3)
    plain = course(fedavg(parts(there, SGD, select=Turns(((3, 0), (1, 2), (3, 0))))), there, rounds=3)
    assert run.steps[-1].tally.failures == {}
    assert not same(run.final, plain.final)
