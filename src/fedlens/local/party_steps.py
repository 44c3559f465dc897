"""The steps of vertical learning, as operations: a bottom at each party, and the top at the party with the labels.

A party's state has `positions`, its rows of the common examples (`fedlens.local.set_intersection`), `bottom` and, at
the label party, `top`: each with `tree` and `optimizer`, see `fedlens.local.halves.Half`. Before its first step a party
draws its bottom itself. A batch is a set of numbers into the common examples, which each party draws from the training
seed and the round, in every round the same at all of them. So no operation sends positions, and the order of a party's
own rows does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.core.arithmetic import gradients_of
from fedlens.core.dataset_info import PartyExamples
from fedlens.core.measured import total
from fedlens.core.protocol import Client, Letter, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.tree import tree_of
from fedlens.local.halves import Half, Pass, cache_pass, cached_pass, epoch_order, received
from fedlens.tasks.task import Task

MEAN_OF = 1000  # examples over which a party's mean embedding is taken


@dataclass(frozen=True)
class Bottoms:
    """The bottom of each party, by its number."""

    halves: Mapping[int, Half]

    def of(self, client: Client) -> Half:
        """The bottom of this party."""
        return self.halves[int(client.id)]

    def forward(self, client: Client, rng: Rng, at: int) -> Pass:
        """The forward pass of the batch of step `at`."""
        half, rows = self.of(client), self.rows(client, rng, at)
        inputs = client.data.inputs(rows).to(client.device)
        return half.forward(begun(half, client), client, inputs, rng.of_client().child("step", at))

    def rows(self, client: Client, rng: Rng, at: int) -> Tensor:
        """The party's own positions of the batch of step `at`, int64 [B]."""
        settings, common, node = self.of(client).settings, client.state["positions"].cpu(), rng.of_round()
        size, (epoch, within) = settings.batch(len(common)), divmod(at, settings.batches_at(len(common)))
        key, order = client.scratch.get("common order", (None, None))
        if key != (node, epoch):  # the same at all parties of this worker
            order = epoch_order(settings, len(common), epoch, node)
            client.scratch["common order"] = (node, epoch), order
        batch: Tensor = common[order[within * size : (within + 1) * size]]
        return batch

    def embeddings(self, client: Client, data: PartyExamples, rows: Tensor, size: int) -> Iterator[Tensor]:
        """Those of these rows in evaluation mode, [B, width] of up to `size` rows at a time."""
        half = self.of(client)
        learner = half.learner(client)
        learner.load(begun(half, client)["tree"])
        learner.module.eval()
        with torch.inference_mode():
            for part in torch.split(rows, size):
                yield learner.module(data.inputs(part).to(client.device))


def begun(half: Half, client: Client) -> Payload:
    """The state of a half: the initial weights before its first step."""
    found: Payload = client.state.get(half.name) or {"tree": tree_of(half.model.build()), "optimizer": {}}
    return found


@dataclass(frozen=True)
class Embed:
    """At a party without labels: the backward pass and the step of one batch, then the forward pass of the next.

    Payload besides the rate: `back`, the step whose gradient came, or None; `step`, whose batch is next, or None at the
    end; `steps` of the round. The letter has `embedding` [B, width], its answer `gradient` of the same shape.
    """

    bottoms: Bottoms
    labels_at: int

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Raises `ValueError` if a gradient should have come."""
        at, back, half = payload["step"], payload["back"], self.bottoms.of(client)
        if back is not None:
            ((_, content),) = payload["letters"]
            done = cached_pass(client, rng.of_client(), back) or self.bottoms.forward(client, rng, back)
            gradients = half.backward(done, content["gradient"], client)
            own = half.stepped(
                begun(half, client), done, gradients, {**payload, "step": back}, payload["steps"]
            )
            client = _with(client, half, own)
        if at is None:
            return Outcome({}, client.state)
        done = self.bottoms.forward(client, rng, at)
        cache_pass(client, rng.of_client(), at, done)
        letter = Letter(self.labels_at, {"embedding": done.outputs.detach()})
        return Outcome({}, client.state if back is not None else None, {"batches": 1.0}, letters=[letter])


@dataclass(frozen=True)
class Label:
    """At the party with the labels: its own bottom and the top, forward and backward, and a step of both.

    Payload besides the rate: `step` and `steps`. The gradients that it sends are of the top before its step.
    """

    bottoms: Bottoms
    top: Half
    parties: tuple[int, ...]
    task: Task

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """The step of one batch, of which all embeddings have come."""
        at, half, top = payload["step"], self.bottoms.of(client), self.top
        own, given = self.bottoms.forward(client, rng, at), dict(payload["letters"])
        learner = top.learner(client)
        embeddings = torch.stack(
            [
                own.outputs.detach() if k == client.id else received(given[k]["embedding"], learner, client)
                for k in self.parties
            ]
        )
        done = top.forward(
            begun(top, client),
            client,
            embeddings.detach().requires_grad_(),
            rng.of_client().child("step", at, "top"),
        )
        targets = client.data.labels(self.bottoms.rows(client, rng, at)).to(client.device)
        loss = self.task.loss(done.outputs, targets)
        gradient, *gradients = gradients_of(
            loss, [done.inputs, *done.weights.values()], learner.autocast_dtype
        )
        back = dict(zip(self.parties, gradient, strict=True))
        below = half.backward(own, back.pop(int(client.id)), client)
        after = _with(
            client, top, top.stepped(begun(top, client), done, gradients, payload, payload["steps"])
        )
        after = _with(after, half, half.stepped(begun(half, client), own, below, payload, payload["steps"]))
        sums = {"loss": float(loss.detach()) * len(targets), "examples": float(len(targets)), "batches": 1.0}
        letters = [Letter(k, {"gradient": value.clone()}) for k, value in back.items()]
        return Outcome({}, after.state, sums, letters=letters)


@dataclass(frozen=True)
class Measuring:
    """The operations of measuring: what a party's bottom is, and what all of them reach on other examples.

    Each party takes these by the order of their ids.
    """

    bottoms: Bottoms
    top: Half
    parties: tuple[int, ...]
    labels_at: int
    task: Task
    batch_size: int

    def show(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """`bottom`, a tree; `mean` [width], of its embeddings of up to 1,000 examples; at the label party `top`."""
        common, half = client.state["positions"].cpu(), self.bottoms.of(client)
        few = common[torch.linspace(0, len(common) - 1, min(MEAN_OF, len(common))).long()]
        embeddings = torch.cat(list(self.bottoms.embeddings(client, client.data, few, self.batch_size)))
        shown = {"bottom": begun(half, client)["tree"], "mean": embeddings.mean(0)}
        if client.id == self.labels_at:
            shown["top"] = begun(self.top, client)["tree"]
        return Outcome(shown)

    def embed_held(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends the embeddings of the examples of `name`, such as `@test`, [n, width], to the label party."""
        letter = Letter(self.labels_at, {"embedding": self._held(client, payload["name"])})
        return Outcome({}, letters=[letter])

    def _held(self, client: Client, name: str) -> Tensor:
        data = client.data.held[name]
        return torch.cat(list(self.bottoms.embeddings(client, data, by_id(data), self.batch_size)))

    def measure(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """At the label party: the task's measurements `all`, and `without.K`, the embedding of party K being its mean.

        Payload: `name` of the examples; `means`, those that are known, by party; `without`, whether
        to measure with one missing. One that has sent no embedding is replaced too.
        """
        data = client.data.held[payload["name"]]
        means = {int(k): mean.to(client.device) for k, mean in payload["means"].items()}
        found = {k: content["embedding"].to(client.device) for k, content in payload["letters"]}
        found[int(client.id)] = self._held(client, payload["name"])
        rows = len(data)
        for k in set(self.parties) - found.keys():
            if k not in means:
                raise ValueError(
                    f"party {k} has sent no embedding of these examples, and has none of training either"
                )
            found[k] = means[k].expand(rows, -1)
        targets = data.labels(by_id(data)).to(client.device)
        learner = self.top.learner(client)
        learner.load(begun(self.top, client)["tree"])
        learner.module.eval()

        def measured(of: Mapping[int, Tensor]) -> Payload:
            with torch.inference_mode():
                outputs = learner.module(torch.stack([of[k] for k in self.parties]))
                return total(
                    self.task.measure(o, t)
                    for o, t in zip(
                        outputs.split(self.batch_size), targets.split(self.batch_size), strict=True
                    )
                ).to_payload()

        missing = means.items() if payload["without"] else ()
        each = {f"without.{k}": measured({**found, k: mean.expand(rows, -1)}) for k, mean in missing}
        return Outcome({"all": measured(found), **each})


def by_id(data: PartyExamples) -> Tensor:
    """The positions of a party's examples in the order of their ids, int64 [n]."""
    return torch.tensor(sorted(range(len(data)), key=data.ids.__getitem__), dtype=torch.int64)


def _with(client: Client, half: Half, own: Payload) -> Client:
    """The client with another state of this half."""
    return replace(client, state={**client.state, half.name: own})
