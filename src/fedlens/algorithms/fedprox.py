"""FedProx: Li et al. 2020 (arXiv 1812.06127); ghaemi2022 Algorithm 2."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedlens.aggregate.server import Plain, Rate
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.local.rules import proximal


def fedprox(
    parts: Parts,
    *,
    mu: Annotated[
        float, Field(ge=0, description="weight of the proximal term; 0 is FedAvg, ghaemi2022 takes 3")
    ] = 0.01,
    lr: Rate = 1.0,
) -> Averaging:
    """Clients minimize F_k(w) + mu/2 ||w - w^t||^2; selection and weights are FedAvg's.

    Its gamma-inexact clients, which do less work than asked, are `local.stragglers`.
    """
    return averaging(parts, client=proximal(mu=mu), server=Plain(lr))
