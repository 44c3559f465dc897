"""FedDANE: Li et al. 2019 (arXiv 2001.01920), Algorithm 2."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_sampling import Select, Uniform
from fedlens.algorithms.full_gradients import (
    FULL_GRADIENT,
    OP,
    Gradient,
    expected,
    mean_gradient,
    refuse_corrected,
)
from fedlens.core.protocol import Answers, Ask, ClientId, FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.schema import Field as SchemaField
from fedlens.core.schema import Schema, TreeField
from fedlens.core.tree import TreeSpec
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Tensors, Traits, proximal_grad

NAME = "feddane"

Mu = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="weight of the proximal term; 0 leaves it out")
]
From = Annotated[
    Literal["another", "same"],
    Field(
        description="the clients whose gradients are averaged: a separate sample (Algorithm 2), or "
        "the same clients that train"
    ),
]


def feddane(parts: Parts, *, mu: Mu = 0.01, gradients_from: From = "another", lr: Rate = 1.0) -> Averaging:
    """FedDANE: clients minimize their own loss with everyone's gradient at the global model.

    A round has two exchanges: clients send the gradient over all their data, then train with the mean of
    those.

    Fixes: Under FedAvg a client goes to its own optimum. Here a linear term makes its loss fall, at the
        global model, as everyone's falls; only its curvature is its own. With all clients in both exchanges,
        nobody moves at an optimum of the whole.

    Equation:
        first:     g^t = 1/|S_t| sum_{k in S_t} grad F_k(w^t)                   (Algorithm 2)
        client k:  min_w F_k(w) + <g^t - grad F_k(w^t), w - w^t> + mu/2 ||w - w^t||^2
                                                       (Algorithm 2, line 7, inexactly; k in S'_t)
                   each step goes against
                   grad F_k(w; batch) + g^t - grad F_k(w^t) + mu (w - w^t)
        server:    w^{t+1} = w^t - lr 1/|S'_t| sum_{k in S'_t} (w^t - w_k)      (lr = 1 there)

    Source: Li et al. 2019 (arXiv 2001.01920), Algorithm 2, which draws S_t and S'_t independently; its
        authors' published code draws the same clients twice: `gradients_from = "same"`.

    Weighting: Uniform, in both exchanges; the source draws clients in proportion to their examples,
        `[select]` uniformly by default. By examples, both, with `aggregate.weighting = "examples"`.

    State: Nothing.

    Sent: First the model down and a gradient up, then the model and g^t down and the update up: three models
        down and two up for FedAvg's one each, over twice the clients unless `gradients_from = "same"`.

    Composes: Any `[select]`, `[aggregate]`, `[server]` and local optimizer. With `select.name = "all"` or
        `"fixed"` both draws are the same clients. The mu of `client.name = "proximal"` adds to this one.
        `control-variate` and `dynamic` are refused: they correct the same drift. With FedIR gradients are of
        its weighted loss. With `local.examples` (FedVC) each exchange draws its own examples.

    Ranges:
        mu: 0 to 1; larger where few clients take part, since g^t is then a poor estimate. The term is zero in
            the first step of a round.
        gradients_from: with "same" a round's corrections sum to zero over its clients (not with
            `local.examples`).
        lr: 1.
        local.epochs: few: the correction is that of the global model. A round costs one more pass in each
            exchange: about 3 times FedAvg's gradients at one epoch, 1.4 times at five. `batches_max` counts
            them.

    Try: algorithm.mu=0.1

    Not when: Few of many clients take part, or they differ much. Its own authors report that it then falls
        behind FedAvg and FedProx: one cohort's gradient says little of the next. SCAFFOLD corrects the same
        at one exchange a round.

    Tests: tests/identity/test_feddane.py

    Example:
        >>> context = LocalContext(["w"], [torch.tensor([1.0])], {}, {}, lr=0.1, steps=1)
        >>> context.saved["feddane"] = [torch.tensor([-0.5])]  # g - grad F_k
        >>> traits = Traits(proximal=2.0)
        >>> tilted([torch.tensor([2.0])], [torch.tensor([1.5])], context, traits=traits)  # 2 - 0.5 + 2 (1.5 - 1)
        [tensor([2.5000])]
    """
    refuse_corrected(parts, "FedDANE")
    aggregate = parts.aggregate or Mean("uniform")  # 1/K in both exchanges
    ask = partial(
        first_exchange,
        select=(parts.select or Uniform()) if gradients_from == "another" else None,
        expect=expected(parts, aggregate.weighting),
    )
    traits = Traits(
        stackable=True, all_weights=True, full_gradients=True, discloses=(FULL_GRADIENT,), proximal=mu
    )
    rule = ClientRule(
        name=NAME,
        start=tilt,
        grad=partial(tilted, traits=traits),
        server_rules={
            NAME: ServerRule(
                shared=_shared,
                takes=_takes,
                asks={OP: "shared"},
                prepare=ask,
                after=_after,
                follows_device=True,
            )
        },
        ops={OP: Gradient},
        traits=traits,
    )
    return averaging(parts, client=rule, aggregate=aggregate, server=ServerSGD(lr))


# -- at the client -------------------------------------------------------------------------------------------


def tilt(context: LocalContext) -> None:
    """g^t - grad F_k(w^t), by one more pass over the client's data: it need not have been asked before."""
    own, _ = context.problem.gradient()
    context.saved[NAME] = list(torch._foreach_sub(context.listed(context.payload[NAME]), own))


def tilted(gradients: Tensors, parameters: Tensors, context: LocalContext, *, traits: Traits) -> Tensors:
    """grad F_k(w; batch) + (g^t - grad F_k(w^t)) + mu (w - w^t): the gradient of line 7."""
    turned = list(torch._foreach_add(gradients, context.saved[NAME]))
    return proximal_grad(turned, parameters, context, traits=traits) if traits.proximal else turned


# -- at the server -------------------------------------------------------------------------------------------


def first_exchange(
    state: Payload,
    shared: Payload,
    cohort: Sequence[ClientId],
    ctx: RoundContext,
    *,
    select: Select | None,
    expect: Schema,
) -> Generator[Ask, Answers, Payload | None]:
    """g^t from a draw of its own by `select`, or from the cohort itself where that is None.

    The draw comes from the round's seed under another name, so it is independent of the cohort's. Clients that do not
    reply are left out of the mean; where none does, the round comes to nothing.
    """
    asked = cohort if select is None else select.cohort(replace(ctx, rng=ctx.rng.child("gradients")))
    gradient = yield from mean_gradient(shared, asked, expect, ctx)
    return None if gradient is None else {"gradient": gradient}


def _shared(state: Payload) -> Payload:
    return {NAME: state["gradient"]}


def _takes(spec: TreeSpec, federation: FederationInfo) -> Mapping[str, SchemaField]:
    return {NAME: TreeField.weights(spec)}


def _after(state: Payload, update: Update, ctx: RoundContext) -> tuple[Payload, Update]:
    return {}, update  # g^t is not kept
