"""Parts of a user's own that break a rule: they change their inputs, return nothing, or take other arguments."""

from __future__ import annotations

from typing import Any

import torch

from fedlens.aggregate.mean import Aggregate, Mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.reduction import Update
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Tensors, Traits


def grad(gradients: Tensors, parameters: Tensors, context: LocalContext, how: str) -> Any:
    if how == "anchor":
        return [
            g + 0.1 * (p - a.sub_(p)) for g, p, a in zip(gradients, parameters, context.anchor, strict=True)
        ]
    if how == "payload":
        for leaf in context.payload["model"].values():
            leaf.zero_()
    if how == "data":
        context.anchor[0].data.zero_()
    if how == "numpy":
        context.anchor[0].numpy()[:] = 0
    if how == "one":
        return gradients[:1]
    if how == "shape":
        return [gradients[0], gradients[0]]
    return None if how == "nothing" else gradients


def moves_anchor(context: LocalContext) -> None:
    context.anchor = [a + 1 for a in context.anchor]


def detached(loss: Any, outputs: Any, targets: Any, context: LocalContext) -> Any:
    return loss.detach()


def moved(*, stackable: bool = True) -> ClientRule:
    return ClientRule(name="moved", start=moves_anchor, traits=Traits(stackable=stackable))


def without_gradient() -> ClientRule:
    return ClientRule(name="flat", loss=detached, traits=Traits(stackable=True))


def sharing(parts: Parts, *, key: str) -> Averaging:
    share = ServerRule(shared=lambda state: {key: 0.5} if key else None)  # type: ignore[arg-type,return-value]
    return averaging(parts, client=ClientRule(name="sharing", server_rules={"sharing": share}))


def algorithm(parts: Parts, *, how: str) -> Averaging:
    def hook(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Any:
        return grad(gradients, parameters, context, how)

    return averaging(parts, client=ClientRule(name="hooked", grad=hook, traits=Traits(stackable=True)))


class Bent(AlgorithmBase):
    """FedAvg whose training is done by an operation that does what `how` says after it."""

    def __init__(self, plain: Averaging, how: str) -> None:
        self.plain, self.how = plain, how

    @property
    def ops(self) -> Any:
        return {**self.plain.ops, "train": self.train}

    def train(self, payload: Payload, client: Client, rng: Rng) -> Any:
        model, state = payload["model"], client.state
        outcome = self.plain.ops["train"](payload, client, rng)
        if self.how == "zero the payload":
            model["1.weight"].data.zero_()
        if self.how == "replace in the payload":
            model["1.weight"] = torch.zeros_like(model["1.weight"])
        if self.how == "add to the state" and state:
            state["seen"] += 1
        seen = state.get("seen", torch.zeros(1))
        return (
            None
            if self.how == "return nothing"
            else Outcome(outcome.payload, {"seen": seen}, outcome.metrics)
        )

    def init(self, model: Any, federation: Any) -> Any:
        return self.plain.init(model, federation)

    def round(self, state: Any, ctx: Any) -> Any:
        return self.plain.round(state, ctx)

    def evaluate(self, state: Any, ctx: Any) -> Any:
        return self.plain.evaluate(state, ctx)

    def model(self, state: Any) -> Any:
        return self.plain.model(state)


def operation(parts: Parts, *, how: str) -> Bent:
    return Bent(averaging(parts), how)


def short_op(parts: Parts) -> Any:
    bent = Bent(averaging(parts), "")
    bent.train = lambda payload: None  # type: ignore[assignment,method-assign,misc]
    return bent


def parameters_by_data(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    parameters[0].data.mul_(0.5)
    return gradients


def halving() -> ClientRule:
    return ClientRule(name="halving", grad=parameters_by_data, traits=Traits(stackable=True))


class ByData(ServerSGD):
    def step(self, weights: Any, update: Any, state: Any) -> Any:
        weights["1.weight"].data.mul_(0.5)
        return super().step(weights, update, state)


def by_data() -> ByData:
    return ByData()


class InitByData(ServerSGD):
    def init(self, weights: Any) -> Any:
        weights["1.weight"].data.mul_(0.5)
        return {}


def init_by_data() -> InitByData:
    return InitByData()


class Halving(Aggregate):
    """Halves the replies themselves, streamed or all at once."""

    def aggregate(self, answers: Any, fields: Any, ctx: Any) -> Any:
        replies = list(answers)
        for reply in replies:
            reply.payload["update"]["1.weight"].numpy()[:] *= 0.5
        return replies and Update(replies[0].payload["update"], {}, {}, {}, len(replies), 1.0)


class StateByData(Averaging):
    def round(self, state: Any, ctx: Any) -> Any:
        state["model"]["1.weight"].data.mul_(0.5)
        return (yield from super().round(state, ctx))


def state_by_data(parts: Parts) -> StateByData:
    return StateByData(**{key: value for key, value in vars(averaging(parts)).items() if key != "rule_"})


class InPlace(ServerSGD):
    def step(self, weights: Any, update: Any, state: Any) -> Any:
        return {name: value.sub_(update[name]) for name, value in weights.items()}, state


def in_place() -> InPlace:
    return InPlace()


def a_class() -> type:
    return InPlace


class NoResult(ServerSGD):
    def step(self, weights: Any, update: Any, state: Any) -> Any:
        pass


def no_result() -> NoResult:
    return NoResult()


class NoState(ServerSGD):
    def init(self, weights: Any) -> Any:
        pass


def no_state() -> NoState:
    return NoState()


class ShortStep:
    def init(self, weights: Any) -> Any:
        return {}

    def step(self, weights: Any, update: Any) -> Any:
        return weights, {}


class Forgetful(Aggregate):
    def aggregate(self, answers: Any, fields: Any, ctx: Any) -> Any:
        for _ in answers:
            pass


class ShortAggregate(Aggregate):
    def aggregate(self, answers: Any) -> Any:  # type: ignore[override]
        return None


class Without(Aggregate):
    pass


class Earlier(Aggregate):
    """As written for an earlier version."""

    def fold(self, answers: Any, fields: Any, ctx: Any) -> Any:
        return None


class EarlierMean(Mean):
    """Overrides what the base class no longer calls."""

    def fold(self, answers: Any, fields: Any, ctx: Any) -> Any:
        return None


class Halved(ClientRule):
    """A rule as a class, whose hook is a method."""

    name = "halved"
    traits = Traits(stackable=True)

    def grad(self, gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:  # type: ignore[override]
        return [g / 2 for g in gradients]


class Short(ClientRule):
    def grad(self, g: Tensors, p: Tensors) -> Tensors:  # type: ignore[override]
        return g


def wide(folder: Any, more: Any, still: Any, most: Any) -> None:
    pass


class Mapped(Aggregate):
    def aggregate(self, answers: Any, fields: Any, ctx: Any) -> Any:
        return {"update": [answer.client for answer in answers]}


class Bare:
    def aggregate(self, answers: Any, fields: Any, ctx: Any) -> Any:
        return None


def with_bare_aggregate(parts: Parts) -> Averaging:
    return averaging(parts, aggregate=Bare())  # type: ignore[arg-type]


def with_a_class(parts: Parts) -> Averaging:
    return averaging(parts, client=Halved)  # type: ignore[arg-type]


def positional(parts: Parts, mu: float = 0.1) -> Averaging:
    return averaging(parts)


def tells_more(parameters: Tensors, context: LocalContext) -> Any:
    return {"note": 1.0}, None


def unannounced() -> ClientRule:
    return ClientRule(name="unannounced", finish=tells_more)


def reads_problem(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    return [g * context.problem.batch for g in gradients]


def not_stackable() -> ClientRule:
    """A rule that is not stackable, although it says so; rules with a server half are not tried before the run."""
    return ClientRule(
        name="single",
        grad=reads_problem,
        traits=Traits(stackable=True),
        server_rules={"single": ServerRule()},
    )
