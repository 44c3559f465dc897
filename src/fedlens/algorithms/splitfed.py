"""SplitFed: Thapa et al. 2022 (arXiv 2004.12088), SFLV1 and SFLV2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_sampling import refuse_repeats
from fedlens.algorithms.registry import refuse_unused
from fedlens.base.errors import ConfigError
from fedlens.base.frozen import FrozenSplit
from fedlens.core.protocol import Ask, Op, Payload, Reply, Request, Round, RoundContext, State, Steps
from fedlens.core.schema import Schema, TensorField
from fedlens.core.tree import map_tree, select
from fedlens.local.halves import Finish, Half, Lower, Upper, holder_of
from fedlens.models.stages import LayerName, stages


@dataclass(frozen=True, kw_only=True)
class SplitFed(Averaging):
    """The round loop: the steps of all clients side by side, then the mean of both halves."""

    lower: Lower
    upper: Upper
    activations: Tensor  # of two examples: shape and dtype
    cut: str
    asks_each_step = True

    @property
    def ops(self) -> Mapping[str, Op]:
        """The steps of both halves, their end, and evaluation."""
        own: dict[str, Op] = {
            "lower": self.lower,
            "upper": self.upper,
            "finish-lower": Finish(self.lower.half),
            "finish-upper": Finish(self.upper.half),
        }
        return {**own, **{name: op for name, op in super().ops.items() if name != "train"}}

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients beyond model updates."""
        sent = f"In every step each client sends the labels of its batch and what the layers up to '{self.cut}' compute"
        return (*super().discloses, f"{sent} from its images, from which images can be reconstructed.")

    @property
    def training_op(self) -> str | None:
        """None: a client has only the lower half."""
        return None

    @property
    def no_local_models(self) -> str:
        """Why replies hold no local models."""
        return "each client has only the lower half of the model"

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Runs the steps of both halves, then averages the halves of the clients that finished."""
        own, cohort = self.lower.own_holder, self.select.cohort(ctx)
        lower, upper = ({"model": self._part(state, half)} for half in (self.lower.half, self.upper.half))
        finished = yield from self._trained(cohort, lower, upper, ctx)
        return (yield from self._averaged(state, finished, ctx, own))

    def _trained(self, cohort: Sequence[int], lower: Payload, upper: Payload, ctx: RoundContext) -> Steps:
        """Runs the steps of these clients side by side; returns those that finished.

        Args:
            lower, upper: what clients and the server's halves get in step 0.
        """
        local, sizes = self.parts.local, ctx.federation.sizes
        steps = {client: local.steps_at(int(sizes[client])) for client in cohort}
        rate = local.shared_rate(ctx.round, ctx.rounds)
        gone: set[int] = set()
        for at in range(max(steps.values()) + 1):
            shared: dict[str, Any] = {**rate, "step": at}
            going = [client for client in cohort if client not in gone and at <= steps[client]]
            requests, first = [Request(client) for client in going], lower if at == 0 else {}
            answers = yield Ask("lower", requests, {**shared, **first}, letter=self._up, deliver=True)
            gone |= {a.client for a in answers if not isinstance(a, Reply)}  # type: ignore[misc]
            senders = [client for client in going if client not in gone and at < steps[client]]
            if senders:
                requests, first = self._served(senders, steps, at, ctx), upper if at == 0 else {}
                list((yield Ask("upper", requests, {**shared, **first}, letter=self._down, deliver=True)))
        return [client for client in cohort if client not in gone]

    def _served(
        self, senders: Sequence[int], steps: Mapping[int, int], at: int, ctx: RoundContext
    ) -> list[Request]:
        """The requests to the server's halves: one for each client, or one for all in random order."""
        if self.lower.own_holder:
            return [Request(holder_of(k, True), {"order": [k], "steps": steps[k]}) for k in senders]
        draw = ctx.rng.child("step", at).numpy("order").permutation(len(senders))
        order = [senders[k] for k in draw]
        return [Request("@server", {"order": order, "steps": max(steps.values())})]

    def _averaged(self, state: State, clients: Sequence[int], ctx: RoundContext, own: bool) -> Round:
        expect = self._finish(state, self.lower.half)
        answers = yield Ask("finish-lower", [Request(k) for k in clients], expect=expect)
        lowers = {a.client: a for a in answers if isinstance(a, Reply)}
        if not lowers:
            return state
        holders = dict.fromkeys(holder_of(k, own) for k in lowers)
        answers = yield Ask(
            "finish-upper", [Request(k) for k in holders], expect=self._finish(state, self.upper.half)
        )
        uppers = {a.client: a.payload for a in answers if isinstance(a, Reply)}
        replies = [
            Reply(
                reply.id,
                client,
                self._joined(
                    state, reply.payload, uppers[holder_of(client, own)], float(ctx.federation.sizes[client])
                ),
            )
            for client, reply in lowers.items()
        ]
        update = Mean().aggregate(replies)
        return state if update is None else {**state, **self._step(state, update, ctx.round)}

    def _joined(self, state: State, lower: Payload, upper: Payload, weight: float) -> Payload:
        """What a client that has trained both halves would send."""
        both = {field: {**lower[field], **upper[field]} for field in lower}
        before = select(state["model"], list(both["weights"]))
        update = map_tree(torch.sub, before, both["weights"])
        return {"update": update, "buffers": both["buffers"], "counters": both["counters"], "weight": weight}

    def _part(self, state: State, half: Half) -> dict[str, Tensor]:
        """The leaves of a half that are sent."""
        return select(state["model"], half.leaves)

    def _finish(self, state: State, half: Half) -> Schema:
        return Finish.expect({name: self.parts.spec[name] for name in self._part(state, half)})

    @property
    def _up(self) -> Schema:
        targets = TensorField((-1,), torch.int64, most=self._most * 8)
        fields = {"activations": self._activations, "targets": targets}
        return Schema(fields, aligned=tuple(fields))

    @property
    def _down(self) -> Schema:
        return Schema({"gradient": self._activations})

    @property
    def _activations(self) -> TensorField:
        one = self.activations[0]
        return TensorField((-1, *one.shape), one.dtype, most=self._most * one.nbytes)

    @property
    def _most(self) -> int:
        """The most examples of a batch."""
        size = self.parts.local.batch_size
        return self.parts.federation.largest if size == "all" else size


def splitfed(
    parts: Parts,
    *,
    cut: Annotated[LayerName, Field(description="the layer after which the model is cut")],
    variant: Annotated[
        Literal["v1", "v2"],
        Field(
            description="a half at the server for each client, or one for all, which takes clients in random order"
        ),
    ] = "v1",
    server_rate: Annotated[float, Field(gt=0, description="factor of local.lr at the server's half")] = 1.0,
    keep_optimizer: Annotated[
        bool, Field(description="both halves keep their optimizer from round to round")
    ] = False,
) -> SplitFed:
    """SplitFed: each client trains the first layers of the model, the server trains the others, and both are averaged.

    In a step a client computes the activations after the layer `cut` for one batch and sends them with the labels. The
    server finishes the forward pass, takes a step with its half and sends the gradient of the activations back, with
    which the client takes its own step. The clients work side by side. At the end of a round they send their halves.

    Fixes: With FedAvg a client computes, holds and sends the whole model. Here it has the first layers alone, and the
        layers after the cut, often most of the weights, never leave the server.

    Equation:
        client k:  a = f(w_k; x),  and sends a and y                            (of one batch)
        server:    g = dL(h(v_k; a), y) / da,  v_k <- v_k - s eta dL / dv_k,  and sends g
        client k:  w_k <- w_k - eta (da / dw_k)^T g
        round:     (w, v) <- (w, v) - lr sum_k n_k / n ((w, v) - (w_k, v_k))    (variant v1)
        v2:        one v for all, which takes the batches of a step in random order

    Source: Thapa et al. 2022 (arXiv 2004.12088), SFLV1 and SFLV2 with label sharing: labels go to the server. In v2
        the server draws the order of the clients anew in every step.

    Weighting: By examples, over the clients that finished the round. A client that fails in the middle of a round is
        not asked again in the round and leaves v1 as if it had not been there; what v2's half learned from it stays.

    State: During a round each client has its half, and the server one half a client in v1 and one in v2. With
        `keep_optimizer` the optimizer of each half stays from round to round. The server keeps the model.

    Sent: In every step the activations and labels of a batch up and the gradient of the activations down; in every
        round the first layers down and up. The server learns the labels and can reconstruct images from activations,
        the more easily the earlier the cut. Clients learn no other client's data, and not the server's half unless
        `evaluation.clients` measures the model at them.

    Composes: Any `[select]` that chooses a client once a round and any `[server]`, which moves both halves. `[client]`
        and `[aggregate]` are refused, and of `[local]` clip_norm, stragglers, examples and lr_scale. Every optimizer
        works, each half with its own. The model is cut where one tensor is alive: after a block of a ResNet, and not
        inside of it. For classification without class weights, and without `model.cache_features`. The engine
        `vectorized` is refused, since clients train one by one.

    Ranges:
        cut: An early layer keeps the client's work small; a later one sends smaller activations. A wrong name is
            answered with the choices.
        variant: "v1" is FedAvg of the whole network, whatever the cut. "v2" takes one step of the server's half a
            client, so its learning rate has to be lower: `server_rate` below 1.
        server_rate: 1; for v2 down to one in the number of clients of a round.
        keep_optimizer: true where all clients take part in every round.

    Try: model=mlp algorithm.cut=1

    Not when: Clients can hold the whole model: FedAvg reaches the same as v1, sends nothing in a step, and no labels
        leave a client. Nor where activations are larger than the model.

    Tests: tests/identity/test_splitfed.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(splitfed).model_fields)
        ['cut', 'variant', 'server_rate', 'keep_optimizer']
    """
    own = variant == "v1"
    return SplitFed(**split(parts, "splitfed", cut, own, server_rate, keep_optimizer, keep_optimizer))


def split(
    parts: Parts,
    name: str,
    cut: str,
    own_holder: bool,
    server_rate: float,
    keep_lower: bool,
    keep_upper: bool,
) -> dict[str, Any]:
    """The fields of `SplitFed`. Raises `ConfigError` for what the algorithm `name` cannot do.

    Args:
        own_holder: whether the server has a half for each client.
        keep_lower, keep_upper: whether a half's optimizer stays at its holder from round to round.
    """
    refuse_unused(name, parts.slots, parts.local)
    refuse_unfit(parts, name)
    lower, upper = stages(parts.model, cut)
    made = averaging(parts)
    refuse_repeats(made.select, parts.federation, name)
    return {
        **vars(made),
        "lower": Lower(Half(lower, parts.local, keep_optimizer=keep_lower), own_holder),
        "upper": Upper(Half(upper, parts.local, server_rate, keep_upper), parts.task),
        "activations": sent_by(lower, parts),
        "cut": cut,
    }


def refuse_unfit(parts: Parts, name: str) -> None:
    """Raises `ConfigError` for a task or a model that cannot be trained in two parts, at clients and at the server."""
    task = parts.task
    one_class_an_image = task.one_class and task.classifier and not task.placed and task.example == "image"
    if not one_class_an_image or task.weighs:
        raise ConfigError(
            f"'{name}' sends labels with activations, so it trains classification without class weights, but the task "
            f"is {parts.task.kind}" + (" with class weights" if parts.task.weighs else ""),
            where="task.class_weights" if parts.task.weighs else "task.name",
            hint="set task.class_weights = 'none'" if parts.task.weighs else "choose another algorithm",
        )
    if FrozenSplit.of(parts.model.build(initial=False)) is not None:
        raise ConfigError(
            f"'{name}' cuts a model that reads images, but cache_features gives it features",
            where="model.cache_features",
            hint="set model.cache_features = false",
        )


def sent_by(lower: Any, parts: Parts) -> Tensor:
    """What the lower half gives for two blank images."""
    module = lower.build(initial=False).eval()
    like = next(module.parameters())
    with torch.no_grad():
        sent = module(parts.task.blank(2, parts.model.input_shape, like.dtype))
    if not isinstance(sent, Tensor) or len(sent) != 2:
        raise ConfigError(
            "the layer before the cut does not give one tensor with a row for each image",
            where="algorithm.cut",
            hint="cut after another layer",
        )
    return sent
