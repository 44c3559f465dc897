"""Federated Averaging: McMahan et al. 2017 (arXiv 1602.05629); hsu2019 section 4.2, ghaemi2022 Algorithm 1."""

from __future__ import annotations

from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging


def fedavg(parts: Parts, *, lr: Rate = 1.0) -> Averaging:
    """FedAvg: clients train for some epochs, and the server averages their updates by examples.

    FedSGD is one full-batch step: `local.steps = 1`, `local.batch_size = "all"`. With all clients it is
    gradient descent on the pooled data.

    Fixes: To train where data must stay and the network is slow: several local steps for each exchange of the
        model, where distributed SGD takes one.

    Equation:
        client k:  w_k <- w^t, then  w_k <- w_k - eta grad F_k(w_k; batch)    (ghaemi2022 Algorithm 1)
                   Delta_k = w^t - w_k
        server:    w^{t+1} = w^t - lr sum_k (n_k / n) Delta_k                 (hsu2019 section 4.2: lr = 1)
                   n = sum_k n_k over the clients that replied                (hsu2020 5.1: lr = gamma)

    Source: McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1; hsu2019 section 4.2, hsu2020 section 5.1,
        ghaemi2022 Algorithm 1.

    Weighting: By examples.

    State: Nothing: clients' optimizers start fresh each round.

    Sent: For each client of a round the model down and one update up, with the running statistics of
        normalization layers.

    Composes: Any `[select]`, `[client]`, `[aggregate]` and `[server]`.

    Ranges:
        lr: 1. Below 1 damps noisy rounds.
        local.epochs: 1 to 20. More saves exchanges; clients drift further, the more they differ.
        local.lr: tuned for every number of epochs and clients a round; it matters most.

    Not when: Clients hold few classes each and do many local steps: the average then moves little and
        unsteadily (hsu2019 figures 3 and 5). Try server momentum (FedAvgM) first: it costs clients nothing.

    Tests: tests/identity/test_fedavg.py tests/identity/test_partial_work.py

    Example:
        >>> import torch
        >>> from fedlens.aggregate.server_steps import ServerSGD
        >>> delta = 0.25 * torch.tensor([4.0]) + 0.75 * torch.tensor([8.0])  # of clients with 1 and 3 examples
        >>> ServerSGD(lr=0.5).step({"w": torch.tensor([1.0])}, {"w": delta}, {})[0]
        {'w': tensor([-2.5000])}
    """
    return averaging(parts, server=ServerSGD(lr))
