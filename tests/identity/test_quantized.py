"""A sum of quantized replies: what it gives, against the definition, and beside the plain aggregates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.normalized import Normalized
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import Vectorized
from fedlens.local.rules import ClientRule, LocalContext
from tests.identity.identity_kit import (
    EXACT,
    Course,
    bare_client,
    close,
    course,
    model,
    parts,
    rng_of,
    same,
    world,
)
from tests.identity.stacked_kit import sizes_of_groups

SIZES = (3, 8, 6, 12, 11, 14)  # no last batch of one example, which batch normalization refuses
there = partial(world, SIZES)
LOCAL = {"lr": 0.2, "epochs": 2, "batch_size": 4}
RANGES = {"update": 4.0, "buffers": 8.0, "loss": 16.0}
FINE = 40  # bits
# Each algorithm of the family that the issue names: its plain aggregate, and the ranges of its own fields.
FAMILY: dict[str, tuple[Any, dict[str, float]]] = {
    "fedavg": (Mean(), {}),
    "fedprox": (Mean(), {}),
    "fednova": (Normalized(), {}),
    "scaffold": (Mean("uniform"), {"variate": 16.0}),
    "feddyn": (Mean("uniform"), {"linear": 4.0}),
    "fedadam": (Mean(), {}),
}


def run(name: str, aggregate: Any, rounds: int = 3, engine: Any = None, **how: Any) -> Course:
    spec = model(norm=how.pop("norm", False))
    given = parts(there(), LOCAL | how.pop("local", {}), spec, aggregate=aggregate, **how)
    return course(ALGORITHMS.find(name)(given), there(), rounds, engine=engine)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_it_is_the_definition(weighting: Any) -> None:
    """round(2^b n_k/n_max v/r) summed as integers, divided by the sum of the rounded weights."""
    aggregate, spec = Quantized(Mean(weighting), bits=16, ranges=RANGES), model(norm=True)
    local = {"lr": 0.2, "epochs": 2, "batch_size": 4}
    found = course(
        fedavg(parts(there(), local, spec, aggregate=aggregate, select=Everyone())), there(), rounds=1
    )
    (step,) = found.steps
    before, totals, weights = step.before["model"], dict[str, Any](), 0
    for slot, client in enumerate(step.cohort):
        sgd = partial(torch.optim.SGD, lr=0.2)
        points = there().data_of(client)
        after = bare_client(spec, before, points, rng_of(step, slot), optimizer=sgd, epochs=2, batch_size=4)
        share = SIZES[client] / max(SIZES) if weighting == "examples" else 1.0
        weights += round(2**16 * share)
        for name, value in after.items():
            buffer = "running" in name
            moved = value if buffer else before[name] - value
            words = torch.round(2.0**16 * share * moved / RANGES["buffers" if buffer else "update"])
            totals[name] = totals.get(name, 0) + words
    for name, total in totals.items():
        buffer = "running" in name
        if "num_batches" in name:
            assert step.after["model"][name] == before[name] + 2 * 4  # ceil(14 / 4) batches, twice
            continue
        value = total * RANGES["buffers" if buffer else "update"] / weights
        expected = value if buffer else before[name] - value
        torch.testing.assert_close(step.after["model"][name], expected, **EXACT)


@pytest.mark.parametrize("bits", [4, 10, 16])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_mean_is_off_by_no_more_than_the_bound(bits: int, weighting: Any) -> None:
    """n 2^-(b+1) r of the numerator and of the weights, over the sum of the weights."""
    how = {"rounds": 1, "norm": True, "select": Everyone()}
    plain = run("fedavg", Mean(weighting), **how)
    blind = run("fedavg", Quantized(Mean(weighting), bits, RANGES), **how)
    total = sum(SIZES) / max(SIZES) if weighting == "examples" else len(SIZES)
    shares = []
    for name, value in plain.final.items():
        off = (blind.final[name] - value).abs().max()
        bound = len(SIZES) * 2.0**-bits * RANGES["buffers" if "running" in name else "update"] / total
        assert off <= bound
        shares.append(off / bound)
    assert max(shares) > 0.01  # it is rounded


@pytest.mark.parametrize("name", FAMILY)
def test_every_algorithm_of_the_family_stays_with_its_plain_aggregate(name: str) -> None:
    plain, more = FAMILY[name]
    how: dict[str, Any] = {"select": Uniform(4), "norm": True}
    one = run(name, plain, **how)
    other = run(name, Quantized(plain, FINE, RANGES | more), **how)
    close(one.final, other.final, rtol=1e-8, atol=1e-8)
    for before, after in zip(one.steps, other.steps, strict=True):
        assert before.cohort == after.cohort
        assert before.after.get("rules", {}).keys() == after.after.get("rules", {}).keys()
        for rule, state in before.after.get("rules", {}).items():
            tree = next(iter(state))
            close(state[tree], after.after["rules"][rule][tree], rtol=1e-8, atol=1e-8)
    coarse = run(name, Quantized(plain, 6, RANGES | more), **how)
    assert not torch.allclose(coarse.final["0.weight"], one.final["0.weight"], rtol=1e-8, atol=1e-8)


STEPS = {
    "epochs": {"epochs": 2, "batch_size": 4},
    "dropped": {"epochs": 3, "batch_size": 5, "last_batch": "drop"},
    "steps": {"steps": 5, "batch_size": 3},
    "full batch": {"epochs": 3, "batch_size": "all"},
    "virtual": {"epochs": 2, "batch_size": 2, "examples": 6},
    "stragglers": {"epochs": 4, "batch_size": 4, "stragglers": 0.5},
}


@pytest.mark.parametrize("work", STEPS)
def test_counters_and_counts_follow_from_public_sizes(work: str) -> None:
    local = {"lr": 0.1, **STEPS[work]}

    def tallied(aggregate: Any) -> Any:
        given = parts(there(), local, model(norm=True), aggregate=aggregate, select=Uniform(4))
        return course(fedavg(given), there(), 3)

    plain, blind = tallied(Mean()), tallied(Quantized(Mean(), FINE, RANGES))
    for one, other in zip(plain.steps, blind.steps, strict=True):
        assert other.tally.per_client[0].keys() == {"client", "exchange"}
        assert other.tally.replied == one.tally.replied
        assert not other.tally.sums
    counters = [name for name in plain.final if "num_batches" in name]
    assert counters
    for name in counters:
        assert torch.equal(plain.final[name], blind.final[name])


def test_engines_agree_to_the_bit(quick_workers: None) -> None:
    how: dict[str, Any] = {"select": Uniform(4)}
    aggregate = Quantized(Mean("uniform"), 16, RANGES | {"variate": 16.0})
    one = run("scaffold", aggregate, norm=True, **how)
    assert same(one.final, run("scaffold", aggregate, norm=True, engine=processes(workers=2), **how).final)


def test_groups_train_together_and_agree(quick_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    together = sizes_of_groups(monkeypatch)
    for name in ("fedavg", "scaffold"):
        plain, more = FAMILY[name]
        aggregate = Quantized(plain, FINE, RANGES | more)
        alone = run(name, aggregate, select=Uniform(4))
        grouped = run(name, aggregate, select=Uniform(4), engine=Vectorized(group=2))
        assert together == [2] * 6
        together.clear()
        close(alone.final, grouped.final, rtol=1e-9, atol=1e-9)
        workers = run(name, aggregate, select=Uniform(4), engine=processes(workers=2, group=2))
        assert same(grouped.final, workers.final)


def ruined(value: float, client: int = 3) -> ClientRule:
    """One client's weights become `value` in its last step."""

    def grad(gradients: Any, parameters: Any, context: LocalContext) -> Any:
        if context.problem.client.id != client:
            return gradients
        return [torch.full_like(g, value) for g in gradients]

    return ClientRule(name="ruined", grad=grad)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "update holds NaN or Inf"),
        (1e3, "update holds a value beyond its range of 4 (aggregate.range.update)"),
    ],
)
def test_a_client_with_a_bad_update_drops_out(value: float, reason: str) -> None:
    """The others' sum is what it would be without that client."""
    aggregate = Quantized(Mean(), 16, RANGES)
    found = run("fedavg", aggregate, rounds=1, client=ruined(value), select=Everyone())
    ((client, reasons),) = found.steps[0].tally.failures.items()
    assert client == 3
    assert [text.removeprefix("ValueError: ") for text in reasons] == [reason]
    assert found.steps[0].cohort == (0, 1, 2, 4, 5)
    plain = run("fedavg", Mean(), rounds=1, client=ruined(float("nan")), select=Everyone())
    bound = 5 * 2.0**-16 * RANGES["update"] / (sum(SIZES[:3] + SIZES[4:]) / max(SIZES))
    assert all((found.final[n] - v).abs().max() <= bound for n, v in plain.final.items())
