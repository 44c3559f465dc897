"""Adaptive server steps, a rate for every weight: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedlens.aggregate.server_steps import Rate
from fedlens.base.errors import ConfigError
from fedlens.base.registry import Feeds
from fedlens.core.protocol import Payload
from fedlens.core.tree import Tree, map_tree, zeros_like

Kind = Literal["adagrad", "adam", "yogi"]
Beta1 = Annotated[
    float, Field(ge=0, lt=1, description="beta_1, decay rate of the first moment m"), Feeds("server")
]
Beta2 = Annotated[
    float, Field(ge=0, lt=1, description="beta_2, decay rate of the second moment v"), Feeds("server")
]
Tau = Annotated[
    float,
    Field(
        ge=1e-12,
        allow_inf_nan=False,
        description="added to sqrt(v); a large tau gives plain momentum with learning rate lr / tau",
    ),
    Feeds("server"),
]
V0 = Annotated[
    float | None,
    Field(gt=0, allow_inf_nan=False, description="v before the first round, at least tau^2, its default"),
    Feeds("server"),
]
BiasCorrection = Annotated[
    bool,
    Field(description="divide m by 1 - beta_1^t and v by 1 - beta_2^t, which the paper does not do"),
    Feeds("server"),
]


@dataclass(frozen=True)
class Adaptive:
    """m <- beta_1 m + (1 - beta_1) Delta, then v by `kind`, then w <- w - lr m / (sqrt(v) + tau).

    Algorithm 2 has w + lr m / (sqrt(v) + tau), since its Delta is w_k - w^t and ours is w^t - w_k; in v the sign is
    lost. Without bias correction, as printed there. A `v0` of None is tau^2.

    >>> step, w = Adaptive("adagrad", lr=1.0, beta1=0.0, tau=1.0), {"w": torch.tensor([0.0, 0.0])}
    >>> w, state = step.step(w, {"w": torch.tensor([0.0, 15.0**0.5])}, step.init(w))
    >>> state["v"]["w"], w["w"]  # v = 1 + 0 and 1 + 15; 0 / (1 + 1) and sqrt(15) / (4 + 1)
    (tensor([ 1., 16.]), tensor([ 0.0000, -0.7746]))
    """

    follows_device: ClassVar[bool] = True
    kind: Kind
    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    v0: float | None = None
    bias_correction: bool = False

    def init(self, weights: Tree) -> Payload:
        """m = 0, v = v_0."""
        v0 = self.tau**2 if self.v0 is None else self.v0
        v = map_tree(lambda w: torch.full_like(w, v0), weights)
        return {"m": zeros_like(weights), "v": v, "steps": 0}

    def step(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        """One step."""
        steps = state["steps"] + 1
        m = map_tree(partial(_decayed, self.beta1), state["m"], update)
        v = map_tree(partial(_SECOND[self.kind], self.beta2), state["v"], update)
        rate, shrink = self.lr, 1.0
        if self.bias_correction:
            rate, shrink = self.lr / (1 - self.beta1**steps), (1 - self.beta2**steps) ** 0.5

        def moved(w: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return w.addcdiv(first, second.sqrt().div_(shrink).add_(self.tau), value=-rate)

        return map_tree(moved, weights, m, v), {"m": m, "v": v, "steps": steps}


def _decayed(beta: float, old: Tensor, new: Tensor) -> Tensor:
    return beta * old + (1 - beta) * new


def _adagrad(beta2: float, v: Tensor, delta: Tensor) -> Tensor:
    """v + Delta^2."""
    return v + delta * delta


def _adam(beta2: float, v: Tensor, delta: Tensor) -> Tensor:
    """beta_2 v + (1 - beta_2) Delta^2."""
    return _decayed(beta2, v, delta * delta)


def _yogi(beta2: float, v: Tensor, delta: Tensor) -> Tensor:
    """v - (1 - beta_2) Delta^2 sign(v - Delta^2): it moves by a share of Delta^2, however far away v is."""
    square = delta * delta
    return v - (1 - beta2) * square * torch.sign(v - square)


_SECOND: dict[Kind, Callable[[float, Tensor, Tensor], Tensor]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "yogi": _yogi,
}


def adagrad(*, lr: Rate = 0.1, beta1: Beta1 = 0.0, tau: Tau = 1e-3, v0: V0 = None) -> Adaptive:
    """FedAdagrad's server step: v <- v + Delta^2."""
    _refuse_small(v0, tau)
    return Adaptive("adagrad", lr, beta1, 0.0, tau, v0)


def adam(
    *,
    lr: Rate = 0.01,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.99,
    tau: Tau = 1e-3,
    v0: V0 = None,
    bias_correction: BiasCorrection = False,
) -> Adaptive:
    """FedAdam's server step: v <- beta_2 v + (1 - beta_2) Delta^2."""
    _refuse_small(v0, tau)
    return Adaptive("adam", lr, beta1, beta2, tau, v0, bias_correction)


def yogi(
    *,
    lr: Rate = 0.01,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.99,
    tau: Tau = 1e-3,
    v0: V0 = None,
    bias_correction: BiasCorrection = False,
) -> Adaptive:
    """FedYogi's server step: v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)."""
    _refuse_small(v0, tau)
    return Adaptive("yogi", lr, beta1, beta2, tau, v0, bias_correction)


def _refuse_small(v0: float | None, tau: float) -> None:
    # A hair of room: 0.1 squared is a little more than 0.01.
    if v0 is not None and v0 < tau**2 * (1 - 1e-9):
        raise ConfigError(
            f"v0 is {v0:g}, but must be at least tau^2 = {tau**2:g}",
            where="v0",
            hint="remove v0 (its default is tau^2), or set a smaller tau",
        )
