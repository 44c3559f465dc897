"""Stragglers: a stated share of a cohort does partial work, and what it did is folded like any other."""

import pytest
import torch

from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedprox import fedprox
from fedlens.base.errors import ConfigError
from tests.identity.identity_kit import bare_client, close, course, mean, model, parts, rng_of, same, world

SIZES = (6, 6, 6, 6, 6, 6, 6, 6)
LOCAL = {"lr": 0.1, "epochs": 5, "batch_size": 3, "stragglers": 0.25}


def epochs_done(step) -> list[int]:
    return [int(row["batches"]) // 2 for row in step.tally.per_client]


def test_the_stated_share_runs_fewer_epochs_each_round() -> None:
    there = world(SIZES)
    run = course(fedavg(parts(there, LOCAL, select=Everyone())), there, rounds=12)
    work = [epochs_done(step) for step in run.steps]
    for done in work:
        assert sum(e < 5 for e in done) == 2
        assert all(1 <= e <= 5 for e in done)
    assert {e for done in work for e in done} == {1, 2, 3, 4, 5}
    assert len({tuple(done) for done in work}) > 6


def test_partial_work_is_averaged_with_the_same_weights() -> None:
    there = world((6, 9, 3, 12))
    local = LOCAL | {"stragglers": 0.5}
    run = course(fedprox(parts(there, local, select=Uniform(4)), mu=0.0), there)
    for step in run.steps:
        work = [
            int(row["batches"]) // (len(there.clients[row["client"]]) // 3) for row in step.tally.per_client
        ]
        assert sum(e < 5 for e in work) == 2
        clients = [
            bare_client(
                model(),
                step.before["model"],
                there.clients[k],
                rng_of(step, slot),
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                epochs=work[slot],
                batch_size=3,
            )
            for slot, k in enumerate(step.cohort)
        ]
        close(step.after["model"], mean(clients, [len(there.clients[k]) for k in step.cohort]))


def test_who_straggles_depends_on_the_seed_alone() -> None:
    there = world(SIZES)
    algorithm = fedavg(parts(there, LOCAL, select=Everyone()))
    first, second, other = (course(algorithm, there, rounds=4, seed=seed) for seed in (0, 0, 1))
    assert same(first.final, second.final)
    assert [epochs_done(s) for s in first.steps] != [epochs_done(s) for s in other.steps]


def test_everyone_may_straggle_and_steps_count_as_work() -> None:
    there = world(SIZES)
    local = {"lr": 0.1, "steps": 4, "batch_size": 3, "stragglers": 1.0}
    run = course(fedavg(parts(there, local, select=Everyone())), there, rounds=6)
    batches = {int(row["batches"]) for step in run.steps for row in step.tally.per_client}
    assert batches == {1, 2, 3}


def test_nobody_straggles_by_default() -> None:
    there = world(SIZES)
    run = course(fedavg(parts(there, LOCAL | {"stragglers": 0.0}, select=Everyone())), there)
    assert all(e == 5 for step in run.steps for e in epochs_done(step))


def test_up_to_E_epochs_may_be_all_of_them() -> None:
    there = world(SIZES)
    local = LOCAL | {"epochs": 3, "stragglers": 1.0}
    for work, most in (("below-E", 2), ("up-to-E", 3)):
        algorithm = fedavg(parts(there, local | {"straggler_work": work}, select=Everyone()))
        done = {e for step in course(algorithm, there, rounds=6).steps for e in epochs_done(step)}
        assert done == set(range(1, most + 1))


def test_dropped_stragglers_take_no_part() -> None:
    there = world(SIZES)
    local = LOCAL | {"epochs": 1, "stragglers": 0.5, "straggler_work": "drop"}
    run = course(fedavg(parts(there, local, select=Everyone())), there, rounds=4)
    assert [len(step.cohort) for step in run.steps] == [4, 4, 4, 4]
    assert len({step.cohort for step in run.steps}) > 1
    with pytest.raises(ConfigError, match="all 8 clients of each round are stragglers"):
        fedavg(parts(there, local | {"stragglers": 0.95}, select=Everyone()))
