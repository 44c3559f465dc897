"""What models see in a batch: their features, which are what enters the last linear layer, in order of definition."""

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
    """While it is open, the features [n, ...] of each forward pass are appended to the list.

    Nothing is where the module has no linear layer, or its last one takes no part in the forward pass.

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
        value = inputs[0]  # in 16 bits where the model computes so; what is made of it is not
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

    The other models are in evaluation mode, so the features of an image do not depend on the rest of the batch.
    """

    def __init__(self, context: LocalContext, trees: Mapping[str, Tree]) -> None:
        problem = context.problem
        self.own = problem.closing.enter_context(listening(problem.learner.module))
        self.task, self.others = problem.task, {}
        for name, tree in trees.items():
            module = problem.twin(f"features-{name}", tree).module.eval()
            self.others[name] = module, problem.closing.enter_context(listening(module))

    def take(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """Features [n, features] by name, of the batch that the trained model has just seen."""
        found = {OWN: self.own.pop().flatten(1)} if self.own else {}
        self.own.clear()
        for name, (module, heard) in self.others.items():
            with torch.no_grad():
                self.task.outputs(module, inputs, targets)
            if heard:
                found[name] = heard.pop().flatten(1)
            heard.clear()
        return found
