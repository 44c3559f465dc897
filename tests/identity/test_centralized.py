"""Centralized training: one uninterrupted run of torch.optim on exactly what the clients hold."""

import numpy as np
import pytest
import torch

from fedlens.algorithms.centralized import centralized
from fedlens.algorithms.client_sampling import Uniform
from fedlens.base.errors import ConfigError
from fedlens.core.random import Rng
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.federated import federate
from fedlens.data.partition.shards import shards
from tests.identity.identity_kit import Course, close, course, epoch, model, parts, world

LOCAL = {"epochs": 2, "batch_size": 8}
OPTIMIZERS = {
    "momentum": ({"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": ({"optimizer": "adam", "lr": 0.02}, lambda p: torch.optim.Adam(p, lr=0.02)),
    "plain": ({"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
}


def bare(run: Course, optimizer, rounds: int, spec=None, lr_of=None) -> dict[str, torch.Tensor]:
    """One module and one optimizer from the first round to the last."""
    pooled, module = run.there.pooled(), (spec or model()).build()
    step = optimizer(list(module.parameters()))
    for round in range(1, rounds + 1):
        order = Rng((run.seed, "op", round, 0, 0, "@train")).torch("batches")
        if lr_of is not None:
            step.param_groups[0]["lr"] = lr_of(round)
        for _ in range(2):
            for at in epoch(len(pooled), 8, order):
                step.zero_grad()
                torch.nn.functional.cross_entropy(module(pooled.inputs[at]), pooled.targets[at]).backward()
                step.step()
    return module.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_one_uninterrupted_run(name: str) -> None:
    settings, optimizer = OPTIMIZERS[name]
    there = world()
    run = course(centralized(parts(there, LOCAL | settings)), there, rounds=4)
    close(run.final, bare(run, optimizer, rounds=4), rtol=1e-9, atol=1e-10)


def test_the_learning_rate_decays_while_the_momentum_goes_on() -> None:
    there = world()
    local = LOCAL | {"lr": 0.1, "momentum": 0.9, "lr_decay": 0.5}
    run = course(centralized(parts(there, local)), there, rounds=4)
    reference = bare(run, OPTIMIZERS["momentum"][1], rounds=4, lr_of=lambda r: 0.1 * 0.5 ** (r - 1))
    close(run.final, reference, rtol=1e-9, atol=1e-10)


def test_statistics_and_counters_go_on() -> None:
    there, spec = world([16, 16, 8]), model(norm=True)
    run = course(centralized(parts(there, LOCAL | OPTIMIZERS["momentum"][0], spec)), there, rounds=3)
    reference = bare(run, OPTIMIZERS["momentum"][1], rounds=3, spec=spec)
    close(run.final, reference, rtol=1e-9, atol=1e-10)
    assert run.final["1.num_batches_tracked"] == 3 * 2 * 5


def test_it_pools_exactly_what_the_clients_hold() -> None:
    labels = np.arange(103) % 10  # shards of one class: some examples are nobody's
    images = np.arange(103, dtype=np.uint8).reshape(-1, 1, 1, 1)
    examples = Examples(images, labels.astype(np.int64))
    whole = Dataset(
        "numbers", examples, examples, tuple("0123456789"), (0.0,), (1 / 255,), "none needed", "counting"
    )
    holders, _ = federate(whole, lambda kept: shards(kept, 3, clients=7), validation=0.1, seed=1)
    pooled, _ = holders.data_of("@train").stretch(0, len(holders.data_of("@train")))
    theirs = [holders.data_of(k).stretch(0, len(holders.data_of(k)))[0] for k in range(holders.clients)]
    pooled, held = pooled.flatten().round().long(), torch.cat(theirs).flatten().round().long()
    assert torch.equal(pooled.sort().values, held.sort().values)
    assert len(pooled) == len(pooled.unique()) == holders.held()["@train"] < 103
    validation, _ = holders.data_of("@validation").stretch(0, 10)
    assert not set(validation.flatten().round().long().tolist()) & set(pooled.tolist())


@pytest.mark.parametrize(
    ("local", "slots", "where"),
    [({}, {"select": Uniform(2)}, "select"), ({"epochs": 2, "stragglers": 0.5}, {}, "local.stragglers")],
)
def test_what_it_has_no_use_for_is_refused(local, slots, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        centralized(parts(world(), {"lr": 0.1} | local, **slots))
    assert caught.value.where == where
