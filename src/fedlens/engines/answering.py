"""Answering one block of requests: the part that every engine shares, run where the data is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedlens.core.protocol import (
    Answer,
    Client,
    ClientId,
    Failure,
    Id,
    Outcome,
    Payload,
    Program,
    Reduce,
    Reply,
)
from fedlens.core.schema import Schema, finite_fault, nbytes
from fedlens.core.seeding import Rng, Secrets


@dataclass(frozen=True)
class Item:
    """One request on its way to where it is answered, with the client's committed state."""

    id: Id
    client: ClientId
    payload: Payload
    state: Payload


@dataclass
class Site:
    """A place where operations run: the program, and a cache that lives as long as the worker."""

    program: Program
    scratch: dict[Any, Any] = field(default_factory=dict)

    def answer(self, op: str, shared: Payload, item: Item, expect: Schema) -> Answer:
        """Runs one operation and checks what comes out. An exception in it is the client's failure, not the run's."""
        rng = Rng((self.program.seed, "op", *item.id, item.client))
        try:
            client = Client(
                id=item.client,
                data=self.program.data.holder(item.client),
                state=item.state,
                secrets=Secrets((self.program.seed, item.client)),
                scratch=self.scratch,
                device=torch.device(self.program.device),
            )
            torch.default_generator.manual_seed(rng.seed("torch"))
            outcome = Outcome(*self.program.ops[op]({**shared, **item.payload}, client, rng))
        except Exception as error:
            return Failure(item.id, item.client, f"{type(error).__name__}: {error}")
        fault = expect.fault(outcome.payload)
        if fault is None and outcome.state is not None:
            fault = finite_fault(outcome.state)
        if fault is not None:
            return Failure(item.id, item.client, fault)
        metrics = {name: float(value) for name, value in outcome.metrics.items()}
        size = nbytes(outcome.payload)
        return Reply(item.id, item.client, outcome.payload, metrics, outcome.state, size)

    def block(self, op: str, shared: Payload, items: Sequence[Item], expect: Schema, reduce: Reduce | None) -> list[Answer]:
        """Answers neighbouring slots; with `reduce`, their folded payload stands in the last answer."""
        if reduce is None:
            return [self.answer(op, shared, item, expect) for item in items]
        fold = Fold(reduce)
        answers = [fold.take(self.answer(op, shared, item, expect)) for item in items]
        answers[-1].folded = fold.result()
        return answers


class Fold:
    """Adds replies up, one by one, in the order given."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.total: dict[str, Any] = {}

    def take(self, answer: Answer) -> Answer:
        """Adds a reply's trees to the total and takes them out of the reply; a failure passes through."""
        if isinstance(answer, Failure):
            return answer
        weight = float(answer.payload[self.reduce.weight])
        fold_payload(self.total, self.reduce, answer.payload, weight)
        rest = {name: value for name, value in answer.payload.items() if name not in self.reduce.fields}
        return Reply(answer.id, answer.client, rest, answer.metrics, answer.state, answer.nbytes)

    def result(self) -> Payload | None:
        """The folded payload; None where every reply of the block failed."""
        return self.total or None


def fold_payload(total: dict[str, Any], reduce: Reduce, payload: Payload, weight: float) -> None:
    """Adds one reply to `total`, in place: weight * tree for `sum`, leaf-wise maximum for `max`."""
    first = not total
    total[reduce.weight] = total.get(reduce.weight, 0.0) + weight
    for name, how in reduce.fields.items():
        tree: Mapping[str, torch.Tensor] = payload[name]
        if first:
            total[name] = {leaf: value * weight if how == "sum" else value.clone() for leaf, value in tree.items()}
        elif tree and how == "sum":
            torch._foreach_add_(list(total[name].values()), [tree[leaf] for leaf in total[name]], alpha=weight)
        else:
            total[name] = {leaf: torch.maximum(value, tree[leaf]) for leaf, value in total[name].items()}
