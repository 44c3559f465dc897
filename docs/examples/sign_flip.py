"""An attack: some clients send the opposite of their update, enlarged."""

from functools import partial
from typing import Annotated

from pydantic import Field

from fedlens.rules import ClientRule, Traits


def sign_flip(
    *,
    clients: list[int],
    scale: Annotated[float, Field(gt=0, description="factor of the reversed update")] = 1.0,
) -> ClientRule:
    """These clients (positions in the partition) send -scale Delta_k in place of Delta_k."""
    rule = partial(flip, clients=frozenset(clients), scale=scale)
    return ClientRule(name="sign-flip", finish=rule, traits=Traits(replaces_update=True))


def flip(parameters, context, *, clients, scale):
    """The fields of the reply, and what changes in the client's state: None, nothing."""
    factor = -scale if context.problem.client.id in clients else 1.0
    changes = zip(context.names, context.anchor, parameters, strict=True)
    return {"update": {name: factor * (anchor - trained) for name, anchor, trained in changes}}, None
