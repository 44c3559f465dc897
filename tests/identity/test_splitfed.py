"""SplitFed: what has to be equal to what, against a bare loop over the batches that the run drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.splitfed import SplitFed, splitfed
from fedlens.core.protocol import ClientId, ModelSpec
from fedlens.core.random import Rng
from fedlens.engines.processes import processes
from fedlens.local.halves import Lower, Middle, Upper
from tests.identity.identity_kit import (
    CLASSES,
    FEATURES,
    Course,
    Points,
    World,
    close,
    course,
    mean,
    parts,
    same,
    world,
)

SGD = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 4}
CUTS = ["0", "1", "4"]
TWO_CUTS = [("0", "4"), ("1", "5")]


def deep(input_shape: Sequence[int], classes: int, *, dropout: float = 0.0) -> nn.Module:
    """Three linear layers in float64, with batch normalization on both sides of most cuts."""
    return nn.Sequential(
        nn.Linear(input_shape[0], 6),
        nn.BatchNorm1d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, classes),
    ).double()


def spec(**settings: Any) -> ModelSpec:
    return ModelSpec(deep, "deep", settings, (FEATURES,), CLASSES, 0)


Drawn = dict[tuple[int | str, ...], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recorded(Points):
    """Points that note each batch under (round, client, step), and may fail at one of them."""

    drawn: Drawn = field(default_factory=dict)
    failing: tuple[int | str, ...] = ()

    def batch(self, positions: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        _, _, round, client, _, at = rng.key
        if (round, client, at) == self.failing:
            raise OSError("the image cannot be read")
        self.drawn[round, client, at] = found = super().batch(positions, rng)
        return found


def recorded(failing: tuple[int | str, ...] = (), sizes: Sequence[int] = (7, 8, 6, 12, 10)) -> World:
    """Clients whose last batches have at least two examples, which batch normalization needs."""
    drawn: Drawn = {}
    return World(tuple(Recorded(p.inputs, p.targets, drawn, failing) for p in world(sizes).clients))


def drawn_by(there: World) -> Drawn:
    first = there.clients[0]
    assert isinstance(first, Recorded)
    return first.drawn


def algorithm(there: World, local: Mapping[str, Any] = SGD, select: Any = None, **more: Any) -> SplitFed:
    made = parts(there, local, more.pop("model", spec()), select=select or Everyone())
    return splitfed(made, **{"cut": "1", **more})


def bare(tree: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]], optimizer: Any = None) -> Any:
    """The state_dict after these batches in bare PyTorch, and the optimizer's state."""
    module = deep((FEATURES,), CLASSES)
    module.load_state_dict(dict(tree))
    sgd = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    if optimizer is not None:
        sgd.load_state_dict(optimizer)
    for inputs, targets in batches:
        sgd.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        sgd.step()
    return {n: v.detach().clone() for n, v in module.state_dict().items()}, sgd.state_dict()


def of_client(there: World, round: int, client: ClientId) -> list[tuple[Tensor, Tensor]]:
    found = {key[2]: batch for key, batch in drawn_by(there).items() if key[:2] == (round, client)}
    return [found[at] for at in range(len(found))]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("keep", [True, False])
def test_one_client_is_centralized_sgd_with_momentum(cut: str, variant: str, keep: bool) -> None:
    there = recorded()
    run = course(
        algorithm(there, select=Fixed((1,)), cut=cut, variant=variant, keep_optimizer=keep), there, 3
    )
    optimizer = None
    for step in run.steps:
        batches = of_client(there, step.round, 1)
        assert len(batches) == step.tally.batches_max == step.tally.sums["batches"] == 4
        expected, optimizer = bare(step.before["model"], batches, optimizer if keep else None)
        close(step.after["model"], expected)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("select", [Everyone(), Uniform(2)], ids=["all", "two"])
@pytest.mark.parametrize("work", [{"epochs": 2}, {"epochs": None, "steps": 3}], ids=["epochs", "steps"])
def test_v1_is_fedavg_of_the_whole_network(cut: str, select: Any, work: Mapping[str, Any]) -> None:
    there = recorded()
    run = course(algorithm(there, {**SGD, **work}, select, cut=cut), there, 3)
    for step in run.steps:
        took = sorted({int(client) for round, client, _ in drawn_by(there) if round == step.round})
        ends = [bare(step.before["model"], of_client(there, step.round, k))[0] for k in took]
        expected = mean(ends, [len(there.clients[k]) for k in took])
        close({n: step.after["model"][n] for n in expected}, expected)
        for name in step.after["model"].keys() - expected.keys():
            assert step.after["model"][name] == max(end[name] for end in ends)


def test_the_cohorts_of_the_test_above_differ() -> None:
    there = recorded()
    course(algorithm(there, select=Uniform(2)), there, 3)
    assert len({client for _, client, _ in drawn_by(there)}) > 2


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_the_servers_half_has_a_learning_rate_of_its_own(variant: str) -> None:
    there = recorded()
    made = algorithm(there, select=Fixed((1,)), variant=variant, server_rate=0.25)
    (step,) = course(made, there, 1).steps
    module = deep((FEATURES,), CLASSES)
    module.load_state_dict(dict(step.before["model"]))
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in ((module[:4], 0.2), (module[4:], 0.05))]
    sgd = torch.optim.SGD(groups, momentum=0.5)
    for inputs, targets in of_client(there, 1, 1):
        sgd.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        sgd.step()
    close(step.after["model"], {n: v.detach() for n, v in module.state_dict().items()})


@pytest.mark.parametrize("cut", ["4", *(pytest.param(cut, marks=pytest.mark.nightly) for cut in CUTS[:2])])
def test_v2_with_one_client_is_v1(cut: str) -> None:
    there = recorded()
    runs = [course(algorithm(there, select=Fixed((3,)), cut=cut, variant=v), there, 2) for v in ("v1", "v2")]
    close(runs[0].final, runs[1].final)


def test_v2_takes_the_letters_of_a_step_in_random_order_with_one_half_at_the_server() -> None:
    there = recorded()
    there = World(there.clients[:2])
    run = course(algorithm(there, {**SGD, "epochs": None, "steps": 2}, variant="v2", cut="0"), there, 4)
    orders = set()
    for step in run.steps:
        found = []
        for way in [(a, b) for a in ((0, 1), (1, 0)) for b in ((0, 1), (1, 0))]:
            end = bare_v2(step.before["model"], there, step.round, way)
            if all(torch.allclose(end[n], step.after["model"][n], rtol=1e-12, atol=1e-13) for n in end):
                found.append(way)
        assert len(found) == 1
        orders.add(found[0])
    assert len(orders) > 1


def bare_v2(tree: Mapping[str, Tensor], there: World, round: int, orders: Sequence[Sequence[int]]) -> Any:
    """The weights after a round of v2 with a cut after layer 0, whose clients are taken in these orders."""
    lowers = [deep((FEATURES,), CLASSES)[:1] for _ in range(2)]
    upper = deep((FEATURES,), CLASSES)
    for module in (*lowers, upper):
        module.load_state_dict({n: v for n, v in tree.items() if n in module.state_dict()})
    rest = upper[1:]
    steps = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in (*lowers, rest)]
    for at, order in enumerate(orders):
        for k in order:
            inputs, targets = drawn_by(there)[round, k, at]
            for each in (steps[k], steps[2]):
                each.zero_grad()
            nn.functional.cross_entropy(rest(lowers[k](inputs)), targets).backward()
            steps[k].step()
            steps[2].step()
    sizes = [len(points) for points in there.clients]
    below = mean([lower.state_dict() for lower in lowers], sizes)
    above = {n: v for n, v in upper.state_dict().items() if not n.startswith("0.") and "num_batches" not in n}
    return {**below, **above}


def test_a_client_that_fails_in_mid_round_leaves_the_others_as_without_it() -> None:
    there, without = recorded(failing=(1, 2, 2)), recorded()
    run = course(algorithm(there), there, 1)
    other = course(algorithm(without, select=Fixed((0, 1, 3, 4))), without, 1)
    close(run.final, other.final)
    assert list(run.steps[0].tally.failures) == [2]


def test_in_v2_the_steps_before_a_failure_stay_and_no_others() -> None:
    there, without = recorded(failing=(1, 1, 1)), recorded()
    local = {**SGD, "epochs": None, "steps": 1}
    one, other = World(there.clients[:2]), World(without.clients[:2])
    run = course(algorithm(one, {**SGD, "epochs": None, "steps": 2}, variant="v2", cut="0"), one, 1)
    alone = course(algorithm(other, local, variant="v2", cut="0"), other, 1)
    assert not same(run.final, alone.final)
    assert (1, 0, 1) in drawn_by(one)
    assert (1, 1, 1) not in drawn_by(one)


class Uncached(Lower):
    """The same operation on a worker that keeps no graph."""

    def __call__(self, payload, client, rng):  # type: ignore[no-untyped-def]
        outcome = super().__call__(payload, client, rng)
        client.scratch.get("split", {}).clear()
        return outcome


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_without_the_cache_a_run_has_the_same_bits(variant: str) -> None:
    there = recorded()
    chosen = {"model": spec(dropout=0.3), "variant": variant}
    kept = course(algorithm(there, **chosen), there, 2)
    forgetful = algorithm(there, **chosen)
    object.__setattr__(forgetful, "lower", Uncached(**vars(forgetful.lower)))
    again = course(forgetful, there, 2)
    assert same(kept.final, again.final)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("cut", ["1", ("0", "4")])
def test_on_two_workers_a_run_has_the_same_bits(variant: str, cut: str | tuple[str, str]) -> None:
    there = recorded()
    made = algorithm(there, model=spec(dropout=0.3), variant=variant, cut=cut)
    apart = Course(made, there, engine=processes(workers=2)).run(2)
    assert same(course(made, there, 2).final, apart.final)


@pytest.mark.parametrize(
    ("cuts", "variant", "keep"),
    [(TWO_CUTS[0], "v1", True), (TWO_CUTS[1], "v1", False), (TWO_CUTS[1], "v2", True)],
)
def test_two_cuts_are_one_cut(cuts: tuple[str, str], variant: str, keep: bool) -> None:
    there = recorded()
    chosen = {"variant": variant, "keep_optimizer": keep}
    chosen["select"] = Uniform(2) if variant == "v1" else Fixed((3,))
    two, one = (course(algorithm(there, cut=cut, **chosen), there, 2) for cut in (cuts, cuts[0]))
    close(two.final, one.final)


def test_between_two_cuts_v2_takes_the_gradients_of_a_step_at_the_weights_before_it() -> None:
    there = recorded()
    there = World(there.clients[:2])
    local = {"lr": 0.2, "epochs": None, "steps": 1, "batch_size": 4}
    (step,) = course(algorithm(there, local, cut=("0", "4"), variant="v2"), there, 1).steps
    before, after, ends = step.before["model"], step.after["model"], []
    for order in ((0, 1), (1, 0)):
        module, total = deep((FEATURES,), CLASSES), {}
        module.load_state_dict(dict(before))
        for k in order:
            module.zero_grad()
            inputs, targets = drawn_by(there)[1, k, 0]
            nn.functional.cross_entropy(module(inputs), targets).backward()
            total = {n: p.grad + total.get(n, 0.0) for n, p in module.named_parameters()}
        ends.append({n: before[n] - 0.2 * total[n] for n in total if n[0] in "14"})
        ends[-1] |= {f"1.{n}": v for n, v in module[1].named_buffers() if "num" not in n}
    assert any(all(torch.allclose(end[n], after[n], rtol=1e-12, atol=1e-13) for n in end) for end in ends)


def test_a_client_that_fails_with_its_last_layers_leaves_the_others_as_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, call = recorded(), Upper.__call__

    def lost(self: Upper, payload: Any, client: Any, rng: Any) -> Any:
        if client.id == 2 and payload["step"] == 1:
            raise ConnectionError("no answer")
        return call(self, payload, client, rng)

    monkeypatch.setattr(Upper, "__call__", lost)
    run = course(algorithm(there, cut=("0", "4")), there, 1)
    other = course(algorithm(there, cut=("0", "4"), select=Fixed((0, 1, 3, 4))), there, 1)
    close(run.final, other.final)
    assert list(run.steps[0].tally.failures) == [2]


class UncachedMiddle(Middle):
    """The same operation on a worker that keeps no graph."""

    def __call__(self, payload, client, rng):  # type: ignore[no-untyped-def]
        outcome = super().__call__(payload, client, rng)
        client.scratch.get("split", {}).clear()
        return outcome


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_without_the_middle_cache_a_run_has_the_same_bits(variant: str) -> None:
    there = recorded()
    chosen = {"model": spec(dropout=0.3), "variant": variant, "cut": ("0", "4")}
    forgetful = algorithm(there, **chosen)
    object.__setattr__(forgetful, "middle", UncachedMiddle(**vars(forgetful.middle)))
    kept, again = (course(made, there, 2) for made in (algorithm(there, **chosen), forgetful))
    assert same(kept.final, again.final)


def test_activations_in_float16_are_rounded_and_their_gradients_are_not() -> None:
    there = recorded()
    (step,) = course(algorithm(there, select=Fixed((1,)), activations="float16"), there, 1).steps
    module = deep((FEATURES,), CLASSES)
    module.load_state_dict(dict(step.before["model"]))
    sgd = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    for inputs, targets in of_client(there, 1, 1):
        sgd.zero_grad()
        sent = module[:4](inputs)
        got = sent.detach().half().double().requires_grad_()
        nn.functional.cross_entropy(module[4:](got), targets).backward()
        sent.backward(got.grad)
        sgd.step()
    close(step.after["model"], {n: v.detach() for n, v in module.state_dict().items()})
