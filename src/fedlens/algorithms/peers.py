"""Peer-to-peer learning: the rounds in which peers train, send to their neighbours in a graph, and mix.

An algorithm of this family is a `PeerRule`: what a peer sends, and what it makes of the weighted sum of what it got.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.client_evaluation import (
    EVALUATE_OWN,
    EvaluateOwn,
    Who,
    asked,
    disclosure,
    everywhere,
    refuse_too_many,
    refuse_unmeasured,
)
from fedlens.algorithms.peer_evaluation import EVALUATE_PEER, EvaluatePeer, PeersOnTest
from fedlens.algorithms.registry import refuse_unused
from fedlens.algorithms.topology import Ring, Topology, TopologySettings, without
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.algorithm_base import AlgorithmBase, ClientGraph, OwnCurve
from fedlens.core.protocol import (
    Ask,
    Client,
    ClientId,
    Evaluation,
    FederationInfo,
    Letter,
    ModelSpec,
    Op,
    Outcome,
    Payload,
    Reply,
    Request,
    Round,
    RoundContext,
    State,
)
from fedlens.core.random import Rng
from fedlens.core.schema import AskedField, NumberField, Schema, TreeField
from fedlens.core.schema import Field as SchemaField
from fedlens.core.tree import Tree, TreeSpec, norm, subtract, tree_of
from fedlens.core.wire.asked_fields import GroupField, ListField, RowField
from fedlens.local.halves import positions
from fedlens.local.personal_leaves import own_leaves
from fedlens.local.rate_scales import model_scales
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import FOREVER, Train, asked_rate
from fedlens.tasks.central_evaluation import Evaluate, central_metrics

RING, PLAIN = Ring(), ClientRule()
MASS = "mass"  # how much a peer of push-sum counts
CONSENSUS = OwnCurve(
    "consensus_distance",
    "peers from their mean model",
    {"consensus_distance": "square root of the mean over peers of |x_i - mean|²"},
)
Graph = Annotated[
    TopologySettings,
    Field(
        description="the graph of the peers: `ring`, `complete`, `exponential` (`one_peer`), `erdos-renyi` "
        "(`probability`, `redraw`), or `edges` (`file`: a CSV of two client numbers a line)"
    ),
]


@dataclass(frozen=True)
class PeerRule(ABC):
    """What one algorithm of peers sends and mixes.

    What a peer holds after a mixing is a payload: its model, as `personal`, and whatever else the rule needs.

    Attributes:
        train: the training before a mixing. It keeps its optimizer.
        sends: what a peer sends to its neighbours, for `discloses`.
    """

    train: Train
    sends: ClassVar[str] = "its model"

    @abstractmethod
    def drafted(self, own: Tree, held: Payload, trained: Outcome, lr: float) -> dict[str, Any]:
        """The draft: `content`, trees and numbers that are sent and mixed, and what `after` needs.

        Args:
            own: the peer's model.
            held: what it holds; empty before its first mixing.
            trained: the outcome of `train`.
            lr: the learning rate.
        """

    @abstractmethod
    def after(self, mixed: dict[str, Any], draft: Payload, own: Tree, lr: float) -> dict[str, Any]:
        """What the peer holds after a mixing: `mixed` has the weighted sum of each name of the content."""

    def letter(self, spec: TreeSpec) -> dict[str, SchemaField]:
        """The fields of the content; `spec` has the leaves that are mixed."""
        return {"model": TreeField.like(spec)}


def moved(own: Tree, update: Tree, trained: Outcome) -> dict[str, Tensor]:
    """The model own - update, with the statistics and counters after training."""
    weights = {name: own[name] - value for name, value in update.items()}
    return {**own, **weights, **trained.payload["buffers"], **trained.payload["counters"]}


@dataclass(frozen=True)
class PeerModel:
    """What a peer holds, in its state: what it had `before` its last mixing (`step`) and `after` it, and a `draft`.

    The server's `at` has the last mixing of each peer that holds: if one peer fails in a mixing, all others go on from
    `before`. The draft is what it has sent and not yet mixed; nothing goes on from it.
    """

    model: ModelSpec
    leaves: frozenset[str]  # of the model that are mixed

    def held(self, payload: Payload, client: Client) -> Mapping[str, Any]:
        """What the peer goes on from; empty before its first mixing."""
        last = "after" if client.state.get("step", -1) == payload["at"][client.id] else "before"
        held: Mapping[str, Any] = client.state.get(last, {})
        return held

    def own(self, held: Mapping[str, Any], client: Client) -> Mapping[str, Tensor]:
        """Its model: the initial one before its first mixing."""
        return own_leaves(self.model, self.leaves, replace(client, state=held))


@dataclass(frozen=True)
class Send:
    """Trains the peer's model and sends what the rule drafts to the peers `to`.

    With `settings` it takes one step, that of `mixing`, on the batch that these settings give it in the round.
    """

    peer: PeerModel
    rule: PeerRule
    settings: LocalSettings | None

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains; only the draft in the peer's state is new."""
        held = self.peer.held(payload, client)
        own = self.peer.own(held, client)
        asked = {**payload, "model": own}
        if self.settings is not None:
            at = positions(self.settings, len(client.data), payload["mixing"], rng.of_client())
            asked["positions"] = at
        alone = replace(client, state={"optimizer": held.get("optimizer", {})})
        trained = self.rule.train(asked, alone, rng)
        assert trained.state is not None
        draft = {
            **self.rule.drafted(own, held, trained, payload["lr"]),
            "held": held,
            "optimizer": trained.state["optimizer"],
        }
        letters = [Letter(payload["to"], draft["content"])] if payload["to"] else []
        return Outcome({}, {**client.state, "draft": draft}, trained.metrics, letters=letters)


@dataclass(frozen=True)
class Mix:
    """Takes the weighted sum of what the peer got and of its own, in the order of the peers.

    Payload: `weights`, pairs of a peer and its weight.
    """

    peer: PeerModel
    rule: PeerRule

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Mixes, and keeps what the peer had before. What was sent is not changed: others may read it, too."""
        draft = client.state["draft"]
        content = {**dict(payload["letters"]), client.id: draft["content"]}
        mixed: dict[str, Any] = {}
        for name, own in draft["content"].items():
            parts = [(weight, content[peer][name]) for peer, weight in payload["weights"]]
            mixed[name] = weighted_sum(parts) if isinstance(own, Mapping) else sum(w * x for w, x in parts)
        own = self.peer.own(draft["held"], client)
        after = self.rule.after(mixed, draft, own, payload["lr"])
        return Outcome({}, {"before": draft["held"], "after": after, "step": payload["step"]})


def weighted_sum(models: list[tuple[float, Tree]]) -> dict[str, Tensor]:
    """sum_j w_j x_j leaf by leaf, in this order. Statistics are mixed like weights; counters take the maximum.

    >>> one, other = ({"x": torch.tensor([x]), "n": torch.tensor(n)} for x, n in ((1.0, 3), (0.0, 5)))
    >>> weighted_sum([(0.25, one), (0.75, other)])
    {'x': tensor([0.2500]), 'n': tensor(5)}
    """
    (weight, first), *others = models
    floats = [name for name, value in first.items() if value.is_floating_point()]
    # A loop in C++, for many small leaves.
    sums = torch._foreach_mul([first[name] for name in floats], weight)
    for weight, model in others:
        torch._foreach_add_(sums, [model[name] for name in floats], alpha=weight)
    total = {**first, **dict(zip(floats, sums, strict=True))}
    for name in first.keys() - set(floats):
        for _, model in others:
            total[name] = torch.maximum(total[name], model[name])
    return total


@dataclass(frozen=True)
class Show:
    """Sends the peer's model to be measured, and how much it counts."""

    peer: PeerModel

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Changes nothing."""
        held = self.peer.held(payload, client)
        return Outcome({"model": dict(self.peer.own(held, client)), "weight": held.get(MASS, 1.0)})


@dataclass(frozen=True)
class EvaluateHeld:
    """Evaluates the peer's model on what it holds out; see `EvaluateOwn`."""

    peer: PeerModel
    evaluate: EvaluateOwn

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Changes nothing."""
        return self.evaluate(payload, replace(client, state=self.peer.held(payload, client)), rng)


@dataclass(frozen=True)
class PeerToPeer(AlgorithmBase):
    """The rounds of peers: all train and send, and those that sent mix, once or more often in a round.

    The server coordinates and has no model of its own. Its state: `at`, the last mixing of each peer that holds (-1:
    none); `model`, the mean of the peers' models; `consensus`, sqrt(mean |x_i - mean|^2), where peers with a mass count
    by it in both means; `parted`, in how many mixings a redrawn graph was not connected; and `edges`, which tells
    whether the CSV file is still the same.

    Attributes:
        parts: the objects that the settings define.
        topology: the graphs.
        rule: what is sent and mixed.
        asks_each_step: whether each mixing takes one local step. If not, a round is one mixing with all its steps.
    """

    has_peers = True
    tested_model = "the mean of the peers' models"
    parts: Parts
    topology: Topology
    rule: PeerRule
    asks_each_step: bool = False

    @property
    def peer(self) -> PeerModel:
        """What peers hold."""
        return PeerModel(self.parts.model, frozenset(self.parts.spec) - set(self.parts.model.fixed))

    @property
    def ops(self) -> Mapping[str, Op]:
        """Training and sending, mixing, and what is measured."""
        parts, peer, rule = self.parts, self.peer, self.rule
        size, batch = parts.evaluation_size, parts.evaluation_batch
        evaluate = Evaluate(parts.model, parts.task, batch, size)
        own = EvaluateOwn(parts.model, parts.task, batch, peer.leaves, size=size)
        return {
            "send": Send(peer, rule, parts.local if self.asks_each_step else None),
            "mix": Mix(peer, rule),
            "show": Show(peer),
            "evaluate": evaluate,
            EVALUATE_PEER: EvaluatePeer(evaluate),
            EVALUATE_OWN: EvaluateHeld(peer, own),
        }

    @property
    def measured(self) -> Who:
        """Which peers are evaluated on their own held-out data: all, if they hold any out."""
        return self.parts.measure_clients or ("all" if len(self.parts.federation.holding_out) else "none")

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the peers."""
        return (
            f"Each peer sends {self.rule.sends} to its neighbours in the graph.",
            "The mean of the peers' models is only measured: no peer has it. To measure it, each peer's model is read "
            "after each round, which counts no bytes.",
            *PeersOnTest(self.parts).discloses,
            *((disclosure(self.parts.task, self.parts.federation),) if self.measured != "none" else ()),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How fast the peers agree."""
        return (self.topology.note,)

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """How far the peers' models are from one another."""
        return (CONSENSUS, *PeersOnTest(self.parts).curves)

    @property
    def graphs(self) -> tuple[ClientGraph, ...]:
        """The graphs of the peers."""
        return self.topology.drawn

    @property
    def follows_device(self) -> bool:
        """Whether state and replies may stay on a GPU: the mean is a running sum."""
        return True

    @property
    def evaluation_asks(self) -> int:
        """One of the server, two of each peer on the test data, and one of the peers if they are measured."""
        return 1 + 2 * len(PeersOnTest(self.parts).peers) + (self.measured != "none")

    def clients_per_round(self, federation: FederationInfo) -> int:
        """The number of peers."""
        return federation.clients

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The initial model, which every peer begins with."""
        tree = {**tree_of(model.build()), **model.fixed}
        edges = self.topology.edges_digest
        return {"model": tree, "at": [-1] * federation.clients, "consensus": 0.0, "parted": 0, "edges": edges}

    def takes(self, op: str) -> Schema | None:
        """What `round` sends with "send", "mix" and "show", and `evaluate` to peers."""
        parts, n = self.parts, self.parts.federation.clients
        peer, step = NumberField(-1, n - 1, whole=True), NumberField(-1, FOREVER, whole=True)
        weight = NumberField(above=0, most=1)
        at = {"at": ListField(NumberField(-2, FOREVER, whole=True), n, least=n)}
        if op == "show":
            return Schema(at)
        if op == EVALUATE_OWN and self.measured != "none":
            return asked({}, at)
        rate = {"mixing": step, **asked_rate(parts.local, parts.rounds)}
        if self.asks_each_step:
            rate.pop("schedule", None)  # `lr` is the rate of the step then
        letters = ListField(RowField((peer, GroupField(self.rule.letter(self._mixed_spec)))), n)
        row = ListField(RowField((peer, weight)), n)
        asks: dict[str, dict[str, AskedField]] = {
            "send": {**at, **rate, "to": ListField(peer, n)},
            "mix": {**rate, "step": step, "weights": row, "letters": letters},
        }
        return Schema(asks[op]) if op in asks else None

    def round(self, state: State, ctx: RoundContext) -> Round:
        """The mixings of a round, and what is measured. A peer that fails takes no part in the rest of the round."""
        local, peers = self.parts.local, list(range(ctx.federation.clients))
        mixings = local.steps_at(ctx.federation.largest) if self.asks_each_step else 1
        for mixing in range(mixings):
            step = (ctx.round - 1) * mixings + mixing
            state = self._counted(state, step, ctx.round)
            rate = local.shared_rate(ctx.round, ctx.rounds)
            if self.asks_each_step and local.changes_by_step:
                rate = {"lr": local.lr_at(ctx.round, ctx.rounds, mixing, mixings)}
            peers, at = yield from self._mixing(state["at"], peers, step, {"mixing": mixing, **rate})
            state = {**state, "at": at}
        show = Ask("show", [Request(k) for k in peers], {"at": state["at"]}, self._shown, measuring=True)
        total, square = 0.0, 0.0
        mean: dict[str, Tensor] = {}
        for answer in (yield show):
            if isinstance(answer, Reply):
                shown, weight = answer.payload["model"], answer.payload["weight"]
                total += weight
                mean, square = _with_one_more(mean, square, weight / total, weight, shown)
        if not total:
            return state
        return {**state, "model": {**state["model"], **mean}, "consensus": (square / total) ** 0.5}

    def _mixing(self, at: list[int], peers: list[int], step: int, shared: Payload) -> Any:
        """Send and mix. If a peer fails in mixing, none has mixed. Returns those that are left, and the new `at`."""
        to, letter = self.topology.neighbours(step), Schema(self.rule.letter(self._mixed_spec))
        requests = [Request(peer, {"to": to[peer]}) for peer in peers]
        sent = yield from _replied(
            Ask("send", requests, {**shared, "at": at}, expect=Schema({}), letter=letter)
        )
        weights = without(self.topology.weights(step), set(range(len(at))) - set(sent))
        requests = [Request(peer, {"weights": _row(weights[peer])}) for peer in sent]
        mixed = yield from _replied(
            Ask("mix", requests, {**shared, "step": step}, expect=Schema({}), deliver=True)
        )
        whole = len(mixed) == len(sent)
        return mixed, [step if whole and peer in sent else last for peer, last in enumerate(at)]

    def _counted(self, state: State, mixing: int, round: int) -> dict[str, Any]:
        """The state with the graph of this mixing counted. Raises `RunFailed` if the file of edges was changed."""
        edges = self.topology.edges_digest
        before = state["edges"]
        if before["file"] == edges["file"] and before != edges:
            raise RunFailed(
                f"the edges of {edges['file']} are others than before round {round}",
                where="algorithm.topology.file",
                hint="restore the file and resume the run, or start a new one",
            )
        return {**state, "parted": state["parted"] + self.topology.parted(mixing), "edges": edges}

    @property
    def _mixed_spec(self) -> dict[str, Any]:
        leaves = self.peer.leaves
        return {name: leaf for name, leaf in self.parts.spec.items() if name in leaves}

    @property
    def _shown(self) -> Schema:
        return Schema({"model": TreeField.like(self._mixed_spec), "weight": NumberField(above=0)})

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """Evaluates the mean model and chosen peers' models centrally, and each peer's model on what it holds out."""
        parts = self.parts
        sent = parts.model.sent(state["model"])
        metrics = yield from central_metrics(sent, ctx.federation, parts.task, parts.measure)
        metrics = {**metrics, "consensus_distance": state["consensus"]}
        if self.topology.redrawn:
            metrics["disconnected_graphs"] = state["parted"]
        metrics |= yield from PeersOnTest(parts).measured({"at": state["at"]}, self._shown)
        if self.measured == "none":
            return metrics
        at_peers = yield from everywhere({"model": {}, "at": state["at"]}, ctx, parts.task, self.measured)
        return {**metrics, **at_peers}

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """The mean model."""
        return self.parts.model, state["model"]


def _replied(ask: Ask) -> Any:
    return [answer.client for answer in (yield ask) if isinstance(answer, Reply)]


def _row(weights: np.ndarray) -> list[tuple[ClientId, float]]:
    return [(int(peer), float(weights[peer])) for peer in np.flatnonzero(weights)]


def _with_one_more(
    mean: dict[str, Tensor], square: float, share: float, weight: float, model: Tree
) -> tuple[dict[str, Tensor], float]:
    """The mean of models and the sum of weight times squared distance from it, with one more model (Welford).

    `share` is its weight as a share of all weights, its own included.
    """
    if not mean:
        return {name: value.clone() for name, value in model.items()}, 0.0
    floats = {name: value for name, value in model.items() if value.is_floating_point()}
    off = subtract(floats, {name: mean[name] for name in floats})
    new = weighted_sum([(1 - share, mean), (share, model)])
    return new, square + weight * float(norm(off)) ** 2 * (1 - share)


def one_step(parts: Parts, rule: ClientRule = PLAIN) -> Train:
    """Training that takes one step, over all the examples that it is given."""
    local = parts.local.model_copy(update={"steps": 1, "epochs": None, "batch_size": "all"})
    return Train(parts.model, parts.task, local, rule, "uniform", keep_optimizer=True)


def refuse_unfit(parts: Parts, name: str) -> None:
    """Raises `ConfigError` for settings, tasks and clients that peers cannot have."""
    refuse_unused(name, parts.slots, parts.local)
    if parts.task.local_leaves(parts.spec):
        raise ConfigError(
            f"'{name}' mixes whole models, and the task keeps leaves at each client", where="task.name"
        )
    if len(parts.federation.eligible) < parts.federation.clients:
        empty = int(np.flatnonzero(parts.federation.sizes == 0)[0])
        raise ConfigError(
            f"client {empty} holds no example, and every client is a peer that trains",
            where="data.partition",
            hint="choose a partition without empty clients",
        )
    PeersOnTest(parts)  # its check
    model_scales(parts.local, parts.model)  # its checks
    if parts.measure_clients not in (None, "none"):
        refuse_unmeasured(parts.federation, "`evaluation.clients` measures each peer's model")
        refuse_too_many(parts.federation, parts.measure_clients)
