"""Centralized training: what the same model and local settings reach on the pooled data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedlens.algorithms.averaging import Parts
from fedlens.core.errors import ConfigError
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
from fedlens.local.rules import ClientRule
from fedlens.local.training import Train
from fedlens.tasks.evaluation import Evaluate, central


@dataclass(frozen=True)
class Centralized:
    """One holder, the pooled data; a round is `local.epochs` passes over it, and the optimizer goes on."""

    parts: Parts
    train: Train

    @property
    def ops(self) -> Mapping[str, Op]:
        """Training, and the central evaluation."""
        parts = self.parts
        return {"train": self.train, "evaluate": Evaluate(parts.model, parts.task, parts.evaluation_batch)}

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The model's initial weights."""
        return {"model": tree_of(model.build())}

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Local training at the server."""
        shared = {"model": state["model"], "lr": self.parts.local.lr_at(ctx.round)}
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
        """The central evaluation."""
        return central(state["model"], ctx.federation.held, self.parts.task, self.parts.measure)

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The model."""
        return self.parts.model, state["model"]


def centralized(parts: Parts) -> Centralized:
    """The same model, trained with the same local settings on all clients' data together.

    It is the upper bound that relative accuracy is measured against (hsu2020 section 6). Unlike a client's, its
    optimizer is not cleared from round to round. Nothing is selected or aggregated, so those tables are refused.
    """
    filled = [
        slot for slot in ("select", "client", "aggregate", "server") if getattr(parts, slot) is not None
    ]
    if filled:
        raise ConfigError(
            f"'centralized' has no use for a table [{filled[0]}]", where=filled[0], hint="take it out"
        )
    if parts.local.stragglers:
        raise ConfigError("'centralized' has no stragglers", where="local.stragglers", hint="set it to 0")
    return Centralized(parts, Train(parts.model, parts.task, parts.local, ClientRule(), keep_optimizer=True))
