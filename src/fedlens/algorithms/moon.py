"""MOON, model-contrastive learning: Li, He and Song 2021 (arXiv 2103.16257); chen2022 section 6.5."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo, ModelSpec, Payload
from fedlens.core.tree import Tree, part
from fedlens.local.features import OWN
from fedlens.local.rules import ClientRule, LocalContext, Tensors, Traits
from fedlens.models.projection import last_linear

Mu = Annotated[
    float,
    Field(ge=0, allow_inf_nan=False, description="weight of the contrastive term; 0 is FedAvg"),
]
Temperature = Annotated[
    float, Field(gt=0, allow_inf_nan=False, description="temperature that divides the similarities")
]

# In a client's state: its model as it was after its last training.
PREVIOUS = "previous"
THERE = "global"


def moon(parts: Parts, *, mu: Mu = 5.0, temperature: Temperature = 0.5, lr: Rate = 1.0) -> Averaging:
    """MOON: pulls a client's image features to the global model's, away from those of its own last model.

    `z` is what enters the model's last linear layer. The paper puts a projection head of two layers before
    it: `model = { name = "projection", base = { name = "hsu-cnn" } }`; any other model works without. In a
    client's first visit there is no last model, and the term is left out. `z_glob` and `z_prev` come from
    models in evaluation mode, as in the authors' code, `z` from training mode.

    Fixes: On skewed data a client's features drift from those of the global model, which has seen more
        classes and tells images apart better.

    Equation:
        client k:  l = l_sup + mu l_con                                            (Eq. 4)
                   l_con = -log( exp(sim(z, z_glob) / T)
                                 / (exp(sim(z, z_glob) / T) + exp(sim(z, z_prev) / T)) )    (Eq. 3)
                   sim(a, b) = a . b / (|a| |b|),  mean over the batch
                   gradients go through z alone
        server:    w^{t+1} = w^t - lr sum_k (n_k / n) (w^t - w_k)                  (Algorithm 1)

    Source: Li, He and Song 2021 (arXiv 2103.16257), Eq. 3 and 4 and Algorithm 1; chen2022 section 6.5.

    Weighting: By examples.

    State: At each client that took part its model after its last training, with running statistics, without
        frozen weights. A client whose reply was refused keeps the older one.

    Sent: As FedAvg.

    Composes: Any `[select]`, `[aggregate]`, `[server]` and `[client]` but rules with their own solver. Models
        whose features before the last linear layer depend on no trained weight are refused.

    Ranges:
        mu: 0.1 to 10; the paper takes 5 on CIFAR-10, and 1 on CIFAR-100 and Tiny-ImageNet.
        temperature: 0.1 to 1; 0.5 in the paper. Smaller sharpens the term.
        lr: 1.
        local.epochs: 5 to 10 (10 in the paper). With few local steps the features hardly drift.

    Try: algorithm.mu=1.0 model.name=projection

    Not when: Clients take part only once: without a last model it is FedAvg. Nor where time counts: two more
        forward passes a step make a round about 1.9 times FedAvg's.

    Tests: tests/identity/test_moon.py

    Example:
        >>> z, there, last = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
        >>> contrast(z, there, last, temperature=0.5)  # similarities 1 and 0: log(1 + exp(-2))
        tensor(0.1269)
    """
    return averaging(parts, client=contrastive(mu=mu, temperature=temperature), server=ServerSGD(lr))


def contrastive(*, mu: Mu = 5.0, temperature: Temperature = 0.5) -> ClientRule:
    """MOON's model-contrastive term, Eq. 3 and 4."""
    if not mu:
        return ClientRule()
    loss = partial(_loss, mu=mu, temperature=temperature)
    return ClientRule(
        name="contrastive",
        references=_references,
        loss=loss,
        finish=_finish,
        fits=_fits,
        traits=Traits(stackable=True, features=True),
    )


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """l_con of Eq. 3, the mean over rows [n, features], written as log(1 + exp((sim_prev - sim_glob) / T))."""
    nearer = torch.nn.functional.cosine_similarity(z, z_prev) - torch.nn.functional.cosine_similarity(
        z, z_glob
    )
    return torch.nn.functional.softplus(nearer / temperature).mean()


def _fits(federation: FederationInfo, model: ModelSpec) -> None:
    """Refuses a model without a last linear layer, whose input the features are, or with nothing trained before it."""
    module = model.build(initial=False)
    found = last_linear(module)
    if found is None:
        raise ConfigError(
            "MOON compares the inputs of the last linear layer, and this model has no linear layer",
            where="model.name",
            hint="take another model, or another algorithm",
        )
    name, layer = found
    own = {id(parameter) for parameter in layer.parameters()}
    if not any(p.requires_grad and id(p) not in own for p in module.parameters()):
        raise ConfigError(
            f"what enters the last linear layer{f' ({name!r})' if name else ''} does not depend on any "
            "trainable weight, so MOON's term would have no gradient",
            where="model.name",
            hint="choose a model with layers before it, or model.name = 'projection', which adds two",
        )


def _references(context: LocalContext) -> Mapping[str, Tree]:
    """The global model and the client's last one; none at its first context."""
    tree = context.problem.tree
    return {THERE: tree, PREVIOUS: {**tree, **context.state[PREVIOUS]}} if PREVIOUS in context.state else {}


def _loss(
    loss: Tensor, outputs: Tensor, targets: Tensor, context: LocalContext, *, mu: float, temperature: float
) -> Tensor:
    """l_sup + mu l_con (Eq. 4); l_sup alone at the client's first context."""
    if PREVIOUS not in context.state:
        return loss
    seen = context.features
    if OWN not in seen:
        raise ConfigError(
            "the model's last linear layer, in order of definition, is not used in its forward pass",
            where="model.name",
            hint="define the classification layer last",
        )
    return loss + mu * contrast(seen[OWN], seen[THERE], seen[PREVIOUS], temperature)


def _finish(parameters: Tensors, context: LocalContext) -> tuple[Mapping[str, Any], Payload]:
    """The trained model becomes the client's last one: its weights and its own running statistics."""
    learner = context.problem.learner
    statistics = {name: learner.rest[name] for name in part(learner.spec, "buffer", "counter")}
    trained = {**context.tree(parameters), **statistics}
    return {}, {PREVIOUS: {name: value.clone() for name, value in trained.items()}}
