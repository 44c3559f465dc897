"""The operation of the averaging family: train the global model on a client's data, send back how it moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Client, ModelSpec, Outcome, Payload
from fedlens.core.schema import Field, NumberField, Schema, TreeField
from fedlens.core.seeding import Rng
from fedlens.core.tree import TreeSpec, part
from fedlens.local.optimizers import OptimizerState, clip, optimizer
from fedlens.local.rules import ClientRule, Visit
from fedlens.local.settings import LocalSettings
from fedlens.tasks.evaluation import Task

Weighting = Literal["examples", "uniform"]


@dataclass(frozen=True)
class Train:
    """Local training.

    Payload: `model`, the global tree; `lr`; and, for a client that does partial work, `work` (epochs, or steps where
    the settings count in those). It sends back

    - `update`: w^t - w_k of the trainable weights, hsu2019's Delta w_k;
    - `buffers` and `counters`: as they are after training;
    - `weight`: the number of its examples, or 1;
    - whatever the rule's `finish` adds.

    With `keep_optimizer` the optimizer's state is the client's state and goes on in the next round.
    """

    model: ModelSpec
    task: Task
    settings: LocalSettings
    rule: ClientRule
    weighting: Weighting = "examples"
    keep_optimizer: bool = False

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains at one client."""
        examples = len(client.data)
        if examples == 0:
            raise ValueError("the client holds no example")
        learner = loadable(self.model, client.scratch, client.device)
        learner.load(payload["model"])
        names, parameters = list(learner.trainable), list(learner.trainable.values())
        anchor = [payload["model"][name] for name in names]
        steps = self.settings.steps_at(examples, payload.get("work"))
        labels = client.data.labels() if self._hooked else torch.empty(0)
        visit = Visit(names, anchor, payload, client.state, labels, payload["lr"], steps)
        state = _optimizer_state(client.state) if self.keep_optimizer else {}
        loss, seen = self._train(learner, parameters, visit, client, rng, state)
        with torch.no_grad():
            update = torch._foreach_sub(anchor, parameters)
        more, new_state = self._finish(parameters, visit, state)
        reply = {
            "update": dict(zip(names, update, strict=True)),
            "buffers": _copies(learner, "buffer"),
            "counters": _copies(learner, "counter"),
            "weight": float(examples) if self.weighting == "examples" else 1.0,
            **more,
        }
        return Outcome(reply, new_state, {"loss": loss * seen, "examples": seen, "batches": steps})

    @property
    def _hooked(self) -> bool:
        return any((self.rule.loss, self.rule.grad, self.rule.finish))

    def _train(
        self,
        learner: Loadable,
        parameters: list[Tensor],
        visit: Visit,
        client: Client,
        rng: Rng,
        state: OptimizerState,
    ) -> tuple[float, int]:
        """The loop itself; gives the mean of the task's loss while training, and how many examples it saw."""
        settings, rule, task, module = self.settings, self.rule, self.task, learner.module
        step = optimizer(settings, visit.lr, state)
        # The same memory without history: changing it in place needs no leave from autograd.
        weights = [p.detach() for p in parameters]
        module.train()
        batches = client.data.batches(settings.batch(len(client.data)), rng)
        losses: list[Tensor] = []
        counts: list[int] = []
        for inputs, targets in islice(batches, visit.steps):
            outputs = module(inputs)
            loss = task.loss(outputs, targets)
            bent = loss if rule.loss is None else rule.loss(loss, outputs, targets, visit)
            gradients = _gradients(bent, parameters)
            if rule.grad is not None:
                gradients = rule.grad(gradients, weights, visit)
            if settings.clip_norm is not None:
                gradients = clip(gradients, settings.clip_norm)
            step(weights, gradients)
            losses.append(loss.detach())
            counts.append(len(targets))
        seen = sum(counts)
        return float(torch.stack(losses).double() @ torch.tensor(counts, dtype=torch.float64)) / seen, seen

    def _finish(
        self, parameters: list[Tensor], visit: Visit, state: OptimizerState
    ) -> tuple[Mapping[str, Any], Payload | None]:
        if self.rule.finish is not None:
            return self.rule.finish([p.detach() for p in parameters], visit)
        return {}, {"optimizer": state} if self.keep_optimizer else None

    def expect(self, spec: TreeSpec, most: float) -> Schema:
        """What a good reply of this operation has, at clients of at most `most` examples."""
        fields: dict[str, Field] = {
            "update": TreeField.like({n: spec[n] for n in part(spec, "weight", trainable=True)}),
            "buffers": TreeField.like({n: spec[n] for n in part(spec, "buffer")}),
            "counters": TreeField.like({n: spec[n] for n in part(spec, "counter")}),
            "weight": NumberField(above=0, most=most if self.weighting == "examples" else 1.0),
        }
        return Schema(fields | dict(self.rule.expect(spec)) if self.rule.expect else fields)


def _gradients(loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """The gradient of each parameter; zero for one that the loss does not depend on."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def _copies(learner: Loadable, role: Literal["buffer", "counter"]) -> dict[str, Tensor]:
    return {name: learner.rest[name].clone() for name in part(learner.spec, role)}


def _optimizer_state(state: Payload) -> OptimizerState:
    return {name: [t.clone() for t in tensors] for name, tensors in state.get("optimizer", {}).items()}
