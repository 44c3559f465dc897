"""The steps of stacked clients: each takes exactly its own, over its own batches, under its own dropout masks.

Batches are padded to one length with a weight of 0, and clients stand in the order of their steps, the most first, so
that those who still have some are always the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedlens.core.arithmetic import gradients_of
from fedlens.core.profiling import scope, scoped
from fedlens.local.optimizers import OptimizerState, optimizer
from fedlens.local.rules import GradHook, LocalContext, Tensors
from fedlens.local.training import Train
from fedlens.local.vectorized.batches import Batch, batches
from fedlens.local.vectorized.context import StackedContext, Unequal, stacked_visit
from fedlens.local.vectorized.features import StackedLooks
from fedlens.local.vectorized.group import Group
from fedlens.local.vectorized.model import StackedModel
from fedlens.local.vectorized.stack import Masks


class Steps:
    """The steps of a group of clients.

    Args:
        train: the operation.
        model: the model, stacked.
        group: the clients.
    """

    def __init__(self, train: Train, model: StackedModel, group: Group) -> None:
        self.train, self.model, self.group, self.contexts = train, model, group, group.contexts
        self.weights = [value.expand(len(group), *value.shape).clone() for value in group.anchor]
        self.kept: OptimizerState = {}
        rule, settings = train.rule, train.settings
        self.stacked = stacked_visit(group.contexts) if rule.grad and rule.traits.stackable else None
        self.looks = StackedLooks(rule, group.contexts) if rule.loss is not None else None
        self.first: tuple[int, StackedContext] | None = (
            None  # the stacked visit of the clients that still have steps
        )
        # A plain step needs no gradient in memory of its own: see `Stack.products`.
        scaled = model.learner.half is torch.float16
        self.direct = settings.plain_steps and rule.grad is None and not scaled

    def run(self) -> tuple[Tensors, list[tuple[float, int]]]:
        """The trained weights [A, ...], and each client's mean loss and number of examples looked at."""
        losses: list[Tensor] = []
        counts: list[list[int]] = []
        n = len(self.group)
        with self.model.ready(self.group.masks) as masks:
            for batch in scoped("data", batches(self.group, self.weights[0])):
                masks.begin(batch.counts, batch.inputs.shape[1])
                losses.append(self._step(batch, masks))
                counts.append(batch.counts)
        seen = torch.tensor([row + [0] * (n - len(row)) for row in counts], dtype=torch.float64)
        lost = torch.zeros(seen.shape, dtype=torch.float64)
        for row, found in zip(lost, losses, strict=True):
            row[: len(found)] = found
        total, examples = (lost * seen).sum(0), seen.sum(0)
        means = (total / examples).tolist()
        return self.weights, [(mean, int(n)) for mean, n in zip(means, examples.tolist(), strict=True)]

    def _step(self, batch: Batch, masks: Masks) -> Tensor:
        rule, active = self.train.rule, len(batch.counts)
        contexts = self.contexts[:active]
        weights = self.weights if active == len(self.group) else [value[:active] for value in self.weights]
        at_anchor: Tensors = []
        if rule.traits.anchored:
            anchor = [value.expand(active, *value.shape) for value in self.group.anchor]
            with scope("rule"):
                _, at_anchor = gradients(self.train, self.model, anchor, batch, contexts)
            masks.again()
            for context in contexts:
                context.problem.seen += 1
        if self.direct:
            return self._straight(batch, weights, contexts)
        losses, found = gradients(self.train, self.model, weights, batch, contexts, self.looks)
        if rule.grad is not None:
            with scope("rule"):
                found = self._bent(found, weights, at_anchor, batch)
        if self.train.settings.clip_norm is not None:
            found = _clipped(found, self.train.settings.clip_norm)
        kept = {name: [v[:active] if v.dim() else v for v in values] for name, values in self.kept.items()}
        with scope("optimizer"):
            optimizer(self.train.settings, self.group.lr, kept)(weights, found)
        self.kept = kept  # whoever has no steps left has no use for it any more
        return losses

    def _straight(self, batch: Batch, weights: Tensors, contexts: Sequence[LocalContext]) -> Tensor:
        """A step of plain SGD: w <- w - lr g, where g may be a product that is never written."""
        lr, stack = self.group.lr, self.model.stack
        stack.products = []
        try:
            with scope("forward"):
                (losses, root), leaves = descended(
                    self.train, self.model, weights, batch, contexts, self.looks
                )
            with scope("backward"):
                slopes = batch.weights.to(root.dtype) if root.dim() else None
                found = differentiated(root, leaves, slopes)
            with scope("optimizer"):
                descend(weights, found, stack.products, lr)
        finally:
            stack.products = None
        return losses

    def _bent(self, found: Tensors, weights: Tensors, at_anchor: Tensors, batch: Batch) -> Tensors:
        """What the rule makes of the gradients: at once where it may, else client by client."""
        grad, contexts = self.train.rule.grad, self.contexts[: len(batch.counts)]
        assert grad is not None
        if self.stacked is not None:
            if self.first is None or self.first[0] != len(contexts):
                self.first = len(contexts), self.stacked.first(len(contexts))
            self.first[1].at_anchor = at_anchor
            try:
                return grad(found, weights, cast("LocalContext", self.first[1]))
            except Unequal:
                self.stacked = None
        return self._bent_each(grad, found, weights, at_anchor, batch)

    def _bent_each(
        self, grad: GradHook, found: Tensors, weights: Tensors, at_anchor: Tensors, batch: Batch
    ) -> Tensors:
        contexts, rows = self.contexts[: len(batch.counts)], []
        for k, context in enumerate(contexts):
            context.batch = batch.inputs[k, : batch.counts[k]], batch.targets[k, : batch.counts[k]]
            context.at_anchor = [value[k] for value in at_anchor]
            rows.append(grad([g[k] for g in found], [w[k] for w in weights], context))
        return [torch.stack(leaf) for leaf in zip(*rows, strict=True)]


def descend(
    weights: Tensors,
    gradients: Sequence[Tensor | None],
    products: Sequence[tuple[Tensor, Tensor, Tensor]],
    lr: float,
) -> None:
    """w <- w - lr g in place, for gradients that are there and for those that are products; see `Stack.products`."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            weight.add_(gradient, alpha=-lr)
    for leaf, left, right in products:
        leaf.detach().baddbmm_(left, right, alpha=-lr)


def differentiated(loss: Tensor, leaves: Tensors, slopes: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradient of each leaf; None where there is none to write, as `Stack.products` has it, or none at all.

    Of a loss that is no scalar, `slopes` says how much each of its numbers counts.
    """
    return torch.autograd.grad(loss, leaves, slopes, allow_unused=True)


def descended(
    train: Train,
    model: StackedModel,
    weights: Tensors,
    batch: Batch,
    contexts: Sequence[LocalContext],
    looks: StackedLooks | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """The mean of the task's loss at each client, [A], and what they descend; and what it depends on.

    What they descend is one sum, or where no rule bends it the loss of each example, [A, B], which counts as
    `batch.weights` say: a step along it needs no sum. The rule's `loss` counts where its `looks` are given, which full
    gradients and those at the anchor are without.
    """
    rule, leaves = train.rule, [value.detach().requires_grad_() for value in weights]
    if looks is not None and looks.weights:
        outputs, own = model.with_features(leaves, batch.inputs)
    else:
        outputs, own = model(leaves, batch.inputs), None
    each = train.task.losses(outputs.flatten(0, 1), batch.targets.flatten(0, 1)).view(batch.weights.shape)
    if rule.risk is None and (rule.loss is None or looks is None):
        return ((each.detach() * batch.weights).sum(1), each), leaves
    losses = (each * batch.weights).sum(1)
    features = looks.take(model, own, batch, contexts) if looks is not None and looks.weights else None
    found = []
    for k, (context, n) in enumerate(zip(contexts, batch.counts, strict=True)):
        context.batch = batch.inputs[k, :n], batch.targets[k, :n]
        context.features = features[k] if features is not None else {}
        said, right = outputs[k, :n], batch.targets[k, :n]
        loss = losses[k] if rule.risk is None else rule.risk(said, right, context)
        found.append(loss if rule.loss is None or looks is None else rule.loss(loss, said, right, context))
    return (losses.detach(), torch.stack(found).sum()), leaves


def gradients(
    train: Train,
    model: StackedModel,
    weights: Tensors,
    batch: Batch,
    contexts: Sequence[LocalContext],
    looks: StackedLooks | None = None,
) -> tuple[Tensor, Tensors]:
    """The mean of the task's loss at each client, [A], and the gradients of what it descends, each [A, ...]."""
    with scope("forward"):
        (losses, root), leaves = descended(train, model, weights, batch, contexts, looks)
        total = (root * batch.weights).sum() if root.dim() else root
    with scope("backward"):
        return losses, gradients_of(total, leaves, model.learner.half, stacked=True)


def _clipped(gradients: Tensors, largest: float) -> Tensors:
    """Each client's gradients, scaled down to this norm where theirs is above it."""
    norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients]
    factor = (largest / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    return [g * factor.view(-1, *[1] * (g.dim() - 1)) for g in gradients]
