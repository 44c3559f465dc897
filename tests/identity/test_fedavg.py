"""FedAvg: what has to be equal to what, at partial participation and with unequal clients."""

import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from tests.identity.identity_kit import (
    SIZES,
    Course,
    bare_client,
    close,
    course,
    mean,
    model,
    parts,
    rng_of,
    same,
    weights_of,
    world,
)

ONE_STEP = {"lr": 0.3, "steps": 1, "batch_size": "all"}
SGD = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 4}


def bare_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def trained(run: Course, step, spec=None, **changes) -> list[dict]:
    """What each slot of a round comes to in bare PyTorch, from the settings `SGD`."""
    how = {"optimizer": bare_sgd, "epochs": 2, "batch_size": 4} | changes
    return [
        bare_client(
            spec or model(), step.before["model"], run.there.data_of(k), rng_of(step, slot, run.seed), **how
        )
        for slot, k in enumerate(step.cohort)
    ]


@pytest.mark.parametrize("select", [Uniform(3), Uniform(1), Everyone()], ids=["three", "one", "all"])
def test_one_full_batch_step_is_gradient_descent_on_the_pooled_data(select) -> None:
    there = world()
    run = course(fedavg(parts(there, ONE_STEP, select=select)), there, rounds=5)
    for step in run.steps:
        pooled = there.pooled(step.cohort)
        module = model().build()
        module.load_state_dict(step.before["model"])
        torch.nn.functional.cross_entropy(module(pooled.inputs), pooled.targets).backward()
        descended = {n: (p - 0.3 * p.grad).detach() for n, p in module.named_parameters()}
        close(step.after["model"], descended)
    assert len({step.cohort for step in run.steps}) > 1 or isinstance(select, Everyone)


def test_all_clients_and_one_full_batch_step_is_centralized_gradient_descent_all_the_way() -> None:
    there = world()
    run = course(fedavg(parts(there, ONE_STEP, select=Everyone())), there, rounds=20)
    pooled, module = there.pooled(), model().build()
    for _ in range(20):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(pooled.inputs), pooled.targets).backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.3 * p.grad
    close(run.final, module.state_dict(), rtol=1e-10, atol=1e-11)


def test_the_update_is_the_weighted_sum_over_the_sample() -> None:
    there = world()
    run = course(fedavg(parts(there, SGD, select=Uniform(3))), there, rounds=4)
    for step in run.steps:
        assert len(set(step.cohort)) == 3
        close(step.after["model"], mean(trained(run, step), [SIZES[k] for k in step.cohort]))
    assert len({step.cohort for step in run.steps}) == 4


def test_uniform_weighting_is_the_plain_mean() -> None:
    there = world()
    for_all = {"select": Uniform(3), "aggregate": Mean("uniform")}
    run = course(fedavg(parts(there, SGD, **for_all)), there)
    by_examples = course(fedavg(parts(there, SGD, select=Uniform(3))), there)
    for step in run.steps:
        close(step.after["model"], mean(trained(run, step), [1, 1, 1]))
    assert not same(run.final, by_examples.final)


@pytest.mark.parametrize("size", [64, 70, 200])
def test_a_large_cohort_is_reduced_in_blocks_to_the_same_sum(size: int) -> None:
    there = world([1 + k % 7 for k in range(size + 5)])
    one_epoch = {**SGD, "epochs": 1}
    run = course(fedavg(parts(there, one_epoch, select=Uniform(size))), there, rounds=1)
    (step,) = run.steps
    assert Mean().reduce(size).block > 1
    weights = [len(there.clients[k]) for k in step.cohort]
    close(step.after["model"], mean(trained(run, step, epochs=1), weights))


def test_the_server_learning_rate_scales_the_update() -> None:
    there = world()
    for gamma in (0.5, 2.0):
        run = course(fedavg(parts(there, SGD, select=Uniform(3)), lr=gamma), there)
        for step in run.steps:
            average = mean(trained(run, step), [SIZES[k] for k in step.cohort])
            before = step.before["model"]
            moved = {n: before[n] + gamma * (average[n] - before[n]) for n in before}
            close(step.after["model"], moved)


def test_the_table_server_is_the_same_as_the_algorithms_own_rate() -> None:
    there = world()
    own = course(fedavg(parts(there, SGD, select=Uniform(3)), lr=0.5), there)
    table = course(fedavg(parts(there, SGD, select=Uniform(3), server=ServerSGD(0.5)), lr=9.0), there)
    assert same(own.final, table.final)


def test_a_client_that_appears_twice_counts_twice_and_trains_in_two_orders() -> None:
    there = world()
    run = course(fedavg(parts(there, SGD, select=Fixed((1, 1, 4)))), there)
    for step in run.steps:
        assert step.cohort == (1, 1, 4)
        first, second, third = trained(run, step)
        assert not same(first, second)
        close(step.after["model"], mean([first, second, third], [8, 8, 12]))


def test_frozen_parameters_stay_and_are_no_part_of_the_update() -> None:
    there, spec = world(), model(frozen=True)
    run = course(fedavg(parts(there, SGD, spec, select=Uniform(3))), there)
    first = run.steps[0].before["model"]
    assert torch.equal(run.final["0.weight"], first["0.weight"])
    assert not torch.equal(run.final["0.bias"], first["0.bias"])
    for step in run.steps:
        close(step.after["model"], mean(trained(run, step, spec), [SIZES[k] for k in step.cohort]))


def test_dropout_draws_from_the_slots_own_seed() -> None:
    there, spec = world(), model(dropout=0.5)
    run = course(fedavg(parts(there, SGD, spec, select=Uniform(3))), there)
    for step in run.steps:
        close(step.after["model"], mean(trained(run, step, spec), [SIZES[k] for k in step.cohort]))


def test_statistics_are_averaged_and_counters_take_the_largest() -> None:
    there, spec = world([4, 8, 5, 2, 12, 7]), model(norm=True)
    local = {**SGD, "batch_size": 20}  # one batch an epoch: a batch of one example has no variance
    run = course(fedavg(parts(there, local, spec, select=Uniform(3))), there)
    for step in run.steps:
        clients = trained(run, step, spec, batch_size=20)
        weights = [len(there.clients[k]) for k in step.cohort]
        after = dict(step.after["model"])
        counter = after.pop("1.num_batches_tracked")
        close(after, mean(clients, weights))
        assert counter == max(c["1.num_batches_tracked"] for c in clients) == 2 * step.round
        assert counter.dtype == torch.int64


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"optimizer": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
        (
            {"optimizer": "adam", "lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.1},
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.9), weight_decay=0.1),
        ),
        (
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
    ],
    ids=["adam", "adam with decay", "nesterov with decay"],
)
def test_other_local_optimizers(settings, optimizer) -> None:
    there = world()
    local = {**settings, "epochs": 3, "batch_size": 4}
    run = course(fedavg(parts(there, local, select=Uniform(3))), there)
    for step in run.steps:
        clients = trained(run, step, optimizer=optimizer, epochs=3)
        close(step.after["model"], mean(clients, [SIZES[k] for k in step.cohort]), rtol=1e-10, atol=1e-11)


def test_momentum_is_cleared_when_the_global_model_arrives() -> None:
    # Every bare client above starts a fresh optimizer, so the same client in round after round tells.
    there = world()
    run = course(fedavg(parts(there, SGD, select=Fixed((4,)))), there, rounds=3)
    for step in run.steps:
        assert step.cohort == (4,)
        close(step.after["model"], trained(run, step)[0])


def test_the_learning_rate_decays_by_round() -> None:
    there = world()
    local = {"lr": 0.2, "epochs": 1, "batch_size": "all", "lr_decay": 0.5, "lr_decay_every": 2}
    run = course(fedavg(parts(there, local, select=Uniform(3))), there, rounds=5)
    for step, lr in zip(run.steps, [0.2, 0.2, 0.1, 0.1, 0.05], strict=True):
        clients = trained(
            run, step, optimizer=lambda p, lr=lr: torch.optim.SGD(p, lr=lr), epochs=1, batch_size=None
        )
        close(step.after["model"], mean(clients, [SIZES[k] for k in step.cohort]))


def test_a_failed_client_is_left_out_of_the_sum() -> None:
    there = world([3, 8, 0, 5])  # client 2 has nothing to train on
    run = course(fedavg(parts(there, ONE_STEP, select=Fixed((0, 1, 2, 3)))), there)
    without = course(fedavg(parts(there, ONE_STEP, select=Fixed((0, 1, 3)))), there)
    for step, other in zip(run.steps, without.steps, strict=True):
        assert step.cohort == (0, 1, 3)
        assert step.tally.failed == 1
        assert same(step.after["model"], other.after["model"])


def test_where_every_client_fails_the_state_stays() -> None:
    there = world([0, 4])
    run = course(fedavg(parts(there, ONE_STEP, select=Fixed((0,)))), there, rounds=1)
    assert run.steps[0].after is run.steps[0].before


def test_the_round_leaves_the_state_that_it_was_given_untouched() -> None:
    there, spec = world([4, 8, 5, 2]), model(norm=True)
    algorithm = fedavg(parts(there, {**SGD, "batch_size": 20}, spec, select=Uniform(2)))
    run = course(algorithm, there)
    again = course(algorithm, there)
    # Each `before` is the `after` of an earlier round, which later rounds had in their hands.
    for step, other in zip(run.steps, again.steps, strict=True):
        assert same(step.before["model"], other.before["model"])
    initial = spec.build().state_dict()
    assert same(run.steps[0].before["model"], initial)
    assert not same(weights_of(run.final), weights_of(initial))
