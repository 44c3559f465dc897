"""The averaging family: one loop with four slots. A paper's file fills the slots.

| slot | question |
|---|---|
| select | who takes part? |
| client | how does local training bend? |
| aggregate | how are replies folded into one update? |
| server | how does the update move the model? |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedlens.aggregate.mean import Aggregate, Mean, Update
from fedlens.aggregate.server import Plain, ServerStep
from fedlens.algorithms.selecting import Select, Uniform
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    FederationInfo,
    ModelSpec,
    Op,
    Request,
    Round,
    RoundContext,
    State,
)
from fedlens.core.tree import Leaf, Tree, part, select, spec_of, tree_of
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.tasks.evaluation import Evaluate, Task, central


@dataclass(frozen=True)
class Parts:
    """What every algorithm is built from: the model, the task, the settings, and the slots that the settings name.

    `measure` holds what the server evaluates on: `@test`, and `@validation` or `@train` where asked for.
    """

    model: ModelSpec
    task: Task
    local: LocalSettings
    federation: FederationInfo
    measure: Sequence[str] = ("@test",)
    evaluation_batch: int = 500
    select: Select | None = None
    client: ClientRule | None = None
    aggregate: Aggregate | None = None
    server: ServerStep | None = None

    @cached_property
    def spec(self) -> dict[str, Leaf]:
        """The spec of the model's tree."""
        return spec_of(self.model.build())


@dataclass(frozen=True)
class Averaging:
    """The loop. Its state: `model`, the global tree, and `server`, the server optimizer's own."""

    parts: Parts
    select: Select
    train: Train
    aggregate: Aggregate
    server: ServerStep

    @property
    def ops(self) -> Mapping[str, Op]:
        """Training, and the central evaluation."""
        parts = self.parts
        return {"train": self.train, "evaluate": Evaluate(parts.model, parts.task, parts.evaluation_batch)}

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The model's initial weights. Raises `ConfigError` where the cohort is larger than the population."""
        self.select.size(federation)
        tree = tree_of(model.build())
        return {"model": tree, "server": self.server.init(self._weights(tree))}

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Select, train, fold, step. Where no reply is good, the state stays as it was."""
        cohort = self.select.cohort(ctx)
        work = straggling(self.parts.local, cohort, ctx)
        shared = {"model": state["model"], "lr": self.parts.local.lr_at(ctx.round)}
        ask = Ask(
            "train",
            [
                Request(client, {"work": work[slot]} if slot in work else {})
                for slot, client in enumerate(cohort)
            ],
            shared,
            expect=self.train.expect(self.parts.spec, most=ctx.federation.largest),
            reduce=self.aggregate.reduce(len(cohort)),
        )
        update = self.aggregate.fold((yield ask))
        return state if update is None else self._step(state, update)

    def _step(self, state: State, update: Update) -> State:
        weights, server = self.server.step(self._weights(state["model"]), update.update, state["server"])
        # Only trainable weights went through the server's optimizer; statistics and counters are taken as they are.
        return {"model": {**state["model"], **weights, **update.buffers, **update.counters}, "server": server}

    def _weights(self, tree: Tree) -> dict[str, Tensor]:
        return select(tree, part(self.parts.spec, "weight", trainable=True))

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The central evaluation."""
        return central(state["model"], ctx.federation.held, self.parts.task, self.parts.measure)

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The global model."""
        return self.parts.model, state["model"]


def averaging(
    parts: Parts,
    *,
    select: Select | None = None,
    client: ClientRule | None = None,
    aggregate: Aggregate | None = None,
    server: ServerStep | None = None,
) -> Averaging:
    """An algorithm of the family. A slot that the user's settings fill goes before what the paper's file gives."""
    fold = parts.aggregate or aggregate or Mean()
    rule = parts.client or client or ClientRule()
    return Averaging(
        parts=parts,
        select=parts.select or select or Uniform(),
        train=Train(parts.model, parts.task, parts.local, rule, fold.weighting),
        aggregate=fold,
        server=parts.server or server or Plain(),
    )


def straggling(local: LocalSettings, cohort: Sequence[int], ctx: RoundContext) -> dict[int, int]:
    """Partial work by slot: a stated share of the cohort runs 1 to E - 1 epochs, drawn uniformly (FedProx, 5.2)."""
    if not local.stragglers:
        return {}
    draw = ctx.rng.numpy("stragglers")
    slots = draw.choice(len(cohort), round(local.stragglers * len(cohort)), replace=False)
    return {int(slot): int(draw.integers(1, local.work)) for slot in sorted(slots)}
