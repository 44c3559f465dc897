"""Centralized training: what the same model and local settings reach on the pooled data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.client_evaluation import (
    EVALUATE_OWN,
    EvaluateOwn,
    Who,
    disclosure,
    everywhere,
    refuse_too_many,
    refuse_unmeasured,
)
from fedlens.algorithms.registry import refuse_unused
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    Failure,
    FederationInfo,
    ModelSpec,
    Op,
    Request,
    Round,
    RoundContext,
    State,
)
from fedlens.core.tree import Tree, add, tree_of
from fedlens.local.rate_scales import model_scales
from fedlens.local.rules import ClientRule
from fedlens.local.vectorized.batched_train import BatchedTrain
from fedlens.tasks.central_evaluation import Evaluate, central_metrics


@dataclass(frozen=True)
class Centralized(AlgorithmBase):
    """Trains on the pooled data; a round is `local.epochs` passes over it, and the optimizer goes on."""

    parts: Parts
    train: BatchedTrain

    @property
    def ops(self) -> Mapping[str, Op]:
        """Training, the central evaluation, and that of the model at the clients."""
        parts = self.parts
        size = parts.evaluation_batch
        return {
            "train": self.train,
            "evaluate": Evaluate(parts.model, parts.task, size, parts.evaluation_size),
            EVALUATE_OWN: EvaluateOwn(parts.model, parts.task, size, size=parts.evaluation_size),
        }

    @property
    def pools_data(self) -> bool:
        """True: `@train` holds the data of all clients."""
        return True

    @property
    def measured(self) -> Who:
        """Which clients the model is evaluated at; none unless the settings name them."""
        return self.parts.measure_clients or "none"

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients besides their data."""
        return (disclosure(self.parts.task, self.parts.federation),) if self.measured != "none" else ()

    @property
    def evaluation_asks(self) -> int:
        """How many asks `evaluate` makes: one of the server, and one of the clients if they are measured."""
        return 1 + (self.measured != "none")

    @property
    def follows_device(self) -> bool:
        """Yes, but for a subclass, which may compute otherwise."""
        return type(self) is Centralized

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The model's initial weights."""
        return {"model": {**tree_of(model.build()), **model.fixed}}

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Local training at the server."""
        shared = {
            "model": self.parts.model.sent(state["model"]),
            **self.parts.local.shared_rate(ctx.round, ctx.rounds),
        }
        expect = self.train.expect(self.parts.spec, most=ctx.federation.held["@train"])
        (answer,) = yield Ask("train", [Request("@train")], shared, expect=expect)
        if isinstance(answer, Failure):
            return state
        reply = answer.payload
        model = {
            **state["model"],
            **add({n: state["model"][n] for n in reply["update"]}, reply["update"], -1.0),
        }
        more = {name: value.clone() for name, value in {**reply["buffers"], **reply["counters"]}.items()}
        return {"model": {**model, **more}}

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """Evaluates centrally, and at the clients if set."""
        parts = self.parts
        sent = parts.model.sent(state["model"])
        metrics = yield from central_metrics(sent, ctx.federation, parts.task, parts.measure)
        if self.measured == "none":
            return metrics
        at_clients = yield from everywhere({"model": sent}, ctx, parts.task, self.measured)
        return {**metrics, **at_clients}

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The model."""
        return self.parts.model, state["model"]


def centralized(parts: Parts) -> Centralized:
    """Centralized training: the same model and local settings, on all clients' data together.

    A round is `local.epochs` passes over the pooled data, or `local.steps` steps. Its optimizer goes on from
    round to round.

    Fixes: A reference, not federated: relative accuracy is measured against it (hsu2020 section 6), and
        `fedlens compare` looks for it.

    Equation:
        w <- w - eta grad F(w; batch),  F(w) = sum_k (n_k / n) F_k(w)
        relative accuracy = Acc_federated / Acc_centralized                   (hsu2020 section 6)

    Source: hsu2020 section 6 (arXiv 2003.08082); hsu2019 figure 3 has it as a dashed line.

    Weighting: None: every example counts the same.

    State: The optimizer, where all the data is.

    Sent: The model down and one update up, a round; a run in one place would send nothing. Measured clients
        get the model and send a few numbers.

    Composes: `[select]`, `[client]`, `[aggregate]`, `[server]` and `local.stragglers` are refused. Where
        `--set` names it on top of a recipe, the recipe's tables of that kind are left out.

    Ranges:
        local.epochs: 1 a round, so that rounds are epochs.
        local.lr: tuned by itself, or the result is no bound.
        evaluation.clients: "all" measures the model on each client's held-out examples
            (`data.validation_from` = "client"). A federated run with the same seeds holds out the same ones.

    Try: local.epochs=1

    Not when: The question is what a federation reaches. Nor as a bound for personal models, which can be
        better on their own data.

    Tests: tests/identity/test_centralized.py

    Example:
        >>> import numpy as np
        >>> from fedlens.core.random import Rng
        >>> from fedlens.local.settings import LocalSettings
        >>> from fedlens.models.simple import linear
        >>> from fedlens.tasks.classification import Classification
        >>> model = ModelSpec(linear, "linear", {}, (1, 8, 8), 10, seed=0)
        >>> there = FederationInfo(np.array([30, 70]), 10, (1, 8, 8), {"@train": 100})
        >>> algorithm = centralized(Parts(model, Classification(), LocalSettings(lr=0.1), there))
        >>> ask = next(algorithm.round(algorithm.init(model, there), RoundContext(1, 5, there, Rng((0,)))))
        >>> [request.client for request in ask.requests]  # not 0 and 1, but the pooled data of both
        ['@train']
    """
    refuse_unused("centralized", parts.slots, parts.local)
    if parts.measure_clients not in (None, "none"):
        refuse_unmeasured(parts.federation, "`evaluation.clients` measures the model at each client")
        refuse_too_many(parts.federation, parts.measure_clients)
    model_scales(parts.local, parts.model)  # its checks
    kept = parts.task.local_leaves(parts.spec)
    train = BatchedTrain(
        parts.model, parts.task, parts.local, ClientRule(), keep_optimizer=True, personal=kept
    )
    return Centralized(parts, train)
