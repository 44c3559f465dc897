"""Client rules: how an algorithm bends local training, through three hooks that do nothing by default.

A hook is a plain function of tensors. It changes no input and does not branch on a tensor's value, so it also runs
over several clients at once. Lists of tensors are in the order of the trainable leaves, `visit.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedlens.core.protocol import Payload
from fedlens.core.registry import Entry, Registry
from fedlens.core.schema import Field as SchemaField
from fedlens.core.tree import TreeSpec

Tensors = list[Tensor]


@dataclass
class Visit:
    """One client's local training, as a hook sees it.

    Attributes:
        names: of the trainable leaves.
        anchor: the global weights that arrived, in that order.
        payload: what the server sent.
        state: the client's state as it was committed.
        labels: int64 [n], all labels of the client.
        lr: the learning rate of this round.
        steps: how many steps it takes.
    """

    names: list[str]
    anchor: Tensors
    payload: Payload
    state: Payload
    labels: Tensor
    lr: float
    steps: int


LossHook = Callable[[Tensor, Tensor, Tensor, Visit], Tensor]
GradHook = Callable[[Tensors, Tensors, Visit], Tensors]
FinishHook = Callable[[Tensors, Visit], tuple[Mapping[str, Any], Payload | None]]


@dataclass(frozen=True)
class ClientRule:
    """The hooks of one algorithm; None does nothing.

    Attributes:
        loss: (task loss, outputs, targets, visit) -> the loss to descend.
        grad: (gradients, parameters, visit) -> the gradients to step along.
        finish: (parameters after training, visit) -> (more fields for the reply, the client's new state).
        expect: spec of the model -> what those fields have to be.
    """

    loss: LossHook | None = None
    grad: GradHook | None = None
    finish: FinishHook | None = None
    expect: Callable[[TreeSpec], Mapping[str, SchemaField]] | None = None


def plain() -> ClientRule:
    """Plain local training, as in FedAvg."""
    return ClientRule()


Mu = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="weight of the proximal term; 0 is FedAvg, ghaemi2022 takes 3",
    ),
]


def proximal(*, mu: Mu = 0.01) -> ClientRule:
    """FedProx: F_k(w) + mu/2 ||w - w^t||^2 (ghaemi2022 Algorithm 2), whose gradient adds mu (w - w^t).

    >>> visit = Visit(["w"], [torch.tensor([1.0])], {}, {}, torch.tensor([]), 0.1, 1)
    >>> proximal(mu=2.0).grad([torch.tensor([0.0])], [torch.tensor([1.5])], visit)
    [tensor([1.])]
    """
    return ClientRule(grad=partial(proximal_grad, mu=mu)) if mu else ClientRule()


def proximal_grad(gradients: Tensors, parameters: Tensors, visit: Visit, *, mu: float) -> Tensors:
    """g + mu (w - w^t)."""
    return list(torch._foreach_add(gradients, torch._foreach_sub(parameters, visit.anchor), alpha=mu))


RULES = Registry(
    "client rule",
    {
        "plain": Entry("fedlens.local.rules:plain", "plain local training"),
        "proximal": Entry("fedlens.local.rules:proximal", "FedProx's proximal term"),
    },
)
