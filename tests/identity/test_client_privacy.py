"""Client-level differential privacy: clipping, the sum over the expected cohort, the noise, and the adaptive clip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import Everyone, Poisson, Select, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedopt import fedadam
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.moon import moon
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo, RoundContext
from fedlens.core.random import Rng
from fedlens.core.reduction import Update
from fedlens.engines.vectorized import Vectorized
from fedlens.local.client_privacy import NAME, PrivateMean
from fedlens.local.rules import ClientRule
from fedlens.local.training import limited_together
from fedlens.privacy.settings import PrivacySettings
from tests.covering import covering
from tests.identity.identity_kit import (
    SIZES,
    bare_client,
    close,
    course,
    model,
    parts,
    rng_of,
    same,
    world,
)
from tests.identity.stacked_kit import agree
from tests.identity.test_fedavg import SGD, bare_sgd

N = len(SIZES)
HUGE = 1e9  # no update is longer


def settings(**changes: Any) -> PrivacySettings:
    given = {"clip": 0.05, "noise_multiplier": 0.0, "delta": 1e-5, "noise": "seeded"}
    return PrivacySettings(**given | changes)


def private(select: Select, algorithm: Any = fedavg, spec: Any = None, **changes: Any) -> Any:
    return algorithm(parts(world(), SGD, spec, select=select, privacy=settings(**changes)))


@pytest.mark.parametrize("engine", [None, Vectorized], ids=["inline", "vectorized"])
@pytest.mark.parametrize("select", [Everyone(), Poisson(1.0), Uniform()])
def test_without_noise_and_clipping_it_is_uniform_fedavg_bit_for_bit(engine: Any, select: Select) -> None:
    uniform = fedavg(parts(world(), SGD, select=Everyone(), aggregate=Mean("uniform")))
    kept = private(Everyone() if isinstance(select, Uniform | Everyone) else select, clip=HUGE)
    made = replace(kept, select=Everyone())  # the same slots: those of a Poisson cohort are drawn
    there = world()
    expected = course(uniform, there, engine=engine and engine())
    assert same(course(made, there, engine=engine and engine()).final, expected.final)


@pytest.mark.parametrize("select", [Poisson(0.5), Uniform(3)], ids=["poisson", "fixed"])
def test_the_clipped_updates_are_summed_over_the_expected_cohort(select: Select) -> None:
    there, clip = world(), 0.05
    run = course(private(select), there, rounds=6)
    assert any(len(step.cohort) != 3 for step in run.steps) == isinstance(select, Poisson)
    for step in run.steps:
        anchor, total = (
            step.before["model"],
            {n: torch.zeros_like(v) for n, v in step.before["model"].items()},
        )
        for slot, k in enumerate(step.cohort):
            trained = bare_client(
                model(),
                anchor,
                there.data_of(k),
                rng_of(step, slot),
                optimizer=bare_sgd,
                epochs=2,
                batch_size=4,
            )
            update = {n: anchor[n] - trained[n] for n in anchor}
            norm = math.sqrt(sum(float(v.square().sum()) for v in update.values()))
            total = {n: total[n] + update[n] * min(1.0, clip * (1 - 1e-6) / norm) for n in update}
        close(step.after["model"], {n: anchor[n] - total[n] / 3 for n in total})  # q N = 3, whoever came


def test_the_denominator_is_the_expected_cohort_where_a_client_fails() -> None:
    federation = world().info
    mean = {"w": torch.tensor([4.0])}
    _, released = mechanism(N, 3.0, "fixed").after(
        {"clip": 1.0}, Update(mean, {}, {}, {}, 2, 2.0), context(federation)
    )
    assert released.update["w"].item() == pytest.approx(4.0 * 2 / 3)


@pytest.mark.parametrize("engine", [None, Vectorized], ids=["inline", "vectorized"])
@pytest.mark.parametrize("algorithm", [fedavg, fedprox], ids=["no hooks", "hooks"])
def test_no_client_sends_more_than_the_clip(engine: Any, algorithm: Any) -> None:
    run = course(private(Everyone(), algorithm, clip=0.5), world(), engine=engine and engine())
    norms = [norm for step in run.steps for _, _, norm in step.tally.norms]
    assert len(norms) == 4 * N
    assert max(norms) <= 0.5
    assert max(norms) > 0.5 * (1 - 2e-6)  # some are clipped, and to no less
    assert min(norms) < 0.49  # others are not


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_norms_stay_below_the_clip_where_float32_is_rounded(scale: float) -> None:
    made = mechanism(clip=0.3 * scale)
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 1000), (40, 30, 30), (40,))
    leaves = [scale * torch.randn(shape, generator=generator) / 200 for shape in shapes]
    leaves[0] *= torch.linspace(0.1, 3, 40)[:, None]
    before = [leaf.clone() for leaf in leaves]
    limited_together(ClientRule(limit=made.limit), leaves, {})
    kept = 0
    for k in range(40):
        norm = math.hypot(*(float(leaf[k].double().norm()) for leaf in leaves))
        assert norm <= 0.3 * scale
        same_as_before = all(torch.equal(leaf[k], own[k]) for leaf, own in zip(leaves, before, strict=True))
        assert same_as_before or norm > 0.3 * scale * (1 - 2e-6)
        kept += same_as_before
    assert 0 < kept < 40


def test_an_update_that_is_not_finite_stays_so_and_is_rejected() -> None:
    leaves = [torch.tensor([[math.inf], [math.nan], [0.0]])]
    limited_together(ClientRule(limit=mechanism().limit), leaves, {})
    assert leaves[0].isfinite().view(-1).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("algorithm", "adaptive"),
    covering({"fedavg": fedavg, "fedprox": fedprox, "fedadam": fedadam, "moon": moon}, [False, True]),
)
def test_clients_of_a_group_are_clipped_as_each_alone(algorithm: Any, adaptive: bool) -> None:
    clip = {"clip": "adaptive", "clip_first": 0.05} if adaptive else {}
    agree(private(Everyone(), algorithm, **clip), world())
    agree(private(Everyone(), algorithm, **clip), world(), group=4)


# -- noise -----------------------------------------------------------------------------------------------------


def mechanism(
    clients: int = 1000, expected: float = 40.0, sampling: Any = "poisson", **changes: Any
) -> PrivateMean:
    return PrivateMean(settings(**changes), sampling, clients, expected)


def context(federation: FederationInfo | None = None, round: int = 1, **changes: Any) -> RoundContext:
    return RoundContext(round, 10, federation or world().info, Rng((0, "round", round)), **changes)


@pytest.mark.parametrize("replies", [0, 40])
@pytest.mark.parametrize("noise", ["seeded", "system"])
def test_the_noise_has_the_deviation_of_the_formula(noise: str, replies: int) -> None:
    update = {"w": torch.full((50_000,), 0.5), "b": torch.full((250, 200), 0.5)}
    made = mechanism(clip=0.1, noise_multiplier=1.5, noise=noise)
    _, released = made.after({"clip": 0.1}, Update(update, {}, {}, {}, replies, 0.0), context())
    for value in released.update.values():
        noised = value.double() - 0.5 * replies / 40
        assert noised.std().item() == pytest.approx(1.5 * 0.1 / 40, rel=0.02)
        assert abs(noised.mean().item()) < 5 * 1.5 * 0.1 / 40 / math.sqrt(50_000)
        assert value.dtype == torch.float32
    assert not torch.equal(released.update["w"], released.update["b"].view(-1))


def test_noise_is_added_in_float64() -> None:
    made = mechanism(clip=1e-5, noise_multiplier=1.0)
    mean = torch.linspace(1.0, 2.0, 1000)
    _, released = made.after({"clip": 1e-5}, Update({"w": mean}, {}, {}, {}, 39, 39.0), context())
    exact = mean.double() * (39 / 40) + 1e-5 / 40 * made._stream(context()).normal(1000)
    assert torch.equal(released.update["w"], exact.float())


def test_seeded_noise_repeats_and_system_noise_never() -> None:
    update = Update({"w": torch.zeros(100)}, {}, {}, {}, 0, 0.0)

    def drawn(noise: str, **of_round: Any) -> torch.Tensor:
        made = mechanism(noise_multiplier=1.0, noise=noise)
        return made.after({"clip": 1.0}, update, context(**of_round))[1].update["w"]

    assert torch.equal(drawn("seeded"), drawn("seeded"))
    assert not torch.equal(drawn("seeded"), drawn("seeded", round=2))
    assert not torch.equal(drawn("system"), drawn("system"))
    assert not torch.equal(drawn("system"), drawn("seeded"))
    assert torch.equal(
        drawn("system", entropy=bytes), drawn("system", entropy=bytes, round=2)
    )  # nothing else


def test_an_empty_cohort_releases_noise_and_is_counted() -> None:
    there = world()
    run = course(private(Poisson(1e-9), clip=0.1, noise_multiplier=1.0), there, rounds=3)
    for step in run.steps:
        assert step.cohort == ()
        moved = torch.cat([(step.after["model"][n] - v).view(-1) for n, v in step.before["model"].items()])
        assert moved.std().item() == pytest.approx(0.1 / (1e-9 * N), rel=0.3)
        assert [event["round"] for event in run.algorithm.spent(step.after)] == [step.round]


def test_the_events_of_a_round_say_how_its_clients_were_drawn() -> None:
    there, made = world(), private(Poisson(0.5), noise_multiplier=1.0)
    run = course(made, there, rounds=2)
    assert made.spent(run.steps[0].before) == []
    assert made.spent(run.steps[1].after) == [
        {
            "event": "gaussian", "round": 2, "clip": 0.05, "q": 0.5, "z": 1.0, "relation": "add-or-remove",
            "sampling": "poisson", "cohort": 3.0, "clients": N,
        }
    ]  # fmt: skip
    kinds = {"fixed": Uniform(3), "all": Uniform()}
    for sampling, select in kinds.items():
        made = private(select, noise_multiplier=1.0)
        (event,) = made.spent(course(made, there, rounds=1).steps[0].after)
        relation = "replace" if sampling == "fixed" else "add-or-remove"
        assert (event["sampling"], event["relation"]) == (sampling, relation)
        assert event["q"] == (0.5 if sampling == "fixed" else 1.0)


def test_the_seed_tells_no_cohort_where_noise_is_the_systems() -> None:
    there = world(sizes=[2] * 64)

    def cohorts(select: Select, noise: str) -> list[tuple[int, ...]]:
        made = fedavg(parts(there, SGD, select=select, privacy=settings(noise=noise)))
        return [step.cohort for step in course(made, there, rounds=3).steps]

    for select in (Poisson(0.5), Uniform(32)):
        assert cohorts(select, "seeded") == cohorts(select, "seeded")
        drawn = cohorts(select, "system")
        assert drawn != cohorts(select, "system")
        assert all(len({*cohort}) == len(cohort) for cohort in drawn)
        assert not isinstance(select, Uniform) or [len(cohort) for cohort in drawn] == [32] * 3


# -- the adaptive clip -----------------------------------------------------------------------------------------


def test_the_adaptive_clip_finds_the_median() -> None:
    clients, made = 2000, mechanism(2000, 200.0, clip="adaptive", noise_multiplier=1.0)
    draw = np.random.default_rng(0)
    norms = torch.tensor(np.exp(draw.normal(1.0, 0.7, clients)))
    state: Mapping[str, Any] = made.init({}, world().info)
    assert state["clip"] == 0.1
    for round in range(1, 301):
        cohort = torch.tensor(np.flatnonzero(draw.random(clients) < 0.1))
        _, fields = made.limit(norms[cohort], made.shared(state))
        update = Update({}, {}, {}, {"unclipped": float(fields["unclipped"].sum())}, len(cohort))
        ctx = context(round=round)
        before = state["clip"]
        state, _ = made.after(state, update, ctx)
        assert ctx.metrics["clip"] == before
        assert state["clip"] == pytest.approx(
            before * math.exp(-0.2 * (ctx.metrics["unclipped"] - 0.5)), rel=1e-12
        )
    assert state["clip"] == pytest.approx(norms.median().item(), rel=0.1)


def test_the_share_of_unclipped_clients_is_centred() -> None:
    """An empty cohort, and one of half unclipped clients of any size, leave the clip as it is, but for noise."""
    for replies in (0, 30, 60):
        made, ctx = mechanism(clip="adaptive", noise_multiplier=0.0), context()
        more = {"unclipped": replies / 2}
        state, _ = made.after({"clip": 0.3}, Update({}, {}, {}, more, replies), ctx)
        assert (state["clip"], ctx.metrics["unclipped"]) == (0.3, 0.5)
    more = {"unclipped": 31.0}  # one client more moves the share by half of 1 / (q N)
    made.after({"clip": 0.3}, Update({}, {}, {}, more, 61), ctx)
    assert ctx.metrics["unclipped"] == pytest.approx(0.5 + 0.5 / 40)


def test_the_share_gets_the_noise_of_the_formula_and_the_updates_a_little_more() -> None:
    made = mechanism(clip="adaptive", noise_multiplier=1.0)
    shares = []
    for round in range(1, 2001):
        ctx = context(round=round)
        made.after({"clip": 0.3}, Update({}, {}, {}, {"unclipped": 0.0}, 0), ctx)
        shares.append(ctx.metrics["unclipped"])
    assert np.std(shares) == pytest.approx(0.05, rel=0.05)  # sigma_b / (q N)
    # Both together are one Gaussian: the squares of sensitivity / deviation add up, 1/2 being that of the count.
    assert (1 / made.update_multiplier) ** 2 + (0.5 / 2.0) ** 2 == pytest.approx(1.0)
    _, released = made.after(
        {"clip": 0.3}, Update({"w": torch.zeros(100_000)}, {}, {}, {"unclipped": 0}), ctx
    )
    assert released.update["w"].std().item() == pytest.approx(made.update_multiplier * 0.3 / 40, rel=0.02)


def test_the_adaptive_clip_does_not_fall_below_its_floor() -> None:
    made = mechanism(clip="adaptive", clip_first=2e-3, clip_floor=2e-3)
    state, _ = made.after({"clip": 2e-3}, Update({}, {}, {}, {"unclipped": 40.0}, 40), context())
    assert state["clip"] == 2e-3


def test_an_adaptive_clip_needs_a_cohort_that_hides_the_count() -> None:
    with pytest.raises(ConfigError, match="more than 15 clients a round, and 15 are expected"):
        mechanism(1000, 15.0, clip="adaptive", noise_multiplier=1.5)
    assert mechanism(1000, 15.1, clip="adaptive", noise_multiplier=1.5).update_multiplier > 10
    assert mechanism(1000, 1.0, clip="adaptive", noise_multiplier=0.0).update_multiplier == 0


def test_an_adaptive_run_sends_its_clip_and_repeats_to_the_bit() -> None:
    made = private(Poisson(0.9), clip="adaptive", clip_first=0.05, clip_floor=1e-4)
    run = course(made, world(), rounds=5)
    clips = [step.after["rules"][NAME]["clip"] for step in run.steps]
    assert len(set(clips)) == 5
    assert same(run.final, course(made, world(), rounds=5).final)
