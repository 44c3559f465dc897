"""The features of stacked clients in the `references` of a rule; see `fedlens.local.features`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlens.core.tree import Tree
from fedlens.local.features import OWN
from fedlens.local.rules import ClientRule, LocalContext, Tensors
from fedlens.local.vectorized.batches import Batch
from fedlens.local.vectorized.model import StackedModel


class StackedFeatures:
    """The reference models of the clients' rules, stacked by name; the anchor replaces a missing model.

    Their buffers are those of the global model: a model that changes buffers in training is not stacked.
    """

    def __init__(self, rule: ClientRule, contexts: Sequence[LocalContext]) -> None:
        self.trees = [rule.references(context) if rule.references is not None else {} for context in contexts]
        self.weights: dict[str, Tensors] = {}
        for name in sorted({name for trees in self.trees for name in trees}):
            of_each = [
                self._leaves(context, trees.get(name))
                for context, trees in zip(contexts, self.trees, strict=True)
            ]
            self.weights[name] = [_stacked(leaf) for leaf in zip(*of_each, strict=True)]

    @staticmethod
    def _leaves(context: LocalContext, tree: Tree | None) -> Tensors:
        return context.anchor if tree is None else [tree[name] for name in context.names]

    def names(self, at: int) -> frozenset[str]:
        """The names of the features that the rule gets for this client."""
        return frozenset({OWN, *self.trees[at]} if self.trees[at] else ())

    def take(self, model: StackedModel, own: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """The features [A, B, features] by name; `own` are those of the clients' own models."""
        features = {} if own is None else {OWN: own}
        module, active = model.learner.module.eval(), len(batch.counts)
        try:
            for name, leaves in self.weights.items():
                # On a GPU, a model that all clients share processes all images at once, like frozen layers.
                one = model.flat and all(leaf.is_cuda and leaf.stride(0) == 0 for leaf in leaves)
                with torch.no_grad():
                    at = [leaf[0] if one else leaf[:active] for leaf in leaves]
                    _, seen = model.with_features(at, batch.inputs)
                if seen is not None:
                    features[name] = seen
        finally:
            module.train()
        return features


def _stacked(leaves: Sequence[Tensor]) -> Tensor:
    """The leaves as [A, ...]; a view if all clients share one tensor."""
    one = leaves[0]
    return (
        one.expand(len(leaves), *one.shape)
        if all(leaf is one for leaf in leaves)
        else torch.stack(list(leaves))
    )
