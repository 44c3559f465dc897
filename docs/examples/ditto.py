"""Ditto: each client keeps a model of its own, near the global one. Li et al. 2021 (arXiv 2012.04221), Algorithm 1.

Each client is measured with its own model, on what it holds out of its own data; the test data with the global one.
"""

from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from fedlens.parts import Averaging, Parts, averaging
from fedlens.rules import ClientRule


def ditto(
    parts: Parts, *, lam: Annotated[float, Field(ge=0, description="pull towards the global model")] = 0.1
) -> Averaging:
    """FedAvg, and v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - w^t)) for as many steps."""
    rule = ClientRule(name="ditto", finish=partial(train_own, lam=lam))
    return averaging(parts, client=rule, own_model=own_model)


def own_model(state):
    """v_k, from the client's state; before its first visit nothing, and the global model is measured."""
    return state.get("ditto", {})


def train_own(parameters, context, *, lam):
    """No further field of the reply, and the client's own model after its steps."""
    kept = own_model(context.state)
    own = [w.clone() for w in (context.listed(kept) if kept else context.anchor)]
    for batch in context.problem.batches(context.steps):
        gradients = context.problem.objective(own, over=batch).gradient
        with torch.no_grad():
            for v, g, w in zip(own, gradients, context.anchor, strict=True):
                v.sub_(g + lam * (v - w), alpha=context.lr)
    return {}, {"ditto": context.tree(own)}
