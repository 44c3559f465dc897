"""The steps of stacked clients: each client takes its own steps, with its own batches and dropout masks.

Batches are padded to one length, and the padding has weight 0. Clients are in descending order of steps, so the clients
that still have steps come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedlens.base.profiling import scope, scoped
from fedlens.core.arithmetic import gradients_of
from fedlens.core.device_copies import downloaded
from fedlens.local.optimizers import OptimizerState, Rate, descend, optimizer
from fedlens.local.rules import GradHook, LocalContext, Tensors
from fedlens.local.training import Train
from fedlens.local.vectorized.batches import Batch, Group, batches
from fedlens.local.vectorized.context import StackedContext, Unequal, stacked_context
from fedlens.local.vectorized.model import StackedModel
from fedlens.local.vectorized.objectives import Objectives
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
        self.stacked = stacked_context(group.contexts) if rule.grad and rule.traits.stackable else None
        self.objectives = Objectives(rule, group.contexts)
        self.risks = Objectives(rule)  # of the gradients at the anchor
        self.first: tuple[int, StackedContext] | None = (
            None  # the context of the clients that still have steps
        )
        # A plain step needs no stored gradient: see `Stack.products`.
        scaled = model.learner.autocast_dtype is torch.float16
        self.direct = settings.plain_steps and rule.grad is None and not scaled

    def run(self) -> tuple[Tensors, list[tuple[float, int]]]:
        """The trained weights [A, ...], and each client's mean loss and number of examples seen."""
        losses: list[Tensor] = []
        counts: list[list[int]] = []
        n, taken = len(self.group), self.model.taken
        taken.begin(self.group.steps[0], clients=n)
        with self.model.ready(self.group.masks) as masks:
            for step, batch in enumerate(scoped("data", batches(self.group, self.weights[0]))):
                masks.begin(batch.counts, batch.inputs.shape[1])
                losses.append(self._step(batch, masks, self.group.rate(step)))
                counts.append(batch.counts)
                taken.done += 1
        seen = torch.tensor([row + [0] * (n - len(row)) for row in counts], dtype=torch.float64)
        lost = torch.zeros(seen.shape, dtype=torch.float64)
        for row, values in zip(lost, downloaded(losses), strict=True):
            row[: len(values)] = values
        total, examples = (lost * seen).sum(0), seen.sum(0)
        means = (total / examples).tolist()
        return self.weights, [(mean, int(n)) for mean, n in zip(means, examples.tolist(), strict=True)]

    def _step(self, batch: Batch, masks: Masks, lr: float) -> Tensor:
        rule, active = self.train.rule, len(batch.counts)
        contexts = self.contexts[:active]
        weights = self.weights if active == len(self.group) else [value[:active] for value in self.weights]
        at_anchor: Tensors = []
        if rule.traits.anchored:
            anchor = [value.expand(active, *value.shape) for value in self.group.anchor]
            with scope("rule"):
                _, at_anchor = gradients(self.train, self.model, anchor, batch, contexts, self.risks)
            masks.again()
            for context in contexts:
                context.problem.seen += 1
        if self.direct:
            return self._straight(batch, weights, contexts, lr)
        losses, slopes = gradients(self.train, self.model, weights, batch, contexts, self.objectives)
        if rule.grad is not None:
            with scope("rule"):
                slopes = self._modified(slopes, weights, at_anchor, batch)
        if self.train.settings.clip_norm is not None:
            slopes = _clipped(slopes, self.train.settings.clip_norm)
        kept = {name: [v[:active] if v.dim() else v for v in values] for name, values in self.kept.items()}
        with scope("optimizer"):
            optimizer(self.train.settings, kept)(weights, slopes, self._rates(lr))
        self.kept = kept  # not needed for clients without further steps
        return losses

    def _straight(
        self, batch: Batch, weights: Tensors, contexts: Sequence[LocalContext], lr: float
    ) -> Tensor:
        """A step of plain SGD: w <- w - lr g, where g may be a product that is never stored: see `Stack.products`."""
        stack = self.model.stack
        stack.products = []
        try:
            with scope("forward"):
                (losses, root), leaves = objective(
                    self.train, self.model, weights, batch, contexts, self.objectives
                )
            with scope("backward"):
                example_weights = batch.weights.to(root.dtype) if root.dim() else None
                slopes = differentiated(root, leaves, example_weights)
            with scope("optimizer"):
                rates = [lr * scale for scale in self.group.scales] or [lr] * len(weights)
                descend(weights, slopes, rates)
                # The leaf of a product is another tensor in the memory of its weight.
                of = {w.data_ptr(): rate for w, rate in zip(weights, rates, strict=True)}
                for leaf, left, right in stack.products:
                    leaf.detach().baddbmm_(left, right, alpha=-of[leaf.data_ptr()])
        finally:
            stack.products = None
        return losses

    def _rates(self, lr: float) -> Rate:
        return [lr * scale for scale in self.group.scales] if self.group.scales else lr

    def _modified(self, slopes: Tensors, weights: Tensors, at_anchor: Tensors, batch: Batch) -> Tensors:
        """The gradients after the rule's `grad`: called once if the rule allows it, otherwise client by client."""
        grad, contexts = self.train.rule.grad, self.contexts[: len(batch.counts)]
        assert grad is not None
        if self.stacked is not None:
            if self.first is None or self.first[0] != len(contexts):
                self.first = len(contexts), self.stacked.first(len(contexts))
            self.first[1].at_anchor = at_anchor
            try:
                return grad(slopes, weights, cast("LocalContext", self.first[1]))
            except Unequal:
                self.stacked = None
        return self._modified_each(grad, slopes, weights, at_anchor, batch)

    def _modified_each(
        self, grad: GradHook, slopes: Tensors, weights: Tensors, at_anchor: Tensors, batch: Batch
    ) -> Tensors:
        contexts, rows = self.contexts[: len(batch.counts)], []
        for k, context in enumerate(contexts):
            context.batch = batch.inputs[k, : batch.counts[k]], batch.targets[k, : batch.counts[k]]
            context.at_anchor = [value[k] for value in at_anchor]
            rows.append(grad([g[k] for g in slopes], [w[k] for w in weights], context))
        return [torch.stack(leaf) for leaf in zip(*rows, strict=True)]


def differentiated(loss: Tensor, leaves: Tensors, slopes: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradient of each leaf; None if it is in `Stack.products`, or the loss does not depend on the leaf.

    `slopes` are the weights of the elements of a loss that is not a scalar.
    """
    return torch.autograd.grad(loss, leaves, slopes, allow_unused=True)


def objective(
    train: Train,
    model: StackedModel,
    weights: Tensors,
    batch: Batch,
    contexts: Sequence[LocalContext],
    objectives: Objectives,
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """The mean of the task's loss at each client, [A], the objective of the clients, and its weights.

    The objective is one sum. Without a rule that changes the loss, it is the loss of each example, [A, B], weighted by
    `batch.weights`, so that a step needs no sum.
    """
    references, leaves = objectives.references, [value.detach().requires_grad_() for value in weights]
    if references is not None and references.weights:
        outputs, own = model.with_features(leaves, batch.inputs)
    else:
        outputs, own = model(leaves, batch.inputs), None
    each_loss = train.task.losses
    assert each_loss is not None  # `obstacle` has refused the task otherwise
    each = each_loss(outputs.flatten(0, 1), batch.targets.flatten(0, 1)).view(batch.weights.shape)
    if objectives.plain:
        return ((each.detach() * batch.weights).sum(1), each), leaves
    losses = (each * batch.weights).sum(1)
    features = references.take(model, own, batch) if references is not None and references.weights else {}
    values = {"losses": losses, "outputs": outputs, "targets": batch.targets, **features}
    return (losses.detach(), objectives.total(batch, contexts, values)), leaves


def gradients(
    train: Train,
    model: StackedModel,
    weights: Tensors,
    batch: Batch,
    contexts: Sequence[LocalContext],
    objectives: Objectives,
) -> tuple[Tensor, Tensors]:
    """The mean of the task's loss at each client, [A], and the gradients of its objective, each [A, ...]."""
    with scope("forward"):
        (losses, root), leaves = objective(train, model, weights, batch, contexts, objectives)
        total = (root * batch.weights).sum() if root.dim() else root
    with scope("backward"):
        return losses, gradients_of(total, leaves, model.learner.autocast_dtype, stacked=True)


def _clipped(gradients: Tensors, largest: float) -> Tensors:
    """Each client's gradients, scaled down to this norm if their norm is larger."""
    norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients]
    factor = (largest / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    return [g * factor.view(-1, *[1] * (g.dim() - 1)) for g in gradients]
