"""Ditto: each client keeps a model of its own, near the global one. Li et al. 2021 (arXiv 2012.04221), Algorithm 1.

Set `evaluation.clients = "all"`: each client is measured with its own model, the test data with the global one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from fedlens.parts import EVALUATE_OWN, Averaging, EvaluateOwn, Parts, averaging
from fedlens.rules import ClientRule

STATE = "ditto"  # the client's own model, in its state


def ditto(
    parts: Parts, *, lam: Annotated[float, Field(ge=0, description="pull towards the global model")] = 0.1
) -> Averaging:
    """FedAvg, and v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - w^t)) for as many steps."""
    rule = ClientRule(
        name="ditto",
        finish=partial(train_own, lam=lam),
        ops={
            EVALUATE_OWN: lambda train: EvaluateOwnModel(
                EvaluateOwn(train.model, train.task, parts.evaluation_batch)
            )
        },
    )
    return averaging(parts, client=rule)


def train_own(parameters, context, *, lam):
    """No further field of the reply, and the client's own model after its steps."""
    kept = context.state.get(STATE)
    own = [w.clone() for w in (context.anchor if kept is None else context.listed(kept))]
    for batch in context.problem.batches(context.steps):
        gradients = context.problem.objective(own, over=batch).gradient
        with torch.no_grad():
            for v, g, w in zip(own, gradients, context.anchor, strict=True):
                v -= context.lr * (g + lam * (v - w))
    return {}, {STATE: context.tree(own)}


@dataclass(frozen=True)
class EvaluateOwnModel:
    """Per-client evaluation of the client's own model; before its first visit, of the global one."""

    evaluate: EvaluateOwn

    def __call__(self, payload, client, rng):
        """The measurements on what the client holds out."""
        model = {**payload["model"], **client.state.get(STATE, {})}
        return self.evaluate({**payload, "model": model}, client, rng)
