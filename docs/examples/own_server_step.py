"""A server step of one's own: the sign of the update, with momentum."""

from typing import Annotated

import torch
from pydantic import Field


def signed(*, lr: Annotated[float, Field(gt=0)] = 0.01, momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9):
    """m <- momentum m + (1 - momentum) Delta, w <- w - lr sign(m)."""
    return Signed(lr, momentum)


class Signed:
    """Its state is m: it is handed in and out, and never kept in the object."""

    def __init__(self, lr, momentum):
        self.lr, self.momentum = lr, momentum

    def init(self, weights):
        """The state before the first step: a mapping, {} if there is none."""
        return {"m": {name: torch.zeros_like(value) for name, value in weights.items()}}

    def step(self, weights, update, state):
        """The new weights and the new state. None of the inputs is changed."""
        m = {n: self.momentum * state["m"][n] + (1 - self.momentum) * update[n] for n in update}
        return {name: value - self.lr * m[name].sign() for name, value in weights.items()}, {"m": m}
