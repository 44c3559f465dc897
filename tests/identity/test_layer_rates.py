"""`local.lr_scale`: a rate for each leaf, against plain rates and against bare loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlens.algorithms.admm import admm, ceadmm, liadmm
from fedlens.algorithms.averaging import averaging
from fedlens.algorithms.centralized import centralized
from fedlens.algorithms.client_sampling import Everyone
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fednova import fednova
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.mime import mime
from fedlens.algorithms.scaffold import scaffold, travel
from fedlens.base.errors import ConfigError
from fedlens.engines.vectorized import Vectorized
from fedlens.local import training
from fedlens.local.rules import proximal
from fedlens.local.settings import LocalSettings
from tests.covering import covering
from tests.identity.identity_kit import (
    bare_client,
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
from tests.identity.stacked_kit import agree

PLAIN = {"lr": 0.125, "epochs": 2, "batch_size": 4}
ALL = {"0": 0.5, "head": 0.5}  # the model has layers 0 and 3; 3 is the classifier
HALF = {**PLAIN, "lr": 0.0625}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "clipped": {"clip_norm": 0.3},
    "by step": {"lr_schedule": "cosine", "lr_change": "step"},
}


@pytest.mark.parametrize(("optimizer", "engine"), covering([*OPTIMIZERS], ["inline", "vectorized"]))
def test_one_factor_of_all_leaves_is_that_factor_of_the_rate(optimizer: str, engine: str) -> None:
    there, more = world(), OPTIMIZERS[optimizer]

    def ran(local: dict[str, Any]) -> Any:
        stacked = Vectorized() if engine == "vectorized" else None
        return course(fedavg(parts(there, {**local, **more}, select=Everyone())), there, 2, engine=stacked)

    scaled, plain = ran({**PLAIN, "lr_scale": ALL}), ran(HALF)
    assert same(scaled.final, plain.final)
    assert not same(scaled.final, ran(PLAIN).final)


@pytest.mark.parametrize("make", [scaffold, mime, fednova, fedprox, centralized, admm])
def test_so_it_is_in_every_algorithm_with_local_steps(make: Any) -> None:
    there = world()
    more = {"solver": "sgd"} if make is admm else {}
    scaled, plain = (
        course(make(parts(there, local), **more), there, 3).final
        for local in ({**PLAIN, "lr_scale": ALL}, HALF)
    )
    close(scaled, plain)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_each_leaf_takes_its_own_rate_as_parameter_groups_do(optimizer: str) -> None:
    there, more = world(), OPTIMIZERS[optimizer]
    made = fedavg(
        parts(
            there, {**PLAIN, **more, "lr_scale": {"head": 10.0, "0": 0.5, "0.bias": 0.25}}, select=Everyone()
        )
    )
    ran = course(made, there, 1)
    rates = {"0.weight": 0.0625, "0.bias": 0.03125, "3.weight": 1.25, "3.bias": 1.25}
    kind: Any = torch.optim.Adam if more.get("optimizer") == "adam" else torch.optim.SGD
    given = {name: value for name, value in more.items() if name != "optimizer"}

    def groups(module: list[torch.Tensor]) -> torch.optim.Optimizer:
        each = [{"params": [p], "lr": rate} for p, rate in zip(module, rates.values(), strict=True)]
        return kind(each, **given)

    (step,) = ran.steps
    trees = [
        bare_client(
            model(),
            step.before["model"],
            there.clients[k],
            rng_of(step, slot),
            optimizer=groups,
            epochs=2,
            batch_size=4,
        )
        for slot, k in enumerate(step.cohort)
    ]
    close(step.after["model"], mean(trees, [len(there.clients[k]) for k in step.cohort]))


@pytest.mark.parametrize("local", OPTIMIZERS)
def test_clients_that_train_together_take_the_same_steps(local: str) -> None:
    there = world()
    settings = {**PLAIN, **OPTIMIZERS[local], "lr_scale": {"head": 3.0, "0.weight": 0.5}}
    agree(fedavg(parts(there, settings, select=Everyone())), there, 2)


def test_scaffold_together_and_alone_agree() -> None:
    there = world()
    agree(scaffold(parts(there, {**PLAIN, "lr_scale": {"head": 3.0}}, select=Everyone())), there, 3)


@pytest.mark.parametrize("local", [{}, {"momentum": 0.6}])
def test_scaffold_divides_each_leaf_by_its_own_rate(local: dict[str, Any]) -> None:
    """Option II, Eq. (4): c_i+ = c_i - c + (x - y) / (eta_l A_l); here against a loop over two rounds."""
    there, factors = world(), {"0.weight": 1.0, "0.bias": 1.0, "3.weight": 4.0, "3.bias": 4.0}
    settings = LocalSettings(**PLAIN, **local)
    made = scaffold(parts(there, {**PLAIN, **local, "lr_scale": {"head": 4.0}}, select=Everyone()))
    ran = course(made, there, 2)
    names = list(factors)
    own = {k: dict.fromkeys(names, 0.0) for k in range(len(there.clients))}
    c: dict[str, Any] = dict.fromkeys(names, 0.0)
    for step in ran.steps:
        deltas, changes = [], []
        for slot, k in enumerate(step.cohort):
            points, order = there.clients[k], rng_of(step, slot).torch("batches")
            module = model().build()
            module.load_state_dict(dict(step.before["model"]))
            weights, velocity, steps = dict(module.named_parameters()), {}, 0
            for _ in range(2):
                for at in epoch(len(points), 4, order):
                    module.zero_grad()
                    nn.functional.cross_entropy(module(points.inputs[at]), points.targets[at]).backward()
                    steps += 1
                    with torch.no_grad():
                        for n, w in weights.items():
                            g = w.grad - own[k][n] + c[n]
                            velocity[n] = local.get("momentum", 0.0) * velocity.get(n, 0.0) + g
                            w -= 0.125 * factors[n] * velocity[n]
            moved = {n: step.before["model"][n] - weights[n].detach() for n in names}
            far = {n: 0.125 * factors[n] * travel(settings, 0.125, steps) for n in names}
            new = {n: own[k][n] - c[n] + moved[n] / far[n] for n in names}
            changes.append({n: new[n] - own[k][n] for n in names})
            deltas.append(moved)
            own[k] = new
        after = {n: step.before["model"][n] - sum(d[n] for d in deltas) / len(deltas) for n in names}
        close({n: step.after["model"][n] for n in names}, after)
        c = {n: c[n] + sum(d[n] for d in changes) / len(there.clients) for n in names}
        close(step.after["rules"]["control-variate"]["variate"], c)


def test_steps_leaf_by_leaf_respect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there, local = world(), {**PLAIN, "lr_scale": {"head": 3.0}}
    usual = course(fedavg(parts(there, local)), there, 2).final
    monkeypatch.setattr(training, "leafwise", lambda learner: True)
    assert same(course(fedavg(parts(there, local)), there, 2).final, usual)


def test_names_that_no_trained_weight_has_are_refused() -> None:
    there = world()
    with pytest.raises(ConfigError) as refused:
        fedavg(parts(there, {**PLAIN, "lr_scale": {"heat": 2.0}}))
    assert refused.value.where == "local.lr_scale"
    assert refused.value.hint == "did you mean 'head'"
    with pytest.raises(ConfigError, match="no trained weight"):
        centralized(parts(there, {**PLAIN, "lr_scale": {"0.weight": 2.0}}, model(frozen=True)))
    with pytest.raises(ConfigError, match="trains no linear layer"):
        fedavg(parts(there, {**PLAIN, "lr_scale": {"head": 2.0}}, model(factory=lambda s, c: _plain())))


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: admm(p, solver="exact"),
        ceadmm,
        liadmm,
        lambda p: liadmm(p, gradient="training"),
        lambda p: averaging(p, client=proximal(mu=0.1), aggregate=fednova(p).aggregate),
    ],
)
def test_a_formula_with_one_rate_for_all_is_refused(make: Any) -> None:
    there = world()
    with pytest.raises(ConfigError) as refused:
        make(parts(there, {"lr": 0.1, "lr_scale": {"head": 2.0}}))
    assert refused.value.where == "local.lr_scale"


def test_the_bound_of_a_quadratic_term_is_that_of_the_fastest_leaf() -> None:
    there = world()
    fedprox(parts(there, {**PLAIN}), mu=3.0)
    with pytest.raises(ConfigError, match="diverges"):
        fedprox(parts(there, {**PLAIN, "lr_scale": {"head": 10.0}}), mu=3.0)


def test_tables_stand_for_names_with_dots() -> None:
    local = LocalSettings(lr=0.1, lr_scale={"layer": {"1": 2.0, "2": {"bias": 3.0}}, "head": 4.0})
    assert local.lr_scale == {"layer.1": 2.0, "layer.2.bias": 3.0, "head": 4.0}
