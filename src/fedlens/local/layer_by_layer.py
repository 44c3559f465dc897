"""The operations of FedMA (arXiv 2002.06440): clients train and send a layer at a time, the server matches it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.core.protocol import Client, Letter, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.tree import tree_of
from fedlens.local.class_counts import class_counts
from fedlens.local.knowledge_transfer import SERVER
from fedlens.local.matching import UnitPrior, layer_in, match_layer, mean_rows, named, widen_inputs
from fedlens.local.training import Train


@dataclass(frozen=True)
class TrainLayers:
    """A client's part of a pass: trains the layers that are not matched yet, and sends the first of them.

    Payload besides that of `Train`: `layer`, the number of that layer. At layer 0 `model` is what the client starts
    from; without it the client draws its own initial weights, in every round the same. Later `before`, the global layer
    before this one, takes the place of the client's, and `units`, int64, says which of its units the client's are;
    `varied` freezes what is matched. The letter has `layer`, and for the last one `counts`, int64: the client's
    examples of each class. Between two asks the state has the network.
    """

    train: Train
    layers: tuple[str, ...]

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains from where the last layer has left the client. Raises `ValueError` without a state to go on from."""
        at, name = payload["layer"], self.layers[payload["layer"]]
        tree = self._begun(payload, client, rng) if at == 0 else self._continued(payload, client)
        outcome = self.train({**payload, "model": tree}, client, rng)
        trained = {leaf: tree[leaf] - update for leaf, update in outcome.payload["update"].items()}
        tree, content = {**tree, **trained}, {"layer": layer_in(trained, name)}
        if at < len(self.layers) - 1:
            return Outcome({}, {"tree": tree}, outcome.metrics, letters=[Letter(SERVER, content)])
        counts = class_counts(self.train.task, client, self.train.model.classes)
        return Outcome({}, {}, outcome.metrics, letters=[Letter(SERVER, {**content, "counts": counts})])

    def _begun(self, payload: Payload, client: Client, rng: Rng) -> dict[str, Tensor]:
        if "model" in payload:
            return dict(payload["model"])
        own = replace(self.train.model, seed=rng.of_client(each_round=False).seed("weights"))
        return {leaf: value.to(client.device) for leaf, value in tree_of(own.build()).items()}

    def _continued(self, payload: Payload, client: Client) -> dict[str, Tensor]:
        if "tree" not in client.state:
            raise ValueError("the client has not trained the layer before")
        at, tree, before = payload["layer"], client.state["tree"], payload["before"]
        behind = widen_inputs(layer_in(tree, self.layers[at]), payload["units"], len(before["weight"]))
        return {**tree, **named(before, self.layers[at - 1]), **named(behind, self.layers[at])}


@dataclass(frozen=True)
class MatchLayer:
    """The server's part: the `weight` and `bias` of the matched layer, and `units`, int64 [clients, units].

    The letters have `layer`; row k of `units` belongs to the k-th of them.
    """

    prior: UnitPrior

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Matches the layers of all letters."""
        layer, units = match_layer([content["layer"] for _, content in payload["letters"]], self.prior)
        return Outcome({**layer, "units": torch.stack(units)})


def average_last(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """The server's part behind the last layer: the mean of each class, by the clients' `counts` of its examples.

    Payload: `kept`, the layer whose rows stay where no client has an example.
    """
    contents = [content for _, content in payload["letters"]]
    counts = torch.stack([content["counts"] for content in contents])
    return Outcome(mean_rows([content["layer"] for content in contents], counts, payload["kept"]))
