"""Mime and MimeLite: Karimireddy et al. 2020 (arXiv 2008.03606), Algorithm 1."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field as SettingField
from torch import Tensor

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.full_gradients import (
    FULL_GRADIENT,
    OP,
    Gradient,
    expected,
    mean_gradient,
    refuse_corrected,
)
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Answers, Ask, ClientId, FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.schema import AskedField, Field, Schema, TreeField
from fedlens.core.tree import Tree, TreeSpec, map_tree
from fedlens.core.wire.asked_fields import GroupField
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Tensors, Traits
from fedlens.local.settings import LocalSettings

MIME, LITE = "mime", "mimelite"
STATISTICS = "statistics"  # s, in the payload and in the server's state
CONTROL = "control"  # c, likewise
FULL = "full_gradient"  # the field of MimeLite's replies

BaseOptimizer = Annotated[
    Literal["sgd", "momentum", "adam", "adagrad"],
    SettingField(description="the optimizer whose statistics the server keeps"),
]
Beta = Annotated[
    float | None,
    SettingField(ge=0, lt=1, description="decay rate of the momentum; by default 0.9 (momentum, adam)"),
]
Beta2 = Annotated[
    float | None,
    SettingField(ge=0, lt=1, description="decay rate of the squared gradients; by default 0.99 (adam)"),
]
Eps = Annotated[
    float | None,
    SettingField(gt=0, allow_inf_nan=False, description="added to sqrt(v); by default 0.001 (adam, adagrad)"),
]
FirstV = Annotated[
    float | None,
    SettingField(
        ge=0, allow_inf_nan=False, description="v in the first round; by default eps^2 (adam, adagrad)"
    ),
]

# What each has, with its usual value; v0's depends on eps.
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "sgd": {},
    "momentum": {"beta": 0.9},
    "adam": {"beta": 0.9, "beta2": 0.99, "eps": 1e-3, "v0": 0.0},
    "adagrad": {"eps": 1e-3, "v0": 0.0},
}
STATISTICS_OF: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("m",),
    "adam": ("m", "v"),
    "adagrad": ("v",),
}

Statistics = Mapping[str, Tree]
Scale = float | Tensors


def mime(
    parts: Parts,
    *,
    optimizer: BaseOptimizer = "momentum",
    beta: Beta = None,
    beta2: Beta2 = None,
    eps: Eps = None,
    v0: FirstV = None,
    lr: Rate = 1.0,
) -> Averaging:
    """Mime: clients take the steps of one optimizer whose statistics the server keeps, along corrected gradients.

    Fixes: A momentum or Adam at each client follows that client's data; one at the server sees the clients'
        drift and not their gradients. Here the server makes the statistics `s` of full gradients at the
        global model, and clients use them unchanged; a control variate `c` takes each client's drift out of
        its steps.

    Equation:
        first:     c = 1/|S| sum_{i in S} grad f_i(x), over all their data           (Algorithm 1; Mime)
        client i:  y <- x, then K times, with one batch for both gradients:
                   g <- grad f_i(y; batch) - grad f_i(x; batch) + c
                   y <- y - eta U(g; s)
        server:    x <- x - lr 1/|S| sum_{i in S} (x - y_i)                          (lr = 1 there)
                   s <- V(c, s)
        sgd:       U = g                                                             (no statistics)
        momentum:  U = (1 - beta) g + beta m;   V: m <- (1 - beta) g + beta m        (m = 0 at first)
        adam:      U = ((1 - beta) g + beta m) / (sqrt(v) + eps);  V: m as above,
                   v <- (1 - beta2) g^2 + beta2 v                                    (v = v0 at first)
        adagrad:   U = g / (sqrt(v) + eps);     V: v <- v + g^2                      (v = v0 at first)

    Source: Karimireddy et al. 2020 (arXiv 2008.03606), Algorithm 1 and its table of base optimizers. Adam has
        no bias correction there. `adagrad` is the same construction for one more optimizer.

    Weighting: Uniform for the models and `c`; by examples, both, with `aggregate.weighting = "examples"`.

    State: At the server the statistics, in copies of the trainable weights: none with sgd, one with momentum
        and adagrad, two with adam.

    Sent: First the model down and a gradient up, then the model, `c` and the statistics down and the update
        up. With momentum four models down and two up, for FedAvg's one each.

    Composes: Any `[select]`, `[aggregate]` and `[server]`, whose momentum comes on top. `[client]` rules come
        after U: a proximal term, `local.weight_decay` and `local.clip_norm` act on the step and not on the
        statistics; what `contrastive` adds to the loss is in `U`, uncorrected. Refused: `local.momentum` and
        a local Adam, since the statistics are the server's; `control-variate` and `dynamic`, which correct
        the same drift. With FedIR gradients are of its weighted loss. With `local.examples` (FedVC) each
        exchange draws its own examples.

    Ranges:
        optimizer: momentum. sgd is variance-reduced FedAvg (SVRG with all clients). adam where gradients of
            parts of the model differ much in size.
        beta: 0.9; 0 leaves the memory out. Refused with sgd and adagrad.
        beta2: 0.99.
        eps: 0.001. Larger is nearer to plain momentum, and safer in the first rounds.
        v0: `eps^2`. With 0 the first round's step is `1 / eps` times the gradient.
        lr: 1.
        local.lr: momentum, sgd: as FedAvg's, since U is as long as a gradient. adam, adagrad: 0.001 to 0.01.
        local.epochs: 1 to 10. A step takes two gradients, and a round one more pass: 3 times FedAvg's
            gradients at one epoch, 2.1 times at ten. `batches_max` counts them.

    Try: algorithm.beta=0.5 local.epochs=2

    Not when: Time or traffic counts: with one epoch a round takes 3 times as long as FedAvg's. MimeLite saves
        a gradient a step, and its paper finds it about as good. With one step a round there is no drift, and
        FedAvgM does the same.

    Tests: tests/identity/test_mime.py

    Example:
        >>> context = LocalContext(["w"], [torch.tensor([0.0])], {}, {}, lr=0.1, steps=1)
        >>> context.payload = {"statistics": {"m": {"w": torch.tensor([4.0])}}, "control": {"w": torch.tensor([1.0])}}
        >>> base = base_optimizer("momentum", beta=0.5)
        >>> start_mime(context, base=base)
        >>> context.at_anchor = [torch.tensor([2.0])]
        >>> mime_step([torch.tensor([3.0])], [], context)  # g = 3 - 2 + 1; 0.5 g + 0.5 m
        [tensor([3.])]
    """
    base = base_optimizer(optimizer, beta=beta, beta2=beta2, eps=eps, v0=v0)
    refuse_corrected(parts, "Mime")
    aggregate = parts.aggregate or Mean("uniform")
    rule = ClientRule(
        name=MIME,
        start=partial(start_mime, base=base),
        grad=mime_step,
        server_rules={
            MIME: ServerRule(
                init=partial(_first, base=base),
                shared=dict,
                takes=partial(_takes, base=base, control=True),
                asks={OP: "shared"},
                prepare=partial(control, expect=expected(parts, aggregate.weighting)),
                after=partial(_mime_after, base=base),
                follows_device=True,
            )
        },
        ops={OP: Gradient},
        check=partial(refuse_local_statistics, title="Mime"),
        traits=Traits(
            stackable=True, anchored=True, all_weights=True, full_gradients=True, discloses=(FULL_GRADIENT,)
        ),
    )
    return averaging(parts, client=rule, aggregate=aggregate, server=ServerSGD(lr))


def mimelite(
    parts: Parts,
    *,
    optimizer: BaseOptimizer = "momentum",
    beta: Beta = None,
    beta2: Beta2 = None,
    eps: Eps = None,
    v0: FirstV = None,
    lr: Rate = 1.0,
) -> Averaging:
    """MimeLite: clients take the steps of one optimizer whose statistics the server keeps.

    It is Mime without the control variate.

    Fixes: As in [Mime](mime.md), the server makes the statistics `s` of full gradients at the global model,
        and clients use them unchanged: every step contains the past of all clients.

    Equation:
        client i:  y <- x, then K times  y <- y - eta U(grad f_i(y; batch); s)       (Algorithm 1; MimeLite)
                   sends y_i, and grad f_i(x) over all its data
        server:    x <- x - lr 1/|S| sum_{i in S} (x - y_i)                          (lr = 1 there)
                   s <- V(1/|S| sum_{i in S} grad f_i(x), s)
        sgd:       U = g                                                             (no statistics)
        momentum:  U = (1 - beta) g + beta m;   V: m <- (1 - beta) g + beta m        (m = 0 at first)
        adam:      U = ((1 - beta) g + beta m) / (sqrt(v) + eps);  V: m as above,
                   v <- (1 - beta2) g^2 + beta2 v                                    (v = v0 at first)
        adagrad:   U = g / (sqrt(v) + eps);     V: v <- v + g^2                      (v = v0 at first)

    Source: Karimireddy et al. 2020 (arXiv 2008.03606), Algorithm 1 and its table of base optimizers; Adam and
        `adagrad` as in Mime.

    Weighting: Uniform for the models and the gradients; by examples, both, with
        `aggregate.weighting = "examples"`.

    State: At the server the statistics, in copies of the trainable weights: none with sgd, one with momentum
        and adagrad, two with adam.

    Sent: The model and the statistics down; the update and the gradient up. With momentum twice FedAvg's,
        both ways. With sgd, what FedAvg sends.

    Composes: As for [Mime](mime.md). `control-variate` and `dynamic` are refused, since they would measure
        the drift on steps that U has modified.

    Ranges:
        optimizer: momentum. adam where gradients of parts of the model differ much in size. sgd is FedAvg
            with uniform weights, bit for bit.
        beta: 0.9; 0 leaves the memory out. Refused with sgd and adagrad.
        beta2: 0.99.
        eps: 0.001. Larger is nearer to plain momentum, and safer in the first rounds.
        v0: `eps^2`. With 0 the first round's step is `1 / eps` times the gradient.
        lr: 1.
        local.lr: momentum: as FedAvg's, since U is as long as a gradient. adam, adagrad: 0.001 to 0.01.
        local.epochs: 1 to 10. A round takes one more pass over the data: twice FedAvg's gradients at one
            epoch, 1.1 times at ten. `batches_max` counts them.

    Try: algorithm.beta=0.5 local.epochs=2

    Not when: Clients' data differ so much that their steps part within a round: momentum holds them together
        only in part, and Mime or SCAFFOLD correct it. With one step a round FedAvgM does the same.

    Tests: tests/identity/test_mime.py

    Example:
        >>> base = base_optimizer("adam", beta=0.5, eps=1.0)
        >>> s = {"m": [torch.tensor([4.0])], "v": [torch.tensor([9.0])]}
        >>> along([torch.tensor([2.0])], *direction(base, s))  # (0.5 g + 0.5 m) / (sqrt(9) + 1)
        [tensor([0.7500])]
    """
    base = base_optimizer(optimizer, beta=beta, beta2=beta2, eps=eps, v0=v0)
    refuse_corrected(parts, "MimeLite")
    check = partial(refuse_local_statistics, title="MimeLite")
    rule = ClientRule(name=LITE, check=check, traits=Traits(stackable=True))
    if base.statistics:
        rule = ClientRule(
            name=LITE,
            start=partial(start_lite, base=base),
            grad=lite_step,
            finish=_finish,
            expect=_expect,
            fields={FULL: "mean"},
            traits=Traits(stackable=True, all_weights=True, full_gradients=True, discloses=(FULL_GRADIENT,)),
            server_rules={
                LITE: ServerRule(
                    init=partial(_first, base=base),
                    shared=dict,
                    takes=partial(_takes, base=base, control=False),
                    after=partial(_lite_after, base=base),
                    follows_device=True,
                )
            },
            check=check,
        )
    return averaging(parts, client=rule, aggregate=Mean("uniform"), server=ServerSGD(lr))


_TITLES = {"adam": "Adam", "adamw": "Adam"}


def refuse_local_statistics(local: LocalSettings, title: str) -> None:
    """Raises `ConfigError` where the local optimizer has statistics of its own."""
    if local.optimizer == "lars":
        raise ConfigError(
            f"{title} corrects plain gradient steps, and LARS scales the steps of each layer",
            where="local.optimizer",
            hint="set local.optimizer = 'sgd'",
        )
    adam = local.optimizer != "sgd"
    if adam or local.momentum:
        raise ConfigError(
            f"{title} keeps the optimizer's statistics at the server, and a client's own "
            + (_TITLES[local.optimizer] if adam else "momentum")
            + " would be a second one on top of it, fed by that client's drift",
            where="local.optimizer" if adam else "local.momentum",
            hint=f"set algorithm.optimizer = '{'adam' if adam else 'momentum'}' and leave plain SGD in [local]",
        )


# -- at the client -------------------------------------------------------------------------------------------


def _sent(context: LocalContext) -> dict[str, Tensors]:
    return {name: context.listed(tree) for name, tree in context.payload[STATISTICS].items()}


def start_mime(context: LocalContext, *, base: Base) -> None:
    """U is linear in g: U(g - g_x + c; s) = scale (g - g_x) + U(c; s), and U(c; s) is the same in every step."""
    scale, shift = direction(base, _sent(context))
    context.saved[MIME] = scale, along(context.listed(context.payload[CONTROL]), scale, shift)


def mime_step(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    """U(grad f_i(y; batch) - grad f_i(x; batch) + c; s)."""
    scale, shift = context.saved[MIME]
    return along(list(torch._foreach_sub(gradients, context.at_anchor)), scale, shift)


def start_lite(context: LocalContext, *, base: Base) -> None:
    """The statistics, and grad f_i(x) over all the client's data."""
    context.saved[LITE] = direction(base, _sent(context))
    context.saved[FULL], _ = context.problem.gradient()


def lite_step(gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
    """U(grad f_i(y; batch); s)."""
    return along(gradients, *context.saved[LITE])


def _finish(parameters: Tensors, context: LocalContext) -> tuple[Mapping[str, Any], Payload | None]:
    return {FULL: context.tree(context.saved[FULL])}, None


def _expect(spec: TreeSpec) -> Mapping[str, Field]:
    return {FULL: TreeField.weights(spec)}


# -- at the server -------------------------------------------------------------------------------------------


def _first(weights: Tree, federation: FederationInfo, *, base: Base) -> Payload:
    return {STATISTICS: first_statistics(base, weights)}


def _takes(
    spec: TreeSpec, federation: FederationInfo, *, base: Base, control: bool
) -> Mapping[str, AskedField]:
    weights = TreeField.weights(spec)
    statistics = {STATISTICS: GroupField(dict.fromkeys(base.statistics, weights))}
    return {**statistics, CONTROL: weights} if control else statistics


def control(
    state: Payload,
    shared: Payload,
    cohort: Sequence[ClientId],
    ctx: RoundContext,
    *,
    expect: Schema,
) -> Generator[Ask, Answers, Payload | None]:
    """c, from those of the cohort that reply. A client that does not may still train: c is not its own."""
    c = yield from mean_gradient(shared, cohort, expect, ctx)
    return None if c is None else {STATISTICS: state[STATISTICS], CONTROL: c}


def _mime_after(state: Payload, update: Update, ctx: RoundContext, *, base: Base) -> tuple[Payload, Update]:
    return {STATISTICS: tracked(base, state[CONTROL], state[STATISTICS])}, update


def _lite_after(state: Payload, update: Update, ctx: RoundContext, *, base: Base) -> tuple[Payload, Update]:
    return {STATISTICS: tracked(base, update.more[FULL], state[STATISTICS])}, update


# -- base optimizers, in two halves: a step U(g; s) and the tracking of statistics V(g, s) --


@dataclass(frozen=True)
class Base:
    """An optimizer and those of its settings that it has; the others are 0."""

    optimizer: str
    beta: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    v0: float = 0.0

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of its statistics: `m`, the mean of past gradients, and `v`, of their squares."""
        return STATISTICS_OF[self.optimizer]


def base_optimizer(
    optimizer: BaseOptimizer,
    *,
    beta: float | None = None,
    beta2: float | None = None,
    eps: float | None = None,
    v0: float | None = None,
) -> Base:
    """The optimizer of these settings; None is the usual value.

    Raises `ConfigError` where a setting is given that the optimizer does not have.

    >>> base_optimizer("adam", eps=0.01)
    Base(optimizer='adam', beta=0.9, beta2=0.99, eps=0.01, v0=0.0001)
    """
    has = SETTINGS[optimizer]
    every = {"beta": beta, "beta2": beta2, "eps": eps, "v0": v0}
    given = {name: value for name, value in every.items() if value is not None}
    stray = next((name for name in given if name not in has), None)
    if stray is not None:
        takers = [f"'{other}'" for other, settings in SETTINGS.items() if stray in settings]
        raise ConfigError(
            f"'{optimizer}' has no {stray}",
            where=stray,
            hint=f"leave it out, or take optimizer = {' or '.join(takers)}",
        )
    settings = {**has, **given}
    if "v0" in has and v0 is None:
        settings["v0"] = settings["eps"] ** 2
    return Base(optimizer, **settings)


def first_statistics(base: Base, weights: Tree) -> dict[str, dict[str, Tensor]]:
    """m = 0 and v = v0, in the shapes of the weights."""
    first = {"m": 0.0, "v": base.v0}
    return {
        name: map_tree(lambda w, value=first[name]: torch.full_like(w, value), weights)
        for name in base.statistics
    }


def direction(base: Base, statistics: Mapping[str, Tensors]) -> tuple[Scale, Tensors | None]:
    """U(g; s) = scale g + shift: the scale, and the shift (None is 0), which depend on s alone.

    >>> direction(base_optimizer("momentum", beta=0.75), {"m": [torch.tensor([4.0])]})
    (0.25, [tensor([3.])])
    """
    shift = list(torch._foreach_mul(statistics["m"], base.beta)) if "m" in statistics else None
    if "v" not in statistics:
        return 1 - base.beta, shift
    length = torch._foreach_sqrt(statistics["v"])
    torch._foreach_add_(length, base.eps)
    if shift is not None:
        torch._foreach_div_(shift, length)
    scale = torch._foreach_reciprocal(length)
    torch._foreach_mul_(scale, 1 - base.beta)
    return list(scale), shift


def along(gradients: Tensors, scale: Scale, shift: Tensors | None) -> Tensors:
    """scale g + shift, as new tensors."""
    scaled = torch._foreach_mul(gradients, scale)
    if shift is not None:
        torch._foreach_add_(scaled, shift)
    return list(scaled)


def tracked(base: Base, gradient: Tree, statistics: Statistics) -> dict[str, dict[str, Tensor]]:
    """V(g, s): the statistics after one more gradient.

    >>> after = tracked(base_optimizer("momentum", beta=0.75), {"w": torch.ones(1)}, {"m": {"w": torch.zeros(1)}})
    >>> after["m"]["w"]
    tensor([0.2500])
    """
    new: dict[str, dict[str, Tensor]] = {}
    if "m" in statistics:
        new["m"] = map_tree(lambda g, m: (1 - base.beta) * g + base.beta * m, gradient, statistics["m"])
    if "v" in statistics:
        keep, add = (1.0, 1.0) if base.optimizer == "adagrad" else (base.beta2, 1 - base.beta2)
        new["v"] = map_tree(lambda g, v: add * g.square() + keep * v, gradient, statistics["v"])
    return new
