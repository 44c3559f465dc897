"""FedAvg whose clients are pulled towards the global model; written from scratch, this is FedProx."""

from functools import partial

from fedlens.parts import Averaging, Parts, averaging
from fedlens.rules import ClientRule, LocalContext, Tensors


def my_prox(parts: Parts, *, mu: float = 0.1) -> Averaging:
    """Client k minimizes F_k(w) + mu/2 ||w - w^t||^2, where w^t is the global model."""
    return averaging(parts, client=ClientRule(name="my-prox", grad=partial(pull, mu=mu)))


def pull(gradients: Tensors, weights: Tensors, context: LocalContext, *, mu: float) -> Tensors:
    """The gradients of that objective, one tensor per layer."""
    start = context.anchor  # the global model w^t
    return [g + mu * (w - w0) for g, w, w0 in zip(gradients, weights, start, strict=True)]
