"""FedAvgM, FedAvg with server momentum: hsu2019 section 4.2."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedlens.aggregate.server_steps import Rate
from fedlens.aggregate.server_steps import momentum as server_momentum
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.registry import Feeds


def fedavgm(
    parts: Parts,
    *,
    lr: Rate = 1.0,
    momentum: Annotated[
        float, Field(ge=0, lt=1, description="beta, 0.7 to 0.997 in Hsu et al. 2019"), Feeds("server")
    ] = 0.9,
    nesterov: Annotated[
        bool, Field(description="Nesterov's momentum, as in Hsu et al. 2019"), Feeds("server")
    ] = False,
) -> Averaging:
    """FedAvgM: the server takes the averaged update with momentum.

    Fixes: On skewed clients each round's average points where this round's few clients do. Momentum sums up
        rounds, and their disagreements cancel.

    Equation:
        clients:   as in FedAvg;  Delta w = sum_k (n_k / n) Delta w_k
        server:    v <- beta v + Delta w                                      (hsu2019 section 4.2)
                   w <- w - lr v                                              (Hsu et al. 2020, section 5.1)
        nesterov:  w <- w - lr (Delta w + beta v),  v being the new one

    Source: hsu2019 section 4.2 (arXiv 1909.06335), hsu2020 section 5.1 (arXiv 2003.08082).

    Weighting: By examples.

    State: At the server `v`, one more copy of the trainable weights. Running statistics are averaged, without
        momentum.

    Sent: As FedAvg.

    Composes: Any `[select]`, `[client]` and `[aggregate]`. `server.name = "momentum"` gives the same to
        another algorithm.

    Ranges:
        momentum: 0.9. Higher for fewer clients a round.
        lr: 1, as in hsu2019. Change `local.lr` instead.
        nesterov: true, as in hsu2019: [better than the plain
            one](../which-algorithm.md#what-the-evidence-says-of-each) of hsu2020 section 5.1.
        local.lr: tune the effective rate `local.lr / (1 - momentum)`: at momentum 0.9, start with a tenth of
            FedAvg's. With few clients a round good ones span only one order of magnitude (hsu2019 figure 6).

    Try: algorithm.momentum=0.7 local.lr=0.03

    Not when: There are few rounds: `v` takes about `1 / (1 - momentum)` of them to build up. A local learning
        rate tuned for FedAvg may diverge: the effective one is `1 / (1 - momentum)` times as large.

    Tests: tests/identity/test_fedavgm.py

    Example:
        >>> import torch
        >>> from fedlens.aggregate.server_steps import momentum
        >>> step, w, delta = momentum(momentum=0.5), {"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])}
        >>> w, state = step.step(w, delta, step.init(w))  # v = 1, w = -1
        >>> w, state = step.step(w, delta, state)  # v = 0.5 + 1, w = -1 - 1.5
        >>> w["w"], state["v"]["w"]
        (tensor([-2.5000]), tensor([1.5000]))
    """
    return averaging(parts, server=server_momentum(lr=lr, momentum=momentum, nesterov=nesterov))
