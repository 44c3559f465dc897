"""Groups of clients on a GPU: no step waits for it, a group waits a fixed number of times, the results are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.api import Experiment
from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientStates, RoundContext
from fedlens.core.random import Rng
from fedlens.engines import executor
from fedlens.engines.executor import Executor
from fedlens.experiment.build import build
from fedlens.experiment.plan import plan
from fedlens.local import hook_checks
from fedlens.local.rules import ClientRule, LocalContext, Traits
from fedlens.local.vectorized.steps import Steps

STEPS, CLIENTS = 4, 3
WAITS = 2  # of a group: for the losses of its steps, and for the norms of its updates


@dataclass
class Case:
    """Settings of a run, and what a group may take: waits in all, launches and uploads a step."""

    launches: int
    waits: int = WAITS
    uploads: int = 0
    algorithm: Any = "fedavg"
    model: Any = "small-cnn"
    local: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    clients: int = CLIENTS


@dataclass
class Seen:
    """The counts of the groups of a run's last round, and between the beginnings of two steps."""

    groups: list[Counter[str]] = field(default_factory=list)
    steps: list[Counter[str]] = field(default_factory=list)
    begun: list[Counter[str]] = field(default_factory=list)
    sites: str = ""


def driven(case: Case, device: str, rounds: int = 2) -> dict[str, Tensor]:
    """The global model after some rounds, in each of which all clients train together."""
    settings: dict[str, Any] = {
        "rounds": rounds,
        "model": case.model,
        "algorithm": case.algorithm,
        "local": {"lr": 0.05, "steps": STEPS, "batch_size": 4, **case.local},
        "data": {
            "dataset": {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "train": 90, "test": 20},
            "partition": {"name": "iid", "clients": case.clients},
            **case.data,
        },
        "select": {"clients_per_round": case.clients},
        "engine": {"name": "vectorized", "device": device},
        **case.more,
    }
    experiment = Experiment(**settings)
    built = build(plan(experiment.config, experiment._source), Path("nowhere"), False)
    states = ClientStates()
    built.engine.open(built.program, states)
    try:
        state = built.algorithm.init(built.model, built.federation)
        driver = Driver(built.engine, states)
        for round in range(1, rounds + 1):
            context = RoundContext(round, rounds, built.federation, Rng((0, "round", round)))
            state = driver.drive(built.algorithm.round(state, context), round)
        _, tree = built.algorithm.model(state)
        return {name: value.cpu() for name, value in tree.items()}
    finally:
        built.engine.close()


def seen_in(case: Case, simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the second round of a run counts, in which clients have states and nothing is compared any more."""
    seen, step, together = Seen(), Steps._step, Executor.together

    def counted_step(self: Steps, *given: Any) -> Tensor:
        seen.begun.append(Counter(simgpu.COUNT))
        return step(self, *given)

    def counted_group(self: Executor, *given: Any, **named: Any) -> Any:
        seen.begun.clear()
        with simgpu.counted() as counts:
            answers = together(self, *given, **named)
        if given[2][0].id.round == 2:
            seen.groups.append(Counter(counts))
            seen.steps += [Counter(b) - Counter(a) for a, b in zip(seen.begun, seen.begun[1:], strict=False)]
            seen.sites += str(counts.at("waits"))
        return answers

    for module in (executor, hook_checks):
        monkeypatch.setattr(module, "FIRST_VISITS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(Steps, "_step", counted_step)
        patched.setattr(Executor, "together", counted_group)
        driven(case, "cuda")
    return seen


def nightly(**cases: Case) -> list[Any]:
    return [pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in cases.items()]


def ci(**cases: Case) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in cases.items()]


def dropping(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small network with both kinds of dropout."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(),
        nn.Linear(8 * input_shape[1] * input_shape[2], 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes),
    )  # fmt: skip


def own_loss() -> ClientRule:
    """A rule whose loss reads what only the context of a single client has."""

    def loss(loss: Tensor, outputs: Tensor, targets: Tensor, context: LocalContext) -> Tensor:
        return loss + len(context.problem.data) / 100 * outputs.square().mean() + context.saved["pull"]

    def start(context: LocalContext) -> None:
        context.saved["pull"] = context.anchor[0].new_zeros(())

    return ClientRule(name="own", loss=loss, start=start, traits=Traits(stackable=True))


UNEVEN = {"partition": {"name": "dirichlet", "clients": CLIENTS, "alpha": 0.5}}
EPOCH = {"steps": None, "epochs": 1, "batch_size": 7}
CASES = [
    *ci(
        fedavg=Case(42),
        larger=Case(42, local={"steps": 2 * STEPS}, clients=2 * CLIENTS),
        uneven=Case(42, local=EPOCH, data=UNEVEN),
        dropout=Case(47, model=dropping),
    ),
    *nightly(
        fedprox=Case(52, algorithm="fedprox"),
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_no_step_waits_and_a_group_waits_a_fixed_number_of_times(
    case: Case, simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_in(case, simgpu, monkeypatch)
    assert len(seen.steps) >= STEPS - 1
    for step in seen.steps:
        assert (step["waits"], step["downloads"]) == (0, 0), seen.sites
        assert step["uploads"] <= case.uploads
        assert step["kernels"] <= case.launches
    assert [group["waits"] for group in seen.groups] == [case.waits] * len(seen.groups), seen.sites


SAME = [
    *ci(moon=Case(0, algorithm="moon", local=EPOCH, data=UNEVEN)),
    *nightly(
        own=Case(0, more={"client": own_loss}),
        fedir=Case(0, algorithm="fedir", local=EPOCH, data=UNEVEN),
        feddane=Case(0, algorithm="feddane", local=EPOCH, data=UNEVEN),
        dropout=Case(0, model=dropping, local=EPOCH, data=UNEVEN),
    ),
]


@pytest.mark.parametrize("case", SAME)
def test_a_group_on_a_gpu_learns_what_it_learns_on_the_processor(case: Case) -> None:
    torch.testing.assert_close(driven(case, "cuda"), driven(case, "cpu"), rtol=0, atol=1e-6)
