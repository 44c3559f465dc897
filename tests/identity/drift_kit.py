"""What the tests of SCAFFOLD and FedDyn share: runs whose client states are seen, and quadratics that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientStates, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from tests.identity.identity_kit import LossOnly, Points, World, course, model


@dataclass
class Faulty:
    """Training whose reply is lost or spoiled: {round: {client: what}}."""

    op: object
    plan: Mapping[int, Mapping[int, str]]
    round: int = 0

    def __call__(self, payload, client, rng):
        fault = self.plan.get(self.round, {}).get(client.id)
        if fault == "lost":
            raise ConnectionError("no answer")
        outcome = self.op(payload, client, rng)
        if fault is None:
            return outcome
        spoiled = {n: v * float("nan") for n, v in outcome.payload[fault].items()}
        return outcome._replace(payload={**outcome.payload, fault: spoiled})


@dataclass(frozen=True)
class Seen:
    """One round, with what the clients keep after it."""

    round: int
    before: Mapping
    after: Mapping
    cohort: tuple[int, ...]
    held: Mapping[int, Mapping]
    tally: Tally


def watched(algorithm, there: World, rounds: int = 5, faults=None, held=None) -> list[Seen]:
    """The rounds of a run, and every client's state after each; `held`: what clients hold before the first."""
    engine, states, seen = inline(), ClientStates(), []
    for k, kept in (held or {}).items():
        states.commit(k, kept)
    train = Faulty(algorithm.ops["train"], faults or {})
    engine.open(Program({**algorithm.ops, "train": train}, there, 0), states)
    state, gate = algorithm.init(algorithm.parts.model, there.info), Driver(engine, states)
    for round in range(1, rounds + 1):
        gate.tally, train.round = Tally(), round
        context = RoundContext(round, rounds, there.info, Rng((0, "round", round)))
        after = gate.drive(algorithm.round(state, context), round)
        cohort = tuple(row["client"] for row in gate.tally.per_client)
        held = {k: states.get(k) for k in range(len(there.clients))}
        seen.append(Seen(round, state, after, cohort, held, gate.tally))
        state = after
    engine.close()
    return seen


def mean_of(trees: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([t[n] for t in trees]).mean(0) for n in trees[0]}


# -- quadratics whose curvature and optimum differ from client to client ----------------------------------------


@dataclass(frozen=True)
class Squares(LossOnly):
    """1/2 of the mean squared error."""

    def loss(self, outputs: Tensor, targets: Tensor, weights: None = None, normalize: bool = True) -> Tensor:
        return 0.5 * ((outputs - targets) ** 2).mean()


def line(input_shape, classes) -> nn.Module:
    return nn.Linear(input_shape[0], 1, bias=False).double()


LINE = model(factory=line)
COUNTS = (5, 9, 6, 20, 7)


def quadratics() -> World:
    g, clients = torch.Generator().manual_seed(3), []
    for k, n in enumerate(COUNTS):
        x = torch.randn(n, 4, generator=g, dtype=torch.float64) * (0.6 + 0.2 * k)
        there = torch.randn(4, 1, generator=g, dtype=torch.float64) * 2
        clients.append(Points(x, x @ there + 0.1 * torch.randn(n, 1, generator=g, dtype=torch.float64)))
    return World(tuple(clients))


def optimum(there: World, weights: Sequence[float], decay: float = 0.0) -> Tensor:
    """The minimizer of sum_k p_k (1/2 mean |x w - y|^2 + decay/2 |w|^2)."""
    grams = [p.inputs.T @ p.inputs / len(p) + decay * torch.eye(4).double() for p in there.clients]
    sides = [p.inputs.T @ p.targets / len(p) for p in there.clients]
    h = sum(w * g for w, g in zip(weights, grams, strict=True))
    return torch.linalg.solve(h, sum(w * s for w, s in zip(weights, sides, strict=True)))  # type: ignore[arg-type]


def distances(algorithm, there: World, rounds: int, best: Tensor) -> list[float]:
    run = course(algorithm, there, rounds=rounds)
    return [float((step.after["model"]["weight"].T - best).norm()) for step in run.steps]


UNIFORM = [1.0] * len(COUNTS)
