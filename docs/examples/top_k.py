"""Compression: clients send the largest values of their update, and keep the rest for their next one.

Stich, Cordonnier and Jaggi 2018 (arXiv 1809.07599), "Sparsified SGD with Memory".
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedlens.aggregate.mean import Aggregate
from fedlens.core.protocol import Outcome, Reply
from fedlens.core.reduction import Update
from fedlens.core.schema import Schema


def top_k(
    *, share: Annotated[float, Field(gt=0, le=1, description="share of values sent")] = 0.1
) -> Aggregate:
    """The weighted mean of sparse updates."""
    return TopK(share)


@dataclass(frozen=True)
class Compressed:
    """Local training whose reply has `at` and `values` of each leaf in place of `update`."""

    train: object
    share: float

    def __call__(self, payload, client, rng):
        """Trains, and sends the largest values of the update and of what earlier updates left out."""
        outcome = self.train(payload, client, rng)
        memory, left, at, values = client.state.get("memory", {}), {}, {}, {}
        for name, update in outcome.payload["update"].items():
            whole = (update + memory.get(name, 0.0)).flatten()
            at[name] = whole.abs().topk(max(1, round(self.share * whole.numel()))).indices
            values[name] = whole[at[name]]
            left[name] = whole.index_fill(0, at[name], 0.0).view(update.shape)
        sent = {**outcome.payload, "at": at, "values": values}
        del sent["update"]
        return Outcome(sent, {**(outcome.state or client.state), "memory": left}, outcome.metrics)


@dataclass(frozen=True)
class TopK(Aggregate):
    """Asks for compressed training, and averages what comes."""

    share: float

    @property
    def ops(self):
        """The operation that clients run, made of the algorithm's local training."""
        return {"train-compressed": lambda train: Compressed(train, self.share)}

    def exchange(self, ask, fields, ctx):
        """The update of the round."""
        answers = yield replace(ask, op="train-compressed", expect=Schema())
        return self.fold((answer, ask.shared["model"]) for answer in answers)

    def fold(self, answers, fields=None, ctx=None):
        """sum_k n_k Delta_k / sum_k n_k, where values that were not sent are 0."""
        total, payloads = {}, []
        for answer, model in answers:
            if not isinstance(answer, Reply):
                continue
            payloads.append(answer.payload)
            for name, at in answer.payload["at"].items():
                values = answer.payload["weight"] * answer.payload["values"][name]
                total.setdefault(name, torch.zeros(model[name].numel())).index_add_(0, at, values)
        if not payloads:
            return None
        weight = sum(payload["weight"] for payload in payloads)
        update = {name: (value / weight).view(model[name].shape) for name, value in total.items()}
        last = payloads[-1]  # running statistics and counters are those of one client
        return Update(update, last["buffers"], last["counters"], replies=len(payloads), weight=weight)
