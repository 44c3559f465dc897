"""Optimizers in two halves, a step U(g; s) and the tracking of statistics V(g, s): what Mime takes apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedlens.core.errors import ConfigError
from fedlens.core.tree import Tree, map_tree
from fedlens.local.rules import Tensors

BaseOptimizer = Annotated[
    Literal["sgd", "momentum", "adam", "adagrad"],
    Field(description="the optimizer whose statistics the server keeps"),
]
Beta = Annotated[
    float | None, Field(ge=0, lt=1, description="memory of the momentum; unset: 0.9 (momentum, adam)")
]
Beta2 = Annotated[
    float | None, Field(ge=0, lt=1, description="memory of the squared gradients; unset: 0.99 (adam)")
]
Eps = Annotated[
    float | None,
    Field(gt=0, allow_inf_nan=False, description="added to sqrt(v); unset: 0.001 (adam, adagrad)"),
]
FirstV = Annotated[
    float | None,
    Field(ge=0, allow_inf_nan=False, description="v in the first round; unset: eps^2 (adam, adagrad)"),
]

# What each has, with its usual value; v0's depends on eps.
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "sgd": {},
    "momentum": {"beta": 0.9},
    "adam": {"beta": 0.9, "beta2": 0.99, "eps": 1e-3, "v0": 0.0},
    "adagrad": {"eps": 1e-3, "v0": 0.0},
}
STATISTICS: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("m",),
    "adam": ("m", "v"),
    "adagrad": ("v",),
}

Statistics = Mapping[str, Tree]
Scale = float | Tensors


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
        return STATISTICS[self.optimizer]


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
