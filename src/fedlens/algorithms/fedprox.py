"""FedProx: Li et al. 2020 (arXiv 1812.06127); ghaemi2022 Algorithm 2."""

from __future__ import annotations

from fedlens.aggregate.server import Plain, Rate
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.local.rules import Mu, proximal


def fedprox(parts: Parts, *, mu: Mu = 0.01, lr: Rate = 1.0) -> Averaging:
    """Clients minimize F_k(w) + mu/2 ||w - w^t||^2; selection and weights are FedAvg's.

    Its gamma-inexact clients, which do less work than asked, are `local.stragglers`.
    """
    return averaging(parts, client=proximal(mu=mu), server=Plain(lr))
