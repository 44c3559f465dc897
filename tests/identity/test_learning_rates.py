"""Schedules of the learning rate: those of torch.optim.lr_scheduler, over rounds and over local steps."""

import pytest
import torch
from torch.optim import lr_scheduler

from fedlens.algorithms.centralized import centralized
from fedlens.algorithms.client_sampling import Everyone
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fednova import fednova
from fedlens.algorithms.scaffold import scaffold
from fedlens.base.errors import ConfigError
from fedlens.core.random import Rng
from fedlens.local.settings import LocalSettings
from tests.identity.identity_kit import close, course, epoch, mean, model, parts, rng_of, world

ROUNDS = 8
SCHEDULES = {
    "linear": ({}, lambda o, n: lr_scheduler.LinearLR(o, 1.0, 1e-30, n)),
    "linear to a share": ({"lr_final": 0.1}, lambda o, n: lr_scheduler.LinearLR(o, 1.0, 0.1, n)),
    "polynomial": ({}, lambda o, n: lr_scheduler.PolynomialLR(o, n, 0.9)),
    "polynomial of 2": ({"lr_power": 2.0}, lambda o, n: lr_scheduler.PolynomialLR(o, n, 2.0)),
    "cosine": ({}, lambda o, n: lr_scheduler.CosineAnnealingLR(o, n)),
    "cosine to a share": ({"lr_final": 0.1}, lambda o, n: lr_scheduler.CosineAnnealingLR(o, n, 0.3 * 0.1)),
}


def torchs(name: str, count: int) -> list[float]:
    """The rates of PyTorch's scheduler over so many steps, from 0.3."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = SCHEDULES[name][1](optimizer, count)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def settings(name: str, **more) -> LocalSettings:
    return LocalSettings(lr=0.3, lr_schedule=name.split()[0], **SCHEDULES[name][0], **more)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_over_rounds_is_that_of_torch(name: str) -> None:
    local = settings(name)
    assert [local.lr_at(r, ROUNDS) for r in range(1, ROUNDS + 1)] == pytest.approx(
        torchs(name, ROUNDS), rel=1e-9
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_over_steps_is_that_of_torch_over_all_of_the_run(name: str) -> None:
    local = settings(name, lr_change="step")
    rates = [rate for r in range(1, ROUNDS + 1) for rate in local.rates(local.shared_rate(r, ROUNDS), 5)]
    assert rates == pytest.approx(torchs(name, 5 * ROUNDS), rel=1e-9)


def test_warm_up_rises_to_the_rate_and_the_schedule_follows() -> None:
    local = settings("cosine", lr_warmup=2)
    rates = [local.lr_at(r, ROUNDS + 2) for r in range(1, ROUNDS + 3)]
    assert rates[:2] == pytest.approx([0.3 / 3, 0.6 / 3])
    assert rates[2:] == pytest.approx(torchs("cosine", ROUNDS), rel=1e-9)
    by_step = LocalSettings(lr=0.3, lr_warmup=2, lr_change="step")
    rates = [rate for r in (1, 2, 3) for rate in by_step.rates(by_step.shared_rate(r, 9), 4)]
    assert rates == pytest.approx([0.3 * t / 9 for t in range(1, 9)] + [0.3] * 4)
    decaying = LocalSettings(lr=0.3, lr_warmup=2, lr_decay=0.5, lr_decay_every=2)
    assert [decaying.lr_at(r, 9) for r in (3, 4, 5)] == [0.3, 0.3, 0.15]


@pytest.mark.parametrize("change", ["round", "step"])
def test_centralized_training_is_one_run_of_torch_with_its_scheduler(change: str) -> None:
    there = world()
    local = {
        "lr": 0.3,
        "momentum": 0.9,
        "epochs": 2,
        "batch_size": 8,
        "lr_schedule": "cosine",
        "lr_change": change,
    }
    run = course(centralized(parts(there, local)), there, rounds=4)
    pooled, module = there.pooled(), model().build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    steps = 2 * -(-len(pooled) // 8)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4 * (steps if change == "step" else 1))
    for round in range(1, 5):
        order = Rng((0, "op", round, 0, 0, "@train")).torch("batches")
        for at in [at for _ in range(2) for at in epoch(len(pooled), 8, order)]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(pooled.inputs[at]), pooled.targets[at]).backward()
            optimizer.step()
            if change == "step":
                scheduler.step()
        if change == "round":
            scheduler.step()
    close(run.final, module.state_dict(), rtol=1e-9, atol=1e-10)


def test_each_client_goes_through_the_same_rates_in_its_own_steps() -> None:
    there = world((4, 12, 8))
    local = {"lr": 0.3, "epochs": 2, "batch_size": 4, "lr_schedule": "linear", "lr_change": "step"}
    step = course(fedavg(parts(there, local, select=Everyone())), there, rounds=3).steps[1]
    trained = []
    for slot, k in enumerate(step.cohort):
        module, points = model().build(), there.clients[k]
        module.load_state_dict(dict(step.before["model"]))
        order = rng_of(step, slot).torch("batches")
        steps = [at for _ in range(2) for at in epoch(len(points), 4, order)]
        for s, at in enumerate(steps):
            rate = 0.3 * (1 - (1 + s / len(steps)) / 3)
            loss = torch.nn.functional.cross_entropy(module(points.inputs[at]), points.targets[at])
            for p, g in zip(
                module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
            ):
                p.data -= rate * g
        trained.append(module.state_dict())
    close(step.after["model"], mean(trained, [4, 12, 8]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("algorithm", [fednova, scaffold])
def test_what_counts_steps_at_one_rate_refuses_rates_that_change_with_them(algorithm) -> None:
    local = {"lr": 0.3, "lr_schedule": "linear", "lr_change": "step"}
    with pytest.raises(ConfigError) as caught:
        algorithm(parts(world(), local))
    assert caught.value.where == "local.lr_change"
