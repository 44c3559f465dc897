"""SCAFFOLD: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.schema import Field as SchemaField
from fedlens.core.schema import TreeField
from fedlens.core.tree import Tree, TreeSpec, add, zeros_like
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Tensors, Traits
from fedlens.local.settings import LocalSettings

Option = Annotated[
    Literal["I", "II"],
    Field(
        description="a client's new control variate: I, its full gradient at the global model; II, "
        "the mean gradient of its steps"
    ),
]


def scaffold(parts: Parts, *, option: Option = "II", lr: Rate = 1.0) -> Averaging:
    """SCAFFOLD: control variates turn each client's steps from its own optimum towards everyone's.

    Fixes: With several local steps a client drifts to its own optimum, and FedAvg comes to rest where the
        drifts cancel, not at the optimum. Here a client knows where its own gradient points (`c_i`) and where
        everyone's does (`c`), and steps along the difference. At the optimum nobody moves.

    Equation:
        client i:  y <- x, then K times  y <- y - eta (g_i(y) - c_i + c)              (Eq. (3), line 10)
        option I:  c_i+ = grad F_i(x) over all its examples                           (Eq. (4), line 12)
        option II: c_i+ = c_i - c + (x - y) / (eta A)                                 (Eq. (4), line 12)
                   A = sum_t a_t, where x - y = eta sum_t a_t (g_t - c_i + c); the paper's K for plain SGD
        sends:     Delta_i = x - y  and  dc_i = c_i+ - c_i;  then c_i <- c_i+         (lines 13, 14)
        server:    x <- x - lr 1/|S| sum_{i in S} Delta_i                             (lines 16, 17; lr is eta_g)
                   c <- c + |S|/N 1/|S| sum_{i in S} dc_i                             (Eq. (5), lines 16, 17)
        S: the clients that replied. N: all clients that hold data. c = c_i = 0 before the first round.

    Source: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1, Eq. (3) to (5); chen2022 compares with it.

    Weighting: Uniform, the paper's objective `1/N sum_i F_i`. `aggregate.weighting = "examples"` weighs the
        models alone; `c` stays the plain mean of all `c_i`.

    State: One copy of the trainable weights, `c_i`, at each client that took part, and `c` at the server.

    Sent: The model and `c` down, the update and `dc_i` up: twice FedAvg's, both ways.

    Composes: Any `[select]` that draws no client twice, any `[aggregate]` and `[server]`.

        Local momentum works: option II then divides by `A`, the sum of the gradients' weights in the client's
        path, in place of `K`. Weight decay is part of `c_i`; a `proximal` rule's term is not. Any other
        rule's term counts as gradient in option II alone.

        Refused: `dynamic`, which corrects the same drift; and with option II Adam and `local.clip_norm`,
        whose paths are no weighted sum of gradients.

    Ranges:
        option: II, in general: it costs nothing. I takes one more pass over the client's data, is exact where
            the round began and overcorrects later steps: on skewed clients it diverges at rates at which II
            is steady. Take I for few steps, small rates, or `lr` below 1.
        lr: 1. The theory takes up to the square root of |S|, with smaller local rates.
        local.epochs: 1 to 10. The more local work, the more there is to correct.
        local.lr: as FedAvg's, or somewhat smaller: a large step makes an old `c_i` worse.

    Try: algorithm.lr=0.5 local.epochs=2

    Not when: A client takes part in few rounds: its `c_i` is then old or zero, and the correction adds noise.
        With one local step there is no drift. With large networks and heavy skew published results differ;
        compare with FedAvgM, which is cheaper.

    Tests: tests/identity/test_scaffold.py tests/seam/test_refused_scaffold.py

    Example:
        >>> from fedlens.local.settings import LocalSettings
        >>> sent = {"variate": {"w": torch.tensor([1.0])}}  # c = 1, and c_i = 3
        >>> own = {"variate": {"w": torch.tensor([3.0])}}
        >>> context = LocalContext(["w"], [torch.tensor([5.0])], sent, own, lr=0.5, steps=2)
        >>> rule = control_variate()
        >>> rule.start(context)
        >>> rule.grad([torch.tensor([4.0])], [], context)  # 4 - 3 + 1
        [tensor([2.])]
        >>> fields, state = rule.finish([torch.tensor([3.5])], context)  # after a second gradient of 3
        >>> state["variate"]["w"], fields["variate"]["w"]  # c_i+ = (4 + 3) / 2, and how it changed
        (tensor([3.5000]), tensor([0.5000]))
    """
    return averaging(
        parts,
        client=control_variate(option=option),
        aggregate=Mean("uniform"),  # lines 16 and 17: 1/|S| sum over S
        server=ServerSGD(lr),
    )


DISCLOSURE = "Each client sends the change of its control variate, a mean gradient over its own examples."


def control_variate(*, option: Option = "II") -> ClientRule:
    """SCAFFOLD's control variates as a client rule, on top of any averaging algorithm."""
    traits = Traits(
        stackable=True,
        corrects=True,
        all_weights=True,
        invariant=True,
        full_gradients=option == "I",
        discloses=(DISCLOSURE,),
    )
    return ClientRule(
        name="control-variate",
        start=partial(_start, option=option),
        grad=_corrected,
        finish=partial(_finish, option=option),
        expect=_expect,
        fields={"variate": "sum"},
        server_rules={
            "control-variate": ServerRule(
                init=_zero, shared=_shared, takes=_takes, after=_after, follows_device=True
            )
        },
        check=partial(_refuse_bent, option=option),
        traits=traits,
    )


def travel(settings: LocalSettings, lr: float, steps: int, proximal: float = 0.0) -> float:
    """sum_t a_t of x - y = lr sum_t a_t g_t: how far the steps go under a constant gradient of 1, over lr.

    The number of steps for plain SGD. Unlike `effective_steps`, FedNova's norm, it keeps the signs: a heavy momentum
    against a proximal term swings back.

    >>> travel(LocalSettings(lr=0.1), 0.1, 3), travel(LocalSettings(lr=0.1, momentum=0.5), 0.1, 3)  # 1 + 1.5 + 1.75
    (3.0, 4.25)
    """
    momentum, moved, velocity = settings.momentum, 0.0, 0.0
    for _ in range(steps):
        gradient = 1.0 - lr * proximal * moved
        velocity = momentum * velocity + gradient
        moved += gradient + momentum * velocity if settings.nesterov else velocity
    return moved


# -- the client ------------------------------------------------------------------------------------------------


def _start(context: LocalContext, option: str) -> None:
    control, own = context.listed(context.payload["variate"]), context.state.get("variate")
    if own is not None:
        control = list(torch._foreach_sub(control, context.listed(own)))
    context.saved["control"] = control  # c - c_i
    if option == "I":  # Eq. (4): the gradient of the client's objective at x, its weight decay with it
        gradient, _ = context.problem.gradient()
        decay = context.settings.weight_decay
        context.saved["variate"] = list(torch._foreach_add(gradient, context.anchor, alpha=decay))


def _corrected(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    """Eq. (3): g_i(y) - c_i + c."""
    return list(torch._foreach_add(gradients, context.saved["control"]))


def _finish(parameters: Tensors, context: LocalContext, option: str) -> tuple[Mapping[str, Any], Payload]:
    if option == "I":
        new: Tensors = context.saved["variate"]
    else:  # Eq. (4): c_i - c + (x - y) / (eta A)
        new = list(torch._foreach_sub(context.anchor, parameters))
        each = {scale: _distance(context, scale) for scale in {*context.scales} or {1.0}}
        torch._foreach_div_(new, [each[scale] for scale in context.scales] or each[1.0])
        torch._foreach_sub_(new, context.saved["control"])
    own = context.state.get("variate")
    change = new if own is None else torch._foreach_sub(new, context.listed(own))
    return {"variate": context.tree(change)}, {"variate": context.tree(new)}


def _distance(context: LocalContext, scale: float) -> float:
    """eta A of a leaf whose rate is `scale` times that of the step: how far a constant gradient of 1 moves it."""
    lr = context.lr * scale
    return lr * travel(context.settings, lr, context.steps, context.proximal)


def _expect(spec: TreeSpec) -> Mapping[str, SchemaField]:
    return {"variate": TreeField.weights(spec)}


_STEPS = {
    "local.optimizer": "the steps of adam, adamw and lars are no sum of gradients",
    "local.clip_norm": "clipped steps are no sum of gradients",
    "local.lr_change": "steps of different learning rates are no plain sum of gradients",
}


def _refuse_bent(local: LocalSettings, option: str) -> None:
    if option == "I":
        return
    what = {
        "local.optimizer": local.optimizer != "sgd",
        "local.clip_norm": local.clip_norm is not None,
        "local.lr_change": local.changes_by_step,
    }
    where = next((key for key, is_set in what.items() if is_set), None)
    if where is not None:
        raise ConfigError(
            "option II of SCAFFOLD takes a client's mean gradient from the distance it moved, and "
            + _STEPS[where],
            where=where,
            hint="take option = 'I', which computes the gradient, or plain SGD",
        )


# -- the server ------------------------------------------------------------------------------------------------


def _zero(weights: Tree, federation: FederationInfo) -> Payload:
    return {"variate": zeros_like(weights)}


def _shared(state: Payload) -> Payload:
    return {"variate": state["variate"]}


def _takes(spec: TreeSpec, federation: FederationInfo) -> Mapping[str, SchemaField]:
    return {"variate": TreeField.weights(spec)}


def _after(state: Payload, update: Update, ctx: RoundContext) -> tuple[Payload, Update]:
    """Eq. (5): c + |S|/N mean_S dc_i, where N counts every client that holds data."""
    everyone = len(ctx.federation.eligible)
    return {"variate": add(state["variate"], update.more["variate"], scale=1 / everyone)}, update
