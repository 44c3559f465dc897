"""Groups of clients on a GPU: no step waits for it, a group waits a fixed number of times, the results are right."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from fedlens.data.dataset import Examples
from fedlens.engines import executor
from fedlens.engines.executor import Executor
from fedlens.local import hook_checks
from fedlens.local.rules import ClientRule, LocalContext, Traits
from fedlens.local.vectorized.steps import Steps
from fedlens.run.build import build
from fedlens.settings.plan import plan
from tests.gpu.conftest import SIMULATED

STEPS, CLIENTS = 4, 3
SMALL = {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "train": 90, "test": 20}
WAITS = 2  # of a group: for the losses of its steps, and for the norms of its updates


@dataclass
class Case:
    """Settings of a run, and what a group may take: launches and uploads a step, and waits in all.

    `gradient_waits` are those of the groups of another exchange before, for full gradients.
    """

    launches: int
    waits: int = WAITS
    gradient_waits: int | None = None
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
            "dataset": SMALL,
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
OF_A_RULE = WAITS + 1  # the norms of all that the rule adds to replies and states
FULL = WAITS + 1  # the losses of full gradients
CASES = [
    *ci(
        fedavg=Case(42),
        larger=Case(42, local={"steps": 2 * STEPS}, clients=2 * CLIENTS),
        uneven=Case(42, local=EPOCH, data=UNEVEN),
        dropout=Case(47, model=dropping),
        scaffold=Case(46, OF_A_RULE, algorithm="scaffold"),
        moon=Case(124, OF_A_RULE, algorithm="moon"),
    ),
    *nightly(
        leaves=Case(403, model={"name": "resnet20", "norm": "group"}),
        fedprox=Case(47, algorithm="fedprox"),
        feddyn=Case(47, OF_A_RULE, algorithm="feddyn"),
        fednova=Case(42, algorithm="fednova"),
        fedir=Case(70, algorithm="fedir"),
        feddane=Case(48, FULL, gradient_waits=WAITS, algorithm="feddane"),
        mime=Case(87, gradient_waits=WAITS, algorithm="mime"),
        mimelite=Case(47, FULL + 1, algorithm="mimelite"),
        scaffold_full_gradient=Case(46, OF_A_RULE + 1, algorithm={"name": "scaffold", "option": "I"}),
        admm=Case(47, algorithm={"name": "admm", "solver": "sgd"}),
        liadmm=Case(42, algorithm={"name": "liadmm", "gradient": "training"}),
        momentum=Case(52, local={"momentum": 0.9, "weight_decay": 0.01}),
        adam=Case(63, local={"optimizer": "adam"}),
        clipped=Case(63, local={"clip_norm": 0.5}),
        layer_rates=Case(43, local={"lr_scale": {"6.bias": 2.0}}),
        augmented=Case(59, uploads=2 * CLIENTS, data={"augment": {"name": "flip"}}),
        moon_uneven=Case(124, OF_A_RULE, algorithm="moon", local=EPOCH, data=UNEVEN),
        fedir_uneven=Case(110, algorithm="fedir", local=EPOCH, data=UNEVEN),
        dropout_uneven=Case(47, model=dropping, local=EPOCH, data=UNEVEN),
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
    waits = [case.waits] if case.gradient_waits is None else [case.gradient_waits, case.waits]
    assert [group["waits"] for group in seen.groups] == waits, seen.sites


@pytest.mark.nightly
def test_no_step_waits_for_images_that_do_not_fit_on_the_gpu(
    simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Examples, "on", lambda self, device, room: replace(self, device=device))
    seen = seen_in(Case(0), simgpu, monkeypatch)
    assert [(step["waits"], step["uploads"]) for step in seen.steps] == [(0, 1)] * (STEPS - 1), seen.sites
    assert [group["waits"] for group in seen.groups] == [WAITS]


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
    if case.model is dropping and not SIMULATED:
        pytest.skip("a real GPU draws the masks of a group from a generator of its own")
    torch.testing.assert_close(driven(case, "cuda"), driven(case, "cpu"), rtol=0, atol=1e-6)


@dataclass
class Memory:
    """The tensors on the simulated GPU: bytes now, at most, and of the largest one."""

    now: int = 0
    most: int = 0
    largest: int = 0

    def watch(self, simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """From here on; each memory counts once, whatever tensors share it."""
        made, held = simgpu.Sim.__init__, Counter[int]()

        def gone(at: int, size: int) -> None:
            held[at] -= 1
            self.now -= 0 if held[at] else size

        def counted(tensor: Any, inner: Tensor, gpu: int) -> None:
            made(tensor, inner, gpu)
            at, size = inner.untyped_storage().data_ptr(), inner.untyped_storage().nbytes()
            self.now += 0 if held[at] else size
            held[at] += 1
            self.most, self.largest = max(self.most, self.now), max(self.largest, inner.nbytes)
            weakref.finalize(inner, gone, at, size)

        monkeypatch.setattr(simgpu.Sim, "__init__", counted)


WIDE = Case(0, local={"steps": 1, "batch_size": 16}, data={"dataset": SMALL | {"shape": [1, 16, 16]}})


def test_a_group_takes_no_more_memory_than_its_estimate(
    simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, together, shares = Memory(), Executor.together, list[float]()

    def measured(self: Executor, op: str, shared: Any, items: Any, *more: Any) -> Any:
        memory.most = before = memory.now
        answers = together(self, op, shared, items, *more)
        data, trained = self.program.data, self.program.ops[op]
        estimate = trained.footprint(self.device, data.largest, data.data_of(items[0].client))
        shares.append((memory.most - before) / len(items) / estimate)
        return answers

    memory.watch(simgpu, monkeypatch)
    monkeypatch.setattr(Executor, "together", measured)
    driven(WIDE, "cuda")
    assert shares
    assert all(0.3 < share < 1 for share in shares), shares


def test_a_group_that_runs_out_of_memory_is_halved(
    simgpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = replace(WIDE, clients=4)
    with monkeypatch.context() as watching:
        memory = Memory()
        memory.watch(simgpu, watching)
        whole = driven(case, "cuda")
    monkeypatch.setattr(simgpu, "LARGEST", memory.largest - 1)
    halved = driven(case, "cuda")
    torch.testing.assert_close(halved, whole, rtol=0, atol=1e-6)
    assert "out of memory with 4 clients at once; trying 2 at once" in capsys.readouterr().err
