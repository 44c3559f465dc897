"""Gradient tracking: Pu and Nedic 2018 (arXiv 1805.11454)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.peers import RING, Graph, PeerRule, PeerToPeer, moved, one_step, refuse_unfit
from fedlens.algorithms.topology import Topology
from fedlens.core.protocol import Outcome, Payload
from fedlens.core.schema import Field, TreeField
from fedlens.core.tree import Tree, TreeSpec
from fedlens.local.personal_leaves import PERSONAL
from fedlens.local.rules import ClientRule, LocalContext, Solved, Tensors

_TRACKED, _GRADIENT = "tracked", "gradient"


@dataclass(frozen=True)
class TrackGradient(PeerRule):
    """x and y are mixed; the peer holds W y as `tracked`, and the `gradient` that y contains."""

    sends: ClassVar[str] = "its model and its estimate of the mean gradient"

    def drafted(self, own: Tree, held: Payload, trained: Outcome, lr: float) -> dict[str, Any]:
        """y = W y + g+ - g, with the gradient g+ at the peer's model; and x - eta y."""
        gradient = y = trained.payload["update"]
        if _GRADIENT in held:
            y = {name: held[_TRACKED][name] + (g - held[_GRADIENT][name]) for name, g in gradient.items()}
        x = moved(own, {name: lr * value for name, value in y.items()}, trained)
        return {"content": {"model": x, _TRACKED: y}, _GRADIENT: gradient}

    def after(self, mixed: dict[str, Any], draft: Payload, own: Tree, lr: float) -> dict[str, Any]:
        """The mixed model, and what the next gradient is added to."""
        return {PERSONAL: mixed["model"], _TRACKED: mixed[_TRACKED], _GRADIENT: draft[_GRADIENT]}

    def letter(self, spec: TreeSpec) -> dict[str, Field]:
        """The model, and y."""
        return {**super().letter(spec), _TRACKED: TreeField.weights(spec)}


def take_gradient(context: LocalContext) -> Solved:
    """The gradient over a batch, and no step."""
    (batch,) = context.problem.batches(1)
    found = context.problem.objective(statistics=True, over=batch)
    context.saved[_GRADIENT] = found.gradient
    return Solved(context.anchor, float(found.loss), len(batch[1]), 1)


def send_gradient(
    parameters: Tensors, context: LocalContext
) -> tuple[Mapping[str, Mapping[str, Tensor]], None]:
    """The gradient in the place of the update."""
    return {"update": context.tree(context.saved[_GRADIENT])}, None


def gradient_tracking(parts: Parts, *, topology: Graph = RING) -> PeerToPeer:
    """Gradient tracking: peers step along an estimate of everyone's gradient, which they mix like their models.

    Fixes: With a constant step D-SGD stops near the optimum, because each peer's own gradient pulls it away.
        Here each step follows an estimate of the mean gradient, which is right where the peers agree.

    Equation:
        y_i <- g_i(x_i) at first
        x_i <- sum_j W_ij (x_j - eta y_j)
        y_i <- sum_j W_ij y_j + g_i(x_i) - g_i(x_i')     with x_i' the model before, each g over one batch
        W_ij = 1 / (1 + max(d_i, d_j)) of neighbours,  W_ii = 1 - sum_j W_ij  (Metropolis)

    Source: Pu and Nedic 2018 (arXiv 1805.11454), DSGT. The sum of all y is the sum of all g, whoever is missing.

    Weighting: None: peers count by their edges, whatever their examples.

    State: At each peer its model, y and last gradient, before and after its last mixing.

    Sent: The model and y, as large as its weights, to each neighbour in every mixing; nothing to a server.
        The first y is a gradient over one batch, from which images can be reconstructed. `bytes_peer` counts
        each addressee.

    Composes: `[select]`, `[client]`, `[aggregate]` and `[server]` are refused. Of `[local]` it uses the
        learning rate with its schedule, `steps` or `epochs`, `batch_size` and `last_batch`. All clients are
        peers, with the mixings of [Push-sum](push-sum.md).

    Ranges:
        topology: as for D-SGD: "ring", or { name = "exponential", one_peer = true } for a power of two of
            peers.
        local.lr: as for D-SGD, or lower.

    Try: algorithm.topology.name=ring local.epochs=1 local.momentum=0

    Not when: Batches are small: their noise is larger than the difference between peers that this removes,
        and D-SGD sends half as much, once after many steps.

    Tests: tests/identity/test_gradient_tracking.py tests/unit/algorithms/test_topology.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(gradient_tracking).model_fields)
        ['topology']
    """
    refuse_unfit(parts, "gradient-tracking")
    graph = Topology(topology, parts.federation.clients, seed=parts.selection_seed)
    train = one_step(parts, ClientRule(solve=take_gradient, finish=send_gradient))
    return PeerToPeer(parts, graph, TrackGradient(train), asks_each_step=True)
