"""D-SGD: Lian, Zhang, Zhang, Hsieh, Zhang, Liu 2017 (arXiv 1705.09056)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

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
from fedlens.algorithms.peer_evaluation import EVALUATE_PEER, EvaluatePeer, PeersOnTest
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
from fedlens.core.schema import Schema, TreeField
from fedlens.core.tree import Tree, norm, part, subtract, tree_of
from fedlens.local.personal_leaves import PERSONAL, own_leaves
from fedlens.local.rate_scales import model_scales
from fedlens.local.rules import ClientRule
from fedlens.local.training import Train
from fedlens.tasks.central_evaluation import Evaluate, central_metrics

RING = Ring()
CONSENSUS = OwnCurve(
    "consensus_distance",
    "of the peers' models from their mean",
    {"consensus_distance": "square root of the mean over peers of |x_i - mean|²"},
)


@dataclass(frozen=True)
class PeerModel:
    """What a peer holds, in its state: what it had `before` its last mixing (`step`) and `after` it, and a `draft`.

    Each is the model, as `personal`, and the optimizer's state. The server's `at` has the last mixing of each peer that
    holds: if one peer fails in a mixing, all others go on from `before`. The draft is what it has sent and not yet
    mixed; nothing goes on from it.
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
    """Trains the peer's model and sends it to the peers `to`: before training, or the trained one."""

    peer: PeerModel
    train: Train
    before: bool

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains; only the draft in the peer's state is new."""
        held = self.peer.held(payload, client)
        own = self.peer.own(held, client)
        alone = replace(client, state={"optimizer": held.get("optimizer", {})})
        trained = self.train({**payload, "model": own}, alone, rng)
        assert trained.state is not None
        found = trained.payload
        moved = {name: own[name] - update for name, update in found["update"].items()}
        draft = {
            "held": held,
            "model": {**own, **moved, **found["buffers"], **found["counters"]},
            "optimizer": trained.state["optimizer"],
            "steps": trained.metrics["batches"],
        }
        letters = [Letter(payload["to"], {"model": own if self.before else draft["model"]})]
        letters = letters if payload["to"] else []
        return Outcome({}, {**client.state, "draft": draft}, trained.metrics, letters=letters)


@dataclass(frozen=True)
class Mix:
    """Replaces the peer's model by the weighted sum of those it got and its own, in the order of the peers.

    Payload: `weights`, pairs of a peer and its weight. Statistics are mixed like weights; counters take the maximum.
    """

    peer: PeerModel
    before: bool
    quasi_global: float | None
    trainable: tuple[str, ...]

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Mixes, and keeps what it had before."""
        draft = client.state["draft"]
        own, trained = self.peer.own(draft["held"], client), draft["model"]
        models = {sender: content["model"] for sender, content in payload["letters"]}
        models[client.id] = own if self.before else trained
        mixed = weighted_sum([(weight, models[peer]) for peer, weight in payload["weights"]])
        if self.before:
            for name, value in trained.items():
                whole = not value.is_floating_point()
                mixed[name] = (
                    torch.maximum(mixed[name], value) if whole else mixed[name] + (value - own[name])
                )
        kept = draft["optimizer"]
        if self.quasi_global is not None:
            moved = [(own[n] - mixed[n]) / (payload["lr"] * draft["steps"]) for n in self.trainable]
            last = draft["held"].get("optimizer", {}).get("momentum") or [torch.zeros_like(d) for d in moved]
            mu = self.quasi_global
            kept = {"momentum": [mu * m + (1 - mu) * d for m, d in zip(last, moved, strict=True)]}
        after = {PERSONAL: mixed, "optimizer": kept}
        return Outcome({}, {"before": draft["held"], "after": after, "step": payload["step"]})


def weighted_sum(models: list[tuple[float, Tree]]) -> dict[str, Tensor]:
    """sum_j w_j x_j leaf by leaf, in this order; leaves of whole numbers take the maximum.

    >>> one, other = ({"x": torch.tensor([x]), "n": torch.tensor(n)} for x, n in ((1.0, 3), (0.0, 5)))
    >>> weighted_sum([(0.25, one), (0.75, other)])
    {'x': tensor([0.2500]), 'n': tensor(5)}
    """
    total: dict[str, Tensor] = {}
    for weight, model in models:
        for name, value in model.items():
            if name not in total:
                total[name] = value * weight if value.is_floating_point() else value.clone()
            elif value.is_floating_point():
                total[name].add_(value, alpha=weight)
            else:
                torch.maximum(total[name], value, out=total[name])
    return total


@dataclass(frozen=True)
class Show:
    """Sends the peer's model to be measured."""

    peer: PeerModel

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Changes nothing."""
        return Outcome({"model": dict(self.peer.own(self.peer.held(payload, client), client))})


@dataclass(frozen=True)
class EvaluateHeld:
    """Evaluates the peer's model on what it holds out; see `EvaluateOwn`."""

    peer: PeerModel
    evaluate: EvaluateOwn

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Changes nothing."""
        return self.evaluate(payload, replace(client, state=self.peer.held(payload, client)), rng)


@dataclass(frozen=True)
class DSGD(AlgorithmBase):
    """The rounds of D-SGD: all peers train and send, and those that sent mix. Each round is one mixing.

    The server coordinates and has no model of its own. Its state: `at`, the last mixing of each peer that holds (-1:
    none); `model`, the mean of the peers' models; `consensus`, sqrt(mean |x_i - mean|^2); `parted`, in how many mixings
    a redrawn graph was not connected; and `edges`, which tells whether the CSV file is still the same.
    """

    has_peers = True
    parts: Parts
    topology: Topology
    train: Train
    mix: Literal["before", "after"]
    quasi_global: float | None

    @property
    def peer(self) -> PeerModel:
        """What peers hold."""
        return PeerModel(self.parts.model, frozenset(self.parts.spec) - set(self.parts.model.fixed))

    @property
    def ops(self) -> Mapping[str, Op]:
        """Training and sending, mixing, and what is measured."""
        parts, peer, before = self.parts, self.peer, self.mix == "before"
        size, batch = parts.evaluation_size, parts.evaluation_batch
        evaluate = Evaluate(parts.model, parts.task, batch, size)
        own = EvaluateOwn(parts.model, parts.task, batch, peer.leaves, size=size)
        trainable = tuple(part(parts.spec, "weight", trainable=True))
        return {
            "send": Send(peer, self.train, before),
            "mix": Mix(peer, before, self.quasi_global, trainable),
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
            "Each peer sends its model to its neighbours in the graph.",
            "The mean of the peers' models is only measured: no peer has it. To measure it, each peer's model is read "
            "after each round, which counts no bytes.",
            *PeersOnTest(self.parts).discloses,
            *((disclosure(self.parts.task),) if self.measured != "none" else ()),
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

    def round(self, state: State, ctx: RoundContext) -> Round:
        """One mixing: send, mix, measure. If a peer fails in mixing, none has mixed."""
        state = self._counted(state, ctx.round - 1)
        step, at, n = ctx.round - 1, list(state["at"]), ctx.federation.clients
        to, tree = self.topology.neighbours(step), TreeField.like(self._mixed_spec)
        rate = self.parts.local.shared_rate(ctx.round, ctx.rounds)
        requests = [Request(peer, {"to": to[peer]}) for peer in range(n)]
        sent = yield from _replied(
            Ask("send", requests, {"at": at, **rate}, expect=Schema({}), letter=Schema({"model": tree}))
        )
        weights = without(self.topology.weights(step), set(range(n)) - set(sent))
        requests = [Request(peer, {"weights": _row(weights[peer])}) for peer in sent]
        shared = {"step": step, "lr": rate["lr"]}
        mixed = yield from _replied(Ask("mix", requests, shared, expect=Schema({}), deliver=True))
        if len(mixed) == len(sent):
            for peer in sent:
                at[peer] = step
        show = Ask(
            "show", [Request(k) for k in mixed], {"at": at}, expect=Schema({"model": tree}), measuring=True
        )
        count, square = 0, 0.0
        mean: dict[str, Tensor] = {}
        for answer in (yield show):
            if isinstance(answer, Reply):
                count += 1
                mean, square = _with_one_more(mean, square, count, answer.payload["model"])
        if not count:
            return {**state, "at": at}
        return {
            **state, "model": {**state["model"], **mean}, "at": at, "consensus": (square / count) ** 0.5
        }  # fmt: skip

    def _counted(self, state: State, mixing: int) -> dict[str, Any]:
        """The state with the graph of this mixing counted. Raises `RunFailed` if the file of edges was changed."""
        edges = self.topology.edges_digest
        before = state["edges"]
        if before["file"] == edges["file"] and before != edges:
            raise RunFailed(
                f"the edges of {edges['file']} are others than before round {mixing + 1}",
                where="algorithm.topology.file",
                hint="restore the file and resume the run, or start a new one",
            )
        return {**state, "parted": state["parted"] + self.topology.parted(mixing), "edges": edges}

    @property
    def _mixed_spec(self) -> dict[str, Any]:
        leaves = self.peer.leaves
        return {name: leaf for name, leaf in self.parts.spec.items() if name in leaves}

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """Evaluates the mean model and chosen peers' models centrally, and each peer's model on what it holds out."""
        parts = self.parts
        sent = parts.model.sent(state["model"])
        metrics = yield from central_metrics(sent, ctx.federation, parts.task, parts.measure)
        metrics = {**metrics, "consensus_distance": state["consensus"]}
        if self.topology.redrawn:
            metrics["disconnected_graphs"] = state["parted"]
        shared, shown = {"at": state["at"]}, Schema({"model": TreeField.like(self._mixed_spec)})
        metrics |= yield from PeersOnTest(parts).measured(shared, shown)
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
    mean: dict[str, Tensor], square: float, count: int, model: Tree
) -> tuple[dict[str, Tensor], float]:
    """The mean of `count` models and the sum of their squared distances from it, with one more model (Welford)."""
    floats = {name: value for name, value in model.items() if value.is_floating_point()}
    if count == 1:
        return {name: value.clone() for name, value in model.items()}, 0.0
    off = subtract(floats, {name: mean[name] for name in floats})
    new = weighted_sum([(1 - 1 / count, mean), (1 / count, model)])
    return new, square + float(norm(off)) ** 2 * (1 - 1 / count)


def dsgd(
    parts: Parts,
    *,
    topology: Annotated[
        TopologySettings,
        Field(
            description="who is joined to whom: `ring`, `complete`, `exponential` (with `one_peer`), `erdos-renyi` "
            "(with `probability` and `redraw`), or `edges` (with `file`, a CSV of two client numbers a line)"
        ),
    ] = RING,
    mix: Annotated[
        Literal["before", "after"],
        Field(description="send the model before local training, or the trained one"),
    ] = "after",
    quasi_global: Annotated[
        float | None,
        Field(
            ge=0, lt=1, description="mu of quasi-global momentum (Lin et al. 2021), instead of the peer's own"
        ),
    ] = None,
) -> DSGD:
    """D-SGD: peers train their own models and mix them with those of their neighbours, without a server.

    Fixes: A server is a bottleneck and has to be trusted. Here a peer talks to its neighbours in a graph only.

    Equation:
        mix = "before":  x_i <- sum_j W_ij x_j - eta g_i(x_i)                 (Algorithm 1)
        mix = "after":   x_i <- sum_j W_ij (x_j - eta g_j(x_j))
        W_ij = 1 / (1 + max(d_i, d_j)) of neighbours,  W_ii = 1 - sum_j W_ij  (Metropolis)
        quasi-global:    v = m v + g starts at v = q_i,  q_i <- mu q_i + (1 - mu) (x_i - x_i') / (eta steps)

    Source: Lian et al. 2017 (arXiv 1705.09056), Algorithm 1; quasi-global momentum of Lin et al. 2021
        (arXiv 2102.04761), Algorithm 1. eta g_i stands for all local steps of a round.

    Weighting: None: peers count by their edges, whatever their examples.

    State: At each peer: its model and optimizer, from before and after its last mixing.

    Sent: The model to each neighbour, every round; nothing to a server. `bytes_peer` counts each addressee.

    Composes: With nothing: `[select]`, `[client]`, `[aggregate]` and `[server]` are refused, and so is
        `local.stragglers`. All clients are peers, in every round.

    Ranges:
        topology: "ring" mixes slowly with many peers; { name = "exponential", one_peer = true } mixes fast with one
            letter a peer, for a power of two of peers.
        mix: "after". "before" is the paper's.
        quasi_global: 0.9, with `local.momentum` = 0.9, where peers differ.
        data.validation: 0.1 to 0.3, with `data.validation_from` = "client": each peer's model is measured on its own.
        evaluation.test_peers: 4, or "all": so many peers' models on the test data. No peer has the mean model, and
            where data differ their own can be much worse.

    Try: algorithm.topology.name=ring

    Not when: A server can be had: FedAvg mixes completely with two models a client.

    Tests: tests/identity/test_dsgd.py tests/unit/algorithms/test_topology.py
        tests/unit/algorithms/test_peer_evaluation.py

    Example:
        >>> Topology(Ring(), 8).spectral_gap() < Topology(Ring(), 4).spectral_gap()  # more peers agree later
        True
    """
    refuse_unfit(parts, "dsgd")
    local = parts.local
    if quasi_global is not None and (local.optimizer != "sgd" or not local.momentum):
        raise ConfigError(
            "quasi-global momentum replaces the momentum of sgd, and there is none",
            where="algorithm.quasi_global",
            hint="set local.momentum = 0.9 and local.optimizer = 'sgd'",
        )
    if quasi_global is not None and (local.changes_by_step or model_scales(local, parts.model)):
        raise ConfigError(
            "quasi-global momentum divides by the learning rate, so it has to be one for all leaves and steps",
            where="algorithm.quasi_global",
            hint="remove local.lr_scale, and set local.lr_change = 'round'",
        )
    train = Train(parts.model, parts.task, local, ClientRule(), "uniform", keep_optimizer=True)
    graph = Topology(topology, parts.federation.clients, seed=parts.selection_seed)
    return DSGD(parts, graph, train, mix, quasi_global)


def refuse_unfit(parts: Parts, name: str) -> None:
    """Raises `ConfigError` for tasks and clients that peers cannot have."""
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
