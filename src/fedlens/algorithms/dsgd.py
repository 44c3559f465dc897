"""D-SGD: Lian, Zhang, Zhang, Hsieh, Zhang, Liu 2017 (arXiv 1705.09056)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.peers import RING, Graph, PeerRule, PeerToPeer, moved, refuse_unfit
from fedlens.algorithms.topology import Topology
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Outcome, Payload
from fedlens.core.tree import Tree, part
from fedlens.local.personal_leaves import PERSONAL
from fedlens.local.rate_scales import model_scales
from fedlens.local.rules import ClientRule
from fedlens.local.training import Train


@dataclass(frozen=True)
class MixModels(PeerRule):
    """Models are mixed: those from `before` training, to which the peer adds what it learned, or the trained ones."""

    before: bool
    quasi_global: float | None
    trainable: tuple[str, ...]

    def drafted(self, own: Tree, held: Payload, trained: Outcome, lr: float) -> dict[str, Any]:
        """The model before or after training; with `before` also the trained one."""
        model = moved(own, trained.payload["update"], trained)
        draft = {"content": {"model": own if self.before else model}, "steps": trained.metrics["batches"]}
        return {**draft, "trained": model if self.before else {}}

    def after(self, mixed: dict[str, Any], draft: Payload, own: Tree, lr: float) -> dict[str, Any]:
        """The mixed model, and the peer's own optimizer or quasi-global momentum."""
        model, kept = mixed["model"], draft["optimizer"]
        for name, value in draft["trained"].items():
            floating = value.is_floating_point()
            model[name] = model[name] + (value - own[name]) if floating else torch.maximum(model[name], value)
        if self.quasi_global is not None:
            went = [(own[n] - model[n]) / (lr * draft["steps"]) for n in self.trainable]
            last = draft["held"].get("optimizer", {}).get("momentum") or [torch.zeros_like(d) for d in went]
            mu = self.quasi_global
            kept = {"momentum": [mu * m + (1 - mu) * d for m, d in zip(last, went, strict=True)]}
        return {PERSONAL: model, "optimizer": kept}


def dsgd(
    parts: Parts,
    *,
    topology: Graph = RING,
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
) -> PeerToPeer:
    """D-SGD: peers train their own models and mix them with their neighbours', without a server.

    Fixes: A server is a bottleneck and has to be trusted. Here a peer talks to its neighbours in a graph only.

    Equation:
        mix = "before":  x_i <- sum_j W_ij x_j - eta g_i(x_i)                 (Algorithm 1)
        mix = "after":   x_i <- sum_j W_ij (x_j - eta g_j(x_j))
        W_ij = 1 / (1 + max(d_i, d_j)) of neighbours,  W_ii = 1 - sum_j W_ij  (Metropolis)
        quasi-global:    v = m v + g starts at v = q_i,  q_i <- mu q_i + (1 - mu) (x_i - x_i') / (eta steps)

    Source: Lian et al. 2017 (arXiv 1705.09056), Algorithm 1; quasi-global momentum of Lin et al. 2021
        (arXiv 2102.04761), Algorithm 1. eta g_i stands for all local steps of a round.

    Weighting: None: peers count by their edges, whatever their examples.

    State: At each peer its model and optimizer, before and after its last mixing.

    Sent: The model to each neighbour, every round; nothing to a server. `bytes_peer` counts each addressee.

    Composes: `[select]`, `[client]`, `[aggregate]`, `[server]` and `local.stragglers` are refused. All
        clients are peers, in every round.

    Ranges:
        topology: "ring" mixes slowly with many peers; { name = "exponential", one_peer = true } mixes fast
            with one message a peer, for a power of two of peers.
        mix: "after". "before" is the paper's.
        quasi_global: 0.9, with `local.momentum` = 0.9, where peers differ.
        data.validation: 0.1 to 0.3, with `data.validation_from` = "client": each peer's model is measured on
            its own data.
        evaluation.test_peers: 4, or "all": how many peers' models are tested. No peer has the mean model, and
            where data differ their own can be much worse.

    Try: algorithm.topology.name=ring

    Not when: A server is possible: FedAvg mixes completely with two models a client.

    Tests: tests/identity/test_dsgd.py tests/unit/algorithms/test_topology.py
        tests/unit/algorithms/test_peer_evaluation.py

    Example:
        >>> Topology(RING, 8).spectral_gap() < Topology(RING, 4).spectral_gap()  # more peers agree later
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
    trainable = tuple(part(parts.spec, "weight", trainable=True))
    return PeerToPeer(parts, graph, MixModels(train, mix == "before", quasi_global, trainable))
