"""Full gradients of stacked clients; see `fedlens.local.problem.LocalProblem.gradient`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlens.base.errors import HookError, out_of_memory
from fedlens.core.device_copies import downloaded, uploaded
from fedlens.core.random import Rng
from fedlens.core.stacked import StackedRow, StackedTrees
from fedlens.local.rules import LocalContext, Tensors
from fedlens.local.training import Train
from fedlens.local.vectorized.batches import stretches
from fedlens.local.vectorized.model import StackedModel
from fedlens.local.vectorized.objectives import Objectives
from fedlens.local.vectorized.stack import mask_generator
from fedlens.local.vectorized.steps import gradients


def full_gradients(
    train: Train, model: StackedModel, contexts: Sequence[LocalContext], rngs: Sequence[Rng]
) -> list[tuple[StackedRow, float]]:
    """Each client's gradient at the initial weights of training, and the mean of the task's loss there."""
    order = sorted(range(len(contexts)), key=lambda k: -contexts[k].problem.passes())
    contexts, rngs = [contexts[k] for k in order], [rngs[k] for k in order]
    anchor = contexts[0].anchor
    total = [
        torch.zeros(len(contexts), *value.shape, dtype=value.dtype, device=value.device) for value in anchor
    ]
    objectives = Objectives(train.rule)
    means: list[Tensor] = []
    shares: list[Tensor] = []
    sizes = torch.tensor([len(context.problem.data) for context in contexts], dtype=torch.float64)
    # The clients' generators before the first draw.
    masks = [mask_generator(rng, anchor[0].device) for rng in rngs] if model.random else []
    with model.ready(masks) as drawn:
        for batch in stretches(contexts, anchor[0]):
            drawn.begin(batch.counts, batch.inputs.shape[1])
            active = len(batch.counts)
            weights = [value.expand(active, *value.shape) for value in anchor]
            losses, slopes = gradients(train, model, weights, batch, contexts[:active], objectives)
            means.append(losses)
            shares.append(torch.tensor(batch.counts, dtype=torch.float64) / sizes[:active])
            share = uploaded(shares[-1], losses.device)
            parts = [g * share.to(g).view(-1, *[1] * (g.dim() - 1)) for g in slopes]
            torch._foreach_add_([own[:active] for own in total], parts)
    loss = torch.zeros(len(contexts), dtype=torch.float64)
    for share, mean in zip(shares, downloaded(means), strict=True):
        loss[: len(share)] += share * mean
    rows = StackedTrees(dict(zip(contexts[0].names, total, strict=True))).rows()
    done = dict(zip(order, zip(rows, loss.tolist(), strict=True), strict=True))
    return [done[k] for k in range(len(order))]


class SharedGradients:
    """The full gradients that rules request before the first step; the first request computes all of them."""

    def __init__(
        self, train: Train, model: StackedModel, contexts: Sequence[LocalContext], rngs: Sequence[Rng]
    ) -> None:
        self.train, self.model, self.contexts, self.rngs = train, model, contexts, rngs
        self.gradients: dict[int, tuple[StackedRow, float]] | None = None

    def of(self, at: int) -> tuple[Tensors, float] | None:
        """The gradient and the loss of client `at`; None if they cannot be computed together."""
        if self.gradients is None:
            try:
                every = full_gradients(self.train, self.model, self.contexts, self.rngs)
            except Exception as error:  # computing one client at a time shows whose error it is
                if out_of_memory(error) or isinstance(error, HookError):
                    raise
                every = []
            self.gradients = dict(enumerate(every))
        if at not in self.gradients:
            return None
        row, loss = self.gradients[at]
        return list(row.values()), loss
