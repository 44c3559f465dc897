"""Split learning: clients have the lower layers, the server the upper ones. Gupta and Raskar 2018 (arXiv 1810.06060).

In a step, one client sends the outputs of the lower layers and the labels of a batch, and receives the gradient of
the outputs. The next client goes on with the lower layers of the last one. Steps, batches and lr are those of `local`.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch.func import functional_call

from fedlens.parts import AlgorithmBase, Ask, Averaging, ModelSpec, Outcome, Parts, Reply, Request, averaging


def split_learning(
    parts: Parts, *, cut: Annotated[int, Field(ge=1, description="number of layers at the client")] = 3
) -> AlgorithmBase:
    """SGD of the whole model, cut in two; the model must be an `nn.Sequential`, such as `mlp`."""
    return SplitLearning(averaging(parts), cut)


def layers(model: ModelSpec, tree, lower, cut):
    """(module, weights) of the lower or the upper layers."""
    module = model.build(initial=False)
    part = torch.nn.Sequential(*(list(module)[:cut] if lower else list(module)[cut:]))
    first = 0 if lower else cut
    names = {name: f"{int(name.split('.')[0]) + first}.{name.split('.', 1)[1]}" for name in part.state_dict()}
    return part, {name: tree[whole].clone().requires_grad_() for name, whole in names.items()}, names


@dataclass(frozen=True)
class Lower:
    """The client's half of a step. With a gradient it moves the lower layers, without it sends their outputs."""

    parts: Parts
    cut: int

    def __call__(self, payload, client, rng):
        """The batch is the same in both calls of a step, drawn with the step's number."""
        draw = torch.Generator().manual_seed(payload["step"])
        size = min(self.parts.local.batch(len(client.data)), len(client.data))
        at = torch.randperm(len(client.data), generator=draw)[:size]
        inputs, targets = client.data.take(at.sort().values).stretch(0, size)
        module, weights, names = layers(self.parts.model, payload["lower"], True, self.cut)
        outputs = functional_call(module, weights, (inputs,))
        if "gradient" not in payload:
            return Outcome({"outputs": outputs.detach(), "targets": targets})
        gradients = torch.autograd.grad(outputs, list(weights.values()), payload["gradient"])
        lr = self.parts.local.lr
        moved = {
            names[name]: (w - lr * g).detach()
            for (name, w), g in zip(weights.items(), gradients, strict=True)
        }
        return Outcome({"lower": moved}, metrics={"examples": size, "batches": 1})


@dataclass(frozen=True)
class SplitLearning(AlgorithmBase):
    """A round is a visit to each client of the cohort, one after the other."""

    base: Averaging
    cut: int

    @property
    def ops(self):
        """Both halves of a step at the client, and the evaluation of the whole model."""
        return {**self.base.ops, "split": Lower(self.base.parts, self.cut)}

    def init(self, model, federation):
        """The initial model."""
        return self.base.init(model, federation)

    def round(self, state, ctx):
        """Steps at each client in turn; a client that fails is left out."""
        parts, model = self.base.parts, dict(state["model"])
        for client in self.base.select.cohort(ctx):
            steps = parts.local.steps_at(int(ctx.federation.sizes[client]), None)
            for step in range(steps):
                _, lower, names = layers(parts.model, model, True, self.cut)
                sent = {"lower": {names[name]: w.detach() for name, w in lower.items()}}
                seed = ctx.rng.seed(f"{client}/{step}")
                (reply,) = yield Ask("split", [Request(client, {"step": seed})], sent)
                if not isinstance(reply, Reply):
                    break
                gradient, upper = self.upper(model, reply.payload["outputs"], reply.payload["targets"])
                (reply,) = yield Ask("split", [Request(client, {"step": seed, "gradient": gradient})], sent)
                if not isinstance(reply, Reply):
                    break
                model |= {**upper, **reply.payload["lower"]}
        return {**state, "model": model}

    def upper(self, model, outputs, targets):
        """The gradient of the outputs, and the upper layers after a step: the server's half."""
        parts, outputs = self.base.parts, outputs.clone().requires_grad_()
        module, weights, names = layers(parts.model, model, False, self.cut)
        loss = parts.task.loss(functional_call(module, weights, (outputs,)), targets)
        gradient, *own = torch.autograd.grad(loss, [outputs, *weights.values()])
        lr = parts.local.lr
        moved = {names[n]: (w - lr * g).detach() for (n, w), g in zip(weights.items(), own, strict=True)}
        return gradient, moved

    def evaluate(self, state, ctx):
        """On the test data."""
        return self.base.evaluate(state, ctx)

    def model(self, state):
        """The whole model."""
        return self.base.model(state)
