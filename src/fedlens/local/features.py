"""The features of a batch: the inputs of the last linear layer in order of definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core.tree import Tree
from fedlens.local.rules import LocalContext
from fedlens.models.projection import last_linear

OWN = "own"  # the features of the model that is trained


@contextmanager
def listening(module: nn.Module) -> Iterator[list[Tensor]]:
    """While open, appends the features [n, ...] of each forward pass to the list.

    Appends nothing if the module has no linear layer, or if the last one is not used in the forward pass.

    >>> layer = nn.Linear(2, 1)
    >>> with listening(layer) as heard:
    ...     _ = layer(torch.ones(3, 2))
    >>> heard
    [tensor([[1., 1.],
            [1., 1.],
            [1., 1.]])]
    """
    heard: list[Tensor] = []

    def hear(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        value = inputs[0]  # may be in 16 bits; computations with it are in 32
        heard.append(value.float() if value.dtype in (torch.bfloat16, torch.float16) else value)

    found = last_linear(module)
    handle = found[1].register_forward_pre_hook(hear) if found else None
    try:
        yield heard
    finally:
        if handle is not None:
            handle.remove()


class ModelFeatures:
    """The features of the model that is trained at a client, and of the `references` of its rule.

    The reference models are in evaluation mode, so features do not depend on the other images of the batch.
    """

    def __init__(self, context: LocalContext, trees: Mapping[str, Tree]) -> None:
        problem = context.problem
        self.own = problem.closing.enter_context(listening(problem.learner.module))
        self.task, self.others = problem.task, {}
        for name, tree in trees.items():
            module = problem.twin(f"features-{name}", tree).module.eval()
            self.others[name] = module, problem.closing.enter_context(listening(module))

    def take(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """Features [n, features] by name, for the batch that the trained model has just processed."""
        found = {OWN: self.own.pop().flatten(1)} if self.own else {}
        self.own.clear()
        for name, (module, heard) in self.others.items():
            with torch.no_grad():
                self.task.outputs(module, inputs, targets)
            if heard:
                found[name] = heard.pop().flatten(1)
            heard.clear()
        return found
