"""Momentum that a client keeps for its next visit, in its state."""

from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from fedlens.rules import ClientRule


def kept(*, beta: Annotated[float, Field(ge=0, lt=1)] = 0.9) -> ClientRule:
    """m <- beta m + g, and a step along m."""
    return ClientRule(name="kept", start=fetch, grad=partial(blend, beta=beta), finish=keep)


def fetch(context):
    """The m of the client's last visit, or 0."""
    context.saved["m"] = context.state.get("m", [torch.zeros_like(w) for w in context.anchor])


def blend(gradients, parameters, context, *, beta):
    """The new m."""
    context.saved["m"] = [beta * m + g for m, g in zip(context.saved["m"], gradients, strict=True)]
    return context.saved["m"]


def keep(parameters, context):
    """No more fields of the reply, and m for the next visit."""
    return {}, {"m": context.saved["m"]}
