"""Example-level differential privacy: a step is opacus', noise and batches are the client's own; what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlens import Experiment
from fedlens.aggregate.mean import Mean
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.algorithms.client_sampling import Everyone
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.scaffold import scaffold
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Client
from fedlens.core.random import Rng, Secrets
from fedlens.data.datasets.digits import digits
from fedlens.local.example_privacy import NAME, PrivateSteps
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.privacy.accounting import epsilons
from fedlens.privacy.noise import KeyedStream
from fedlens.privacy.settings import PrivacySettings
from fedlens.tasks.classification import Classification
from tests.identity.identity_kit import Points, close, course, model, parts, rng_of, same, world

CLIP, Z = 0.5, 0.7
FEW = (3, 9)  # examples of two clients
LOCAL: Mapping[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 2, "momentum": 0.5}


def settings(**changes: Any) -> PrivacySettings:
    given = {"unit": "example", "clip": CLIP, "noise_multiplier": Z, "delta": 1e-5, "noise": "seeded"}
    return PrivacySettings.model_validate(given | changes)


def private(algorithm: Any = fedavg, local: Mapping[str, Any] = LOCAL, **rest: Any) -> Any:
    privacy = rest.pop("privacy", settings())
    return algorithm(parts(world(FEW), local, select=Everyone(), privacy=privacy, **rest))


@dataclass(frozen=True)
class Patients(Points):
    """Points of patients: the number of each is that of its patient."""

    patients: tuple[int, ...] = ()

    def units(self, column: str) -> np.ndarray:
        assert column == "patient"
        return np.array(self.patients)


# -- a step ------------------------------------------------------------------------------------------------------------


def by_autograd(
    anchor: Mapping[str, Tensor], points: Points, key: bytes, steps: int, units: Any = None
) -> tuple[Any, int]:
    """The weights after DP-SGD in bare PyTorch, one unit after the other; how many batches were empty.

    `units` are the positions of the examples of each unit; by default each is one example.
    """
    module, n, stream = model().build(), len(points), KeyedStream(key)
    module.load_state_dict(dict(anchor))
    weights, batch, empty = list(module.parameters()), min(LOCAL["batch_size"], n), 0
    sgd = torch.optim.SGD(weights, lr=LOCAL["lr"], momentum=LOCAL["momentum"])
    units = [[k] for k in range(n)] if units is None else units
    for _ in range(steps):
        drawn = (stream.uniform(len(units)) < batch / n).nonzero().view(-1)
        empty += not len(drawn)
        total = [torch.zeros_like(w) for w in weights]
        for k in drawn:
            outputs, targets = module(points.inputs[units[k]]), points.targets[units[k]]
            loss = nn.functional.cross_entropy(outputs, targets, reduction="sum")
            own = torch.autograd.grad(loss, weights)
            norm = torch.cat([leaf.flatten() for leaf in own]).norm()
            total = [t + g * min(1.0, CLIP / float(norm)) for t, g in zip(total, own, strict=True)]
        noise = stream.normal(sum(w.numel() for w in weights)) * Z * CLIP
        for w, t, drawn in zip(weights, total, noise.split([w.numel() for w in weights]), strict=True):
            w.grad = (t + drawn.view_as(w)) / batch
        sgd.step()
    return {name: value.detach() for name, value in module.state_dict().items()}, empty


def by_opacus(anchor: Mapping[str, Tensor], points: Points, key: bytes, steps: int) -> tuple[Any, int]:
    """The weights after DP-SGD by opacus, with the batches and the noise of this key; how many batches were empty."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module, n, stream = model().build(), len(points), KeyedStream(key)
    module.load_state_dict(dict(anchor))
    sampled = GradSampleModule(module, loss_reduction="sum")
    batch = min(LOCAL["batch_size"], n)
    bare = torch.optim.SGD(module.parameters(), lr=LOCAL["lr"], momentum=LOCAL["momentum"])
    optimizer = DPOptimizer(
        bare, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=batch, loss_reduction="mean"
    )
    empty = 0
    for _ in range(steps):
        at = (stream.uniform(n) < batch / n).nonzero().view(-1)
        optimizer.zero_grad()
        if len(at):
            nn.functional.cross_entropy(
                sampled(points.inputs[at]), points.targets[at], reduction="sum"
            ).backward()
        else:
            empty += 1
            for p in module.parameters():
                p.grad_sample = torch.zeros(0, *p.shape, dtype=p.dtype)
        optimizer.pre_step()
        noise = stream.normal(sum(p.numel() for p in module.parameters())) * Z * CLIP / batch
        sizes = [p.numel() for p in module.parameters()]
        for p, drawn in zip(module.parameters(), noise.split(sizes), strict=True):
            p.grad += drawn.view_as(p)
        bare.step()
    return {name: value.detach() for name, value in module.state_dict().items()}, empty


@pytest.mark.parametrize(
    "reference",
    [by_autograd, pytest.param(by_opacus, marks=[pytest.mark.nightly, pytest.mark.filterwarnings("ignore")])],
)
def test_steps_are_those_of_opacus_with_the_same_batches_and_noise(reference: Any) -> None:
    there, algorithm, empty = world(FEW), private(), 0
    (step,) = course(algorithm, there, rounds=1).steps
    trained = []
    for slot, k in enumerate(step.cohort):
        key = hashlib.sha256(str(rng_of(step, slot).seed(NAME)).encode()).digest()
        steps = algorithm.client_release(k)["steps"]
        weights, none = reference(step.before["model"], there.data_of(k), key, steps)
        trained.append(weights)
        empty += none
    assert empty > 0  # an empty batch is a step too
    mean = {name: sum(each[name] for each in trained) / len(trained) for name in trained[0]}
    close(step.after["model"], mean, rtol=1e-5, atol=1e-6)  # opacus adds 1e-6 to each norm


RNG = Rng((0, "op", 1, 0, 0, 0))


def alone(points: Points, **changes: Any) -> list[Tensor]:
    """The weights that a client with these points sends."""
    steps, context, _ = contextual(points, **changes)
    context.problem.rng = RNG
    return list(steps(context).parameters)


def patients_of(points: Points, *patients: int) -> Patients:
    return Patients(points.inputs, points.targets, patients)


def test_patients_with_one_image_each_are_examples_to_the_bit() -> None:
    points = world(FEW).data_of(1)
    each = patients_of(points, *reversed(range(len(points))))
    plain, joined = alone(points), alone(each, column="patient")
    assert all(torch.equal(one, other) for one, other in zip(plain, joined, strict=True))


# The images of a patient are apart, and the second patient's number is the smallest.
OWNERS = (5, 2, 5, 7, 7, 2, 7, 7, 7)
UNITS = [[0, 2], [1, 5], [3, 4, 6, 7, 8]]


@pytest.mark.parametrize("at_once", [256, 2])  # 2: a patient's images are in several parts
def test_images_of_a_patient_are_drawn_and_clipped_together(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlens.local.example_privacy._AT_ONCE", at_once)
    points = patients_of(world(FEW).data_of(1), *OWNERS)
    _, context, before = contextual(points, column="patient")
    anchor = {name: leaf.clone() for name, leaf in zip(context.names, before, strict=True)}
    key = hashlib.sha256(str(RNG.seed(NAME)).encode()).digest()
    expected, _ = by_autograd(anchor, points, key, context.steps, UNITS)
    found = alone(points, column="patient")
    close(dict(zip(context.names, found, strict=True)), expected, rtol=1e-5, atol=1e-6)


def test_one_patient_changes_the_sum_by_the_clip_at_most() -> None:
    points = patients_of(world(FEW).data_of(1), *OWNERS)
    steps, context, weights = contextual(points, clip=1e-3, column="patient")

    def summed(units: list[int]) -> Tensor:
        at = [k for unit in units for k in UNITS[unit]]
        of = [unit for unit in units for _ in UNITS[unit]]
        sums = steps.clipped_sum(context, weights, torch.tensor(at), torch.tensor(of), Rng((0,)))
        return torch.cat([leaf.flatten() for leaf in sums])

    for k in range(3):
        moved = summed([0, 1, 2]) - summed([unit for unit in range(3) if unit != k])
        assert 1e-3 * (1 - 2e-6) < float(moved.norm()) <= 1e-3


def test_a_patient_releases_what_an_image_does_without_the_column() -> None:
    images, patients = (PrivateSteps(settings(noise_multiplier=1.0, column=c)) for c in (None, "patient"))
    local = LocalSettings(lr=0.1, steps=1000, batch_size=20)
    release = patients.release(1000, local)
    # Of epsilon 3.9; without the column 27.5 for 5 images and 71.5 for 10: tests/unit/privacy/test_accounting.py.
    assert release == images.release(1000, local)
    assert (release["q"], release["z"], release["steps"]) == (0.02, 1.0, 1000)


def test_a_run_hides_the_patients_of_a_column(tmp_path: Path) -> None:
    def scans() -> Any:
        whole = digits(Path(), False, 0)
        column = np.array([f"P{k // 3}" for k in range(len(whole.train))])
        return replace(whole, train=replace(whole.train, columns={"patient": column}))

    def run(folder: str, **privacy: Any) -> Any:
        return Experiment(
            rounds=1,
            model="linear",
            local={"lr": 0.1, "steps": 2, "batch_size": "all"},
            data={"dataset": scans, "partition": {"name": "iid", "clients": 3}, "normalize": "unit"},
            engine="inline",
            privacy={"unit": "example", "clip": 1.0, "delta": 1e-3, "column": "patient", **privacy},
        ).run(tmp_path / folder, report=False)

    summary = run("run", epsilon=3.0).summary["privacy"]
    assert "in whether any one 'patient' with all its examples takes part" in summary["sentence"]
    assert 2.99 < summary["epsilon"] <= 3.0
    with pytest.raises(ConfigError, match="have no column 'patent'"):
        run("other", noise_multiplier=1.0, column="patent")


def contextual(points: Points, **changes: Any) -> tuple[PrivateSteps, Any, list[Tensor]]:
    """The steps, a client's context, and the weights."""
    algorithm = private(privacy=settings(**changes))
    train: Train = algorithm.train
    client = Client(0, points, {}, Secrets((0, 0)), {}, torch.device("cpu"))
    tree = algorithm.init(algorithm.parts.model, world(FEW).info)["model"]
    context = train.context({"model": tree, "lr": 0.3}, client, Rng((0, "op", 1, 0, 0, 0)), ExitStack())
    return train.rule.solve, context, context.anchor  # type: ignore[return-value]


def test_one_example_changes_the_sum_by_the_clip_at_most() -> None:
    points = world(FEW).data_of(1)
    steps, context, weights = contextual(points, clip=1e-3)
    everyone = torch.arange(len(points))

    def summed(at: Tensor) -> Tensor:
        sums = steps.clipped_sum(context, weights, at, at, Rng((0,)))
        return torch.cat([leaf.flatten() for leaf in sums])

    whole = summed(everyone)
    for k in everyone:
        moved = float((whole - summed(everyone[everyone != k])).norm())
        assert 1e-3 * (1 - 2e-6) < moved <= 1e-3
        assert torch.allclose(whole - summed(everyone[everyone != k]), summed(k.view(1)), atol=1e-15)
    assert summed(everyone[:0]).count_nonzero() == 0


def test_a_gradient_that_is_not_finite_counts_as_none() -> None:
    points = world(FEW).data_of(1)
    inputs = points.inputs.clone()
    inputs[3] = torch.nan
    steps, context, weights = contextual(Points(inputs, points.targets))
    at = torch.arange(len(points))
    found, rest = (steps.clipped_sum(context, weights, rows, rows, Rng((0,))) for rows in (at, at[at != 3]))
    close(dict(enumerate(found)), dict(enumerate(rest)))  # type: ignore[arg-type]


def test_examples_are_computed_in_parts_to_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, context, weights = contextual(points := world(FEW).data_of(1))
    at = torch.arange(len(points))
    whole = steps.clipped_sum(context, weights, at, at, Rng((0,)))
    monkeypatch.setattr("fedlens.local.example_privacy._AT_ONCE", 5)
    parted = steps.clipped_sum(context, weights, at, at, Rng((0,)))
    close(dict(enumerate(parted)), dict(enumerate(whole)))  # type: ignore[arg-type]


# -- what a client sends -----------------------------------------------------------------------------------------------


def test_a_client_draws_from_its_own_entropy_and_sends_no_loss() -> None:
    there = world(FEW)
    runs = [course(private(privacy=settings(noise="system")), there, rounds=1) for _ in range(2)]
    assert not same(runs[0].final, runs[1].final)
    seeded = [course(private(), there, rounds=1) for _ in range(2)]
    assert same(seeded[0].final, seeded[1].final)
    tally = runs[0].steps[0].tally
    assert tally.sums.keys() == {"examples", "batches"}
    # The expected sizes of batches: those of the drawn ones would tell who is in them.
    assert tally.sums["examples"] == sum(-(-n // 2) * 2 * 2 for n in FEW)


def test_what_a_client_releases_follows_from_its_size() -> None:
    found = private().client_release(1)
    assert (found["q"], found["steps"], found["z"]) == (2 / 9, 10, Z)
    assert private().release is None
    assert not private(privacy=settings(noise="system")).private  # who takes part is no secret


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: private(aggregate=Mean("examples")), "weighs them by their examples"),
        (lambda: private(aggregate=Quantized(Mean("examples"))), "weighs them by their examples"),
        (lambda: private(measure_clients="all"), r"evaluation\.clients = 'none'"),
        (lambda: private(fedprox), "changes local steps"),
        (lambda: private(scaffold), "changes local steps"),
        (lambda: private(local={**LOCAL, "stragglers": 0.5}), "number of steps"),
        (lambda: private(local={**LOCAL, "examples": 4}), "drawn by DP-SGD alone"),
        (lambda: private(local={**LOCAL, "clip_norm": 1.0}), "clipped already"),
        (lambda: private(task=Classification(class_weights="balanced")), "is not its own"),
    ],
)
def test_what_reads_examples_without_noise_is_refused(made: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made()


def test_settings_of_the_other_unit_are_refused() -> None:
    with pytest.raises(ValueError, match="is for unit = 'client'"):
        settings(clip="adaptive")
    with pytest.raises(ValueError, match="column is for unit = 'example'"):
        settings(unit="client", column="patient")


def test_the_client_that_spends_most_decides_the_noise_for_an_epsilon() -> None:
    local = {**LOCAL, "batch_size": "all"}  # q = 1, which PLD counts quickly
    made = private(local=local, privacy=settings(noise_multiplier=None, epsilon=2.0), rounds=2)
    releases = {k: [made.client_release(k)] * 2 for k in range(len(FEW))}
    assert len({release["z"] for (release, _) in releases.values()}) == 1
    spent = [epsilons(events, 1e-5).best for events in releases.values()]
    assert 1.99 < max(spent) <= 2.0
