"""FedBN: Li, Jiang, Zhang, Kamp, Dou 2021 (arXiv 2102.07623)."""

from __future__ import annotations

from typing import get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import ConfigError
from fedlens.base.registry import settings_model
from fedlens.core.protocol import ModelSpec
from fedlens.models.prepare import Preparation


def fedbn(parts: Parts, *, lr: Rate = 1.0) -> Averaging:
    """FedBN: batch normalization stays at the clients, and everything else is averaged.

    Fixes: Clients whose images look different (scanners, cameras, light) have other statistics in every
        layer. Averaged statistics fit none: the variance of a mixture is not the mean of the variances.

    Equation:
        client k:  w_k = (v_k, u_k), v_k its normalization layers, u the rest;  w_k <- local training from (v_k, u^t)
        server:    u <- u - lr sum_k (n_k / n) (u^t - u_k)                       (Algorithm 1; v_k is never sent)

    Source: Li, Jiang, Zhang, Kamp and Dou 2021 (arXiv 2102.07623), Algorithm 1.

    Weighting: By examples.

    State: At each client that took part: scale, shift, running mean and variance of its batch normalization.

    Sent: What FedAvg sends, without the normalization layers.

    Composes: Any `[select]`, `[aggregate]` and `[server]`, and client rules that send nothing (`proximal`,
        `reweighted`). The others (`control-variate`, `dynamic`, `dual`) are refused: they would send the
        personal parts.

    Ranges:
        lr: 1.
        data.validation: 0.1 to 0.3, with `data.validation_from` = "client": clients measure their own models,
            since none is common.

    Try: data.validation=0.2 data.validation_from=client model.norm=batch

    Not when: The model has no batch normalization (refused); clients differ in labels rather than images; or
        clients that never took part need a model: the exported one has the initial normalization.

    Tests: tests/identity/test_personal.py::fedbn

    Example:
        >>> own_normalization(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    personal = own_normalization(parts.model.build(initial=False))
    if personal and all(parts.spec[name].fixed for name in personal):
        raise ConfigError(
            "every batch normalization of the model is frozen, so no layer would stay at the clients",
            where="model.freeze",
            hint="freeze fewer layers, or choose algorithm.name = 'fedavg'",
        )
    if not personal:
        raise ConfigError(
            f"the model '{parts.model.name}' has no batch normalization, so no layer would stay at the clients",
            where="model.name",
            hint=f"{_with_batch_normalization(parts.model)}, as the recipe digits-personal does, or choose "
            "algorithm.name = 'fedavg'",
        )
    return averaging(parts, server=ServerSGD(lr), personal=frozenset(personal))


def _with_batch_normalization(model: ModelSpec) -> str:
    """The setting that gives the model batch normalization, or another model that has such a setting."""
    if isinstance(model.prepare, Preparation) and model.prepare.norm not in (None, "batch"):
        return "set model.norm = 'batch'"
    norm = settings_model(model.factory).model_fields.get("norm")
    if norm is not None and "batch" in get_args(norm.annotation):
        return "set model.norm = 'batch'"
    return "choose a model with it, such as model = { name = 'small-cnn', norm = 'batch' }"


def own_normalization(module: nn.Module) -> list[str]:
    """The names of all leaves of batch normalization layers: parameters, running statistics and counters."""
    return [
        ".".join(filter(None, [path, name]))
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for name in layer.state_dict()
    ]
