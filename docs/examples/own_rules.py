"""Client rules of one's own: two that change the gradient, one the loss, one the update that is sent."""

from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch.nn import functional

from fedlens.rules import ClientRule, Traits


def pulled(*, mu: Annotated[float, Field(ge=0, description="weight of the pull")] = 0.1) -> ClientRule:
    """Adds mu (w - w^t) to the gradient: a pull towards the global weights w^t (FedProx)."""
    return ClientRule(name="pulled", grad=partial(pull, mu=mu), traits=Traits(stackable=True))


def pull(gradients, parameters, context, *, mu):
    """The gradients to step along, in the same order."""
    return [g + mu * (w - anchor) for g, w, anchor in zip(gradients, parameters, context.anchor, strict=True)]


def smoothed(*, share: Annotated[float, Field(ge=0, lt=1)] = 0.1) -> ClientRule:
    """Label smoothing: a share of the loss is that of uniform targets."""
    return ClientRule(name="smoothed", loss=partial(smooth, share=share), traits=Traits(stackable=True))


def smooth(loss, outputs, targets, context, *, share):
    """The loss to descend: a tensor with one number."""
    return (1 - share) * loss - share * functional.log_softmax(outputs, dim=1).mean()


def jittered(*, scale: Annotated[float, Field(ge=0)] = 0.01) -> ClientRule:
    """Adds new Gaussian noise to the gradients of each step (Langevin dynamics)."""
    return ClientRule(name="jittered", start=seed_noise, grad=partial(jitter, scale=scale))


def seed_noise(context):
    """Makes the generator once: `rng.torch` returns a new generator with the same numbers at each call."""
    context.saved["noise"] = context.problem.rng.torch("noise")


def jitter(gradients, parameters, context, *, scale):
    """The gradients to step along, in the same order."""
    draw = context.saved["noise"]
    return [g + scale * torch.randn(g.shape, generator=draw).to(g) for g in gradients]


def noisy(*, scale: Annotated[float, Field(ge=0)] = 0.01) -> ClientRule:
    """Sends the update with Gaussian noise, whose random numbers are the client's own."""
    return ClientRule(name="noisy", finish=partial(blur, scale=scale), traits=Traits(replaces_update=True))


def blur(parameters, context, *, scale):
    """The fields of the reply, and what changes in the client's state: None, nothing."""
    draw = context.problem.rng.torch("noise")
    update = {}
    for name, anchor, trained in zip(context.names, context.anchor, parameters, strict=True):
        update[name] = anchor - trained + scale * torch.randn(anchor.shape, generator=draw)
    return {"update": update}, None
