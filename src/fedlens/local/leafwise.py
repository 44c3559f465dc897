"""Plain SGD for heavy models: each weight takes its step as soon as its gradient is computed, then that is freed.

All gradients together are another copy of the model; leaf by leaf, memory holds little more than the largest one. The
steps are the same to the bit, because plain SGD treats each leaf separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fedlens.core.modules import Loadable
from fedlens.core.tree import HEAVY


class WeightReused(Exception):
    """A weight was needed for another gradient after its step."""


class Leafwise:
    """Takes the step w <- w - lr g of every parameter when g is computed; lr times the parameter's `scales`.

    >>> w = torch.ones(2, requires_grad=True)
    >>> with ExitStack() as closing:
    ...     Leafwise([w], 0.5, closing)((3 * w).sum())
    >>> w.detach(), w.grad is None
    (tensor([-0.5000, -0.5000]), True)
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, closing: ExitStack, scales: Sequence[float] = ()
    ) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.scales = {id(p): scale for p, scale in zip(parameters, scales, strict=True)} if scales else {}
        for parameter in parameters:
            hooked: Any = parameter.register_post_accumulate_grad_hook  # untyped
            closing.callback(hooked(self._step).remove)

    def __call__(self, loss: Tensor) -> None:
        """Takes a step along the gradient of the loss. After `WeightReused`, the weights are unusable."""
        try:
            torch.autograd.backward(loss, inputs=self.parameters)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise WeightReused from error
            raise

    def _step(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.detach().add_(parameter.grad, alpha=-(self.lr * self.scales.get(id(parameter), 1.0)))
        parameter.grad = None


def heavy(learner: Loadable) -> bool:
    """Whether avoiding a copy of the weights pays."""
    return learner.weight_bytes >= HEAVY


def leafwise(learner: Loadable) -> bool:
    """Whether plain training of this model takes its steps leaf by leaf."""
    return (
        learner.autocast_dtype is not torch.float16 and heavy(learner) and learner.kept.get("leafwise", True)
    )


def forgo(learner: Loadable) -> None:
    """Records that the weights of this model are needed after their steps."""
    learner.kept["leafwise"] = False
