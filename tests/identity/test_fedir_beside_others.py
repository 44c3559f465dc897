"""FedIR: what is gathered for the population's target and what is not, and the weights under other algorithms."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedir import COUNT, fedir, importance, reweighted
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.local.chain import chain
from fedlens.local.rules import ClientRule, LocalContext, proximal
from tests.covering import covering
from tests.identity.identity_kit import (
    CLASSES,
    FEATURES,
    IN_TWO_PARTS,
    PEERS,
    Points,
    World,
    close,
    course,
    mean,
    model,
    parts,
    rng_of,
    same,
    world,
)
from tests.identity.test_fedir import FULL, SGD, SKEWED, expected, ratios, shares

# -- the population's distribution ---------------------------------------------------------------------------


def population(there: World) -> list[float]:
    return shares(there.pooled())


def test_the_population_is_asked_once_and_is_the_target_from_then_on() -> None:
    there = world()
    given = parts(there, FULL, select=Uniform(3))
    run = course(fedir(given, target="population"), there)
    known = course(fedir(given, target=population(there)), there)
    assert same(run.final, known.final)
    targets = [step.after["rules"]["reweighted"]["target"] for step in run.steps]
    torch.testing.assert_close(targets[0], torch.tensor(population(there), dtype=torch.float64))
    assert all(torch.equal(t, targets[0]) for t in targets)
    assert run.steps[0].before["rules"] == {"reweighted": {}}
    asked = [step.tally.replies for step in run.steps]
    assert asked == [6 + 3, 3, 3, 3]
    # Counts up once: 8 bytes a class and client, and one more number. p down with every model.
    counts, p = 6 * (8 * CLASSES + 8), 3 * 8 * CLASSES
    assert run.steps[0].tally.bytes_up - known.steps[0].tally.bytes_up == counts
    assert run.steps[1].tally.bytes_up == known.steps[1].tally.bytes_up
    assert [a.tally.bytes_down - b.tally.bytes_down for a, b in zip(run.steps, known.steps, strict=True)] == [
        p
    ] * 4


@pytest.mark.parametrize("normalize", [True, False])
def test_on_clients_that_are_all_alike_the_populations_weights_are_1_and_it_is_fedavg(
    normalize: bool,
) -> None:
    inputs = world().pooled().inputs
    alike = [Points(inputs[9 * k :][: 3 * n], torch.tensor([0, 1, 1] * n)) for k, n in enumerate((1, 3, 2))]
    there = World(tuple(alike))
    for points in alike:
        weights = importance(
            torch.bincount(points.targets, minlength=CLASSES),
            torch.tensor(population(there), dtype=torch.float64),
        )
        torch.testing.assert_close(weights, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    given = parts(there, FULL, select=Uniform(2))
    run = course(fedir(given, target="population", normalize=normalize), there)
    close(run.final, course(fedavg(given), there).final)


@dataclass(frozen=True)
class Silent(Points):
    """Data whose labels cannot be had."""

    def read_targets(self, start: int = 0, stop: int | None = None) -> Tensor:
        raise ConnectionError("no answer")


@dataclass(frozen=True)
class Lying(Points):
    """Data with labels that are not those it is trained on: none is above class 0."""

    def read_targets(self, start: int = 0, stop: int | None = None) -> Tensor:
        return torch.zeros(1000, dtype=torch.int64)


@pytest.mark.parametrize("fault", [Silent, Lying])
def test_the_target_is_of_those_who_answered_well(fault) -> None:
    there = world()
    bad = there.clients[4]
    there = World((*there.clients[:4], fault(bad.inputs, bad.targets), there.clients[5]))
    run = course(fedir(parts(there, FULL, select=Fixed((0, 1))), target="population"), there)
    others = World((*there.clients[:4], there.clients[5]))
    found = run.steps[-1].after["rules"]["reweighted"]["target"]
    torch.testing.assert_close(found, torch.tensor(population(others), dtype=torch.float64))
    (reason,) = run.steps[0].tally.failures[4]
    assert "ConnectionError: no answer" in reason or "counts holds 1000, outside [0, 12]" in reason
    assert [step.tally.failed for step in run.steps] == [1, 0, 0, 0]


def test_where_nobody_answers_nothing_changes_and_the_next_round_asks_again() -> None:
    there = World(tuple(Silent(p.inputs, p.targets) for p in world().clients))
    run = course(fedir(parts(there, FULL, select=Uniform(2)), target="population"), there, rounds=2)
    for step in run.steps:
        assert step.after["model"] is step.before["model"]
        assert step.after["rules"] == step.before["rules"] == {"reweighted": {}}
    assert [step.tally.failed for step in run.steps] == [6, 6]


def test_clients_that_hold_nothing_are_not_asked_and_many_are_counted_in_blocks() -> None:
    there = world([1 + k % 5 if k % 7 else 0 for k in range(200)])
    run = course(fedir(parts(there, FULL, select=Uniform(2)), target="population"), there, rounds=1)
    (step,) = run.steps
    assert step.tally.failed == 0
    assert step.tally.replies == sum(n > 0 for n in there.info.sizes) + 2
    found = step.after["rules"]["reweighted"]["target"]
    torch.testing.assert_close(
        found, torch.tensor(population(there), dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_only_the_population_discloses_and_asks_anything() -> None:
    there = world()
    given = parts(there, FULL, select=Uniform(3))
    plain = fedavg(given)
    for target in ("uniform", SKEWED):
        made = fedir(given, target=target)
        assert made.discloses == ()
        assert made.ops.keys() == plain.ops.keys()
        # A reply with anything else in it is refused.
        assert made.train.expect(given.spec, 12).fields == plain.train.expect(given.spec, 12).fields
        run = course(made, there, rounds=1)
        assert run.steps[0].tally.replies == 3
        assert run.steps[0].after.keys() == {"model", "server"}
    made = fedir(given, target="population")
    (sentence,) = made.discloses
    assert "how many examples of each class" in sentence
    assert made.ops.keys() - plain.ops.keys() == {COUNT}


# -- beside others -------------------------------------------------------------------------------------------


def test_a_rule_on_top_and_the_algorithm_are_the_same() -> None:
    there = world()
    table = {"client": reweighted(target=SKEWED), "select": Uniform(3)}
    assert same(
        course(fedavg(parts(there, SGD, **table)), there).final,
        course(fedir(parts(there, SGD, select=Uniform(3)), target=SKEWED), there).final,
    )


def test_with_the_proximal_term_both_are_in_what_is_descended() -> None:
    there, mu = world(), 0.7
    given = parts(there, SGD, select=Uniform(3), client=reweighted(target=SKEWED))
    run = course(fedprox(given, mu=mu), there)
    for step in run.steps:
        close(step.after["model"], expected(run, step, SKEWED, mu=mu))
    other = course(fedir(parts(there, SGD, select=Uniform(3), client=proximal(mu=mu)), target=SKEWED), there)
    assert same(run.final, other.final)


def test_a_gradient_of_all_examples_that_another_rule_asks_for_is_the_weighted_one() -> None:
    there, seen = world(), []

    def start(context: LocalContext) -> None:
        seen.append((context.problem.client.id, context.problem.gradient()[0], list(context.anchor)))

    rule = replace(chain(proximal(mu=1.0), reweighted(target=SKEWED)), start=start)
    course(fedavg(parts(there, FULL, select=Fixed((1, 4)), client=rule)), there, rounds=1)
    assert [k for k, _, _ in seen] == [1, 4]
    for k, gradient, anchor in seen:
        module, points = model().build(), there.clients[k]
        with torch.no_grad():
            for p, value in zip(module.parameters(), anchor, strict=True):
                p.copy_(value)
        F.cross_entropy(module(points.inputs), points.targets, weight=ratios(points, SKEWED)).backward()
        close(dict(enumerate(gradient)), dict(enumerate(p.grad for p in module.parameters())))


def test_under_fedvc_the_weights_are_those_of_all_the_client_holds() -> None:
    there = world()
    local = {"lr": 0.3, "examples": 5, "batch_size": "all"}
    run = course(fedir(parts(there, local, select=Fixed((1, 4))), target=SKEWED), there, rounds=3)
    for step in run.steps:
        clients = []
        for slot, k in enumerate(step.cohort):
            points, draw = there.clients[k], rng_of(step, slot).torch("virtual")
            drawn = points.take(torch.randperm(len(points), generator=draw)[:5].sort().values)
            module = model().build()
            module.load_state_dict(step.before["model"])
            loss = F.cross_entropy(module(drawn.inputs), drawn.targets, weight=ratios(points, SKEWED))
            loss.backward()
            clients.append({n: (p - 0.3 * p.grad).detach() for n, p in module.named_parameters()})
        close(step.after["model"], mean(clients, [1, 1]))


# Three clients with 4, 2 and 2 examples of the classes in turn. For a uniform target an example of the class that has
# four counts 8/4/3, the others 8/2/3 each: one to two. So it is as if each of the others stood there twice.
COUNTS = ((4, 2, 2), (2, 4, 2), (2, 2, 4))


def skewed() -> World:
    g = torch.Generator().manual_seed(11)
    clients = []
    for counts in COUNTS:
        labels = torch.tensor([y for y, n in enumerate(counts) for _ in range(n)])
        clients.append(Points(torch.randn(8, FEATURES, generator=g, dtype=torch.float64), labels))
    return World(tuple(clients))


def repeated(there: World) -> World:
    clients = []
    for points, counts in zip(there.clients, COUNTS, strict=True):
        times = torch.tensor([4 // counts[y] for y in points.targets.tolist()])
        clients.append(points.take(torch.arange(8).repeat_interleave(times)))
    return World(tuple(clients))


def linear(input_shape, classes) -> nn.Module:
    """A convex model, where an exact solver has one place to end."""
    return nn.Linear(input_shape[0], classes).double()


SOLVING = {"admm", "ceadmm", "iceadmm", "liadmm"}
# MOON's other term has its own examples, each counting once;
# personal models and peers are measured otherwise; FedVC draws.
OTHERS = sorted(
    set(ALGORITHMS)
    - IN_TWO_PARTS
    - PEERS
    - {"fedir", "centralized", "moon", "fedbn", "local-only", "finetune", "fedvc"}
)


@pytest.mark.parametrize(("name", "target"), covering(OTHERS, ["uniform", "population"]))
def test_under_any_other_algorithm_it_is_as_if_examples_were_repeated(name: str, target: str) -> None:
    local = {"lr": 0.1, "batch_size": "all"} | ({} if name in SOLVING else {"steps": 3})
    spec = model(factory=linear) if name in SOLVING else model()

    def final(there: World, rule: ClientRule | None) -> dict[str, Tensor]:
        given = parts(there, local, spec, select=Uniform(2), client=rule)
        return course(ALGORITHMS.find(name)(given), there, rounds=4).final

    weighted = final(skewed(), reweighted(target=target, normalize=name < "fedn"))
    close(weighted, final(repeated(skewed()), None), rtol=1e-7, atol=1e-8)
    plain = final(skewed(), None)
    assert max((weighted[n] - plain[n]).abs().max() for n in plain) > 1e-4


@pytest.mark.parametrize("normalize", [True, False])
def test_moon_weighs_the_tasks_term_and_leaves_the_contrastive_one(normalize: bool) -> None:
    there, local = world(), {"lr": 0.1, "steps": 2, "batch_size": 4}
    finals = [
        course(
            ALGORITHMS.find("moon")(parts(there, local, select=Uniform(3), client=rule), mu=mu), there
        ).final
        for rule in (reweighted(target=SKEWED, normalize=normalize), None)
        for mu in (0.0, 1.0)
    ]
    alone = course(fedir(parts(there, local, select=Uniform(3)), target=SKEWED, normalize=normalize), there)
    close(finals[0], alone.final)
    assert not any(same(finals[1], other) for other in (finals[0], finals[2], finals[3]))
