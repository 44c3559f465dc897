"""FedVC: hsu2020 section 5.3. Clients are selected by size, and each trains on the same number of examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_sampling import BySize, Everyone, Uniform
from fedlens.base.errors import ConfigError
from fedlens.local.settings import LocalSettings

Examples = Annotated[
    int | None,
    Field(
        ge=1,
        description="N_VC: the number of examples a client trains on per round; by default "
        "local.examples, else 256, rounded up to whole batches",
    ),
]

USUAL = 256


def fedvc(parts: Parts, *, examples: Examples = None, lr: Rate = 1.0) -> Averaging:
    """FedVC: clients are selected by size, and each trains on the same number of examples.

    Every round a client draws N_VC of its examples, with replacement only where it has fewer, and takes
    `N_VC / B` steps. It is selected with a probability proportional to its examples.

    Fixes: A client with many examples takes many steps: it drifts to its own optimum, outweighs the others,
        and the round waits for it. Here it is selected more often instead, and each time does the same work
        as others.

    Equation:
        select:    m draws; client k is expected in m n_k / n of them          (hsu2020 Algorithm 1, section 5.3)
        client k:  D <- N_VC of its n_k examples, without replacement where n_k >= N_VC, else with
                   S = N_VC / B steps  w_k <- w_k - eta grad F_k(w_k; batch of D)        (hsu2020 section 5.3)
        server:    w^{t+1} = w^t - lr 1/m sum_k (w^t - w_k)     (all have N_VC examples, so n_k / n is 1/m)

    Source: Hsu, Qi and Brown 2020 (arXiv 2003.08082), section 5.3 and Algorithm 1: hsu2020.

    Weighting: Uniform, which equals by examples: all have `N_VC`.

    State: Nothing.

    Sent: As FedAvg.

    Composes: FedVC evens out sizes, [FedIR](fedir.md) classes: they combine. Any `[client]`, `[aggregate]`
        and `[server]`. `[select]` is `by-size` by default; `uniform` and `all` are refused, since they waste
        examples of large clients. Other algorithms do the same with `local.examples = 256` and
        `select.name = "by-size"`. SCAFFOLD and FedDyn take no client twice in a round: there
        `clients_per_round` m needs `m n_k <= n` for each client.

    Ranges:
        examples: 256 in hsu2020, with batches of 64; a multiple of `local.batch_size`. About the size of a
            usual client; a smaller one repeats examples.
        lr: 1.
        local.epochs: 1, which gives `N_VC / B` steps; E epochs give E times as many. `local.steps` is
            refused.
        select.method: "systematic" holds a client's appearances in a round to `m n_k / n`, rounded down or
            up; "replacement" draws independently.

    Try: algorithm.examples=60 'data.partition={name="dirichlet-classwise",clients=20,alpha=1.0}'

    Not when: Clients are of about the same size: it is FedAvg. Nor where small clients matter: one with a
        hundredth of the examples is seen a hundredth as often.

    Tests: tests/identity/test_fedvc.py

    Example:
        >>> local = LocalSettings(lr=0.1, batch_size=64, examples=256)
        >>> local.steps_at(local.examples)  # N_VC / B
        4
    """
    if isinstance(parts.select, Uniform | Everyone):
        name = "uniform" if isinstance(parts.select, Uniform) else "all"
        raise ConfigError(
            f"FedVC selects clients in proportion to their number of examples, but select.name is '{name}'",
            where="select.name",
            hint="take 'by-size', or algorithm.name = 'fedavg' with local.examples",
        )
    virtual = replace(parts, local=_drawing(parts.local, examples))
    return averaging(virtual, select=BySize(), aggregate=Mean("uniform"), server=ServerSGD(lr))


def _drawing(local: LocalSettings, examples: int | None) -> LocalSettings:
    """The local settings with N_VC in them. Raises `ConfigError` where they say otherwise."""
    if examples is None:
        batch = 1 if local.batch_size == "all" else local.batch_size
        examples = local.examples or -(-USUAL // batch) * batch
    if local.examples not in (None, examples):
        raise ConfigError(
            f"local.examples ({local.examples}) and algorithm.examples ({examples}) contradict each other",
            where="local.examples",
            hint="remove it: algorithm.examples sets the same",
        )
    if local.steps is not None:
        raise ConfigError(
            "FedVC takes examples / batch_size steps, so local.steps must not be set",
            where="local.steps",
            hint="remove it, and set algorithm.examples",
        )
    if local.batch_size != "all" and examples % local.batch_size:
        raise ConfigError(
            f"{examples} examples are not a whole number of batches of {local.batch_size}",
            where="algorithm.examples",
            hint=f"take a multiple of {local.batch_size}, or another local.batch_size",
        )
    return local.model_copy(update={"examples": examples})
