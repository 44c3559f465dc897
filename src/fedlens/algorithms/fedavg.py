"""Federated Averaging: McMahan et al. 2017 (arXiv 1602.05629); hsu2019 section 4.2, ghaemi2022 Algorithm 1."""

from __future__ import annotations

from fedlens.aggregate.server import Plain, Rate
from fedlens.algorithms.averaging import Averaging, Parts, averaging


def fedavg(parts: Parts, *, lr: Rate = 1.0) -> Averaging:
    """w <- w - lr sum_k (n_k / n) Delta w_k, over the clients that replied.

    FedSGD is the case of one full-batch step: `local.steps = 1`, `local.batch_size = "all"`.
    """
    return averaging(parts, server=Plain(lr))
