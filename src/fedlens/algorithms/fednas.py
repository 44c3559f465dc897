"""FedNAS: He, Annavaram and Avestimehr 2020 (arXiv 2004.08546), with the steps of MiLeNAS (arXiv 2003.12238)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.registry import refuse_unused
from fedlens.base.errors import ConfigError
from fedlens.base.threads import first
from fedlens.core.arithmetic import gradients_of
from fedlens.core.protocol import ModelSpec, Op, State
from fedlens.local.optimizers import OptimizerState, clip, optimizer
from fedlens.local.problem import Batch, LocalProblem
from fedlens.local.rules import ClientRule, LocalContext, Solved, Tensors
from fedlens.local.settings import LocalSettings
from fedlens.models.darts import ARCHITECTURE, SearchNetwork, genotype_of


@dataclass(frozen=True)
class FedNAS(Averaging):
    """The rounds of FedAvg over a search network; the run directory gets the genotype of the final one."""

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """Those of FedAvg, if the model has an architecture to search; not known before the real model is."""
        refuse_fixed_architectures(self.parts.model)
        return super().ops

    def files(self, state: State) -> dict[str, bytes]:
        """`genotype.json`: the architecture that the alphas choose, which the model `darts` reads."""
        return {"genotype.json": json.dumps(genotype_of(state["model"]), indent=1).encode()}


def fednas(
    parts: Parts,
    *,
    alpha_lr: Annotated[float, Field(gt=0, description="learning rate of the architecture, by Adam")] = 3e-4,
    alpha_decay: Annotated[float, Field(ge=0, description="L2 penalty of the architecture")] = 1e-3,
    balance: Annotated[
        float,
        Field(ge=0, description="lambda: weight of the validation loss in the step of the architecture"),
    ] = 1.0,
) -> FedNAS:
    """FedNAS: clients search an architecture together, training weights and alphas of a search network.

    A client halves its training data once. In each step it moves the alphas with a batch of each half, then
    the weights with the training batch. The server averages both. DARTS's second-order step is left out.

    Fixes: An architecture chosen on other data may not fit data that nobody may look at.

    Equation:
        client k:  alpha <- Adam(alpha, grad_alpha L_train(w, alpha) + lambda grad_alpha L_val(w, alpha))
                   w     <- SGD(w, grad_w L_train(w, alpha)),  clipped alone            (in turn)
        server:    (w, alpha) = sum_k n_k / n (w_k, alpha_k)
        result:    on each edge the operation of the largest softmax(alpha), without `none`; two edges a node

    Source: He, Annavaram and Avestimehr 2020 (arXiv 2004.08546), Algorithm 1; the step is that of MiLeNAS (He et al.
        2020, arXiv 2003.12238); the space that of DARTS (Liu et al. 2019, arXiv 1806.09055).

    Weighting: By examples, those of both halves.

    State: Nothing: both optimizers begin anew in every round, and the training seed and the client fix which
        examples validate.

    Sent: What FedAvg sends, of the search network. The averaged alphas are part of the model, and public like
        it.

    Composes: Any `[select]`. `[client]`, `[aggregate]` and `[server]` are refused, and of `[local]`
        `examples` and `lr_scale`. The model is `darts-search`. Epochs are those of the training half.

    Ranges:
        alpha_lr: 3e-4, with betas 0.5 and 0.999 as in DARTS.
        alpha_decay: 1e-3.
        balance: 1. At 0 the alphas follow the training loss alone.
        local.lr: 0.025 with momentum 0.9, weight decay 3e-4 and clip_norm 5, as in DARTS.

    Try: model=darts-search model.channels=4 model.cells=3 model.nodes=2 rounds=5

    Not when: Clients cannot hold the search network, which has eight operations on every edge; or a known
        network is good enough: the search costs many times its training.

    Tests: tests/identity/test_fednas.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(fednas).model_fields)
        ['alpha_lr', 'alpha_decay', 'balance']
    """
    refuse_unused("fednas", parts.slots, parts.local)
    return FedNAS(**vars(averaging(parts, client=searching(alpha_lr, alpha_decay, balance))))


def searching(alpha_lr: float, alpha_decay: float, balance: float) -> ClientRule:
    """The steps of a client, with the settings of `fednas`."""
    adam = LocalSettings(lr=alpha_lr, optimizer="adam", betas=(0.5, 0.999), weight_decay=alpha_decay)
    return ClientRule(name="search", solve=partial(_search, adam=adam, balance=balance))


def refuse_fixed_architectures(model: ModelSpec) -> None:
    """Raises `ConfigError` for a model without trained alphas."""
    if model.wrapper is not None:
        raise ConfigError(
            "'fednas' searches a network that gives logits itself, and this task puts layers around the model",
            where="task.name",
            hint="choose classification, or another algorithm",
        )
    module = model.build(initial=False)
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not isinstance(module, SearchNetwork) or not {*ARCHITECTURE} <= {*trained}:
        raise ConfigError(
            f"the model '{model.name}' has no architecture to search: it needs the trained parameters "
            f"{' and '.join(ARCHITECTURE)} of a search network",
            where="model.freeze" if isinstance(module, SearchNetwork) else "model.name",
            hint="set model.name = 'darts-search', and freeze neither of them",
        )


def halves(problem: LocalProblem) -> tuple[Any, Any]:
    """The client's examples to train and to validate with: half of them each, drawn once, in their own order."""
    assert problem.rng is not None
    generator = problem.rng.of_client(each_round=False).torch("validation")
    order = torch.randperm(len(problem.data), generator=generator)
    held = len(order) // 2
    return problem.data.take(order[held:].sort().values), problem.data.take(order[:held].sort().values)


def _search(context: LocalContext, adam: LocalSettings, balance: float) -> Solved:
    """All steps of a client in a round."""
    problem, settings = context.problem, context.settings
    assert problem.rng is not None
    train, held = halves(problem)
    steps = settings.steps_at(len(train), context.payload.get("work"))
    rates = settings.rates(context.payload, steps)
    step, move = optimizer(settings, OptimizerState()), optimizer(adam, OptimizerState())
    batches = train.batches(settings.batch(len(train)), problem.rng, problem.drop_last)
    others = None
    if balance and len(held):
        others = held.batches(settings.batch(len(held)), problem.rng.child("validation"), problem.drop_last)
        others = first(others, steps, problem.closing)
    alphas = [problem.learner.trainable[name] for name in ARCHITECTURE]
    weights = [value for name, value in problem.learner.trainable.items() if name not in ARCHITECTURE]
    problem.learner.module.train()
    losses, examples, seen = [], 0, 0
    for at, batch in enumerate(first(batches, steps, problem.closing)):
        gradients, _ = _gradients(problem, alphas, batch)
        if others is not None:
            validation, _ = _gradients(problem, alphas, next(others))
            torch._foreach_add_(gradients, validation, alpha=balance)
        move([alpha.detach() for alpha in alphas], gradients, adam.lr)
        gradients, loss = _gradients(problem, weights, batch)
        if settings.clip_norm is not None:
            gradients = clip(gradients, settings.clip_norm)
        step(
            [weight.detach() for weight in weights], gradients, rates[at] if rates else context.payload["lr"]
        )
        losses.append(loss * len(batch[1]))
        examples, seen = examples + len(batch[1]), seen + (2 if others is None else 3)
    total = float(torch.stack(losses).cpu().double().sum())
    return Solved([p.detach() for p in problem.learner.trainable.values()], total / examples, examples, seen)


def _gradients(problem: LocalProblem, of: Tensors, batch: Batch) -> tuple[Tensors, torch.Tensor]:
    """The gradients of a batch's loss, and the loss."""
    outputs = problem.task.outputs(problem.learner.module, *batch)
    loss = problem.risk(outputs, batch[1])
    return list(gradients_of(loss, of, problem.learner.autocast_dtype)), loss.detach()
