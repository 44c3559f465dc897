"""The objectives of stacked clients under a rule's `risk` and `loss`, and the features of its `references`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedlens.base.errors import out_of_memory
from fedlens.core.device_copies import uploaded
from fedlens.core.tree import Tree
from fedlens.local.features import OWN
from fedlens.local.rules import ClientRule, LocalContext, Tensors
from fedlens.local.vectorized.batches import Batch
from fedlens.local.vectorized.context import Named, Partial, StackedContext, common, not_shared
from fedlens.local.vectorized.model import StackedModel

_ATTEMPTS = 2  # a hook may store values in its first call, so the second shows whether one call works for all
_OF_ALL = frozenset({"losses", "outputs", "targets"})


class Objectives:
    """Calls the hooks `risk` and `loss` for one client after the other; on a GPU, once for all of them.

    On a GPU, the kernels of a loss take less time than their launches, so the hooks run under `torch.func.vmap`, once
    for all clients with the same number of examples. A hook that fails there, for example because it reads a value of
    its own client, is called client by client.

    Args:
        rule: the rule.
        contexts: of the clients; None leaves `loss` out, as in full gradients, which are those of the risk.
    """

    def __init__(self, rule: ClientRule, contexts: Sequence[LocalContext] | None = None) -> None:
        self.risk, self.loss = rule.risk, None if contexts is None else rule.loss
        self.references = StackedFeatures(rule, contexts) if contexts is not None and self.loss else None
        self.attempts, self.places = _ATTEMPTS, dict[tuple[int, ...], Tensor]()

    @property
    def plain(self) -> bool:
        """Whether each client's objective is the mean of the task's losses."""
        return self.risk is None and self.loss is None

    def total(self, batch: Batch, contexts: Sequence[LocalContext], values: Mapping[str, Tensor]) -> Tensor:
        """The sum of the clients' objectives.

        Args:
            batch: of the clients.
            contexts: of the clients.
            values: `losses` [A], `outputs` and `targets` [A, B, ...], and features [A, B, ...] by name.
        """
        names = [
            _OF_ALL | (self.references.names(k) if self.references else set()) for k in range(len(contexts))
        ]
        if batch.weights.is_cuda and self.attempts:
            try:
                return self._together(batch.counts, contexts, values, names)
            except Exception as error:  # an error of the hook shows in the calls for each client
                if out_of_memory(error):
                    raise
                self.attempts -= 1
        each = []
        for k, (context, n) in enumerate(zip(contexts, batch.counts, strict=True)):
            own = {name: v[k] if v.dim() == 1 else v[k, :n] for name, v in values.items() if name in names[k]}
            context.batch = batch.inputs[k, :n], own["targets"]
            each.append(self._objective(context, **own))
        return torch.stack(each).sum()

    def _objective(
        self, context: Any, losses: Tensor, outputs: Tensor, targets: Tensor, **features: Tensor
    ) -> Tensor:
        context.features = features
        loss = losses if self.risk is None else self.risk(outputs, targets, context)
        return loss if self.loss is None else self.loss(loss, outputs, targets, context)

    def _together(
        self,
        counts: Sequence[int],
        contexts: Sequence[LocalContext],
        values: Mapping[str, Tensor],
        names: Any,
    ) -> Tensor:
        alike: dict[Any, list[int]] = {}  # clients whose hooks get values of the same names and shapes
        for k, context in enumerate(contexts):
            alike.setdefault((counts[k], names[k], frozenset(context.state)), []).append(k)
        parts = []
        for (n, seen, _), rows in alike.items():
            own = {name: value for name, value in values.items() if name in seen}
            if len(rows) < len(contexts):
                key = tuple(rows)
                if key not in self.places:
                    self.places[key] = uploaded(torch.tensor(rows), own["losses"].device)
                own = {name: value.index_select(0, self.places[key]) for name, value in own.items()}
            own = {name: v[:, :n] if v.dim() > 1 and v.shape[1] > n else v for name, v in own.items()}
            parts.append(self._for_all([contexts[k] for k in rows], own))
        return torch.cat(parts).sum()

    def _for_all(self, contexts: Sequence[LocalContext], own: Mapping[str, Tensor]) -> Tensor:
        """The objectives [A] of clients whose values have the same names and shapes."""
        payload, saved = (common(name, [vars(c)[name] for c in contexts]) for name in ("payload", "saved"))
        columns = {name: [context.saved[name] for context in contexts] for name in saved.errors}
        columns = {name: each for name, each in columns.items() if all(isinstance(v, Tensor) for v in each)}
        context: Any = StackedContext(contexts[0], payload, saved)
        context.state = Named({}, {name: not_shared(f"state[{name!r}]") for name in contexts[0].state})
        context.problem = SimpleNamespace(task=contexts[0].problem.task, model=contexts[0].problem.model)

        def objective(own: dict[str, Tensor], kept: dict[str, Tensor]) -> Tensor:
            others = {name: error for name, error in saved.errors.items() if name not in kept}
            context.saved = Partial({**saved.values_by_name, **kept}, others)
            return self._objective(context, **own)

        objectives: Tensor = vmap(objective)(dict(own), {n: torch.stack(each) for n, each in columns.items()})
        return objectives


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
