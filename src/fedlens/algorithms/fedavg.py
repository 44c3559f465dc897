"""Federated Averaging: McMahan et al. 2017 (arXiv 1602.05629); hsu2019 section 4.2, ghaemi2022 Algorithm 1."""

from __future__ import annotations

from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging


def fedavg(parts: Parts, *, lr: Rate = 1.0) -> Averaging:
    """FedAvg: clients train for some epochs, and the server averages what they send back, weighted by examples.

    FedSGD is the case of one full-batch step: `local.steps = 1`, `local.batch_size = "all"`. All clients with one such
    step are gradient descent on the pooled data.

    Fixes: Data that have to stay where they are, over a network that is slow: several local steps for each exchange
        of the model, where distributed SGD takes one. It is what the others are compared with.

    Equation:
        client k:  w_k <- w^t, then  w_k <- w_k - eta grad F_k(w_k; batch)    (ghaemi2022 Algorithm 1)
                   Delta_k = w^t - w_k
        server:    w^{t+1} = w^t - lr sum_k (n_k / n) Delta_k                 (hsu2019 section 4.2: lr = 1)
                   n = sum_k n_k over the clients that replied                (hsu2020 5.1: lr = gamma)

    Source: McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1; hsu2019 section 4.2, hsu2020 section 5.1,
        ghaemi2022 Algorithm 1.

    Weighting: By examples, `n_k / n` over the clients that replied; uniform with
        `aggregate = { name = "mean", weighting = "uniform" }`.

    State: Nothing at the clients; their optimizers start fresh each round. The server keeps the model.

    Sent: The model down and one update up for each client of a round, each with the running statistics of its
        normalization layers.

    Composes: Any `[select]`, `[client]`, `[aggregate]` and `[server]`: it is what an algorithm is where nothing else
        is said. A table `[server]` takes the place of `lr`.

    Ranges:
        lr: 1, the plain average. Below 1 damps noisy rounds; above 1 goes further than any average of the clients.
        local.epochs: 1 to 20. More is fewer exchanges, and the further the more the clients differ.
        local.lr: tuned anew for every number of epochs and clients a round; it matters more than all else here.

    Not when: Clients hold few classes each and do many local steps: the average then moves little and unsteadily
        (hsu2019 figures 3 and 5). Look at server momentum (FedAvgM) first, which costs nothing at the clients.

    Tests: tests/identity/test_fedavg.py tests/identity/test_partial_work.py

    Example:
        >>> import torch
        >>> from fedlens.aggregate.server_steps import ServerSGD
        >>> delta = 0.25 * torch.tensor([4.0]) + 0.75 * torch.tensor([8.0])  # of clients with 1 and 3 examples
        >>> ServerSGD(lr=0.5).step({"w": torch.tensor([1.0])}, {"w": delta}, {})[0]
        {'w': tensor([-2.5000])}
    """
    return averaging(parts, server=ServerSGD(lr))
