"""Group knowledge transfer: the operations of clients and server in FedGKT (arXiv 2007.14513), and their losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from fedlens.core.arithmetic import gradients_of
from fedlens.core.device_copies import uploaded
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import Client, Letter, ModelSpec, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.local.optimizers import OptimizerState, clip, optimizer
from fedlens.local.personal_leaves import PERSONAL, own_leaves
from fedlens.local.settings import LocalSettings
from fedlens.local.training import optimizer_state
from fedlens.models.stages import cut as cut_in_two
from fedlens.tasks.task import Task

SERVER = "@server"
REST = (
    "rest"  # in a client's state: its network after the cut, which only teaches; `personal` is the extractor
)
LOGITS = "logits"  # in a client's state: what the server last returned, [n, classes], by position
Batches = Iterator[tuple[Tensor, Tensor, Tensor | None]]  # inputs, targets, the teacher's logits


def distillation(teacher: Tensor, own: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(own / T)): the sum over classes, the mean over the batch [n, classes].

    >>> distillation(torch.zeros(1, 2), torch.zeros(1, 2), 3.0)
    tensor(0.)
    """
    there = torch.log_softmax(teacher / temperature, 1)
    here = torch.log_softmax(own / temperature, 1)
    return temperature**2 * kl_div(here, there, reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class Distill:
    """The training of both sides: the task's loss, and alpha times `distillation` where there is a teacher."""

    task: Task
    alpha: float
    temperature: float

    def __call__(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        """The objective of a batch, and the task's loss in it."""
        loss = self.task.loss(outputs, targets)
        if teacher is None or not self.alpha:
            return loss, loss
        return loss + self.alpha * distillation(teacher, outputs.to(teacher), self.temperature), loss

    def descend(
        self,
        learner: Loadable,
        batches: Batches,
        rates: list[float],
        settings: LocalSettings,
        kept: OptimizerState,
    ) -> dict[str, float]:
        """Takes a step at each rate, on a batch each, and returns the metrics of the operation."""
        parameters = list(learner.trainable.values())
        weights, step = [p.detach() for p in parameters], optimizer(settings, kept)
        module, losses, counts = learner.module.train(), list[Tensor](), list[int]()
        for rate, (inputs, targets, teacher) in zip(rates, batches, strict=False):  # batches are endless
            objective, loss = self(module(inputs), targets, teacher)
            gradients = gradients_of(objective, parameters, learner.autocast_dtype)
            if settings.clip_norm is not None:
                gradients = clip(gradients, settings.clip_norm)
            step(weights, gradients, rate)
            losses.append(loss.detach())
            counts.append(len(targets))
        each = torch.stack(losses).cpu().double()  # one synchronization
        total = float(each @ torch.tensor(counts, dtype=torch.float64))
        return {"loss": total, "examples": sum(counts), "batches": len(rates)}


@dataclass(frozen=True)
class TrainAndSend:
    """The client's operation: trains its network, then sends features, logits and label of every image by position.

    The features are what the network gives after `cut`, from images that are not augmented, in evaluation mode.
    """

    whole: ModelSpec  # the composed model, whose leaves before the cut all clients begin with
    own: ModelSpec
    extractor: frozenset[str]
    rest: frozenset[str]
    cut: str
    settings: LocalSettings
    loss: Distill
    features: torch.dtype
    batch_size: int  # of the pass that sends

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains from the client's own network, or from the initial one at its first visit."""
        data = client.data
        if len(data) == 0:
            raise ValueError("the client holds no example")
        learner = loadable(self.own, client)
        later = replace(client, state={PERSONAL: client.state[REST]} if REST in client.state else {})
        before = {
            **own_leaves(self.whole, self.extractor, client),
            **own_leaves(self.own, self.rest, later),
        }
        learner.load(before)
        rates = _rates(self.settings, payload, self.settings.steps_at(len(data)))
        teacher = client.state.get(LOGITS)

        def batches() -> Batches:
            orders = _orders(
                len(data), self.settings.batch(len(data)), rng, self.settings.last_batch == "drop"
            )
            for step, at in enumerate(orders):
                inputs, targets = data.batch(at, rng.of_client().child("step", step))
                yield inputs, targets, None if teacher is None else teacher[uploaded(at, teacher.device)]

        kept = optimizer_state(client.state)
        metrics = self.loss.descend(learner, batches(), rates, self.settings, kept)
        leaves = _leaves(learner)
        state = {
            **client.state,
            PERSONAL: {name: value for name, value in leaves.items() if name in self.extractor},
            REST: {name: value for name, value in leaves.items() if name in self.rest},
            "optimizer": kept,
        }
        return Outcome({}, state, metrics, letters=[Letter(SERVER, self._content(learner, client))])

    def _content(self, learner: Loadable, client: Client) -> Payload:
        key = ("cut", id(self.own), self.cut)
        if key not in client.scratch:  # tracing takes longer than a small client's training
            client.scratch[key] = cut_in_two(learner.module, [self.cut])
        learner.module.eval()
        lower, upper = client.scratch[key]
        dtype = next(iter(learner.trainable.values())).dtype
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for inputs, targets in client.data.stretches(0, len(client.data), self.batch_size):
                features = lower(inputs)
                found.append((features.to(self.features), upper(features).to(dtype), targets))
        features, logits, targets = (torch.cat(part) for part in zip(*found, strict=True))
        return {"features": features, LOGITS: logits, "targets": targets}


@dataclass(frozen=True)
class TrainServer:
    """The operation at `@server`: trains the upper part over all sent images, and returns its logits to each sender."""

    model: ModelSpec
    settings: LocalSettings
    loss: Distill
    batch_size: int  # of the pass that returns logits

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains from `payload["model"]`; the logits are those of the trained network in evaluation mode."""
        letters = payload["letters"]
        learner = loadable(self.model, client)
        learner.load(payload["model"])
        dtype = next(iter(learner.trainable.values())).dtype
        # Not one tensor of all features: that would be a second copy of what takes the most memory.
        features = [image for _, content in letters for image in content["features"]]
        logits, targets = (
            torch.cat([content[name] for _, content in letters]) for name in (LOGITS, "targets")
        )
        if not len(features) == len(logits) == len(targets):
            raise ValueError("a client sent features, logits and labels of different numbers of images")
        n = len(targets)
        orders = _orders(n, self.settings.batch(n), rng, self.settings.last_batch == "drop")

        def batches() -> Batches:
            for at in orders:
                inputs = torch.stack([features[k] for k in at.tolist()]).to(dtype)
                there = uploaded(at, targets.device)
                yield inputs, targets[there], logits[there]

        rates = _rates(self.settings, payload, self.settings.steps_at(n))
        kept = optimizer_state(client.state)
        metrics = self.loss.descend(learner, batches(), rates, self.settings, kept)
        back, module = [], learner.module.eval()
        with torch.no_grad():
            for sender, content in letters:
                parts = [
                    module(part.to(dtype)).to(dtype) for part in content["features"].split(self.batch_size)
                ]
                back.append(Letter(sender, {LOGITS: torch.cat(parts)}))
        return Outcome({"model": _leaves(learner)}, {"optimizer": kept}, metrics, letters=back)


def store(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """The client's last operation: keeps the server's logits. Without a letter it keeps its older ones."""
    for _, content in payload["letters"]:
        return Outcome({}, {**client.state, LOGITS: content[LOGITS]})
    return Outcome({})


@dataclass(frozen=True)
class ShowExtractor:
    """Sends the client's extractor to be measured."""

    whole: ModelSpec
    extractor: frozenset[str]

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Changes nothing."""
        return Outcome({"extractor": dict(own_leaves(self.whole, self.extractor, client))})


def _rates(settings: LocalSettings, payload: Payload, steps: int) -> list[float]:
    return settings.rates(payload, steps) or [payload["lr"]] * steps


def _leaves(learner: Loadable) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in {**learner.trainable, **learner.rest}.items()}


def _orders(n: int, size: int, rng: Rng, drop_last: bool) -> Iterator[Tensor]:
    """The positions of endless batches, each epoch in a new order."""
    draw, end = rng.torch("batches"), n - n % size if drop_last else n
    while True:
        order = torch.randperm(n, generator=draw)
        yield from (order[start : min(start + size, end)] for start in range(0, end, size))
