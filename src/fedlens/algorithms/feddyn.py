"""FedDyn: Acar et al. 2021 (arXiv 2111.04263), Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.core.protocol import FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.schema import Field as SchemaField
from fedlens.core.schema import NumberField, TreeField
from fedlens.core.tree import Tree, TreeSpec, add, scale, zeros_like
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Tensors, Traits

Alpha = Annotated[
    float,
    Field(
        gt=0, allow_inf_nan=False, description="weight of the quadratic term; the paper takes 0.001 to 0.1"
    ),
]
Objective = Annotated[
    Literal["uniform", "examples"],
    Field(description="weight of a client in the objective: the same for all, or its number of examples"),
]


def feddyn(parts: Parts, *, alpha: Alpha = 0.1, weighting: Objective = "uniform") -> Averaging:
    """FedDyn: terms added to each client's objective move its optimum to that of all clients.

    Fixes: The optima of the clients differ, so a client that solves its own problem leaves the optimum of
        all. FedDyn learns for each client a linear term that cancels its own gradient at the common optimum.
        It gains from longer local training, where FedAvg loses.

    Equation:
        client k:  w_k = argmin_w f_k(w) - <l_k, w> + alpha_k/2 ||w - w^t||^2        (Algorithm 1)
                   each step goes against  s_k (grad f_k(w; batch) - l_k + alpha_k (w - w^t))
                   l_k <- l_k - alpha_k (w_k - w^t)                                  (Algorithm 1)
        server:    h <- h - alpha/N sum_{k in S} (w_k - w^t)                         (Algorithm 1)
                   w^{t+1} = 1/|S| sum_{k in S} w_k - h/alpha                        (Algorithm 1)
                   in updates: w^t - (mean_S Delta_k + h/alpha),  Delta_k = w^t - w_k
        uniform:   alpha_k = alpha, s_k = 1, p_k = 1                                 (the paper's)
        examples:  alpha_k = alpha / p_k, s_k = min(1, p_k), p_k = n_k / nbar
        S: the clients that replied. N: all clients that hold data, nbar their mean number of examples.
        h = l_k = 0 before the first round; after every round h = 1/N sum_k p_k l_k over all N clients.

    Source: Acar et al. 2021 (arXiv 2111.04263), Algorithm 1; chen2022 section 6.5 runs it.

    Weighting: Uniform, the paper's objective `1/N sum_k f_k`. `weighting = "examples"` takes FedAvg's,
        `sum_k (n_k / n) f_k`: the paper's method for `p_k f_k`, with `p_k = n_k / nbar`, so in effect
        `alpha_k = alpha / p_k`. Steps are then scaled by `s_k = min(1, p_k)`, which keeps the minimizer.
        Models and running statistics are still averaged uniformly.

    State: One copy of the trainable weights, `l_k`, at each client that took part, and `h` at the server.

    Sent: What FedAvg sends, as `h` follows from the mean of the updates. A further model up, `alpha Delta_k`,
        where that mean does not arrive: with an `[aggregate]` other than the uniform mean, with `[client]`
        rules that send or keep something, and where FedDyn is itself a `[client]` rule.

    Composes: Any `[select]` that draws no client twice. A `[server]` table takes `mean_S Delta_k + h/alpha`
        as its update. But `h/alpha` sums up all updates so far, like a momentum of 1: a server momentum
        overshoots unless it is small, and an adaptive server loses that vector's length. `[aggregate]` by
        examples weighs a cohort's models alone; that is not `weighting = "examples"`.

        Local momentum, Adam and clipping work: only where a client ends counts. Weight decay is part of
        `f_k`. What `[client]` rules add to the gradient is not scaled by `s_k`. `proximal` only slows the
        run. `control-variate`, which corrects the same drift, is refused.

    Ranges:
        alpha: 0.1 to 1 for few local steps. `alpha * local.lr` times the local steps should be 0.1 or more:
            below, clients end far from their minimum, and the model swings. Larger is slower and steadier.
            From `alpha * local.lr` = 2 (with momentum, a little more) the quadratic term alone diverges:
            refused.
        weighting: examples where clients differ in size and the pooled data count.
        local.epochs: 5 and more. The method assumes that a client solves its problem.
        local.lr: as FedAvg's, with some `local.lr_decay`, since noise in `w_k` goes into `l_k`.

    Try: algorithm.alpha=0.5 local.epochs=5

    Not when: Clients do few local steps, or take part in few rounds: `h` and `l_k` are then far from what
        they stand for. SCAFFOLD corrects the same drift with less to tune, and sends twice as much.

    Tests: tests/identity/test_feddyn.py

    Example:
        >>> own = {"linear": {"w": torch.tensor([3.0])}}
        >>> context = LocalContext(["w"], [torch.tensor([5.0])], {}, own, lr=0.5, steps=1)
        >>> rule = dynamic(alpha=2.0)
        >>> rule.start(context)
        >>> rule.grad([torch.tensor([4.0])], [torch.tensor([5.5])], context)  # 4 - 3 + 2 (5.5 - 5)
        [tensor([2.])]
        >>> rule.finish([torch.tensor([4.5])], context)[1]["linear"]["w"]  # 3 - 2 (4.5 - 5)
        tensor([4.])
    """
    mean = parts.aggregate in (None, Mean("uniform"))
    alone = parts.client is None or (parts.client.finish is None and not parts.client.server_rules)
    return averaging(
        parts,
        client=_rule(alpha, weighting, send=not (mean and alone)),
        aggregate=Mean("uniform"),
        server=ServerSGD(),
    )


def dynamic(*, alpha: Alpha = 0.1, weighting: Objective = "uniform") -> ClientRule:
    """FedDyn's linear and quadratic terms as a client rule, on top of any averaging algorithm.

    It does not know how the updates are averaged there, so each client sends `alpha Delta_k` by itself.
    """
    return _rule(alpha, weighting, send=True)


def _rule(alpha: float, weighting: str, send: bool) -> ClientRule:
    weighted = weighting == "examples"
    traits = Traits(stackable=True, proximal=alpha, corrects=True, all_weights=True, invariant=True)
    return ClientRule(
        name="dynamic",
        start=partial(_start, traits=traits),
        grad=dynamic_grad,
        finish=partial(_finish, traits=traits, send=send),
        expect=_expect if send else None,
        fields={"linear": "sum"} if send else {},
        server_rules={
            "dynamic": ServerRule(
                init=_zero,
                shared=_mean_examples if weighted else None,
                takes=_takes if weighted else None,
                after=partial(_after, traits=traits),
                follows_device=True,
            )
        },
        traits=traits,
    )


# -- the client ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Terms:
    """What a client's steps need: alpha_k, s_k, and w^t + l_k / alpha_k, the centre of both terms as one square."""

    alpha: float
    scale: float
    centre: Tensors


def _start(context: LocalContext, traits: Traits) -> None:
    alpha, share = traits.proximal, 1.0
    if "mean_examples" in context.payload:
        share = len(context.problem.client.data) / context.payload["mean_examples"]
    own, centre = context.state.get("linear"), context.anchor
    if own is not None:
        centre = list(torch._foreach_add(centre, context.listed(own), alpha=share / alpha))
    terms = context.saved["dynamic"] = _Terms(alpha / share, min(1.0, share), centre)
    context.proximal += terms.scale * terms.alpha - alpha


def dynamic_grad(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    """s_k (g - l_k + alpha_k (w - w^t)), the gradient of what client k minimizes, scaled."""
    terms: _Terms = context.saved["dynamic"]
    if terms.scale != 1:
        gradients = list(torch._foreach_mul(gradients, terms.scale))
        if context.settings.weight_decay:  # the optimizer adds the whole of it, and it is part of f_k
            decay = (terms.scale - 1) * context.settings.weight_decay
            torch._foreach_add_(gradients, parameters, alpha=decay)
    away = torch._foreach_sub(parameters, terms.centre)
    return list(torch._foreach_add(gradients, away, alpha=terms.scale * terms.alpha))


def _finish(
    parameters: Tensors, context: LocalContext, traits: Traits, send: bool
) -> tuple[Mapping[str, Any], Payload]:
    terms: _Terms = context.saved["dynamic"]
    update = torch._foreach_sub(context.anchor, parameters)
    change = torch._foreach_mul(update, terms.alpha)  # - alpha_k (w_k - w^t)
    own = context.state.get("linear")
    linear = change if own is None else torch._foreach_add(context.listed(own), change)
    # p_k times the change of l_k is alpha Delta_k at every client.
    sent = {"linear": context.tree(torch._foreach_mul(update, traits.proximal))} if send else {}
    return sent, {"linear": context.tree(linear)}


def _expect(spec: TreeSpec) -> Mapping[str, SchemaField]:
    return {"linear": TreeField.weights(spec)}


# -- the server ------------------------------------------------------------------------------------------------


def _zero(weights: Tree, federation: FederationInfo) -> Payload:
    sizes = federation.sizes[federation.eligible]
    return {"linear": zeros_like(weights), "mean_examples": float(sizes.mean()) if len(sizes) else 1.0}


def _mean_examples(state: Payload) -> Payload:
    return {"mean_examples": state["mean_examples"]}


def _takes(spec: TreeSpec, federation: FederationInfo) -> Mapping[str, SchemaField]:
    return {"mean_examples": NumberField(above=0, most=federation.largest)}


def _after(state: Payload, update: Update, ctx: RoundContext, traits: Traits) -> tuple[Payload, Update]:
    """h <- h + alpha/N sum_S Delta_k; the server step's update is mean_S Delta_k + h/alpha."""
    alpha = traits.proximal
    change = update.more.get("linear")
    if change is None:  # the update is the uniform mean
        change = scale(update.update, alpha * update.replies)
    h = add(state["linear"], change, scale=1 / len(ctx.federation.eligible))
    return {**state, "linear": h}, replace(update, update=add(update.update, h, scale=1 / alpha))
