"""FedRep: clients share the body of the model and keep its head. Collins et al. 2021 (arXiv 2102.07078)."""

from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from fedlens.parts import Averaging, Parts, averaging
from fedlens.rules import ClientRule


def fedrep(
    parts: Parts,
    *,
    head: Annotated[str | int, Field(description="name of the layer that stays at the client")],
    head_steps: Annotated[
        float, Field(gt=0, lt=1, description="share of the steps that train the head")
    ] = 0.5,
) -> Averaging:
    """The first local steps move the head alone, the others the body alone; only the body is sent."""
    personal = frozenset(name for name in parts.spec if name.startswith(f"{head}."))
    rule = ClientRule(name="fedrep", grad=partial(by_turns, personal=personal, share=head_steps))
    return averaging(parts, client=rule, personal=personal)


def by_turns(gradients, parameters, context, *, personal, share):
    """The gradients to step along: zero for the part that waits. Use plain SGD, whose zero gradient is no step."""
    step = context.saved.get("step", 0)
    context.saved["step"] = step + 1
    head = step < share * context.steps
    moves = [(name in personal) == head for name in context.names]
    return [g if move else torch.zeros_like(g) for g, move in zip(gradients, moves, strict=True)]
