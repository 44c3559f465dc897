"""An exchange before local training: clients send the gradient over all their data, the server takes the mean."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlens.aggregate.mean import AggregateContext, Mean, Weighting
from fedlens.algorithms.averaging import Parts
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import (
    Answers,
    Ask,
    Call,
    Client,
    ClientId,
    Outcome,
    Payload,
    Request,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.core.reduction import Update
from fedlens.core.schema import NumberField, Schema, TreeField
from fedlens.core.tree import Tree
from fedlens.local.rules import LocalContext
from fedlens.local.vectorized.batched_train import BatchedTrain
from fedlens.local.vectorized.train_group import gradients_together

OP = "gradient"

# Rules that turn a client's steps towards everyone's gradient, as Mime and FedDANE do.
CORRECTIONS = ("control-variate", "dynamic", "dual")

FULL_GRADIENT = (
    "Each client sends the gradient of its objective over all its examples, or the local.examples drawn."
)


@dataclass(frozen=True)
class Gradient:
    """The gradient of a client's risk over all its examples at the global model; see `LocalProblem.gradient`.

    The reply has the fields of an update, so that it is aggregated like one: `update`, the gradient of the trainable
    weights; no `buffers` and no `counters`; and `weight`, the client's weight in local training. It takes no step
    and changes no state.
    """

    train: BatchedTrain

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Takes the gradient. Counts its batches, and no loss and no examples: nothing is trained on them."""
        with ExitStack() as closing:
            context = self.train.context(payload, client, rng, closing)
            gradient, _ = context.problem.gradient()
        return self._reply(context, context.tree(gradient))

    def together(self, calls: Sequence[Call]) -> list[Outcome | BaseException]:
        """Takes the gradients of several clients at once."""
        return gradients_together(self.train, calls, self._reply)

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """About how many bytes each client takes in `together`."""
        return self.train.footprint(device, largest, data)

    def obstacle(self) -> None:
        """None of its own: what keeps clients from training together is the obstacle of training."""

    def _reply(self, context: LocalContext, gradient: Tree) -> Outcome:
        weight = float(len(context.problem.data)) if self.train.weighting == "examples" else 1.0
        reply = {"update": gradient, "buffers": {}, "counters": {}, "weight": weight}
        return Outcome(reply, None, {"batches": context.problem.seen})


def expected(parts: Parts, weighting: Weighting) -> Schema:
    """What a good reply of `Gradient` has."""
    most = float(parts.local.examples or parts.federation.largest) if weighting == "examples" else 1.0
    return Schema(
        {
            "update": TreeField.weights(parts.spec),
            "buffers": TreeField({}),
            "counters": TreeField({}),
            "weight": NumberField(above=0, most=most),
        }
    )


def mean_gradient(
    shared: Payload, cohort: Sequence[ClientId], expect: Schema, ctx: RoundContext
) -> Generator[Ask, Answers, dict[str, Tensor] | None]:
    """Asks the cohort for its gradients at `shared["model"]`, and takes their mean, weighted like updates.

    Over those that replied; None where nobody did. A large cohort is summed where the work runs, as updates are.
    """
    ask = Ask(OP, [Request(k) for k in cohort], shared, expect=expect, counts=False)
    mean = yield from Mean().exchange(ask, {}, AggregateContext.of(ctx, {}))
    return dict(mean.update) if isinstance(mean, Update) else None


def refuse_corrected(parts: Parts, title: str) -> None:
    """Raises `ConfigError` where a rule of `[client]` would correct a second time what this algorithm corrects."""
    named = parts.client.name.split("+") if parts.client is not None else []
    twice = next((name for name in CORRECTIONS if name in named), None)
    if twice is not None:
        raise ConfigError(
            f"{title} and '{twice}' both correct the clients' drift, and each would also correct the "
            "correction of the other",
            where="client.name",
            hint="take one of the two",
        )
