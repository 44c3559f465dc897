"""The client's part of ADMM: its dual variable, solvers and modified steps (ghaemi2022 section 4.3).

With w_i the client's weight in the objective sum_i w_i f_i, the dual variable pi_i and the penalty sigma_i of the paper
are divided by it here: u_i = pi_i / w_i, rho_i = sigma_i / w_i. A client sends z_i = x_i + u_i / rho_i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Payload
from fedlens.core.schema import Bound, NumberField
from fedlens.core.schema import Field as SchemaField
from fedlens.core.tree import TreeSpec
from fedlens.local.rules import ClientRule, LocalContext, Solved, Tensors, Traits
from fedlens.local.settings import LocalSettings
from fedlens.local.solvers import Subproblem, linearized, minimize


@dataclass(frozen=True)
class DualVariables:
    """The variables of a client: their penalty, and which of them the client keeps.

    Attributes:
        sigma: rho_i if sigma_i is proportional to w_i; None is 1 / lr, the gamma of Eq. 4.5.
        mean_size: the mean number of examples, if sigma_i is the same for all clients and w_i is by examples.
        least_size: the smallest number of examples; this client has the largest rho_i.
        last: whether the server's mean keeps the z_i that the client sent last.
        primal: whether the client keeps x_i.
        trained: whether local training replaces the gradient step of Eq. 4.5.
    """

    sigma: float | None
    mean_size: float | None = None
    least_size: float = 1.0
    last: bool = False
    primal: bool = False
    trained: bool = False

    def rho(self, context: LocalContext) -> float:
        """sigma_i / w_i."""
        sigma = 1 / context.lr if self.sigma is None else self.sigma
        return sigma if self.mean_size is None else sigma * self.mean_size / len(context.problem.data)

    @property
    def steepest(self) -> float:
        """The largest sigma_i / w_i of any client; 0 if it is not a setting."""
        sigma = self.sigma or 0.0
        return sigma if self.mean_size is None else sigma * self.mean_size / self.least_size


def _start(context: LocalContext, variables: DualVariables) -> None:
    before = context.state.get("dual")
    context.saved["dual"] = (
        context.listed(before) if before else [torch.zeros_like(w) for w in context.anchor]
    )
    context.saved["rho"] = variables.rho(context)


def _start_steps(context: LocalContext, variables: DualVariables) -> None:
    _start(context, variables)
    # u + rho (x - y) = (u - rho y) + rho x; the first term is the same in all steps.
    context.saved["pull"] = torch._foreach_sub(
        context.saved["dual"], context.anchor, alpha=context.saved["rho"]
    )
    context.proximal += context.saved["rho"] - variables.steepest  # the traits have the steepest


def _grad(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    """g + u + rho (x - y)."""
    total = list(torch._foreach_add(gradients, context.saved["pull"]))
    torch._foreach_add_(total, parameters, alpha=context.saved["rho"])
    return total


def _finish(
    parameters: Tensors, context: LocalContext, variables: DualVariables
) -> tuple[Mapping[str, Any], Payload]:
    """The last dual step of local training, and the reply: z_i relative to y, or to the z_i sent last."""
    rho, dual, y = context.saved["rho"], context.saved["dual"], context.anchor
    x = list(torch._foreach_sub(parameters, dual, alpha=1 / rho)) if variables.trained else parameters
    new = torch._foreach_add(dual, torch._foreach_sub(x, y), alpha=rho)  # Eq. 3.3, 4.6
    z = torch._foreach_add(x, new, alpha=1 / rho)
    state: dict[str, Any] = {"dual": context.tree(new)}
    more: dict[str, Any] = {}
    if variables.primal:
        state["primal"] = context.tree([value.clone() for value in x])
    if variables.last:
        before = context.state.get("sent")
        y = context.listed(before) if before else y
        more["fresh"] = 0.0 if before else 1.0
        state["sent"] = context.tree(z)
    if variables.mean_size is not None:
        more["weight"] = 1.0
    return {"update": context.tree(torch._foreach_sub(y, z)), **more}, state


def _expect(spec: TreeSpec, variables: DualVariables) -> Mapping[str, SchemaField]:
    fields: dict[str, SchemaField] = {}
    if variables.last:
        fields["fresh"] = NumberField(above=-1, most=1)
    if variables.mean_size is not None:
        fields["weight"] = NumberField(above=0, most=1)
    return fields


def _subproblem(context: LocalContext) -> Subproblem:
    decay = context.settings.weight_decay
    return Subproblem(context.problem, context.anchor, context.saved["dual"], context.saved["rho"], decay)


def _solved(context: LocalContext, problem: Subproblem, at: Tensors, **sums: float) -> Solved:
    context.saved["dual"] = problem.dual
    return Solved(at, *problem.mean_loss(), context.problem.seen, sums)


def _solve_exactly(context: LocalContext, k_0: int, tolerance: float, max_iterations: int) -> Solved:
    """Eq. 3.2, k_0 times, with Eq. 3.3 in between; `_finish` does the last dual step."""
    problem, at, unsolved = _subproblem(context), context.anchor, 0
    for local in range(k_0):
        if local:
            problem.ascend(at)
        at, slope = minimize(problem, at, tolerance, max_iterations)
        unsolved += slope > tolerance
    return _solved(context, problem, at, unsolved=float(unsolved > 0))


def _solve_linearized(context: LocalContext, k_0: int, r: float, minibatches: bool) -> Solved:
    """The linearized step, k_0 times, with Eq. 3.3 in between; starts from x_i if it was kept."""
    before = context.state.get("primal")
    problem, at = _subproblem(context), context.listed(before) if before else context.anchor
    batches = context.problem.batches(k_0) if minibatches else None
    for local in range(k_0):
        if local:
            problem.ascend(at)
        at = linearized(problem, at, r, next(batches) if batches else None)
    return _solved(context, problem, at)


def exact(variables: DualVariables, k_0: int, tolerance: float, max_iterations: int) -> ClientRule:
    """k_0 times: solves the subproblem to a tolerance (Eq. 3.2), then the dual step (Eq. 3.3)."""
    solve = partial(_solve_exactly, k_0=k_0, tolerance=tolerance, max_iterations=max_iterations)
    check = partial(_refuse_steps, uses_lr=False)
    unsolved = Bound(0, 1, integer=True)  # whether the solver stopped before its tolerance
    return replace(
        _rule(variables, solve=solve, check=check, full_gradients=True), metrics={"unsolved": unsolved}
    )


def linear(variables: DualVariables, k_0: int, r: float, minibatches: bool) -> ClientRule:
    """k_0 times: one gradient and a step in closed form, then the dual step."""
    solve = partial(_solve_linearized, k_0=k_0, r=r, minibatches=minibatches)
    check = partial(_refuse_steps, uses_lr=variables.sigma is None)
    return _rule(variables, solve=solve, check=check, full_gradients=not minibatches)


def stepping(variables: DualVariables) -> ClientRule:
    """Local training on the subproblem, or instead of the gradient step of Eq. 4.5; then the dual step."""
    if variables.trained:
        return _rule(variables, check=_refuse_scaled if variables.sigma is None else None)
    start = partial(_start_steps, variables=variables)
    rule = _rule(variables)
    traits = replace(rule.traits, proximal=variables.steepest)
    return replace(rule, start=start, grad=_grad, traits=traits)


def _rule(
    variables: DualVariables,
    solve: Callable[[LocalContext], Solved] | None = None,
    check: Callable[[LocalSettings], None] | None = None,
    full_gradients: bool = False,
) -> ClientRule:
    traits = Traits(
        stackable=True,
        replaces_update=True,
        corrects=True,
        all_weights=True,
        invariant=variables.last,
        full_gradients=full_gradients,
    )
    return ClientRule(
        name="dual",
        start=partial(_start, variables=variables),
        solve=solve,
        finish=partial(_finish, variables=variables),
        expect=partial(_expect, variables=variables),
        check=check,
        traits=traits,
    )


def _refuse_scaled(local: LocalSettings) -> None:
    """Raises `ConfigError` if the learning rate, which is gamma, is not the same for all leaves."""
    if local.lr_scale:
        raise ConfigError(
            "local.lr stands for the gamma of Eq. 4.5 and 4.6, which is one number for all leaves",
            where="local.lr_scale",
            hint="remove it",
        )


def _refuse_steps(local: LocalSettings, uses_lr: bool) -> None:
    """Raises `ConfigError` for settings of local steps, because a solver takes none."""
    neutral: dict[str, tuple[bool, str]] = {
        "optimizer": (local.optimizer == "sgd", "set it to 'sgd'"),
        "momentum": (local.momentum == 0, "set it to 0"),
        "epochs": (local.epochs in (None, 1), "set it to 1"),
        "steps": (local.steps is None, "remove it"),
        "clip_norm": (local.clip_norm is None, "remove it"),
        "stragglers": (local.stragglers == 0, "set it to 0"),
        "lr_decay": (local.lr_decay == 1 or uses_lr, "set it to 1"),
        "lr_schedule": (local.lr_schedule == "constant" or uses_lr, "set it to 'constant'"),
        "lr_warmup": (local.lr_warmup == 0 or uses_lr, "set it to 0"),
        "lr_change": (local.lr_change == "round", "set it to 'round'"),
        "lr_scale": (not local.lr_scale, "remove it"),
    }
    for name, (does_nothing, remedy) in neutral.items():
        if not does_nothing:
            raise ConfigError(
                f"the solver of the client's subproblem takes no local steps, so local.{name} has no effect",
                where=f"local.{name}",
                hint=f"{remedy}, as in the recipe digits-admm; or train locally: 'admm' with solver = 'sgd', 'liadmm' "
                "with gradient = 'training'",
            )
