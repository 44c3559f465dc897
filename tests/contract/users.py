"""A user's own file: a dataset, a model, a partition and algorithms that fedlens does not have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.peers import PeerToPeer
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.registry import read_settings
from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.schema import tensors_in
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.synthetic import synthetic
from fedlens.data.partition.partition import Partition
from fedlens.local.rules import ClientRule, LocalContext, Tensors
from fedlens.local.training import Train


def norm_net(input_shape: Sequence[int], classes: int, *, width: int = 6) -> nn.Module:
    """Batch normalization, dropout, and a frozen layer."""
    channels, height, long = input_shape
    module = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Conv2d(width, width, 1),
        nn.Flatten(),
        nn.Linear(width * height * long, classes),
    )
    module[4].requires_grad_(False)
    return module


def scattered(root: Path, download: bool, seed: int) -> Dataset:
    """Four smooth patterns with little noise, taken by five users in places of their own; two groups of classes."""
    plain = synthetic(root, download, 0, shape=(1, 8, 8), classes=4, train=240, test=80, noise=0.1)
    draw = np.random.RandomState(0)
    columns = {
        "client": np.array([f"user {k}" for k in draw.randint(0, 5, 240)]),
        "lat": draw.uniform(-80, 80, 240),
        "lon": draw.uniform(-180, 180, 240),
    }
    return replace(
        plain, name="scattered", train=replace(plain.train, columns=columns), coarse=np.array([0, 0, 1, 1])
    )


def uneven(labels: np.ndarray, seed: int, *, clients: int = 5) -> Partition:
    """Client 0 holds nothing, client 1 one example, the others share the rest."""
    owners = 2 + np.random.default_rng(seed).permutation(len(labels)) % (clients - 2)
    owners[3] = 1
    return Partition.of_owners(owners, clients, spec={"name": "uneven", "clients": clients, "seed": seed})


def one_example(labels: np.ndarray, seed: int, *, clients: int = 5) -> Partition:
    """Client 0 holds one example, the others share the rest."""
    owners = 1 + np.random.default_rng(seed).permutation(len(labels)) % (clients - 1)
    owners[3] = 0
    return Partition.of_owners(owners, clients, spec={"name": "one", "clients": clients, "seed": seed})


def remembering(parts: Parts, *, pull: float = 0.1) -> Averaging:
    """A client is also pulled to where it ended the last time: a state at the client."""
    return averaging(parts, client=ClientRule(grad=partial(pulled, pull=pull), finish=remember))


def pulled(gradients: Tensors, parameters: Tensors, context: LocalContext, *, pull: float) -> Tensors:
    last = context.state.get("last", context.anchor)
    return [g + pull * (p - w) for g, p, w in zip(gradients, parameters, last, strict=True)]


def remember(parameters: Tensors, context: LocalContext) -> tuple[Mapping[str, Any], Payload]:
    times = context.state.get("times", 0) + 1
    return {}, {"last": [p.clone() for p in parameters], "times": times}


@dataclass(frozen=True)
class Centred:
    """A server step along the update less a share of its mean, which is a sum over all weights at the server."""

    share: float

    def init(self, weights: Mapping[str, Tensor]) -> Payload:
        return {"steps": 0}

    def step(
        self, weights: Mapping[str, Tensor], update: Mapping[str, Tensor], state: Payload
    ) -> tuple[dict[str, Tensor], Payload]:
        row = torch.cat([value.flatten() for value in update.values()])
        middle = self.share * row.sum() / len(row)
        return {n: weights[n] - (update[n] - middle) for n in weights}, {"steps": state["steps"] + 1}


def centred(parts: Parts, *, share: float = 1.0) -> Averaging:
    """FedAvg with a centred step."""
    return averaging(parts, server=Centred(share))


@dataclass(frozen=True)
class Flaky:
    """An operation that fails at one client, so many times after so many: not heard of, or its numbers are none."""

    inner: Any
    client: int
    after: int
    times: int
    garbled: bool = False
    asked: list[int] = field(default_factory=list)  # of this process: for the engine that has only one

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        if client.id != self.client:
            return self.inner(payload, client, rng)
        self.asked.append(client.id)
        if not 0 < len(self.asked) - self.after <= self.times:
            return self.inner(payload, client, rng)
        if not self.garbled:
            raise ConnectionError("no answer")
        outcome = self.inner(payload, client, rng)
        for tensor in tensors_in(outcome.payload):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        return outcome

    def expect(self, *given: Any, **named: Any) -> Any:
        return self.inner.expect(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Mumbling:
    """Local training whose reported loss at one client is not a number; its update is good."""

    inner: Train
    client: int

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        outcome = self.inner(payload, client, rng)
        loss = float("nan") if client.id == self.client else outcome.metrics["loss"]
        return outcome._replace(metrics={**outcome.metrics, "loss": loss})

    def expect(self, *given: Any, **named: Any) -> Any:
        return self.inner.expect(*given, **named)


def mumbling(parts: Parts, *, client: int = 1) -> Any:
    """FedAvg with a client that reports a loss which is not a number."""
    made = ALGORITHMS.find("fedavg")(parts)
    return replace(made, train=Mumbling(made.train, client))


def flaky(
    parts: Parts,
    *,
    inner: str = "fedavg",
    client: int = 1,
    after: int = 0,
    times: int = 1000,
    garbled: bool = False,
    settings: dict[str, Any] | None = None,
) -> Any:
    """Any algorithm of the family, with a client that is missing, or sends what no one can use."""
    factory, chosen = ALGORITHMS.find(inner), {k: v for k, v in (settings or {}).items() if k != "name"}
    made = factory(parts, **read_settings(factory, chosen, "algorithm"))
    if isinstance(made, PeerToPeer):
        return replace(made, rule=replace(made.rule, train=Flaky(made.rule.train, client, after, times)))  # type: ignore[arg-type]
    more = {name: Flaky(op, client, after, times, garbled) for name, op in made.more_ops.items()}
    part = "lower" if inner in ("splitfed", "split-relay") else "train"  # what clients do first
    return replace(made, **{part: Flaky(getattr(made, part), client, after, times, garbled)}, more_ops=more)
