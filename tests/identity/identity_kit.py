"""What the identity tests share: a federation in float64, a driver, and a client written in bare PyTorch.

The bare client knows `torch.optim`, the documented order of batches, and no training code of fedlens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.algorithms.averaging import Parts
from fedlens.core.driver import Driver, Tally
from fedlens.core.measured import Measured
from fedlens.core.protocol import (
    Answer,
    Ask,
    ClientDataSource,
    ClientExamples,
    ClientId,
    ClientStates,
    FederationInfo,
    ModelSpec,
    Program,
    Reply,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.core.step_counts import Work
from fedlens.core.types import is_client
from fedlens.engines.inline import inline
from fedlens.local.settings import LocalSettings
from fedlens.tasks.classification import Classification
from fedlens.tasks.task import Task

FEATURES, CLASSES = 4, 3
SIZES = (3, 8, 5, 1, 12, 6)  # unequal on purpose: equal sizes hide a missing weight
EXACT = {"rtol": 1e-12, "atol": 1e-13}

Tree = Mapping[str, Tensor]


# Whose clients train a part of the network at a time: other steps and other settings.
IN_TWO_PARTS = {"fedgkt", "fedma", "fednas", "splitfed", "split-relay", "vertical"}
PEERS = {"dsgd", "push-sum", "gradient-tracking"}  # without a cohort and a server's model


@dataclass(frozen=True)
class Points(ClientExamples):
    """The interface of `fedlens.data.client_datasets.ClientDataset`, in float64."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def read_targets(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.targets[start:stop]

    def take(self, at: Tensor) -> Points:
        return Points(self.inputs[at], self.targets[at])

    def stretch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.inputs[start:stop], self.targets[start:stop]

    def batch(self, positions: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.targets[positions]

    def batches(self, size: int, rng: Rng, drop_last: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        generator = rng.torch("batches")
        while True:
            for at in epoch(len(self), size, generator, drop_last):
                yield self.inputs[at], self.targets[at]


def epoch(n: int, size: int, generator: torch.Generator, drop_last: bool = False) -> Sequence[Tensor]:
    """The batches of one epoch, as documented: a random order, or the given one where a batch holds all."""
    order = torch.arange(n) if size >= n else torch.randperm(n, generator=generator)
    return [at for at in order.split(size) if not drop_last or len(at) == min(size, n)]


@dataclass(frozen=True)
class World(ClientDataSource):
    """Clients with data of their own, and what the server holds: the same points, pooled."""

    clients: tuple[Points, ...]

    @property
    def info(self) -> FederationInfo:
        sizes = np.array([len(points) for points in self.clients])
        held = {"@train": int(sizes.sum()), "@test": int(sizes.sum())}
        return FederationInfo(sizes, CLASSES, (FEATURES,), held)

    def data_of(self, client: int | str) -> Points:
        return self.pooled() if isinstance(client, str) else self.clients[client]

    def pooled(self, clients: Sequence[int] | None = None) -> Points:
        taken = self.clients if clients is None else [self.clients[k] for k in clients]
        return Points(torch.cat([p.inputs for p in taken]), torch.cat([p.targets for p in taken]))


def world(sizes: Sequence[int] = SIZES) -> World:
    """Every client's points stand elsewhere, and lean to a class of its own."""
    g = torch.Generator().manual_seed(5)
    clients = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, FEATURES, generator=g, dtype=torch.float64) + (k % 5) / 3
        y = (torch.randint(0, 2, (n,), generator=g) + k) % CLASSES
        clients.append(Points(x, y))
    return World(tuple(clients))


class LossOnly(Task):
    """The rest of a task whose loss alone matters."""

    kind = "classification"
    features = True

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        raise NotImplementedError

    def metrics(self, measured: Measured) -> dict[str, float]:
        raise NotImplementedError


def net(
    input_shape: Sequence[int],
    classes: int,
    *,
    norm: bool = False,
    frozen: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """A small perceptron in float64."""
    layers: list[nn.Module] = [nn.Linear(input_shape[0], 5)]
    layers += [nn.BatchNorm1d(5)] if norm else []
    layers += [nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, classes)]
    module = nn.Sequential(*layers).double()
    module[0].weight.requires_grad_(not frozen)
    return module


def model(seed: int = 0, factory: Callable[..., nn.Module] = net, **settings: Any) -> ModelSpec:
    return ModelSpec(factory, "net", settings, (FEATURES,), CLASSES, seed)


def parts(there: World, local: Mapping[str, Any], spec: ModelSpec | None = None, **rest: Any) -> Parts:
    task = rest.pop("task", Classification())
    return Parts(spec or model(), task, LocalSettings(**local), there.info, **rest)


@dataclass(frozen=True)
class Step:
    """One round: the states around it, who took part in which slot, and what the gate counted."""

    round: int
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    cohort: tuple[int, ...]
    tally: Tally


@dataclass
class Course:
    """An algorithm on an engine, by default the inline one, round by round."""

    algorithm: Any
    there: World
    seed: int = 0
    engine: Any = None
    steps: list[Step] = field(default_factory=list)
    states: ClientStates = field(default_factory=ClientStates)

    def run(self, rounds: int) -> Course:
        engine, states = self.engine or inline(), self.states
        engine.open(Program(self.algorithm.ops, self.there, self.seed), states)
        state = self.algorithm.init(self.algorithm.parts.model, self.there.info)
        try:
            slots: set[tuple[int, ClientId]] = set()

            def answered(ask: Ask, answer: Answer, work: Work) -> None:
                if isinstance(answer, Reply) and answer.refused is None and is_client(answer.client):
                    slots.add((answer.id.slot, answer.client))

            gate = Driver(engine, states, answered)
            for round in range(1, rounds + 1):
                gate.tally = Tally()
                slots.clear()
                rng, kept = Rng((self.seed, "round", round)), gate.journal
                context = RoundContext(round, rounds, self.there.info, rng, journal=kept)
                after = gate.drive(self.algorithm.round(state, context), round)
                cohort = tuple(client for _, client in sorted(slots))
                self.steps.append(Step(round, state, after, cohort, gate.tally))
                state = after
        finally:
            engine.close()
        return self

    @property
    def final(self) -> Tree:
        return self.steps[-1].after["model"]


def course(algorithm: Any, there: World, rounds: int = 4, seed: int = 0, engine: Any = None) -> Course:
    return Course(algorithm, there, seed, engine=engine).run(rounds)


def rng_of(step: Step, slot: int, seed: int = 0) -> Rng:
    """Where the randomness of one slot's training comes from."""
    return Rng((seed, "op", step.round, 0, slot, step.cohort[slot]))


def bare_client(
    spec: ModelSpec,
    tree: Tree,
    points: Points,
    rng: Rng,
    *,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    epochs: int = 1,
    batch_size: int | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The state_dict after training in bare PyTorch; `penalty` is added to the loss and left to autograd."""
    module = spec.build()
    module.load_state_dict(dict(tree))
    module.train()
    step = optimizer([p for p in module.parameters() if p.requires_grad])
    order = rng.torch("batches")
    torch.manual_seed(rng.seed("torch"))
    for _ in range(epochs):
        for at in epoch(len(points), batch_size or len(points), order):
            step.zero_grad()
            loss = nn.functional.cross_entropy(module(points.inputs[at]), points.targets[at])
            if penalty is not None:
                loss = loss + penalty(module)
            loss.backward()
            step.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def mean(trees: Sequence[Tree], weights: Sequence[float]) -> dict[str, Tensor]:
    """sum_k n_k tree_k / sum_k n_k of the float leaves."""
    floats = [name for name, value in trees[0].items() if value.is_floating_point()]
    total = sum(weights)
    return {n: sum(w / total * t[n] for t, w in zip(trees, weights, strict=True)) for n in floats}  # type: ignore[misc]


def same(a: Tree, b: Tree) -> bool:
    """Equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Tree, b: Tree, **tolerance: float) -> None:
    torch.testing.assert_close(dict(a), dict(b), **(tolerance or EXACT))


def weights_of(tree: Tree) -> dict[str, Tensor]:
    """The tree without running statistics."""
    return {n: v for n, v in tree.items() if "running" not in n and "num_batches" not in n}
