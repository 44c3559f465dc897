"""Solvers of a client's subproblem: its objective, with a linear and a quadratic term about the global model.

    min_x  f(x) + <u, x - y> + rho/2 ||x - y||^2        (ghaemi2022 Eq. 3.2, divided by the client's weight w_i)

u is the client's dual variable and rho its penalty, both divided by w_i; y is the global model; f is the mean of the
client's risk, with the L2 penalty of `local.weight_decay`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.local.problem import BatchMean, LocalProblem, Objective, read
from fedlens.local.rules import Tensors

# torch.optim.LBFGS limits evaluations too; here only the iterations are limited.
_ANY_NUMBER = 2**31


@dataclass
class Subproblem:
    """The problem that is minimized at a client, and its evaluations so far.

    Attributes:
        centre: y.
        dual: u; `ascend` updates it.
        rho: the weight of the quadratic term.
        decay: the weight of the L2 penalty in f.
        evaluated: the number of examples of each evaluation, and the mean of the task's loss there.
    """

    problem: LocalProblem
    centre: Tensors
    dual: Tensors
    rho: float
    decay: float = 0.0
    evaluated: list[tuple[int, BatchMean]] = field(default_factory=list)

    def gradient(
        self, at: Tensors, statistics: bool = False, over: tuple[Tensor, Tensor] | None = None
    ) -> Tensors:
        """grad f(x) + u + rho (x - y); over one batch if it is given, otherwise over all examples."""
        return self._with_terms(self._seen(at, statistics, over).gradient, at)

    def value_and_gradient(self, at: Tensors) -> tuple[float, Tensors]:
        """The subproblem's value, and its gradient."""
        found, away = self._seen(at), list(torch._foreach_sub(at, self.centre))
        pairs = (self.dual, away), (away, away), (at, at)
        value, slope, curve, size = read([found.value, *(_dot(a, b) for a, b in pairs)])
        return value + self.decay / 2 * size + slope + self.rho / 2 * curve, self._with_terms(
            found.gradient, at
        )

    def ascend(self, at: Tensors) -> None:
        """u <- u + rho (x - y) (ghaemi2022 Eq. 3.3)."""
        self.dual = list(torch._foreach_add(self.dual, torch._foreach_sub(at, self.centre), alpha=self.rho))

    def _seen(
        self, at: Tensors, statistics: bool = False, over: tuple[Tensor, Tensor] | None = None
    ) -> Objective:
        found = self.problem.objective(at, statistics, over)
        self.evaluated.append((len(self.problem.data) if over is None else len(over[1]), found.loss))
        return found

    def mean_loss(self) -> tuple[float, int]:
        """The mean of the task's loss over all evaluated examples, each counted as often as evaluated; their number."""
        losses, total, examples = read([loss for _, loss in self.evaluated]), 0.0, 0
        for (n, _), loss in zip(self.evaluated, losses, strict=True):
            total, examples = total + loss * n, examples + n
        return total / examples, examples

    def _with_terms(self, gradient: Tensors, at: Tensors) -> Tensors:
        total = list(torch._foreach_add(gradient, torch._foreach_sub(at, self.centre), alpha=self.rho))
        torch._foreach_add_(total, self.dual)
        if self.decay:
            torch._foreach_add_(total, at, alpha=self.decay)
        return total


class Minimum(NamedTuple):
    """The final point of the solver, and the largest entry of the gradient there."""

    at: Tensors
    slope: float


def minimize(problem: Subproblem, start: Tensors, tolerance: float, max_iterations: int) -> Minimum:
    """Minimizes the subproblem until the largest entry of its gradient is at most `tolerance`.

    L-BFGS with a strong Wolfe line search over all examples: deterministic, and without a step size. It stops after
    `max_iterations`; check `slope` for convergence. A last pass at the solution computes `slope` and updates the
    running statistics of the learner.
    """
    # Weights and gradients are contiguous, because torch's L-BFGS views them as one vector.
    at = [value.clone(memory_format=torch.contiguous_format) for value in start]
    search = torch.optim.LBFGS(
        at,
        lr=1.0,
        max_iter=max_iterations,
        max_eval=_ANY_NUMBER,
        tolerance_grad=tolerance,
        tolerance_change=0.0,  # a constant loss says little about the gradient
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        value, gradient = problem.value_and_gradient(at)
        for own, slope in zip(at, gradient, strict=True):
            own.grad = slope.contiguous()
        return value

    search.step(closure)  # type: ignore[no-untyped-call]  # torch's
    slope = problem.gradient(at, statistics=True)
    largest = max(torch.stack([g.abs().max() for g in slope if g.numel()]).tolist())
    return Minimum([value.detach() for value in at], largest)


def linearized(
    problem: Subproblem, at: Tensors, r: float, over: tuple[Tensor, Tensor] | None = None
) -> Tensors:
    """One step on the subproblem with f replaced by its linear part at x, and a proximal term r/2 ||. - x||^2.

    Its minimizer is  x - (grad f(x) + u + rho (x - y)) / (r + rho).  At x = y with r = 0 that is ghaemi2022 Eq. 4.5.
    Running statistics of the learner are updated.
    """
    gradient = problem.gradient(at, statistics=True, over=over)
    return list(torch._foreach_sub(at, gradient, alpha=1 / (r + problem.rho)))


def _dot(a: Tensors, b: Tensors) -> BatchMean:
    dots = [x.flatten().double() @ y.flatten().double() for x, y in zip(a, b, strict=True)]
    return BatchMean([(1.0, torch.stack(dots).sum())])
