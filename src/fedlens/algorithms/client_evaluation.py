"""Measuring at the clients: each on what it holds out of its own data, and the spread over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from fedlens.core.errors import ConfigError, RunFailed
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import (
    Ask,
    Client,
    ClientId,
    Evaluation,
    Failure,
    FederationInfo,
    Metrics,
    ModelSpec,
    Outcome,
    Payload,
    Request,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.core.schema import finite_fault
from fedlens.local.personal_leaves import own_leaves
from fedlens.local.rules import ClientRule
from fedlens.local.training import Train
from fedlens.tasks.evaluation import Task

OP = "evaluate-own"
Who = int | Literal["all", "none"]
MEASURED = "Each measured client sends its summed loss, and how much was right, on what it holds out of its own data."


@dataclass(frozen=True)
class EvaluateOwn:
    """The operation that measures the model that a client would use, on what the client holds out of its own data.

    Payload: `model`, the global tree; `lr`, of tuning. The client's own leaves take the place of the global ones; with
    `tune` it trains on its own data first, and what it learned is forgotten afterwards. It sends back the task's sums,
    and those `before` tuning. A client that holds out nothing has nothing to say and fails.
    """

    model: ModelSpec
    task: Task
    batch_size: int
    personal: frozenset[str] = frozenset()
    tune: Train | None = None

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Measures in evaluation mode, without gradients."""
        held = client.data.validation
        if held is None or len(held) == 0:
            raise ValueError("the client holds out no example")
        tree = {**payload["model"], **own_leaves(self.model, self.personal, client)}
        learner = loadable(self.model, client)
        learner.load(tree)
        sums = {"sums": self._sums(learner, held)}
        if self.tune is None:
            return Outcome(sums)
        trained = self.tune(payload, client, rng).payload
        if fault := finite_fault(trained):
            raise ValueError(f"tuning failed: {fault}")
        moved = {name: tree[name] - delta for name, delta in trained["update"].items()}
        learner.load({**tree, **moved, **trained["buffers"], **trained["counters"]})
        return Outcome({"before": sums["sums"], "sums": self._sums(learner, held)})

    def _sums(self, learner: Loadable, held: Any) -> dict[str, float]:
        learner.module.eval()
        total: dict[str, float] = {}
        with torch.inference_mode():
            for start in range(0, len(held), self.batch_size):
                inputs, targets = held.stretch(start, min(start + self.batch_size, len(held)))
                for name, value in self.task.sums(learner.module(inputs), targets).items():
                    total[name] = total.get(name, 0.0) + value
        return total


def everywhere(shared: Payload, ctx: RoundContext, task: Task, who: Who, pooled: bool = False) -> Evaluation:
    """Asks clients how the model does on what they hold out, and gives the spread over them.

    Args:
        shared: what is sent: `model`, the global tree less the clients' own leaves, and `lr` where they tune.
        who: "all" clients that hold something out, or so many of them, drawn anew each time.
        pooled: also give `validation_loss` and so on: all those examples as one.

    Returns for every metric of the task, say the accuracy:

    - `clients_accuracy_mean` and `clients_accuracy_std` over clients, each counting the same;
    - `clients_accuracy_worst_decile`: the mean over the worst tenth of the clients, at least one (for a loss, where
      less is better, the tenth with the largest);
    - `clients_accuracy_mean_before`: the mean before tuning, where clients tune.

    Raises `RunFailed` where no client answers.
    """
    asked = _chosen(ctx, who)
    ask = Ask(OP, [Request(client) for client in asked], shared)
    after: list[Mapping[str, float]] = []
    before: list[Mapping[str, float]] = []
    reason = "none was asked"
    for answer in (yield ask):
        if isinstance(answer, Failure):
            reason = answer.reason
            continue
        after.append(answer.payload["sums"])
        before += [answer.payload["before"]] if "before" in answer.payload else []
    if not after:
        raise RunFailed(f"no client could be measured: {reason}")
    metrics: Metrics = {}
    if pooled:
        total = {name: sum(sums[name] for sums in after) for name in after[0]}
        metrics |= {f"validation_{name}": value for name, value in task.metrics(total).items()}
    metrics |= spread([task.metrics(sums) for sums in after])
    for name, value in spread([task.metrics(sums) for sums in before]).items():
        metrics |= {f"{name}_before": value} if name.endswith("_mean") else {}
    return metrics


def spread(measured: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean, the standard deviation and the worst decile of each metric over clients.

    >>> spread([{"accuracy": a / 20} for a in range(20)])["clients_accuracy_worst_decile"]
    0.025
    """
    found: Metrics = {}
    for name in measured[0] if measured else ():
        values = np.sort([row[name] for row in measured])
        worst = values[::-1] if name == "loss" else values
        found[f"clients_{name}_mean"] = float(values.mean())
        found[f"clients_{name}_std"] = float(values.std())
        found[f"clients_{name}_worst_decile"] = float(worst[: math.ceil(len(values) / 10)].mean())
    return found


def _chosen(ctx: RoundContext, who: Who) -> list[ClientId]:
    there = ctx.federation.holding_out
    if isinstance(who, int) and who < len(there):
        there = np.sort(ctx.rng.numpy("measure").choice(there, who, replace=False))
    return [int(client) for client in there]


def refuse_unmeasured(federation: FederationInfo, why: str) -> None:
    """Raises `ConfigError` where clients are to be measured and hold nothing out of their own."""
    if len(federation.holding_out) == 0:
        raise ConfigError(
            f"{why}, and no client holds out any of its examples",
            where="data.validation_from",
            hint="set data.validation, say to 0.2, and data.validation_from = 'client'",
        )


def refuse_too_many(federation: FederationInfo, who: Who | None) -> None:
    """Raises `ConfigError` where more clients are to be measured than hold something out."""
    there = len(federation.holding_out)
    if isinstance(who, int) and who > there:
        raise ConfigError(
            f"{who} clients are to be measured, and {there} hold out examples of their own",
            where="evaluation.clients",
            hint=f"take at most {there}, or 'all'",
        )


def tuning(train: Train, lr: float | None, epochs: int | None) -> Train:
    """The training with which a client tunes the global model: the local settings, but for these.

    A rate that is given holds in every round; otherwise it is that of the round. Whatever happens to the updates that
    are sent, normalized or not, the tuned model is where the client's own steps end.
    """
    changed: dict[str, Any] = {} if epochs is None else {"steps": None, "epochs": epochs}
    changed |= {} if lr is None else {"lr": lr, "lr_decay": 1.0, "lr_decay_every": 1}
    settings = train.settings.model_copy(update=changed)
    return replace(train, settings=settings, rule=ClientRule(), normalized=False)
