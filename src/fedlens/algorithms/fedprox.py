"""FedProx: Li et al. 2020 (arXiv 1812.06127); ghaemi2022 Algorithm 2."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_sampling import BySize
from fedlens.base.errors import ConfigError
from fedlens.local.rules import Mu, proximal

Scheme = Annotated[
    Literal["fedavg", "algorithm-2"],
    Field(
        description="selection and weights: as in FedAvg, or clients drawn with p_k = n_k / n and "
        "averaged with 1/K (Ghaemi 2022, Algorithm 2)"
    ),
]


def fedprox(parts: Parts, *, mu: Mu = 0.01, lr: Rate = 1.0, scheme: Scheme = "fedavg") -> Averaging:
    """FedProx: adds a proximal term to each client's loss, which holds it near the global model.

    Slow clients may do less work (the paper's gamma-inexact clients): `local.stragglers`.

    Fixes: With many local steps, each client moves toward the optimum of its own data, and the average need
        not be a good model. The term pulls clients back to the model that the round began with.

    Equation:
        client k:  min_w h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2            (ghaemi2022 Algorithm 2)
                   each step goes against  grad F_k(w; batch) + mu (w - w^t)
        server:    as in FedAvg: w^{t+1} = w^t - lr sum_k (n_k / n) (w^t - w_k)
                   algorithm-2: K clients drawn with p_k = n_k / n, w^{t+1} = w^t - lr/K sum_k (w^t - w_k)

    Source: Li et al. 2020 (arXiv 1812.06127), Algorithm 2 and section 5.2; ghaemi2022 Algorithm 2.

    Weighting: By examples, `n_k / n`. The source's own, `scheme = "algorithm-2"`, is uniform over clients
        drawn in proportion to their examples; with unequal sizes it is not FedAvg at `mu = 0`, though equal
        in expectation over the draw.

    State: Nothing.

    Sent: As FedAvg.

    Composes: Any `[select]`, `[client]`, `[aggregate]` and `[server]`. With `scheme = "algorithm-2"`
        `[select]` is `by-size` with `method = "replacement"`, where `select.clients_per_round` is K; other
        selections, and weights by examples, are refused.

    Ranges:
        mu: 0.001 to 1 (Li et al. 2020). Larger holds clients closer and learns slower.
        lr: 1.
        scheme: "fedavg" to compare with FedAvg; "algorithm-2" as ghaemi2022 and Li et al. print it.
        local.epochs: 2 and more. In the first step of a round the term is zero.
        local.stragglers: 0, or the share of clients that cannot do all the work; Li et al. 2020 have 0, 0.5
            and 0.9. `local.straggler_work`: 1 to E - 1 epochs as in the authors' code (the default), or 1 to
            E as in the paper. Their FedAvg, which drops stragglers, is `fedavg` with
            `local.straggler_work = "drop"`.

    Try: algorithm.mu=0.1 local.epochs=5

    Not when: Clients do one step a round: the term does nothing. Nor as a first remedy against skew: it slows
        every client, and a smaller `local.lr` or fewer epochs may do the same.

    Tests: tests/identity/test_fedprox.py tests/identity/test_partial_work.py

    Example:
        >>> import torch
        >>> from fedlens.local.rules import LocalContext, proximal
        >>> context = LocalContext(["w"], [torch.tensor([1.0])], {}, {}, lr=0.1, steps=1)
        >>> proximal(mu=2.0).grad([torch.tensor([0.5])], [torch.tensor([1.5])], context)  # 0.5 + 2 (1.5 - 1)
        [tensor([1.5000])]
    """
    rule, server = proximal(mu=mu), ServerSGD(lr)
    if scheme == "fedavg":
        return averaging(parts, client=rule, server=server)
    _refuse_other(parts)
    select = BySize(method="replacement")
    return averaging(parts, select=select, client=rule, aggregate=Mean("uniform"), server=server)


def _refuse_other(parts: Parts) -> None:
    """Raises `ConfigError` where a table of the user's is at odds with Algorithm 2's draw or its 1/K."""
    if parts.select is not None and not isinstance(parts.select, BySize):
        raise ConfigError(
            "FedProx's Algorithm 2 draws clients with p_k = n_k / n, but select.name is another selection",
            where="select.name",
            hint="take 'by-size' with method = 'replacement', or algorithm.scheme = 'fedavg'",
        )
    if parts.aggregate is not None and parts.aggregate.weighting != "uniform":
        raise ConfigError(
            "FedProx's Algorithm 2 averages with 1/K: the draw already accounts for the sizes, which would count twice",
            where="aggregate.weighting",
            hint="take 'uniform', or algorithm.scheme = 'fedavg'",
        )
