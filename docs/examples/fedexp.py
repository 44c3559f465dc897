"""FedExP: a longer server step where the updates differ. Jhunjhunwala et al. 2023 (arXiv 2301.09604), Algorithm 1."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from fedlens.rules import ClientRule, ServerRule, TensorField


def fedexp(*, eps: Annotated[float, Field(gt=0)] = 1e-3) -> ClientRule:
    """w <- w - eta_g Delta, with eta_g = max(1, sum_i ||Delta_i||^2 / (2 m (||Delta||^2 + eps)))."""
    return ClientRule(
        name="fedexp",
        finish=send_square,
        expect=lambda spec: {"square": TensorField((), torch.float32)},
        fields={"square": "sum"},
        server_rules={"fedexp": ServerRule(after=partial(extrapolate, eps=eps))},
    )


def send_square(parameters, context):
    """One more field of the reply, ||Delta_i||^2; the client's state stays as it is."""
    pairs = zip(context.anchor, parameters, strict=True)
    return {"square": sum((before - after).square().sum() for before, after in pairs)}, None


def extrapolate(state, update, ctx, *, eps):
    """The mean update times eta_g, and eta_g in the round's line of metrics.jsonl."""
    mean = sum(delta.square().sum() for delta in update.update.values())
    eta = max(1.0, float(update.more["square"] / (2 * update.replies * (mean + eps))))
    ctx.metrics["eta_g"] = eta
    return state, replace(update, update={name: eta * delta for name, delta in update.update.items()})
