"""Per-client evaluation on held-out data, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from fedlens.base.errors import ConfigError, RunFailed, told
from fedlens.core.device_copies import downloaded
from fedlens.core.measured import Measured, Total
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
    Op,
    Outcome,
    Payload,
    Program,
    Request,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.core.schema import MEASUREMENTS, AskedField, Schema, TreeField, finite_fault
from fedlens.core.tree import Tree, TreeSpec
from fedlens.core.types import forbidden
from fedlens.local.personal_leaves import own_leaves
from fedlens.local.rules import ClientRule
from fedlens.local.settings import RATE_SETTINGS, LocalSettings
from fedlens.local.training import Train
from fedlens.tasks.central_evaluation import measured
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task

EVALUATE_OWN = "evaluate-own"
"""The name of the operation `EvaluateOwn`."""
Who = int | Literal["all", "none"]
OwnModel = Callable[[Payload], Tree]
"""The client's state -> the leaves of its own model, {} before its first visit; other leaves are the global ones."""
_SPARSE = 2**24  # values of the sums of a client that are mostly zero, or those of a matrix of classes


@dataclass(frozen=True)
class EvaluateOwn:
    """The operation that evaluates the model that a client would use, on the client's held-out examples.

    Payload: `model`, the global tree, and `varied` as in `Train`; `lr`, of tuning; and `also`: "confidences" also sends
    the probabilities of classes of each held-out example (see `fedlens.tasks.central_evaluation.measured`). The
    client's personal leaves replace the global ones, or those that `own_model` takes from its state. With `tune` the
    client first trains on its own data; the result is discarded afterwards.
    The reply has the task's sums, and those `before` tuning. A client without held-out examples fails.
    """

    model: ModelSpec
    task: Task
    batch_size: int
    personal: frozenset[str] = frozenset()
    tune: Train | None = None
    size: EvaluationSize = FULL
    own_model: OwnModel | None = None

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Evaluates in evaluation mode, without gradients."""
        held = client.data.validation
        if held is None or len(held) == 0:
            raise ValueError("the client has no held-out examples")
        model = self.model.of(payload)
        tree = {**payload["model"], **own_leaves(model, self.personal, client)}
        if self.own_model is not None:
            tree |= self.own_model(client.state)
        learner = loadable(model, client)
        learner.load(tree)
        confidences = payload.get("also") == "confidences"
        if self.tune is None:
            return Outcome({"after": self._measured(learner, held, confidences)})
        before = self._measured(learner, held)
        trained = self.tune(payload, client, rng).payload
        if fault := finite_fault(trained):
            raise ValueError(f"tuning failed: {fault}")
        moved = {name: tree[name] - delta for name, delta in trained["update"].items()}
        learner.load({**tree, **moved, **trained["buffers"], **trained["counters"]})
        return Outcome({"before": before, "after": self._measured(learner, held, confidences)})

    def _measured(self, learner: Loadable, held: Any, confidences: bool = False) -> Payload:
        stretch = 0, len(held)
        found = measured(
            self.task, learner, held, self.batch_size, *stretch, size=self.size, confidences=confidences
        )
        return self.task.condensed(found).to_payload()


@dataclass(frozen=True)
class EvaluateInTotals:
    """`EvaluateOwn`, or an operation with such a reply, at a site that sends `Task.totals` alone."""

    evaluate: Op
    task: Task

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Changes nothing."""
        found = self.evaluate(payload, client, rng).payload.items()
        parts = {when: self.task.in_totals(Measured.from_payload(part)) for when, part in found}
        return Outcome({when: part.to_payload() for when, part in parts.items()})


def in_totals(program: Program, task: Task) -> Program:
    """The program of a site that sends `Task.totals` alone of its evaluations."""
    if (own := program.ops.get(EVALUATE_OWN)) is None:
        return program
    return replace(program, ops={**program.ops, EVALUATE_OWN: EvaluateInTotals(own, task)})


def everywhere(shared: Payload, ctx: RoundContext, task: Task, who: Who, pooled: bool = False) -> Evaluation:
    """Asks clients to evaluate the model on their held-out examples, and returns the spread over them.

    Args:
        shared: the payload: `model`, the global tree without personal leaves, `ModelSpec.varying`, and `lr` if clients
            tune.
        who: "all" clients with held-out examples, or how many of them, drawn anew each time.
        pooled: also return `validation_loss` and so on, over all those examples together.

    Returns for every metric of the task, say the accuracy:

    - `clients_accuracy_mean` and `clients_accuracy_std` over clients, each counting the same;
    - `clients_accuracy_worst_decile`: the mean over the worst tenth of the clients, at least one: the tenth with the
      largest values of a loss or an error, where less is better;
    - `clients_accuracy_mean_before`: the mean before tuning, where clients tune.

    Each reply's metrics get the values of its client (see `client_values`), which the run records by client.

    If a client sends `Task.totals` alone, the metrics of all clients together are those that its totals define.

    A client is refused whose measurements cannot be read, or give a share outside [0, 1] (`Task.shares`).

    Returns nothing if no client answers because sites do not allow it. Raises `RunFailed` if none does otherwise.
    """
    asked, held_out = _chosen(ctx, who), ctx.federation.held_out
    assert held_out is not None  # `refuse_unmeasured` has refused the run otherwise
    ask = Ask(EVALUATE_OWN, [Request(client) for client in asked], shared, expect=MEASUREMENTS)
    summed = Total()
    most = max(_SPARSE, (ctx.federation.classes + 1) ** 2)
    after: list[Mapping[str, float]] = []
    before: list[Mapping[str, float]] = []
    limited: set[str] | None = None  # the metrics of clients that sent totals alone
    reason, forbids = "no client was asked", False
    for answer in (yield ask):
        if isinstance(answer, Failure):
            reason = answer.reason
            forbids = forbids or reason == forbidden(EVALUATE_OWN)
            continue
        try:
            sent = downloaded(answer.payload)
            found = Measured.from_payload(sent["after"], most)
            of_client, alone = task.metrics(found), task.has_only_totals(found)
            untuned: Mapping[str, float] = {}
            if tuned := "before" in sent:
                first = Measured.from_payload(sent["before"], most)
                untuned, alone = task.metrics(first), alone or task.has_only_totals(first)
            fault = task.metric_fault(of_client) or task.metric_fault(untuned)
            if pooled and fault is None:
                summed.add(found)
        except Exception as error:  # `MEASUREMENTS` accepts any payload
            fault = f"the measurements cannot be read: {told(error)}"
        if fault:
            reason = fault
            answer.refuse(fault)
            continue
        after.append(of_client)
        before += [untuned] if tuned else []
        if alone:
            limited = (limited or set()) | of_client.keys()
        # Added here and not by the operation: a loss that is not finite is a result, not a failed reply.
        values = client_values(int(held_out[int(answer.client)]), of_client, untuned)
        answer.metrics = {**answer.metrics, **values}
    if not after and forbids:
        return {}
    if not after:
        raise RunFailed(f"no client could be measured: {reason}")
    metrics: Metrics = {}
    if pooled:
        together = summed.result() if limited is None else task.in_totals(summed.result())
        metrics |= {f"validation_{name}": value for name, value in task.metrics(together).items()}
    if limited is not None:  # a mean over some of the clients would pass for one over all
        after, before = ([_only(row, limited) for row in rows] for rows in (after, before))
    metrics |= spread(after, task.errors)
    for name, value in spread(before, task.errors).items():
        metrics |= {f"{name}_before": value} if name.endswith("_mean") else {}
    return metrics


def asked(model: TreeSpec, more: Mapping[str, AskedField] = MappingProxyType({})) -> Schema:
    """What `everywhere` asks, for `AlgorithmBase.takes`: all that a client holds out is measured as a whole.

    No range of it can be asked for, nor, by `also`, anything of a single image.

    Args:
        model: the leaves that are sent.
        more: further fields, such as the rate of tuning.
    """
    return Schema({"model": TreeField.like(model), **more})


def client_values(examples: int, after: Mapping[str, float], before: Mapping[str, float]) -> Metrics:
    """The values of one client as a run records them: its held-out examples, and each metric on them.

    >>> client_values(20, {"accuracy": 0.75}, {"accuracy": 0.5})
    {'validation_examples': 20, 'validation_accuracy': 0.75, 'validation_accuracy_before': 0.5}
    """
    values = {f"validation_{name}": value for name, value in after.items()}
    values |= {f"validation_{name}_before": value for name, value in before.items()}
    return {"validation_examples": examples, **values}


def spread(
    values_of_clients: Sequence[Mapping[str, float]],
    errors: Collection[str] = ("loss",),
    whose: str = "clients",
    decile: bool = True,
) -> Metrics:
    """The mean, the standard deviation and the worst decile of each metric over clients; or the worst, if not `decile`.

    `errors` are the metrics of which smaller is better. A client that lacks a metric, such as the precision of a class
    that it does not have, is left out of that metric; `clients_<metric>_undefined` is the number of those clients,
    where any are left out.

    >>> spread([{"accuracy": a / 20} for a in range(20)])["clients_accuracy_worst_decile"]
    0.025
    """
    metrics: Metrics = {}
    for name in dict.fromkeys(name for row in values_of_clients for name in row):
        values = np.sort([row[name] for row in values_of_clients if name in row])
        if len(values) < len(values_of_clients):
            metrics[f"{whose}_{name}_undefined"] = len(values_of_clients) - len(values)
        worst = values[::-1] if name in errors else values
        metrics[f"{whose}_{name}_mean"] = float(values.mean())
        metrics[f"{whose}_{name}_std"] = float(values.std())
        if decile:
            metrics[f"{whose}_{name}_worst_decile"] = float(worst[: math.ceil(len(values) / 10)].mean())
        else:
            metrics[f"{whose}_{name}_worst"] = float(worst[0])
    return metrics


def _only(row: Mapping[str, float], names: Collection[str]) -> Mapping[str, float]:
    return {name: value for name, value in row.items() if name in names}


def _chosen(ctx: RoundContext, who: Who) -> list[ClientId]:
    clients = ctx.federation.holding_out
    if isinstance(who, int) and who < len(clients):
        clients = np.sort(ctx.rng.numpy("measure").choice(clients, who, replace=False))
    return [int(client) for client in clients]


def disclosure(task: Task, federation: FederationInfo) -> str:
    """What measured clients tell the server, in a sentence; a site may send `Task.totals` alone."""
    each = (
        " After the last round it also sends, for each of these images, the label, its probability and the five most "
        "probable classes."
        if task.has_confidences and not federation.at_sites
        else ""
    )
    return f"Each measured client sends {task.sends}, on what it holds out of its own data.{each}"


def refuse_unmeasured(federation: FederationInfo, why: str) -> None:
    """Raises `ConfigError` if clients are to be evaluated and none has held-out examples."""
    if len(federation.holding_out) == 0:
        raise ConfigError(
            f"{why}, but no client holds out examples of its own",
            where="data.validation_from",
            hint="set data.validation = 0.2 and data.validation_from = 'client', as the recipe digits-personal does",
        )


def refuse_too_many(federation: FederationInfo, who: Who | None) -> None:
    """Raises `ConfigError` if more clients are to be evaluated than have held-out examples."""
    holding_out = len(federation.holding_out)
    if isinstance(who, int) and who > holding_out:
        raise ConfigError(
            f"{who} clients are to be measured, but only {holding_out} hold out examples of their own",
            where="evaluation.clients",
            hint=f"set at most {holding_out}, or 'all'",
        )


def tuning(train: Train, lr: float | None, epochs: int | None) -> Train:
    """The training with which a client tunes the global model: the local settings with these changes.

    A given rate is used in every round; otherwise it is the round's rate. The updates that are sent may be normalized;
    tuning never is.
    """
    changed: dict[str, Any] = {} if epochs is None else {"steps": None, "epochs": epochs}
    if lr is not None:
        changed |= {name: LocalSettings.model_fields[name].default for name in RATE_SETTINGS} | {"lr": lr}
    settings = train.settings.model_copy(update=changed)
    return replace(train, settings=settings, rule=ClientRule(), normalized=False)
