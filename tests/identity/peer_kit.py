"""What the tests of peers share: runs whose peers are seen after every round, and their equations in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedlens.algorithms.peers import PeerToPeer
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientStates, ModelSpec, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.core.tree import tree_of
from fedlens.engines.inline import inline
from fedlens.local.settings import LocalSettings
from tests.identity.identity_kit import SIZES, LossOnly, Points, World, epoch, model

N = len(SIZES)
FULL = {"lr": 0.1, "batch_size": "all", "steps": 1}


@dataclass
class Peers:
    """A run of which the models of all peers are kept, after every round."""

    algorithm: PeerToPeer
    there: World
    ops: Mapping[str, Any] | None = None
    begin: Sequence[
        Mapping[str, Tensor]
    ] = ()  # the peers' models before the first round; all the same by default

    def run(self, rounds: int) -> list[list[dict[str, Tensor]]]:
        engine, states = inline(), ClientStates()
        engine.open(Program(self.ops or self.algorithm.ops, self.there, 0), states)
        for k, own in enumerate(self.begin):
            states.commit(k, {"after": {"personal": own}, "step": -1})
        gate, found = Driver(engine, states), []
        state = self.algorithm.init(self.algorithm.parts.model, self.there.info)
        self.states, self.tallies, self.held = [], [], []
        for round in range(1, rounds + 1):
            gate.tally = Tally()
            context = RoundContext(round, rounds, self.there.info, Rng((0, "round", round)))
            state = gate.drive(self.algorithm.round(state, context), round)
            held = [held_by(states.get(k) or {}, state["at"][k]) for k in range(len(self.there.clients))]
            found.append([self.model(each) for each in held])
            self.held.append(held)
            self.states.append(state)
            self.tallies.append(gate.tally)
        return found

    def model(self, held: Mapping[str, Any]) -> dict[str, Tensor]:
        return dict(held.get("personal") or tree_of(self.algorithm.parts.model.build()))


def held_by(state: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    """What a peer goes on from, in its state."""
    held: Mapping[str, Any] = state.get("after" if state.get("step", -1) == at else "before", {})
    return held


def gradient(tree: Mapping[str, Tensor], points: Points, spec: ModelSpec) -> dict[str, Tensor]:
    module = spec.build()
    module.load_state_dict(dict(tree))
    nn.functional.cross_entropy(module(points.inputs), points.targets).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def mixed(weights: np.ndarray, trees: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [
        {n: sum(float(row[j]) * trees[j][n] for j in range(len(trees))) for n in trees[0]} for row in weights
    ]


def stepped(
    trees: Sequence[Mapping[str, Tensor]], there: World, spec: ModelSpec, lr: float
) -> list[dict[str, Tensor]]:
    slopes = [gradient(tree, there.clients[k], spec) for k, tree in enumerate(trees)]
    return [{n: t[n] - lr * g[n] for n in t} for t, g in zip(trees, slopes, strict=True)]


def batch_of(points: Points, settings: LocalSettings, round: int, client: int, at: int) -> Points:
    """The batch of step `at` of a round, in a random order of each epoch, drawn for this client and round."""
    size, n = settings.batch(len(points)), len(points)
    past, within = divmod(at, -(-n // size))
    draw = Rng((0, "client", round, client, "epoch", past)).torch("batches")
    return points.take(epoch(n, size, draw)[within])


@dataclass(frozen=True)
class NoLoss(LossOnly):
    """No gradients: peers only mix."""

    def loss(self, outputs: Tensor, targets: Tensor, weights: None = None, normalize: bool = True) -> Tensor:
        return 0 * outputs.sum()


def models_apart(peers: int) -> list[dict[str, Tensor]]:
    """A model for each peer, each from a seed of its own."""
    return [tree_of(model(seed).build()) for seed in range(peers)]


@dataclass(frozen=True)
class Failing:
    """An operation that fails at one client in one of its calls."""

    op: Any
    client: int
    calls: list[int]
    at: int

    def __call__(self, payload: Any, client: Any, rng: Any) -> Any:
        if client.id == self.client:
            self.calls.append(1)
            if len(self.calls) == self.at:
                raise ValueError("gone")
        return self.op(payload, client, rng)
