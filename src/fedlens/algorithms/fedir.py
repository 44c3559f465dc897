"""FedIR: hsu2020 section 5.2. Clients weigh their examples, so that each trains for one and the same target."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import ConfigError
from fedlens.core.device_copies import uploaded
from fedlens.core.protocol import (
    Answers,
    Ask,
    Client,
    ClientId,
    FederationInfo,
    ModelSpec,
    Op,
    Outcome,
    Payload,
    Reduce,
    Request,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.core.reduction import add_reply
from fedlens.core.schema import Field as SchemaField
from fedlens.core.schema import NumberField, Schema, TensorField
from fedlens.core.tree import TreeSpec
from fedlens.local.class_counts import class_counts
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Traits
from fedlens.local.training import Train
from fedlens.tasks.task import Task

NAME = "reweighted"
COUNT = "class-counts"  # the operation that tells how many examples of each class a client has
TARGET = "target"  # p(y) in the server's state and in the payload: float64 [classes]
DISCLOSURE = (
    "Before its first training, every client that holds data told the server how many examples of each class it "
    "has: FedIR's target is the population's class distribution."
)


def _checked(target: str | list[float]) -> str | list[float]:
    if isinstance(target, str):
        if target not in ("uniform", "population"):
            raise ValueError("should be 'uniform', 'population', or a list of one probability a class")
    elif not all(0 <= p < math.inf for p in target):
        raise ValueError("probabilities must be at least 0")
    elif not math.isclose(math.fsum(target), 1.0, abs_tol=1e-6):
        raise ValueError(f"the probabilities must sum to 1; they sum to {math.fsum(target):g}")
    return target


Target = Annotated[
    str | list[float],
    AfterValidator(_checked),
    Field(
        description="the target class distribution: uniform, population (each client sends its class "
        "counts once), or a list with one probability per class"
    ),
]
Normalize = Annotated[
    bool,
    Field(
        description="divide by the sum of the weights in the batch (Hsu et al. 2020, Eq. 4); "
        "false: Eq. 1 without that division"
    ),
]


def fedir(
    parts: Parts, *, target: Target = "uniform", normalize: Normalize = True, lr: Rate = 1.0
) -> Averaging:
    """FedIR: clients weigh their examples by class, towards a target that all share.

    Fixes: Clients with different classes minimize different losses, and their updates pull apart. Weighted by
        `p(y) / q_k(y)`, each client's loss estimates the same loss, that of the target `p`.

    Equation:
        weights:   w_k(y) = p(y) / q_k(y)                                                   (hsu2020 Eq. 1, 3)
        client k:  L(b) = sum_{(x,y) in b} w_k(y) l(x, y) / sum_{(x,y) in b} w_k(y)         (hsu2020 Eq. 4)
                   L(b) = 1/|b| sum_{(x,y) in b} w_k(y) l(x, y)          (normalize = false; hsu2020 Eq. 1)
        server:    as in FedAvg: w^{t+1} = w^t - lr sum_k (n_k / n) (w^t - w_k)             (hsu2020 Algorithm 1)

    Source: Hsu, Qi and Brown 2020 (arXiv 2003.08082), section 5.2 and Algorithm 1: hsu2020.

    Weighting: By examples, `n_k / n` (hsu2020 Algorithm 1).

    State: Nothing; with `target = "population"` the server keeps p.

    Sent: As FedAvg. With `target = "population"` also, once, the number of examples of each class of
        every client with data (C numbers), and p with the model in every round. In the source these counts,
        `n_k q_k`, never leave the client: the run's report says so. p is of the clients that answered.

    Composes: FedIR evens out classes, [FedVC](fedvc.md) sizes: they combine. Any `[select]`, `[aggregate]`
        and `[server]`. `client.name = "reweighted"` adds it to other algorithms, whose full gradients are
        then of this loss. `q_k` is of all the client's examples, also with `local.examples` (hsu2020 Eq. 2).
        The logged `local_loss` is unweighted.

    Ranges:
        target: "uniform" needs nothing of the clients; "population" where all clients together are skewed as
            the test data are; a list where the server knows the target. A class of probability 0 is not
            learned.
        normalize: true holds the size of the steps; false is unbiased, but one example of a rare class makes
            a step as large as its weight: lower `local.lr`, or set `local.clip_norm`.
        lr: 1.
        local.batch_size: large: the bias of Eq. 4 falls as 1 / batch size.

    Try: local.batch_size=64 'data.partition={name="dirichlet",clients=20,alpha=1.0}'

    Not when: Each client has only a class or two: weights cannot bring in absent classes, and with one class
        Eq. 4 is FedAvg. hsu2020 finds it below FedAvgM on iNaturalist with 100 clients a round (table 3).

    Tests: tests/identity/test_fedir.py tests/identity/test_fedir_beside_others.py

    Example:
        >>> counts = torch.tensor([3, 1, 0])  # q = 3/4, 1/4, and no example of the third class
        >>> importance(counts, torch.tensor([0.5, 0.25, 0.25]))
        tensor([0.6667, 1.0000, 0.0000], dtype=torch.float64)
    """
    return averaging(parts, client=_rule(target, normalize, "algorithm"), server=ServerSGD(lr))


def reweighted(*, target: Target = "uniform", normalize: Normalize = True) -> ClientRule:
    """FedIR's weights on top of any algorithm: see `fedir`."""
    return _rule(target, normalize, "client")


def _rule(target: str | list[float], normalize: bool, table: str) -> ClientRule:
    gathers = target == "population"
    return ClientRule(
        name=NAME,
        start=partial(weigh, target=target),
        risk=partial(risk, target=target, normalize=normalize),
        fits=None if isinstance(target, str) else partial(_fits, target=target, where=f"{table}.target"),
        server_rules={
            NAME: ServerRule(
                shared=_shared, takes=_takes, asks={COUNT: "nothing"}, prepare=gather, follows_device=True
            )
        }
        if gathers
        else {},
        ops={COUNT: _count} if gathers else {},
        traits=Traits(stackable=True, reweighs=True, discloses=(DISCLOSURE,) if gathers else ()),
    )


def _fits(federation: FederationInfo, model: ModelSpec, *, target: Sequence[float], where: str) -> None:
    if len(target) != federation.classes:
        raise ConfigError(
            f"the target has {len(target)} probabilities, but the dataset has {federation.classes} classes",
            where=where,
            hint="give one per class, in the order of the classes",
        )


# -- at the client -------------------------------------------------------------------------------------------


def importance(counts: Tensor, target: Tensor) -> Tensor:
    """w(y) = p(y) / q(y), float64 [classes]: `target` over the class distribution of `counts`, int64 [classes].

    Source: hsu2020 Eq. 3. A class that does not occur has weight 0: it does not come up.
    """
    q = counts.double() / counts.sum()
    return torch.where(q > 0, target.to(q) / q, 0.0)


def weigh(context: LocalContext, *, target: str | list[float]) -> None:
    """Saves the weights of the classes, if they are not there yet."""
    problem = context.problem
    if NAME not in context.saved:
        counts = class_counts(problem.task, problem.client, problem.model.classes)
        there = uploaded((counts, _target(context, target)), context.anchor[0].device)
        context.saved[NAME] = importance(*there).to(context.anchor[0])


def risk(
    outputs: Tensor, targets: Tensor, context: LocalContext, *, target: str | list[float], normalize: bool
) -> Tensor:
    """The weighted loss of a batch: hsu2020 Eq. 4, or Eq. 1 in the mean. 0 where all weights of the batch are 0."""
    # Another rule may want a gradient before `start`, or without local training.
    weigh(context, target=target)
    return context.problem.task.loss(outputs, targets, context.saved[NAME], normalize)


def _target(context: LocalContext, target: str | list[float]) -> Tensor:
    if not isinstance(target, str):
        return torch.tensor(target, dtype=torch.float64)
    if target == "population":
        gathered: Tensor = context.payload[TARGET]
        return gathered
    classes = context.problem.model.classes
    return torch.full((classes,), 1 / classes, dtype=torch.float64)


@dataclass(frozen=True)
class CountClasses:
    """The operation that tells how often each class occurs at a client: `counts`, float64 [classes]."""

    task: Task
    classes: int

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Counts. In float64, whose sums are exact up to 2^53."""
        counts = class_counts(self.task, client, self.classes)
        return Outcome({"counts": counts.double(), "weight": 1.0})


def _count(train: Train) -> Op:
    return CountClasses(train.task, train.model.classes)


# -- at the server -------------------------------------------------------------------------------------------


def gather(
    state: Payload, shared: Payload, cohort: Sequence[ClientId], ctx: RoundContext
) -> Generator[Ask, Answers, Payload | None]:
    """Asks every client that holds data for its class counts, once, and keeps p(y) = sum_k n_k q_k(y) / sum_k n_k.

    Those that do not answer are left out of p. Where nobody answers the round comes to nothing, and the next one
    asks again.
    """
    if TARGET in state:
        return state
    federation = ctx.federation
    there = federation.eligible
    expect: dict[str, SchemaField] = {
        "counts": TensorField((federation.classes,), torch.float64, low=0, high=federation.most_counts),
        "weight": NumberField(above=0, most=1),
    }
    # A hundred thousand clients are about 32 messages to the server, and as many tensors in its memory.
    how = Reduce({"counts": "plain"}, block=max(1, len(there) // 32))
    total: dict[str, Tensor] = {}
    for answer in (
        yield Ask(COUNT, [Request(int(k)) for k in there], expect=Schema(expect), reduce=how, counts=False)
    ):
        if answer.reduced is not None:
            add_reply(total, how, answer.reduced, reduced=True)
    if not total or not bool(total["counts"].sum() > 0):
        return None
    return {TARGET: total["counts"] / total["counts"].sum()}


def _shared(state: Payload) -> Payload:
    return {TARGET: state[TARGET]}


def _takes(spec: TreeSpec, federation: FederationInfo) -> Mapping[str, SchemaField]:
    return {TARGET: TensorField((federation.classes,), torch.float64, low=0, high=1)}
