"""Compression: clients send the largest values of their update, and keep the rest for their next one.

Stich, Cordonnier and Jaggi 2018 (arXiv 1809.07599), "Sparsified SGD with Memory".
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedlens.aggregates import Aggregate, Bound, Mean, Outcome, Reply, Schema


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
        of_values, of_rest = (sum(float(v.square().sum()) for v in tree.values()) for tree in (values, left))
        share = of_values / (of_values + of_rest) if of_values else 1.0
        metrics = {**outcome.metrics, "sent_energy": share}
        return Outcome(sent, {**(outcome.state or client.state), "memory": left}, metrics)


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
        # The share of the squared norm that is sent, summed over the clients: a column of metrics.jsonl.
        metrics = {**ask.expect.metrics, "sent_energy": Bound(0, 1)}
        answers = yield replace(ask, op="train-compressed", expect=Schema(metrics=metrics))
        return self.aggregate((dense(answer, ask.shared["model"]) for answer in answers), fields, ctx)

    def aggregate(self, answers, fields, ctx):
        """sum_k n_k Delta_k / sum_k n_k, where values that were not sent are 0."""
        return Mean().aggregate(answers, fields)


def dense(answer, model):
    """A reply with the whole update in place of its largest values; another answer as it is."""
    if not isinstance(answer, Reply):
        return answer
    update = {}
    for name, at in answer.payload["at"].items():
        zero = torch.zeros(model[name].numel())
        update[name] = zero.index_add(0, at, answer.payload["values"][name]).view(model[name].shape)
    return replace(answer, payload={**answer.payload, "update": update})
