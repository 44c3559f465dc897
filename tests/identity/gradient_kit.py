"""What the tests of algorithms with a first exchange of gradients share: gradients in bare PyTorch, faulty clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.algorithms.averaging import Averaging
from fedlens.algorithms.full_gradients import OP
from fedlens.core.protocol import Client, ModelSpec, Op, Outcome, Payload
from fedlens.core.random import Rng
from tests.identity.identity_kit import Points, Step, Tree, model

EQUAL = (4, 4, 4, 4, 4, 4)


def slots(step: Step, exchange: int) -> tuple[int, ...]:
    """Who sent an update in this exchange, in order; the slots themselves where nobody failed."""
    return tuple(client for client, asked, _ in step.tally.norms if asked == exchange)


def rng_at(step: Step, exchange: int, slot: int, client: int, seed: int = 0) -> Rng:
    """Where the randomness of one slot comes from."""
    return Rng((seed, "op", step.round, exchange, slot, client))


def loaded(spec: ModelSpec, tree: Tree) -> nn.Module:
    """A module of its own, in training mode."""
    module = spec.build()
    module.load_state_dict(dict(tree))
    return module.train()


def gradient(module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Of the mean cross entropy, by the names of the trainable parameters."""
    module.zero_grad()
    nn.functional.cross_entropy(module(inputs), targets).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}


def full_gradient(
    tree: Tree, points: Points, spec: ModelSpec | None = None, batch: int | None = None
) -> dict[str, Tensor]:
    """Over all points, a batch at a time in the given order."""
    module, n = loaded(spec or model(), tree), len(points)
    total: dict[str, Tensor] = {}
    for at in torch.arange(n).split(batch or n):
        for name, value in gradient(module, points.inputs[at], points.targets[at]).items():
            total[name] = total.get(name, torch.zeros_like(value)) + len(at) / n * value
    return total


def weighted(trees: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """sum_k w_k tree_k / sum_k w_k."""
    pairs = list(zip(trees, weights, strict=True))
    return {n: sum(w * t[n] for t, w in pairs) / sum(weights) for n in trees[0]}  # type: ignore[misc]


@dataclass(frozen=True)
class Faulty:
    """An operation that fails at some clients, or answers with what is not a number."""

    inner: Op
    at: tuple[int, ...]
    nan: bool = False

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        if client.id in self.at and not self.nan:
            raise ConnectionError("no answer")
        outcome = self.inner(payload, client, rng)
        if client.id in self.at:
            broken = {n: t * float("nan") for n, t in outcome.payload["update"].items()}
            return outcome._replace(payload={**outcome.payload, "update": broken})
        return outcome

    def expect(self, *given: Any, **named: Any) -> Any:
        return self.inner.expect(*given, **named)  # type: ignore[attr-defined]


def faulty(
    made: Averaging, first: Sequence[int] = (), second: Sequence[int] = (), nan: bool = False
) -> Averaging:
    """The algorithm with clients that fail in the first exchange, and in the second."""
    ops = {**made.more_ops, OP: Faulty(made.more_ops[OP], tuple(first), nan)}
    return replace(made, more_ops=ops, train=Faulty(made.train, tuple(second), nan))  # type: ignore[arg-type]
