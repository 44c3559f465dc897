"""Local optimizers: the arithmetic of `torch.optim`, with explicit state.

SGD gives the same bits as `torch.optim.SGD`; Adam and AdamW agree with torch up to the last bits. LARS is not in torch.
A step costs a fraction of a torch step, and the round of a small model consists mostly of steps.

Plain SGD of heavy models is `Leafwise`: each weight takes its step as soon as its gradient is computed, then that is
freed. All gradients together are another copy of the model; leaf by leaf, memory holds little more than the largest
one. The steps are the same to the bit, because plain SGD treats each leaf separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fedlens.core.modules import Loadable
from fedlens.core.tree import HEAVY
from fedlens.local.settings import LocalSettings

Tensors = list[Tensor]
# state: the optimizer's own tensors, a list for each kind, empty before the first step
OptimizerState = dict[str, Tensors]
Rate = float | list[float]  # one for all parameters, or one for each
Step = Callable[[Tensors, Tensors, Rate], None]


def optimizer(settings: LocalSettings, state: OptimizerState) -> Step:
    """A function `step(parameters, gradients, lr)` that changes the parameters in place and keeps its state in `state`.

    `lr` is one number, or a list with one for each parameter.

    SGD: g <- g + wd w; v <- m v + g; w <- w - lr v, or - lr (g + m v) with Nesterov's momentum.
    Adam: Kingma and Ba 2015, with bias correction and the L2 penalty in the gradient.
    AdamW: Loshchilov and Hutter 2019; w <- (1 - lr wd) w, then Adam's step without a penalty.
    LARS: You et al. 2017 (arXiv 1708.03888), algorithm 1; for each leaf
        v <- m v + lr trust |w| / (|g| + wd |w|) (g + wd w); w <- w - v.
        The factor trust |w| / (...) is 1 where all weights or all gradients of a leaf are 0. With `lars_leaves` =
        "weights", leaves of one dimension (biases, normalization) get v <- m v + lr g.
    """
    made = {"sgd": _sgd, "lars": _lars}.get(settings.optimizer, _adam)
    return made(settings, state)


def _velocity(state: OptimizerState, steps: Tensors, momentum: float) -> Tensors:
    """The velocity v <- momentum v + steps, which stays in the state; the first one is a copy of the steps."""
    if "momentum" in state:
        torch._foreach_mul_(state["momentum"], momentum)
        torch._foreach_add_(state["momentum"], steps)
    else:
        state["momentum"] = [step.clone() for step in steps]
    velocity: Tensors = state["momentum"]
    return velocity


def _sgd(settings: LocalSettings, state: OptimizerState) -> Step:
    momentum, nesterov, decay = settings.momentum, settings.nesterov, settings.weight_decay

    def step(parameters: Tensors, gradients: Tensors, lr: Rate) -> None:
        if decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if momentum:
            velocity = _velocity(state, gradients, momentum)
            ahead = nesterov and torch._foreach_add(gradients, velocity, alpha=momentum)
            gradients = list(ahead or velocity)
        descend(parameters, gradients, lr if isinstance(lr, list) else [lr] * len(parameters))

    return step


def descend(parameters: Tensors, gradients: Sequence[Tensor | None], rates: Sequence[float]) -> None:
    """w <- w - lr g in place, with the rate of each parameter; a gradient that is None changes nothing."""
    given = zip(parameters, gradients, rates, strict=True)
    if not parameters or not parameters[0].is_cuda:
        for parameter, gradient, rate in given:
            if gradient is not None:
                parameter.add_(gradient, alpha=-rate)
        return
    steps = [(parameter, gradient, rate) for parameter, gradient, rate in given if gradient is not None]
    for rate in dict.fromkeys(rate for _, _, rate in steps):  # one launch for all leaves of a rate
        of_rate = [each for each in steps if each[2] == rate]
        torch._foreach_add_([p for p, _, _ in of_rate], [g for _, g, _ in of_rate], alpha=-rate)


def _lars(settings: LocalSettings, state: OptimizerState) -> Step:
    momentum, decay, trust = settings.momentum, settings.weight_decay, settings.trust
    least = 2 if settings.lars_leaves == "weights" else 0  # dimensions of a leaf that is scaled

    def step(parameters: Tensors, gradients: Tensors, lr: Rate) -> None:
        rates = lr if isinstance(lr, list) else [lr] * len(parameters)
        at = [k for k, parameter in enumerate(parameters) if parameter.dim() >= least]
        weights, slopes, steps = [parameters[k] for k in at], [gradients[k] for k in at], list(gradients)
        if at:
            size, slope = (torch.stack(torch._foreach_norm(leaves)) for leaves in (weights, slopes))
            # Compared on the device: a branch would synchronize in every step.
            ratio = torch.where((size > 0) & (slope > 0), trust * size / (slope + decay * size), 1.0)
            decayed = torch._foreach_add(slopes, weights, alpha=decay) if decay else slopes
            for k, scaled in zip(at, torch._foreach_mul(decayed, list(ratio.unbind())), strict=True):
                steps[k] = scaled
        steps = list(torch._foreach_mul(steps, rates))
        if momentum:
            steps = _velocity(state, steps, momentum)
        torch._foreach_sub_(parameters, steps)

    return step


def _adam(settings: LocalSettings, state: OptimizerState) -> Step:
    (b1, b2), eps, decay = settings.betas, settings.eps, settings.weight_decay
    decoupled = settings.optimizer == "adamw"

    def step(parameters: Tensors, gradients: Tensors, lr: Rate) -> None:
        if decay and decoupled:
            if isinstance(lr, list):
                torch._foreach_mul_(parameters, [1 - rate * decay for rate in lr])
            else:
                torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if "steps" not in state:
            state["steps"] = [torch.zeros((), dtype=torch.float64)]
            state["first"] = [torch.zeros_like(p) for p in parameters]
            state["second"] = [torch.zeros_like(p) for p in parameters]
        state["steps"][0] += 1
        t, first, second = float(state["steps"][0]), state["first"], state["second"]
        torch._foreach_lerp_(first, gradients, 1 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - b2)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, (1 - b2**t) ** 0.5)
        torch._foreach_add_(denominator, eps)
        if isinstance(lr, list):
            torch._foreach_addcdiv_(parameters, first, denominator, [-rate / (1 - b1**t) for rate in lr])
        else:
            torch._foreach_addcdiv_(parameters, first, denominator, value=-lr / (1 - b1**t))

    return step


def clip(gradients: Tensors, largest: float) -> Tensors:
    """The gradients, scaled down to the norm `largest` if their norm is larger.

    >>> clip([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
    [tensor([0.6000]), tensor([0.8000])]
    """
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return list(torch._foreach_mul(gradients, (largest / (norm + 1e-6)).clamp(max=1.0)))


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
