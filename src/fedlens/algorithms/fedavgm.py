"""FedAvgM, FedAvg with server momentum: hsu2019 section 4.2."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedlens.aggregate.server import Rate
from fedlens.aggregate.server import momentum as server_momentum
from fedlens.algorithms.averaging import Averaging, Parts, averaging


def fedavgm(
    parts: Parts,
    *,
    lr: Rate = 1.0,
    momentum: Annotated[float, Field(ge=0, lt=1, description="beta, 0.7 to 0.997 in hsu2019")] = 0.9,
    nesterov: Annotated[bool, Field(description="Nesterov's momentum, as hsu2019 uses")] = False,
) -> Averaging:
    """v <- beta v + Delta w, w <- w - lr v. hsu2019 tunes the effective rate, local lr / (1 - beta)."""
    return averaging(parts, server=server_momentum(lr=lr, momentum=momentum, nesterov=nesterov))
