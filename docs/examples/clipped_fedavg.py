"""FedAvg whose clients may not move the model further than a given distance in one round."""

from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from fedlens.parts import Averaging, Parts, averaging
from fedlens.rules import ClientRule, LocalContext, Tensors, Traits


def clipped_fedavg(
    parts: Parts, *, norm: Annotated[float, Field(gt=0, description="longest update of a client")] = 1.0
) -> Averaging:
    """Delta_k <- Delta_k min(1, norm / ||Delta_k||) at each client; then FedAvg."""
    rule = ClientRule(
        name="clipped", finish=partial(clip, norm=norm), traits=Traits(replaces_update=True, stackable=True)
    )
    return averaging(parts, client=rule)


def clip(
    parameters: Tensors, context: LocalContext, *, norm: float
) -> tuple[dict[str, dict[str, torch.Tensor]], None]:
    """What a client sends back after its training, and its new state: none."""
    update = torch._foreach_sub(context.anchor, parameters)
    length = torch.linalg.vector_norm(torch.cat([leaf.flatten() for leaf in update]))
    scale = torch.clamp(norm / length, max=1.0)
    return {"update": {name: leaf * scale for name, leaf in zip(context.names, update, strict=True)}}, None
