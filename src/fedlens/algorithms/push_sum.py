"""Push-sum: stochastic gradient push of Assran, Loizou, Ballas, Rabbat 2019 (arXiv 1811.10792)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.peers import MASS, RING, Graph, PeerRule, PeerToPeer, one_step, refuse_unfit
from fedlens.algorithms.topology import Topology
from fedlens.core.protocol import Outcome, Payload
from fedlens.core.schema import Field, NumberField
from fedlens.core.tree import Tree, TreeSpec
from fedlens.local.personal_leaves import PERSONAL


@dataclass(frozen=True)
class PushMass(PeerRule):
    """x and w are mixed; the peer holds its model x / w, and w as `mass`."""

    sends: ClassVar[str] = "its model times its mass, and its mass,"

    def drafted(self, own: Tree, held: Payload, trained: Outcome, lr: float) -> dict[str, Any]:
        """x less the step that was taken at x / w; statistics times w."""
        mass, found = held.get(MASS, 1.0), trained.payload
        model = {**own, **found["buffers"], **found["counters"]}
        x = {name: value * mass if value.is_floating_point() else value for name, value in model.items()}
        x |= {name: x[name] - step for name, step in found["update"].items()}
        return {"content": {"model": x, MASS: mass}}

    def after(self, mixed: dict[str, Any], draft: Payload, own: Tree, lr: float) -> dict[str, Any]:
        """The model x / w."""
        mass, x = mixed[MASS], mixed["model"]
        model = {name: value / mass if value.is_floating_point() else value for name, value in x.items()}
        return {PERSONAL: model, MASS: mass, "optimizer": draft["optimizer"]}

    def letter(self, spec: TreeSpec) -> dict[str, Field]:
        """The model times the mass, and the mass."""
        return {**super().letter(spec), MASS: NumberField(above=0)}


def push_sum(parts: Parts, *, topology: Graph = RING) -> PeerToPeer:
    """Push-sum: peers mix their models with their neighbours', along edges that may go one way only.

    Fixes: D-SGD needs peers that send to each other, and weights on which both ends agree. Here a peer needs
        to know only to how many it sends. A mass, mixed like the models, shows each peer how much too often
        it was counted.

    Equation:
        g_i at the model z_i = x_i / w_i, over one batch; w_i = 1 at first
        x_i <- sum_j A_ij (x_j - eta g_j(z_j)),   w_i <- sum_j A_ij w_j,   z_i <- x_i / w_i
        A_ij = 1 / (d_j + 1)  for j itself and for each i to which j sends, d_j in number
        mean model:  sum_i x_i / sum_i w_i

    Source: Assran et al. 2019 (arXiv 1811.10792), Algorithm 1. One step a mixing; eta g stands for the step
        of the local optimizer.

    Weighting: None: peers count by their mass, which is 1 on average.

    State: At each peer its model, mass and optimizer, before and after its last mixing.

    Sent: The model times the mass, and the mass, along each edge in every mixing; nothing to a server. A
        neighbour can read the model. `bytes_peer` counts each addressee. A peer keeps what a missing one
        would have got, so no mass is lost.

    Composes: `[select]`, `[client]`, `[aggregate]`, `[server]`, `local.examples` and `local.stragglers` are
        refused. All clients are peers, in every round. A round has `local.steps` mixings, or as many as the
        largest peer has batches in `local.epochs`; smaller peers begin another epoch. Every optimizer works,
        and stays at its peer.

    Ranges:
        topology: { name = "exponential", one_peer = true } mixes fast with one message a peer, for any number
            of peers. A graph of "edges" has to be strongly connected.
        local.steps: 1 to 100, the mixings between two measurements.

    Try: algorithm.topology.name=exponential local.epochs=1

    Not when: Messages are expensive: a model goes along each edge in every step. D-SGD mixes once after many
        steps.

    Tests: tests/identity/test_push_sum.py tests/unit/algorithms/test_topology.py

    Example:
        >>> from fedlens.algorithms.topology import Exponential
        >>> Topology(Exponential(one_peer=True), 6, directed=True).neighbours(1)[5]  # 5 + 2^1 mod 6
        (1,)
    """
    refuse_unfit(parts, "push-sum")
    graph = Topology(topology, parts.federation.clients, directed=True, seed=parts.selection_seed)
    return PeerToPeer(parts, graph, PushMass(one_step(parts)), asks_each_step=True)
