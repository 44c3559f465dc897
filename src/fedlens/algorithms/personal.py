"""The two references of personal models: a client on its own, and the global model tuned at each client."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms import fit
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_evaluation import refuse_unmeasured, tuning
from fedlens.algorithms.registry import refuse_unused
from fedlens.base.errors import ConfigError


def local_only(parts: Parts) -> Averaging:
    """Local-only: every client trains its own model, and nothing is sent.

    Fixes: A reference: what a client gains by taking part is what another algorithm reaches beyond this.

    Equation:
        client k:  w_k <- local training from w_k on its own data, whenever it is chosen
        server:    nothing

    Source: The usual baseline of personalized federated learning, e.g. arXiv 2102.07623, where it is SingleSet.

    Weighting: None: nothing is averaged.

    State: One model at each client that took part. The server keeps the initial model.

    Sent: No weights: the learning rate down, the loss and a few counts up.

    Composes: Any `[select]`; client rules that keep nothing at the server. `[aggregate]` and `[server]` are
        refused.

    Ranges:
        data.validation: 0.1 to 0.3, with `data.validation_from` = "client", on which each client is measured.
        local.epochs: as many rounds and epochs as the algorithm it is compared with.

    Try: data.validation=0.2 data.validation_from=client

    Not when: One model is wanted; the exported one is the initial one.

    Tests: tests/identity/test_personal.py::alone

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(local_only).model_fields)
        []
    """
    refuse_unused("local-only", parts.slots, parts.local)
    links = () if parts.client is None else parts.client.links or (parts.client,)
    if any(link.name == "contrastive" for link in links):
        raise ConfigError(
            "'contrastive' compares a client's model with the global model, and 'local-only' has none",
            where="client.name",
            hint="remove it",
        )
    return averaging(parts, personal=frozenset(parts.spec))


def finetune(
    parts: Parts,
    *,
    epochs: Annotated[
        int | None, Field(ge=1, description="epochs of fine-tuning at a client; by default as in [local]")
    ] = None,
    local_lr: Annotated[
        float | None,
        Field(
            gt=0, allow_inf_nan=False, description="learning rate of fine-tuning; by default as in [local]"
        ),
    ] = None,
    lr: Rate = 1.0,
) -> Averaging:
    """FedAvg + fine-tuning: the global model, tuned at each client on its own data.

    Fixes: One model for all is nobody's best. Tuning is the simplest personal model, and often hard to beat.

    Equation:
        rounds:     FedAvg
        client k:   w_k <- local training from w^t, measured on what k holds out of its own data, then forgotten

    Source: The usual baseline of personalized federated learning; analysed by Cheng, Chadha and Duchi 2021
        (arXiv 2108.07313), as FTFA.

    Weighting: By examples.

    State: Nothing: tuning begins at the global model each time it is measured.

    Sent: What FedAvg sends; to measure, the model down to each measured client, and a few numbers up.

    Composes: Any `[select]`, `[client]`, `[aggregate]` and `[server]`, for the global model. Tuning itself is
        plain local training.

    Ranges:
        epochs: 1 to 5. More overfits small clients.
        local_lr: that of `[local]` or a tenth of it.
        lr: 1.
        data.validation: 0.1 to 0.3, with `data.validation_from` = "client", on which each client is measured.
        evaluation.clients: a number, where measuring all clients takes too long.

    Try: data.validation=0.2 data.validation_from=client algorithm.epochs=1

    Not when: New clients have no labelled data to tune on; then the global model is what they get.

    Tests: tests/identity/test_personal.py::tun

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(finetune).model_fields)
        ['epochs', 'local_lr', 'lr']
    """
    refuse_unmeasured(
        parts.federation, "'finetune' measures each client's tuned model on the client's own data"
    )
    if parts.measure_clients == "none":
        raise ConfigError(
            "'finetune' measures each client's fine-tuned model, but evaluation.clients is 'none'",
            where="evaluation.clients",
            hint="take 'all', a number, or algorithm.name = 'fedavg'",
        )
    made = averaging(parts, server=ServerSGD(lr))
    fit.refuse_measured(made.aggregate, "'finetune' measures each client's tuned model")
    return replace(made, tune=tuning(made.train, local_lr, epochs))
