"""SplitFed: Thapa et al. 2022 (arXiv 2004.12088), SFLV1 and SFLV2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
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
from fedlens.core.algorithm_base import AlgorithmBase, OwnCurve
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    ModelSpec,
    Op,
    Payload,
    Reply,
    Request,
    Round,
    RoundContext,
    State,
    Steps,
)
from fedlens.core.schema import NumberField, Schema, TensorField
from fedlens.core.tree import map_tree, select
from fedlens.local.halves import Finish, Half, Lower, Middle, Upper, holder_of
from fedlens.local.leakage import FEWEST, Leakage
from fedlens.models.stages import LayerName, stages

LEAKAGE = OwnCurve(
    "distance_correlation",
    "what activations tell of images",
    {"distance_correlation": "distance correlation, mean over clients"},
)
COMPARED = 8  # clients that measure it
Cut = Annotated[
    LayerName | Annotated[tuple[LayerName, LayerName], Field()],
    Field(description="the layer after which the model is cut, or two: then labels stay at the clients"),
]
ServerRate = Annotated[float, Field(gt=0, description="factor of local.lr at the server's half")]
Activations = Annotated[
    Literal["float32", "float16"], Field(description="the format in which activations are sent")
]


@dataclass(frozen=True, kw_only=True)
class SplitFed(Averaging):
    """The round loop: the steps of all clients side by side, then the mean of both halves."""

    lower: Lower
    upper: Upper
    middle: Middle | None  # with two cuts; then the client has the upper one too
    activations: tuple[Tensor, ...]  # of two examples, after each cut
    cuts: tuple[str, ...]
    asks_each_step = True
    sends_single_examples = True
    takes = AlgorithmBase.takes  # none: every step is a message, and its images can be reconstructed

    @property
    def ops(self) -> Mapping[str, Op]:
        """The steps of both halves, their end, and evaluation."""
        own: dict[str, Op] = {
            "lower": self.lower,
            "upper": self.upper,
            "finish-client": Finish(self.at_client),
            "finish-server": Finish((self.at_server,)),
            "leakage": Leakage(self.lower.half),
        }
        if self.middle is not None:
            own |= {"middle": self.middle, "back": self.middle.back}
        return {**own, **{name: op for name, op in super().ops.items() if name != "train"}}

    @property
    def at_client(self) -> tuple[Half, ...]:
        """The halves that a client trains: the first layers, and with two cuts the last ones."""
        return (self.lower.half,) if self.middle is None else (self.lower.half, self.upper.half)

    @property
    def at_server(self) -> Half:
        """The half that the server trains."""
        return (self.middle or self.upper).half

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients beyond model updates."""
        sent = f"what the layers up to '{self.cuts[0]}' compute from its images, from which images can be reconstructed"
        labels = "the labels of its batch and "
        if self.middle is not None:
            labels, sent = "", f"{sent}, and a gradient, from which labels can be guessed"
        measured = (
            f"To show what activations tell of images, up to {COMPARED} clients compute the distance correlation of "
            "both at each evaluation and send that number, which counts no bytes."
        )
        return (*super().discloses, f"In every step each client sends {labels}{sent}.", measured)

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """How much of the images is left in the activations."""
        return (LEAKAGE,)

    @property
    def evaluation_asks(self) -> int:
        """One more, for the activations."""
        return super().evaluation_asks + 1

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The evaluation of averaging, and `distance_correlation`: the mean over some clients with examples enough."""
        metrics = yield from super().evaluate(state, ctx)
        able = [k for k in self.candidates(ctx.federation) if ctx.federation.sizes[k] >= FEWEST]
        requests = [Request(int(k)) for k in sorted(ctx.rng.numpy("leakage").permutation(able)[:COMPARED])]
        model, expect = self._part(state, self.lower.half), Schema({"correlation": NumberField(most=1)})
        ask = Ask("leakage", requests, {"model": model}, expect=expect, counts=False, measuring=True)
        found = [answer.payload["correlation"] for answer in (yield ask) if isinstance(answer, Reply)]
        return {**metrics, "distance_correlation": fmean(found)} if found else metrics

    @property
    def training_op(self) -> str | None:
        """None: a client has only a part."""
        return None

    @property
    def no_local_models(self) -> str:
        """Why replies hold no local models."""
        return "each client has only a part of the model"

    def round(self, state: State, ctx: RoundContext) -> Round:
        """Runs the steps of both halves, then averages the halves of the clients that finished."""
        own, cohort = self.lower.own_holder, self.select.cohort(ctx)
        at_client, at_server = {"model": self._part(state)}, {"model": self._part(state, self.at_server)}
        finished = yield from self._trained(cohort, at_client, at_server, ctx)
        return (yield from self._averaged(state, finished, ctx, own))

    def _trained(
        self, cohort: Sequence[int], at_client: Payload, at_server: Payload, ctx: RoundContext
    ) -> Steps:
        """Runs the steps of these clients side by side; returns those that finished.

        Args:
            at_client, at_server: what clients and the server's halves get in step 0.
        """
        local, sizes = self.parts.local, ctx.federation.sizes
        steps = {client: local.steps_at(int(sizes[client])) for client in cohort}
        rate, gone = local.shared_rate(ctx.round, ctx.rounds), set[int]()
        for at in range(max(steps.values(), default=-1) + 1):
            shared: dict[str, Any] = {**rate, "step": at}
            going = [client for client in cohort if client not in gone and at <= steps[client]]
            requests, first = [Request(client) for client in going], at_client if at == 0 else {}
            gone |= yield from self._letters("lower", requests, {**shared, **first}, "activations", 0)
            senders = [client for client in going if client not in gone and at < steps[client]]
            if not senders:
                continue
            requests, first = self._served(senders, steps, at, ctx), at_server if at == 0 else {}
            if self.middle is None:
                yield from self._letters("upper", requests, {**shared, **first}, "gradient", 0)
                continue
            yield from self._letters("middle", requests, {**shared, **first}, "activations", 1)
            own = [
                Request(k, {"order": [holder_of(k, self.lower.own_holder)], "steps": steps[k]})
                for k in senders
            ]
            gone |= yield from self._letters("upper", own, shared, "gradient", 1)
            yield from self._letters("back", requests, shared, "gradient", 0)
        return [client for client in cohort if client not in gone]

    def _letters(self, op: str, requests: Sequence[Request], shared: Payload, name: str, at: int) -> Steps:
        """Has these holders answer the letters that they got by letters with the tensor `name` at a cut.

        Returns those that failed.
        """
        one = self.activations[at][0]
        dtype = self.lower.dtype if name == "activations" else one.dtype
        most = self._most
        fields = {name: TensorField((-1, *one.shape), dtype, most=most * one.numel() * dtype.itemsize)}
        if op == "lower" and self.lower.sends_targets:
            fields["targets"] = TensorField((-1,), torch.int64, most=most * 8)
        answers = yield Ask(op, requests, shared, letter=Schema(fields, aligned=tuple(fields)), deliver=True)
        return {answer.client for answer in answers if not isinstance(answer, Reply)}

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
        answers = yield Ask("finish-client", [Request(k) for k in clients], expect=self._finish(state))
        lowers = {a.client: a for a in answers if isinstance(a, Reply)}
        if not lowers:
            return state
        holders = dict.fromkeys(holder_of(k, own) for k in lowers)
        expect = self._finish(state, self.at_server)
        answers = yield Ask("finish-server", [Request(k) for k in holders], expect=expect)
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
        return state if update is None else {**state, **self._step(state, update, ctx)}

    def _joined(self, state: State, lower: Payload, upper: Payload, weight: float) -> Payload:
        """What a client that has trained both halves would send."""
        both = {field: {**lower[field], **upper[field]} for field in lower}
        before = select(state["model"], list(both["weights"]))
        update = map_tree(torch.sub, before, both["weights"])
        return {"update": update, "buffers": both["buffers"], "counters": both["counters"], "weight": weight}

    def _part(self, state: State, *halves: Half) -> dict[str, Tensor]:
        """The leaves of these halves that are sent, by default of those at a client."""
        return select(state["model"], [name for half in halves or self.at_client for name in half.leaves])

    def _finish(self, state: State, *halves: Half) -> Schema:
        return Finish.expect({name: self.parts.spec[name] for name in self._part(state, *halves)})

    @property
    def _most(self) -> int:
        """The most examples of a batch."""
        size = self.parts.local.batch_size
        return self.parts.federation.largest if size == "all" else size


def splitfed(
    parts: Parts,
    *,
    cut: Cut,
    variant: Annotated[
        Literal["v1", "v2"],
        Field(
            description="a half at the server for each client, or one for all, which takes clients in random order"
        ),
    ] = "v1",
    server_rate: ServerRate = 1.0,
    activations: Activations = "float32",
    keep_optimizer: Annotated[
        bool, Field(description="both halves keep their optimizer from round to round")
    ] = False,
) -> SplitFed:
    """SplitFed: clients train the first layers of a model, the server the others, and both are averaged.

    A client sends the activations after the layer `cut` for a batch, with the labels; the server takes a step
    with its half and returns their gradient, with which the client takes its own. Clients work side by side,
    and send their halves at the end of a round. With two cuts the client also has the last layers, and keeps
    the labels.

    Fixes: With FedAvg a client computes, holds and sends the whole model. Here it has only the first layers;
        the others, often most of the weights, never leave the server.

    Equation:
        client k:  a = f(w_k; x),  and sends a and y                            (of one batch)
        server:    g = dL(h(v_k; a), y) / da,  v_k <- v_k - s eta dL / dv_k,  and sends g
        client k:  w_k <- w_k - eta (da / dw_k)^T g
        round:     (w, v) <- (w, v) - lr sum_k n_k / n ((w, v) - (w_k, v_k))    (variant v1)
        v2:        one v for all, which takes the batches of a step in random order
        two cuts:  client k sends a, gets b = h(v_k; a), sends dL(u_k; b, y) / db, gets g; u_k is averaged too

    Source: Thapa et al. 2022 (arXiv 2004.12088), SFLV1 and SFLV2 with label sharing. In v2 the server draws
        the order of the clients anew in every step. Two cuts: the configuration without label sharing of
        Vepakomma et al. 2018 (arXiv 1812.00564).

    Weighting: By examples, over the clients that finished the round. One that fails is out of the round and
        leaves v1 unchanged; what v2's half learned from it stays.

    State: During a round each client has its half, and the server one half a client in v1 and one in v2. With
        `keep_optimizer` the optimizer of each half stays from round to round.

    Sent: In every step a batch's activations and labels up and their gradient down; in every round the first
        layers down and up. The server learns the labels and can reconstruct images from activations, the more
        easily the earlier the cut. Clients learn nothing of one another's data, and get the server's half
        only where `evaluation.clients` measures them. With two cuts each step has two messages each way; the
        server gets no label, but a gradient from which it can guess labels. "float16" halves activations, not
        gradients. Each evaluation measures what activations tell of images: `distance_correlation`, 0 to 1,
        at up to 8 clients with 4 examples or more.

    Composes: Any `[select]` that chooses a client once a round and any `[server]`, which moves both halves.
        `[client]` and `[aggregate]` are refused, and of `[local]` clip_norm, stragglers, examples and
        lr_scale. Every optimizer works, one for each half. A cut needs a single tensor there: after a block
        of a ResNet, not inside it. Only for classification without class weights, without
        `model.cache_features` and the engine `vectorized`.

    Ranges:
        cut: An early layer keeps the client's work small; a later one sends smaller activations. Two are such
            as ["layer1", "layer3"].
        variant: "v1" is FedAvg of the whole network, whatever the cut. "v2" takes a step of the server's half
            for each client, so it needs a lower `server_rate`. With two cuts all these gradients are taken at
            the weights before the step.
        server_rate: 1; for v2 down to one in the number of clients of a round.
        activations: "float16" where activations are within 65,504; a client with larger ones fails.
        keep_optimizer: true where all clients take part in every round.

    Try: model=mlp algorithm.cut=1

    Not when: Clients can hold the whole model: FedAvg reaches the same as v1, sends nothing in a step, and no
        labels. Nor where activations are larger than the model.

    Tests: tests/identity/test_splitfed.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(splitfed).model_fields)
        ['cut', 'variant', 'server_rate', 'activations', 'keep_optimizer']
    """
    keep = keep_optimizer, keep_optimizer
    return SplitFed(**split(parts, "splitfed", cut, activations, server_rate, variant == "v1", keep))


def split(
    parts: Parts,
    name: str,
    cut: str | tuple[str, str],
    activations: str,
    server_rate: float,
    own_holder: bool,
    keep: tuple[bool, bool],
) -> dict[str, Any]:
    """The fields of `SplitFed`. Raises `ConfigError` for what the algorithm `name` cannot do.

    Args:
        own_holder: whether the server has a half for each client.
        keep: whether optimizers stay at clients, and at the server, from round to round.
    """
    refuse_unused(name, parts.slots, parts.local)
    refuse_unfit(parts, name)
    cuts = (cut,) if isinstance(cut, str) else cut
    models = stages(parts.model, *cuts)
    made = averaging(parts)
    refuse_repeats(made.select, parts.federation, name)
    sent = sent_by(models[:-1], parts)
    dtype = torch.float16 if activations == "float16" else sent[0].dtype
    server = Half("server", models[1], parts.local, server_rate, keep[1])
    first, last = (
        Half(at, models[k], parts.local, keep_optimizer=keep[0]) for at, k in (("first", 0), ("last", -1))
    )
    return {
        **vars(made),
        "lower": Lower(first, own_holder, len(cuts) == 1, dtype),
        "middle": Middle(server, dtype) if len(cuts) == 2 else None,
        "upper": Upper(last if len(cuts) == 2 else server, parts.task),
        "activations": sent,
        "cuts": cuts,
    }


def refuse_unfit(parts: Parts, name: str) -> None:
    """Raises `ConfigError` for a task or a model that cannot be trained in two parts, at clients and at the server."""
    task = parts.task
    one_class_an_image = task.one_class and task.classifier and not task.placed and task.example == "image"
    if not one_class_an_image or task.weighs:
        raise ConfigError(
            f"'{name}' trains classification without class weights, but the task "
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


def sent_by(models: Sequence[ModelSpec], parts: Parts) -> tuple[Tensor, ...]:
    """What the model gives for two blank images after each of these parts of it."""
    modules = [model.build(initial=False).eval() for model in models]
    found, like = [], next(modules[0].parameters())
    given: Any = parts.task.blank(2, parts.model.input_shape, like.dtype)
    for module in modules:
        with torch.no_grad():
            given = module(given)
        if not isinstance(given, Tensor) or len(given) != 2:
            raise ConfigError(
                "the layer before the cut does not give one tensor with a row for each image",
                where="algorithm.cut",
                hint="cut after another layer",
            )
        found.append(given)
    return tuple(found)
